"""Positions of plain RoPE from what engines keep: indptr, masks, segment ids."""

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions._errors import PositionError
from jrope.positions._inputs import as_int32, as_size, as_vector, check_tokens

PADDING = -1


def positions_from_indptr(
    indptr: ArrayLike, offsets: ArrayLike, *, size: int | None = None
) -> np.ndarray:
    """Positions of requests laid end to end: request r counts up from offsets[r].

    Args:
      indptr: int [requests + 1], where each request's tokens begin, ascending from 0.
      offsets: int [requests], position of each request's first token.
      size: length of the result; columns past the tokens hold padding, -1.

    Returns:
      int32 [tokens], or [size].

    Raises:
      PositionError: input, if the two do not fit; capacity, if `size` is too small;
        position_beyond_table, if a position does not fit into int32; too_long.
      TypeError, ValueError: `size` is no number of columns.

    >>> positions_from_indptr([0, 1, 5, 10], [4, 6, 3]).tolist()
    [4, 6, 7, 8, 9, 3, 4, 5, 6, 7]
    """
    starts, first = _checked_indptr(indptr), as_vector("offsets", offsets)
    if len(first) != len(starts) - 1:
        raise PositionError(
            "input", expected=f"{len(starts) - 1} offsets", got=f"{len(first)}"
        )
    tokens = int(starts[-1])
    check_tokens("a batch", tokens)
    if size is not None:
        size = as_size("size", size, least=0)
    if size is not None and size < tokens:
        raise PositionError("capacity", expected=f"{tokens} columns", got=size)
    lengths = np.diff(starts)
    shift = np.repeat(first.astype(np.int64) - starts[:-1], lengths)
    made = np.arange(tokens) + shift
    if tokens and made.max() > np.iinfo(np.int32).max:
        raise PositionError(
            "position_beyond_table",
            expected="positions within int32",
            got=int(made.max()),
        )
    out = np.full(tokens if size is None else size, PADDING, np.int32)
    out[:tokens] = made
    return out


def offsets_from_positions(indptr: ArrayLike, positions: ArrayLike) -> np.ndarray:
    """The inverse of `positions_from_indptr`; 0 for a request without tokens.

    Args:
      indptr: int [requests + 1], ascending from 0.
      positions: int [tokens] or longer, one by one within each request.

    Returns:
      int32 [requests].

    Raises:
      PositionError: input, if a request's positions do not count up one by one.

    >>> offsets_from_positions([0, 1, 5], [4, 6, 7, 8, 9]).tolist()
    [4, 6]
    """
    starts, given = _checked_indptr(indptr), as_vector("positions", positions)
    if len(given) < starts[-1]:
        raise PositionError(
            "input", expected=f"at least {starts[-1]} positions", got=f"{len(given)}"
        )
    lengths = np.diff(starts)
    offsets = np.zeros(len(lengths), np.int32)
    offsets[lengths > 0] = given[starts[:-1][lengths > 0]]
    wrong = np.flatnonzero(
        positions_from_indptr(starts, offsets) != given[: starts[-1]]
    )
    if wrong.size:
        token = int(wrong[0])
        raise PositionError(
            "input",
            index=int(np.searchsorted(starts, token, side="right")) - 1,
            token=token,
            expected="one more than the position before",
            got=int(given[token]),
        )
    return offsets


def positions_from_mask(mask: ArrayLike) -> np.ndarray:
    """Positions of padded rows: real tokens count up from 0, the others are -1.

    Args:
      mask: bool or int [*B, T], 1 for real tokens, 0 for others.

    Returns:
      int32 [*B, T].

    Raises:
      PositionError: input, if an entry is another number, as in masks of packed rows,
        which number their documents; too_long.

    >>> positions_from_mask([[0, 0, 1, 1], [1, 1, 1, 0]]).tolist()
    [[-1, -1, 0, 1], [0, 1, 2, -1]]
    """
    given = np.asarray(mask)
    real = given if given.dtype == bool else _ones(as_int32("mask", mask))
    if not real.ndim:
        raise PositionError("input", expected="mask of shape [*B, T]", got="a scalar")
    check_tokens("mask", real.size)
    count = np.cumsum(real, axis=-1, dtype=np.int32) - np.int32(1)
    return np.where(real, count, np.int32(PADDING))


def positions_from_segment_ids(segment_ids: ArrayLike) -> np.ndarray:
    """Positions of packed rows: every run of one id counts up from 0.

    Args:
      segment_ids: int [*B, T]; negative ids and, as in packed training data, 0 are
        padding.

    Returns:
      int32 [*B, T], -1 for padding.

    Raises:
      PositionError: input, if the ids are no integers [*B, T].

    >>> positions_from_segment_ids([1, 1, 1, 2, 2, 0]).tolist()
    [0, 1, 2, 0, 1, -1]
    """
    ids = as_int32("segment_ids", segment_ids)
    if not ids.ndim:
        raise PositionError(
            "input", expected="segment_ids of shape [*B, T]", got="a scalar"
        )
    index = np.arange(ids.shape[-1], dtype=np.int32)
    begins = np.ones(ids.shape, bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    begin = np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=-1)
    return np.where(ids > 0, index - begin, np.int32(PADDING))


def _ones(mask: np.ndarray) -> np.ndarray:
    """Where a mask of integers is 1."""
    odd = mask[(mask != 0) & (mask != 1)]
    if odd.size:
        raise PositionError(
            "input",
            expected="a mask of 0 and 1",
            got=int(odd[0]),
            hint="are rows packed? Then use positions_from_segment_ids",
        )
    return mask == 1


def _checked_indptr(indptr: ArrayLike) -> np.ndarray:
    starts = as_vector("indptr", indptr).astype(np.int64)
    if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise PositionError(
            "input", expected="indptr ascending from 0", got=starts[:8].tolist()
        )
    return starts
