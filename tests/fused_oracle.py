"""Cases of fused operations, and their results in float64 NumPy, token by token.

The oracle takes nothing from jrope but the cases' own descriptions.
"""

import numpy as np
import oracle

from jrope import RopeConfig
from jrope.fused import QkNorm
from jrope.scalings import Yarn

CONFIGS = {
    "neox": RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=64),
    "gptj-partial": RopeConfig(
        head_dim=80,
        rotary_dim=32,
        rotary_offset=4,
        is_neox_style=False,
        rope_theta=1e4,
        max_position_embeddings=64,
    ),
    "yarn-partial": RopeConfig(
        head_dim=128,
        rotary_dim=96,
        rope_theta=1e4,
        max_position_embeddings=64,
        scaling=Yarn(factor=4.0, original_max_position_embeddings=16),
    ),
}
NORMS = {
    "none": None,
    "qwen3": QkNorm(epsilon=1e-6),
    "gemma": QkNorm(epsilon=1e-6, unit_offset=True),
    "llama4": QkNorm(epsilon=1e-5, order="rotate_norm"),
}


def wide(x):
    """Any array as float64."""
    return np.asarray(x).astype(np.float64)


def rms(x, weight, epsilon, unit_offset):
    out = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon)
    if weight is None:
        return out
    return out * (wide(weight) + (1.0 if unit_offset else 0.0))


def turned(x, weight, rows, norm, layout):
    """Normed and rotated, and by how much float32 arithmetic may be off."""
    cos, sin = (wide(row) for row in rows)
    style = {"is_neox_style": layout.is_neox_style, "offset": layout.rotary_offset}
    x = wide(x)
    if norm is None:
        error = oracle.bound(x, cos, sin, dtype="float32", **style)
        return oracle.rotate(x, cos, sin, **style), error
    args = (weight, norm.epsilon, norm.unit_offset)
    if norm.order == "norm_rotate":
        out = oracle.rotate(rms(x, *args), cos, sin, **style)
    else:
        out = rms(oracle.rotate(x, cos, sin, **style), *args)
    # Sums of up to 256 squares, a root, three products, and the rotation: 16 roundings
    # of the largest feature cover them.
    error = 16 * oracle.F32_EPS * np.max(np.abs(out), -1, keepdims=True)
    return out, np.broadcast_to(error, out.shape)


def assert_close(actual, exact, error, dtype):
    """Within half a unit of the result's type and the float32 error."""
    bound = oracle.half_ulp(np.abs(exact) + error, dtype) + error
    oracle.assert_within(actual, exact, bound)
