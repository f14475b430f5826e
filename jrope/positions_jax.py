"""Positions of plain RoPE built in the graph: the forms of `jrope.positions`, traced.

Shapes are static: a step of any mix of requests runs the program compiled once. Values
on the device cannot be checked inside a program: an `indptr` there that does not ascend
from 0 gives positions without meaning, and a batch that is too long is cut. Values that
lie on the host are checked, as those of the host's functions of the same names.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32

from jrope._gather import device_positions, saturated_sum
from jrope._layout import LONGEST
from jrope._show import show

_PADDING = -1


def positions_from_indptr(
    indptr: ArrayLike, offsets: ArrayLike, *, size: int
) -> Int32[Array, " size"]:
    """Positions of requests laid end to end: request r counts up from offsets[r].

    On the device a count stops at the largest int32: no table has a row for it.

    Args:
      indptr: int32 [requests + 1], where each request's tokens begin, ascending from 0;
        requests may be empty.
      offsets: int32 [requests], position of each request's first token.
      size: length of the result; tokens past `indptr[-1]` are padding, -1.

    Returns:
      int32 [size].

    Raises:
      TypeError, ValueError: if the shapes do not fit, `size` is no static int, an
        `indptr` on the host does not ascend from 0 to at most `size`, or positions that
        are known there do not fit int32.

    >>> positions_from_indptr(jnp.array([0, 1, 5, 10]), jnp.array([4, 6, 3]), size=12
    ...     ).tolist()
    [4, 6, 7, 8, 9, 3, 4, 5, 6, 7, -1, -1]
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise TypeError(
            f"size must be an int of at least 0, and static, got {size!r}; is it a "
            f"value inside jit?"
        )
    starts, first = _indptr(indptr), device_positions(offsets, name="offsets")
    _check_ascending("indptr", indptr, size)
    requests = starts.shape[0] - 1
    if first.shape != (requests,):
        raise ValueError(
            f"offsets must be [requests] = ({requests},) for indptr of {requests + 1}, "
            f"got shape {first.shape}"
        )
    _check_reach(indptr, offsets)
    if not requests:
        return jnp.full((size,), _PADDING, jnp.int32)
    token = jnp.arange(size, dtype=jnp.int32)
    own = _request_of_token(starts, size)
    made = saturated_sum(first[own], token - starts[own])
    return jnp.where(token < starts[-1], made, jnp.int32(_PADDING))


def offsets_from_positions(
    indptr: ArrayLike, positions: ArrayLike
) -> tuple[Int32[Array, " requests"], Bool[Array, ""]]:
    """The inverse of `positions_from_indptr`, and whether it is one.

    Args:
      indptr: int32 [requests + 1].
      positions: int32 [size], at least `indptr[-1]`.

    Returns:
      int32 [requests], 0 for a request without tokens, and whether each request's
      positions count up one by one.

    Raises:
      ValueError: if positions are not [size].

    >>> offsets, holds = offsets_from_positions(jnp.array([0, 1, 5]),
    ...     jnp.array([4, 6, 7, 8, 9]))
    >>> offsets.tolist(), bool(holds)
    ([4, 6], True)
    """
    starts, given = _indptr(indptr), device_positions(positions)
    if given.ndim != 1:
        raise ValueError(f"positions must be [size], got shape {given.shape}")
    size = given.shape[0]
    ascends = (starts[0] == 0) & jnp.all(jnp.diff(starts) >= 0)
    if not size:
        none = jnp.zeros(starts.shape[0] - 1, jnp.int32)
        return none, ascends & (starts[-1] == 0)
    at_start = given[jnp.clip(starts[:-1], 0, size - 1)]
    offsets = jnp.where(jnp.diff(starts) > 0, at_start, jnp.int32(0))
    token = jnp.arange(size, dtype=jnp.int32)
    fits = ascends & (starts[-1] <= size)
    if not offsets.shape[0]:
        return offsets, fits
    own = _request_of_token(starts, size)
    count = given - offsets[own]
    # Counting up past the largest int32 would begin again at the smallest.
    counts_up = (count == token - starts[own]) & (given >= offsets[own])
    return offsets, fits & jnp.all(jnp.where(token < starts[-1], counts_up, True))


def positions_from_mask(mask: ArrayLike) -> Int32[Array, "..."]:
    """Positions of padded rows: real tokens count up from 0, the others are -1.

    Args:
      mask: bool or int [*B, T], 1 for real tokens, 0 for others; other numbers are
        refused where they are known, and inside jit not read as real.

    Returns:
      int32 [*B, T].

    Raises:
      TypeError, ValueError: if it is no such mask, as one of packed rows, which numbers
        their documents.

    >>> positions_from_mask(jnp.array([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
    [[-1, -1, 0, 1], [0, 1, 2, -1]]
    """
    if not isinstance(mask, jax.Array):
        given, mask = mask, np.asarray(mask)
        if not mask.size and not hasattr(given, "dtype"):
            mask = mask.astype(bool)  # An empty list is float64 to NumPy.
        if mask.dtype.kind in "iu" and ((mask != 0) & (mask != 1)).any():
            raise ValueError(
                "mask must be of 0 and 1, got other numbers; are rows packed? Then use "
                "positions_from_segment_ids"
            )
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(
            f"mask must be bools or integers, got {mask.dtype}; a mask that is added "
            f"to scores has 0 where tokens are real"
        )
    real = jnp.asarray(mask) if mask.dtype == bool else jnp.asarray(mask) == 1
    if not real.ndim:
        raise ValueError("mask must be [*B, T], got a scalar")
    count = lax.cumsum(real.astype(jnp.int32), axis=real.ndim - 1) - jnp.int32(1)
    return jnp.where(real, count, jnp.int32(_PADDING))


def positions_from_segment_ids(segment_ids: ArrayLike) -> Int32[Array, "..."]:
    """Positions of packed rows: every run of one id counts up from 0.

    Args:
      segment_ids: int32 [*B, T]; negative ids and, as in packed training data, 0 are
        padding.

    Returns:
      int32 [*B, T], -1 for padding.

    Raises:
      ValueError: if the ids have no axis.

    >>> positions_from_segment_ids(jnp.array([1, 1, 1, 2, 2, 0])).tolist()
    [0, 1, 2, 0, 1, -1]
    """
    ids = device_positions(segment_ids, name="segment_ids")
    if not ids.ndim:
        raise ValueError("segment_ids must be [*B, T], got a scalar")
    axis = ids.ndim - 1
    index = lax.broadcasted_iota(jnp.int32, ids.shape, axis)
    before = jnp.roll(ids, 1, axis)
    begins = (index == 0) | (ids != before)
    begin = lax.cummax(jnp.where(begins, index, jnp.int32(0)), axis=axis)
    return jnp.where(ids > 0, index - begin, jnp.int32(_PADDING))


def positions_from_cu_seqlens(
    cu_seqlens: ArrayLike, *, size: int
) -> Int32[Array, "..."]:
    """Positions of documents packed end to end: every one counts up from 0.

    Args:
      cu_seqlens: int32 [*B, documents + 1], where each document begins, ascending from
        0; documents may be empty, as the last ones of a row that repeats its end.
      size: tokens in a row; those past the last document are padding, -1.

    Returns:
      int32 [*B, size].

    Raises:
      ValueError: if a row is empty, or one on the host does not ascend from 0 to at
        most `size`.

    >>> positions_from_cu_seqlens(jnp.array([[0, 3, 5], [0, 2, 2]]), size=6).tolist()
    [[0, 1, 2, 0, 1, -1], [0, 1, -1, -1, -1, -1]]
    """
    starts = device_positions(cu_seqlens, name="cu_seqlens")
    if not starts.ndim or not starts.shape[-1]:
        raise ValueError(
            f"cu_seqlens must be [*B, documents + 1], got shape {starts.shape}; the "
            f"first entry is 0"
        )
    _check_ascending("cu_seqlens", cu_seqlens, size)

    def row(starts: Array) -> Array:
        return positions_from_indptr(starts, jnp.zeros_like(starts[1:]), size=size)

    for _ in starts.shape[:-1]:
        row = jax.vmap(row)
    return row(starts)


def _indptr(indptr: ArrayLike) -> Int32[Array, " n"]:
    starts = device_positions(indptr, name="indptr")
    if starts.ndim != 1 or not starts.shape[0]:
        raise ValueError(
            f"indptr must be [requests + 1], got shape {starts.shape}; the first entry "
            f"is 0"
        )
    return starts


def _check_ascending(name: str, given: ArrayLike, size: int) -> None:
    """Raises for offsets on the host that are none."""
    if isinstance(given, jax.Array):
        return
    known = np.asarray(given)
    if (known[..., 0] != 0).any() or (np.diff(known.astype(np.int64)) < 0).any():
        raise ValueError(f"{name} must ascend from 0, got {show(known.tolist())}")
    if (known[..., -1] > size).any():
        raise ValueError(
            f"{name} must end at {size} or before, the number of tokens, got "
            f"{known[..., -1].max()}"
        )


def _check_reach(indptr: ArrayLike, offsets: ArrayLike) -> None:
    """Raises if positions that are known on the host pass int32."""
    if isinstance(indptr, jax.Array) or isinstance(offsets, jax.Array):
        return
    lengths = np.diff(np.asarray(indptr).astype(np.int64))
    last = (np.asarray(offsets).astype(np.int64) + lengths - 1)[lengths > 0]
    if last.max(initial=0) > LONGEST:
        raise ValueError(f"positions must fit int32, got up to {last.max()}")


def _request_of_token(starts: Array, size: int) -> Int32[Array, " size"]:
    """Which request each token belongs to: how many of the later ones have begun.

    A scatter and a running sum; a binary search would be a loop in the program.
    """
    begun = jnp.zeros(size, jnp.int32).at[starts[1:-1]].add(1, mode="drop")
    return lax.cumsum(begun)
