"""RMS norms of queries and keys, before the rotation or after it."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jrope._gather import check_array
from jrope._layout import check_bool
from jrope._rotate import compute_dtype

_Order = Literal["norm_rotate", "rotate_norm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkNorm:
    """An RMS norm over the features of each head.

    Args:
      epsilon: added to the mean of squares.
      unit_offset: multiply by 1 + weight, as Gemma does, rather than by weight.
      order: "norm_rotate" (Qwen3, Gemma 3) or "rotate_norm" (Llama 4).
      rounded: cast to the heads' dtype between norm and rotation, as separate layers
        do. By default both are computed in float32 and cast once.

    Raises:
      TypeError, ValueError: if an option is none.

    >>> QkNorm(epsilon=1e-6, unit_offset=True).order
    'norm_rotate'
    """

    epsilon: float
    unit_offset: bool = False
    order: _Order = "norm_rotate"
    rounded: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        if not isinstance(self.epsilon, float):
            raise TypeError(f"epsilon must be a float, got {self.epsilon!r}")
        for name in ("unit_offset", "rounded"):
            check_bool(name, getattr(self, name))
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon must be 0 or more, got {self.epsilon}")
        if self.order not in ("norm_rotate", "rotate_norm"):
            raise ValueError(
                f"order must be 'norm_rotate' or 'rotate_norm', got {self.order!r}"
            )


def rms_norm(x: Array, weight: Array | None, norm: QkNorm) -> Array:
    """X / sqrt(mean(x^2) + epsilon), times the weight, in float32.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    wide = x.astype(compute_dtype(x.dtype))
    energy = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scaled = wide * lax.rsqrt(energy + jnp.asarray(norm.epsilon, wide.dtype))
    if weight is None:
        return scaled
    factor = weight.astype(wide.dtype)
    return scaled * (1 + factor if norm.unit_offset else factor).reshape(
        (1,) * (x.ndim - 1) + (-1,)
    )


def check_norm(norm: object) -> None:
    """Raises unless it is a QkNorm."""
    if not isinstance(norm, QkNorm):
        raise TypeError(
            f"norm must be a QkNorm, got {type(norm).__name__}; of an epsilon it is "
            f"jrope.fused.QkNorm(epsilon=...)"
        )


def check_weight(name: str, weight: Array | None, head_dim: int) -> None:
    """Raises unless a weight is one number a feature."""
    if weight is None:
        return
    check_array(name, weight)
    if weight.shape != (head_dim,) or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be floats [H] with H = {head_dim}, got {weight.dtype} "
            f"{weight.shape}; norms over all heads at once are not fused"
        )
