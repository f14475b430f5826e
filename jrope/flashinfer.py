"""FlashInfer's calling forms: its names, argument orders, layouts and defaults.

JAX arrays are values, so every function returns the rotated queries and keys. The names
in `_inplace` donate theirs, so that XLA may write the results where they lay; outside
jit the arrays passed are gone afterwards, inside it they behave as any others.

Functions without a cache have no argument that a table could come in by, and compute
their rows in the program: see `jrope._phases` for how, and why they keep no table.
FlashInfer computes them in float32, off by 2e-3 at position 32k; these are off by less
than 2^-23 at any position. With several layers, the form with a cache, or
`jrope.lookup` once per step, spares computing them in each.

Other than FlashInfer's: a negative position is padding and is not turned, as are tokens
past `indptr[-1]`; float32 heads are taken too, and any even `rotary_dim`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._gather import check_array, check_table, device_positions
from jrope._layout import RotaryLayout
from jrope._operands import check_donated, check_no_shared_token
from jrope._ops import rotate
from jrope._phases import phase_rows
from jrope._rotate import lookup
from jrope.positions_jax import positions_from_indptr
from jrope.scalings import Default, Linear, Llama3, Scaling

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]

Pair = tuple[Array, Array]
_P = ParamSpec("_P")


def apply_rope(
    q: Float[Array, "nnz N H"],
    k: Float[Array, "nnz K H"],
    indptr: ArrayLike,
    offsets: ArrayLike,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float | int = 1.0,
    rope_theta: float | int = 1e4,
) -> Pair:
    """Rotates a ragged batch; token j of request r is at position offsets[r] + j.

    Args:
      q: queries of all requests end to end.
      k: keys, likewise.
      indptr: int32 [requests + 1], where each request's tokens begin; FlashInfer's
        `nnz` is its last entry, here rows past it are padding.
      offsets: int32 [requests], position of each request's first token.
      rotary_dim: leading features rotated; None for all.
      interleave: pairs are (2i, 2i + 1) if True, (i, i + rotary_dim / 2) if False.
      rope_scale: what positions are divided by.
      rope_theta: base of the geometric series.

    Returns:
      The rotated queries and keys.

    Raises:
      TypeError, ValueError: if shapes, types or widths do not fit.

    >>> import jax.numpy as jnp
    >>> q, k = apply_rope(jnp.ones((3, 2, 4)), jnp.ones((3, 1, 4)),
    ...     jnp.array([0, 1, 3]), jnp.array([0, 7]))
    >>> q.shape, k.shape
    ((3, 2, 4), (3, 1, 4))
    """
    _check_ragged(q, k)
    positions = positions_from_indptr(indptr, offsets, size=q.shape[0])
    return apply_rope_pos_ids(
        q, k, positions, rotary_dim, interleave, rope_scale, rope_theta
    )


def apply_rope_pos_ids(
    q: Float[Array, "nnz N H"],
    k: Float[Array, "nnz K H"],
    pos_ids: ArrayLike,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float | int = 1.0,
    rope_theta: float | int = 1e4,
) -> Pair:
    """`apply_rope` with the position of every token.

    Args:
      q: queries of all requests end to end.
      k: keys, likewise.
      pos_ids: int32 [nnz], absolute; negative ones are padding.
      rotary_dim: leading features rotated; None for all.
      interleave: pairs are (2i, 2i + 1) if True, (i, i + rotary_dim / 2) if False.
      rope_scale: what positions are divided by.
      rope_theta: base of the geometric series.

    Returns:
      The rotated queries and keys.

    Raises:
      TypeError, ValueError: if shapes, types or widths do not fit.

    >>> import jax.numpy as jnp
    >>> q, k = apply_rope_pos_ids(jnp.ones((3, 2, 4)), jnp.ones((3, 1, 4)),
    ...     jnp.array([0, 7, -1]))
    >>> q.shape, k.shape
    ((3, 2, 4), (3, 1, 4))
    """
    _check_ragged(q, k)
    scaling = Default() if rope_scale == 1 else Linear(factor=rope_scale)
    config = _config(q.shape[-1], rotary_dim, interleave, rope_theta, scaling)
    cos, sin = phase_rows(pos_ids, config)
    check_no_shared_token(q, cos)
    return rotate(q, k, cos, sin, layout=config.layout)


def apply_llama31_rope(
    q: Float[Array, "nnz N H"],
    k: Float[Array, "nnz K H"],
    indptr: ArrayLike,
    offsets: ArrayLike,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float | int = 8.0,
    rope_theta: float | int = 5e5,
    low_freq_factor: float | int = 1.0,
    high_freq_factor: float | int = 4.0,
    old_context_len: int = 8192,
) -> Pair:
    """`apply_rope` with Llama 3.1's scaling, which Llama 3.2 has with `rope_scale=32`.

    Args:
      q: queries of all requests end to end.
      k: keys, likewise.
      indptr: int32 [requests + 1], where each request's tokens begin.
      offsets: int32 [requests], position of each request's first token.
      rotary_dim: leading features rotated; None for all.
      interleave: pairs are (2i, 2i + 1) if True, (i, i + rotary_dim / 2) if False.
      rope_scale: what low frequencies are divided by.
      rope_theta: base of the geometric series.
      low_freq_factor: turns within the old context below which a frequency is low.
      high_freq_factor: turns above which it is kept.
      old_context_len: context length of pre-training, in positions.

    Returns:
      The rotated queries and keys.

    Raises:
      TypeError, ValueError: if shapes, types or widths do not fit.

    >>> import jax.numpy as jnp
    >>> q, k = apply_llama31_rope(jnp.ones((3, 2, 4)), jnp.ones((3, 1, 4)),
    ...     jnp.array([0, 1, 3]), jnp.array([0, 7]), rope_scale=32)
    >>> q.shape, k.shape
    ((3, 2, 4), (3, 1, 4))
    """
    _check_ragged(q, k)
    positions = positions_from_indptr(indptr, offsets, size=q.shape[0])
    return apply_llama31_rope_pos_ids(
        q,
        k,
        positions,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        low_freq_factor,
        high_freq_factor,
        old_context_len,
    )


def apply_llama31_rope_pos_ids(
    q: Float[Array, "nnz N H"],
    k: Float[Array, "nnz K H"],
    pos_ids: ArrayLike,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float | int = 8.0,
    rope_theta: float | int = 5e5,
    low_freq_factor: float | int = 1.0,
    high_freq_factor: float | int = 4.0,
    old_context_len: int = 8192,
) -> Pair:
    """`apply_llama31_rope` with the position of every token.

    Args:
      q: queries of all requests end to end.
      k: keys, likewise.
      pos_ids: int32 [nnz], absolute; negative ones are padding.
      rotary_dim: leading features rotated; None for all.
      interleave: pairs are (2i, 2i + 1) if True, (i, i + rotary_dim / 2) if False.
      rope_scale: what low frequencies are divided by.
      rope_theta: base of the geometric series.
      low_freq_factor: turns within the old context below which a frequency is low.
      high_freq_factor: turns above which it is kept.
      old_context_len: context length of pre-training, in positions.

    Returns:
      The rotated queries and keys.

    Raises:
      TypeError, ValueError: if shapes, types or widths do not fit.

    >>> import jax.numpy as jnp
    >>> q, k = apply_llama31_rope_pos_ids(jnp.ones((3, 2, 4)), jnp.ones((3, 1, 4)),
    ...     jnp.array([0, 7, -1]))
    >>> q.shape, k.shape
    ((3, 2, 4), (3, 1, 4))
    """
    _check_ragged(q, k)
    scaling = Llama3(
        factor=rope_scale,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        original_max_position_embeddings=old_context_len,
    )
    config = _config(q.shape[-1], rotary_dim, interleave, rope_theta, scaling)
    cos, sin = phase_rows(pos_ids, config)
    check_no_shared_token(q, cos)
    return rotate(q, k, cos, sin, layout=config.layout)


def apply_rope_with_cos_sin_cache(
    positions: ArrayLike,
    query: Float[Array, "nnz NH"],
    key: Float[Array, "nnz KH"],
    head_size: int,
    cos_sin_cache: Float32[Array, "P R"],
    is_neox: bool = True,
) -> Pair:
    """Rotates by the rows of a table: the form for any scaling.

    Args:
      positions: int32 [nnz]. Those on the host are checked against the table's end; on
        the device, one past it reads the last row.
      query: heads flattened, [nnz, N * head_size].
      key: likewise.
      head_size: features per head.
      cos_sin_cache: `jrope.compute_cos_sin_cache(config)` on the device: cos, then sin,
        as FlashInfer's and vLLM's.
      is_neox: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.

    Returns:
      The rotated query and key.

    Raises:
      TypeError, ValueError: if the table is not float32, or shapes do not fit.

    >>> import jax.numpy as jnp
    >>> cache = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> q, k = apply_rope_with_cos_sin_cache(jnp.array([0, 1]), jnp.ones((2, 2)),
    ...     jnp.ones((2, 2)), 2, cache)
    >>> q.tolist()
    [[1.0, 1.0], [-1.0, 1.0]]
    """
    check_table(cos_sin_cache)
    rows, rotary_dim = cos_sin_cache.shape
    layout = RotaryLayout(
        head_dim=head_size, rotary_dim=rotary_dim, is_neox_style=is_neox
    )
    inside = device_positions(positions, rows=rows)
    cos, sin = lookup(cos_sin_cache, inside, layout=layout, out_of_range="clip")
    check_no_shared_token(query, cos)
    return rotate(query, key, cos, sin, layout=layout)


def _config(
    head_dim: int,
    rotary_dim: int | None,
    interleave: bool,
    rope_theta: float | int,
    scaling: Scaling,
) -> RopeConfig:
    _check_static("rotary_dim", rotary_dim)
    _check_static("interleave", interleave)
    _check_static("rope_theta", rope_theta)
    return _config_of(head_dim, rotary_dim, interleave, rope_theta, scaling)


def _check_static(name: str, value: object) -> None:
    """Raises for an array where the program is made by the value."""
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{name} must be a Python number, known when the program is made, got "
            f"{type(value).__name__}; of an array it is array.item()"
        )


@functools.lru_cache(maxsize=256)
def _config_of(
    head_dim: int,
    rotary_dim: int | None,
    interleave: bool,
    rope_theta: float | int,
    scaling: Scaling,
) -> RopeConfig:
    return RopeConfig(
        head_dim=head_dim,
        rope_theta=rope_theta,
        max_position_embeddings=2**31 - 1,
        scaling=scaling,
        rotary_dim=rotary_dim,
        is_neox_style=not interleave,
    )


def _check_ragged(q: Array, k: Array) -> None:
    for name, x in (("q", q), ("k", k)):
        check_array(name, x)
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be [nnz, heads, head_dim], got shape {x.shape}; heads "
                f"that are flattened go to apply_rope_with_cos_sin_cache"
            )


_HEADS = ("q", "k", "query", "key")
_PLACES = ("indptr", "offsets", "pos_ids", "positions")


def _in_place(function: Callable[_P, Pair]) -> Callable[_P, Pair]:
    """The form of `function` that donates queries and keys."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    donated = [name for name in names if name in _HEADS]
    traced = {*donated, *_PLACES, "cos_sin_cache"}
    jitted = jax.jit(
        function,
        donate_argnames=donated,
        static_argnames=[name for name in names if name not in traced],
    )

    @functools.wraps(function)
    def donating(*args: _P.args, **kwargs: _P.kwargs) -> Pair:
        given = signature.bind(*args, **kwargs).arguments
        for name in donated:
            check_array(name, given[name])
        check_donated(*(given[name] for name in donated))
        for name in given.keys() - traced:
            _check_static(name, given[name])
        # Before jit, which would cut wide integers to 32 bits and see no host values.
        for name in filter(_PLACES.__contains__, names):
            bound = {}
            if name == "positions":
                check_table(given["cos_sin_cache"])
                bound["rows"] = given["cos_sin_cache"].shape[0]
            given[name] = device_positions(given[name], name=name, **bound)
        return jitted(**given)

    name = f"{function.__name__}_inplace"
    donating.__name__ = donating.__qualname__ = name
    donating.__doc__ = _in_place_doc(function, name)
    return donating


def _in_place_doc(function: Callable[..., Pair], name: str) -> str:
    """Says what differs, and takes the example over."""
    example = (function.__doc__ or "").partition("    >>> ")[2]
    own = example.replace(f"{function.__name__}(", f"{name}(")
    return f"""`{function.__name__}` that donates its queries and keys.

    Outside jit the arrays that are passed are gone afterwards: keep what is returned.
    Arguments, shapes and result are those of `{function.__name__}`.

    Raises:
      TypeError, ValueError: as `{function.__name__}`.

    >>> {own}"""


apply_rope_inplace = _in_place(apply_rope)
apply_rope_pos_ids_inplace = _in_place(apply_rope_pos_ids)
apply_llama31_rope_inplace = _in_place(apply_llama31_rope)
apply_llama31_rope_pos_ids_inplace = _in_place(apply_llama31_rope_pos_ids)
apply_rope_with_cos_sin_cache_inplace = _in_place(apply_rope_with_cos_sin_cache)
