"""What tests of adapters share: heads, scalings, positions and their exact waves."""

import jax.numpy as jnp
import numpy as np
import oracle

from jrope import RopeConfig, config_from_hf, mrope_axes

ROWS_ERROR = 2.0**-23
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS = [None, LINEAR, LLAMA3, YARN]
BATCH = np.array([[0, 1, 2, 3], [60_000, 60_001, 5, 7]], np.int32)
FLAT = BATCH.reshape(-1)


def heads(*leading, head_dim=32, dtype=jnp.float32):
    generator = np.random.default_rng(0)
    shapes = ((*leading, 4, head_dim), (*leading, 2, head_dim))
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def waves(positions, theta=5e5, rope=None, width=32):
    """Cosines and sines [..., width / 2], by transformers' formulas."""
    kind = (rope or {}).get("rope_type", "default")
    freqs, factor = oracle.frequencies(
        kind,
        {
            "head_dim": width,
            "rope_theta": theta,
            "max_position_embeddings": 131072,
            "rope_scaling": rope,
        },
    )
    angles = np.maximum(positions, 0)[..., None] * np.array(freqs, np.longdouble)
    return factor * np.cos(angles), factor * np.sin(angles)


def assert_turned(out, x, cos, sin, *, dtype=None, is_neox_style=True):
    style = {"is_neox_style": is_neox_style}
    assert out.shape == x.shape and out.dtype == (dtype or x.dtype)
    exact = oracle.rotate(x, cos, sin, **style)
    allowed = oracle.bound(x, cos, sin, **style, dtype=out.dtype)
    rows = 3 * ROWS_ERROR * np.abs(np.asarray(x, np.float64)).max()
    oracle.assert_within(out, exact, allowed + rows)


def config(rope=None, theta=5e5, **changes):
    made = config_from_hf(
        {
            "head_dim": 32,
            "rope_theta": theta,
            "max_position_embeddings": 131072,
            "rope_scaling": rope,
        },
        **changes,
    )
    assert made is not None
    return made


AXES = mrope_axes([8, 4, 4], rotary_dim=32, order="interleaved")
MROPE = RopeConfig(
    head_dim=32,
    rope_theta=5e5,
    max_position_embeddings=131072,
    axis_of_frequency=AXES,
)


def mrope_waves(positions, axes=AXES):
    """Of positions [3, ...]: frequency j belongs to axis axes[j]."""
    every = [waves(axis) for axis in positions]
    return [
        np.stack([every[axis][i][..., j] for j, axis in enumerate(axes)], -1)
        for i in range(2)
    ]


def grid(*leading):
    return np.random.default_rng(2).integers(0, 999, (3, *leading)).astype(np.int32)
