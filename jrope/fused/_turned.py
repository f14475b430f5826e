"""Normed and rotated heads in plain JAX: what the definitions share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrope._gather import check_array
from jrope._layout import RotaryLayout, check_layout
from jrope._operands import HEAD_DTYPES
from jrope._primitive import bind_rope
from jrope._rotate import compute_dtype
from jrope.fused._norm import QkNorm, rms_norm
from jrope.fused._rows import Rows

_DTYPES = ("bfloat16", "float16", "float32")


def turned(
    xs: list[Array],
    weights: list[Array | None],
    rows: Rows,
    *,
    layout: RotaryLayout,
    norm: QkNorm | None,
    wide: bool = False,
) -> list[Array]:
    """Heads [*B, T, N, H], rotated and, with `norm`, normed.

    Args:
      xs: queries and keys.
      weights: of their norms.
      rows: cosines and sines.
      layout: which features turn.
      norm: whether and how.
      wide: leave the result in float32 (float64 for float64), not cast back.
    """
    dtypes = [x.dtype for x in xs]
    wides = [compute_dtype(dtype) for dtype in dtypes]
    rounded = norm is None or norm.rounded
    between = dtypes if rounded else wides
    if norm is not None and norm.order == "norm_rotate":
        xs = [rms_norm(x, weight, norm) for x, weight in zip(xs, weights, strict=True)]
    if norm is None and wide:
        between = wides
    xs = _cast(xs, between)
    xs = bind_rope(
        xs,
        *rows,
        is_neox_style=layout.is_neox_style,
        rotary_offset=layout.rotary_offset,
        implementation="xla",
    )
    if norm is not None and norm.order == "rotate_norm":
        xs = [rms_norm(x, weight, norm) for x, weight in zip(xs, weights, strict=True)]
    return _cast(xs, wides if wide else dtypes)


def _cast(xs: list[Array], dtypes: list) -> list[Array]:
    return [x.astype(dtype) for x, dtype in zip(xs, dtypes, strict=True)]


def split_qkv(
    qkv: Array, query_heads: int, key_heads: int, head_dim: int
) -> list[Array]:
    """A packed buffer [*B, T, (N + 2 K) H] as queries, keys and values."""
    heads = qkv.reshape(*qkv.shape[:-1], query_heads + 2 * key_heads, head_dim)
    return jnp.split(heads, [query_heads, query_heads + key_heads], axis=-2)


def check_qkv(
    qkv: Array, query_heads: int, key_heads: int, layout: RotaryLayout
) -> None:
    """Raises unless `qkv` holds whole heads of these numbers."""
    check_layout(layout)
    check_array("qkv", qkv)
    for name, heads in (("query_heads", query_heads), ("key_heads", key_heads)):
        if isinstance(heads, bool) or not isinstance(heads, int | np.integer):
            raise TypeError(
                f"{name} must be an int, and static, got {heads!r}; is it a value "
                f"inside jit?"
            )
    if min(query_heads, key_heads) < 1:
        raise ValueError(
            f"query_heads and key_heads must be at least 1, got {query_heads} and "
            f"{key_heads}"
        )
    width = (query_heads + 2 * key_heads) * layout.head_dim
    if qkv.ndim < 2 or qkv.shape[-1] != width:
        raise ValueError(
            f"qkv must be [*B, T, (N + 2 K) H] with N = {query_heads}, K = {key_heads} "
            f"and H = {layout.head_dim}, so its last axis {width} long, got shape "
            f"{qkv.shape}"
        )
    check_floating("qkv", qkv)


def check_floating(name: str, x: Array) -> None:
    """Raises unless `x` holds floats that rotate."""
    if x.dtype not in HEAD_DTYPES:
        raise TypeError(
            f"{name} must be floats of 16, 32 or 64 bits, got {x.dtype}; are they "
            f"quantised?"
        )


def kernel_declines(xs: list[jax.Array], tokens: int) -> str | None:
    """Why no kernel takes these operands, or None."""
    for x in xs:
        if x.dtype.name not in _DTYPES:
            return f"dtype must be one of {_DTYPES}, got {x.dtype.name}"
    if not isinstance(tokens, int) or tokens < 1:
        return f"the number of tokens must be known, got {tokens}"
    return None


def cannot_rewrite(
    place: Any, heads: tuple[int, ...], itemsize: int, *, whole_heads: bool
) -> str | None:
    """Why a kernel cannot turn heads in place, or None."""
    from pallas_kernels import rewritable

    if all(rewritable(place, n, itemsize, whole_heads=whole_heads) for n in heads):
        return None
    return (
        f"heads of so few features cannot be rewritten in place by four warps, got "
        f"{heads} of them with rotary_dim = {place.rotary_dim}"
    )
