"""Positions from indptr, masks and segment ids, on the host and in the graph."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from fuzzing import WAYS, cases, refused, ways, whole_as
from hypothesis import strategies as st

from jrope import positions, positions_jax
from jrope.positions import PositionError

pytestmark = pytest.mark.fuzz

LARGEST = 2**31 - 1
dtypes = st.sampled_from(["int32", "int64"])
# One program for all: rows of so many tokens, of so many requests.
SIZE, REQUESTS = 24, 5
in_graph = jax.jit(positions_jax.positions_from_indptr, static_argnames="size")
back_in_graph = jax.jit(positions_jax.offsets_from_positions)
mask_in_graph = jax.jit(positions_jax.positions_from_mask)
segments_in_graph = jax.jit(positions_jax.positions_from_segment_ids)

offsets = st.integers(-5, 50) | st.sampled_from([LARGEST, LARGEST - 3, -(2**31)])
entries = st.lists(
    st.tuples(st.integers(0, 5), offsets), min_size=REQUESTS, max_size=REQUESTS
)


@cases(entries, st.none() | st.integers(-1, 30), dtypes, ways)
def test_requests_laid_end_to_end(requests, size, dtype, way):
    starts = np.cumsum([0, *(count for count, _ in requests)])
    want = [offset + k for count, offset in requests for k in range(count)]
    first = whole_as([offset for _, offset in requests], dtype, way)
    given = whole_as(starts, dtype, way)

    def run() -> np.ndarray:
        return positions.positions_from_indptr(given, first, size=size)

    tokens = len(want)
    if size is not None and size < 0:
        return refused(ValueError, "size must be at least 0", run)
    if size is not None and size < tokens:
        return refused(PositionError, "capacity", run)
    if max(want, default=0) > LARGEST:
        return refused(PositionError, "position_beyond_table", run)
    padded = want + [-1] * ((size or tokens) - tokens)
    made = run()
    assert made.dtype == np.int32
    assert made.tolist() == padded
    back = positions.offsets_from_positions(given, whole_as(padded, dtype, way))
    assert back.tolist() == [offset if n else 0 for n, offset in requests]
    made = in_graph(
        starts.astype(np.int32),
        np.asarray([o for _, o in requests], np.int32),
        size=SIZE + 6,
    )
    assert made.tolist() == (want + [-1] * 30)[:30]
    return None


@cases(
    st.lists(st.integers(0, 5), min_size=REQUESTS, max_size=REQUESTS),
    st.lists(offsets, min_size=REQUESTS, max_size=REQUESTS),
    st.integers(0, SIZE),
    st.sampled_from([0, 0, 1, -1, 2**31]),
    ways,
)
def test_offsets_of_positions_that_count_up_or_do_not(counts, firsts, where, odd, way):
    starts = np.cumsum([0, *counts])
    rows = [o + k for n, o in zip(counts, firsts, strict=True) for k in range(n)]
    rows = (rows + [-1] * (SIZE + 6))[: SIZE + 6]
    # Past the largest int32 they begin again at the smallest, as an overflow would.
    rows = [
        (p + odd * (k == where) + 2**31) % 2**32 - 2**31 for k, p in enumerate(rows)
    ]
    right = [rows[start] if n else 0 for start, n in zip(starts, counts, strict=False)]
    counts_up = all(
        rows[start + k] == offset + k
        for start, n, offset in zip(starts, counts, right, strict=False)
        for k in range(n)
    )
    given = whole_as(rows, "int32", way)
    made, holds = back_in_graph(starts.astype(np.int32), np.asarray(rows, np.int32))
    assert bool(holds) == counts_up
    back = functools.partial(positions.offsets_from_positions, starts, given)
    if not counts_up:
        return refused(PositionError, "input|position_beyond_table", back)
    assert back().tolist() == right
    assert made.tolist() == right
    return None


@st.composite
def rows_of(draw: Any, values: Any) -> np.ndarray:
    shape = draw(st.sampled_from([(7,), (3, 5), (2, 1, 4), (1, 1), (2, 0), (0, 3)]))
    count = int(np.prod(shape))
    drawn = draw(st.lists(values, min_size=count, max_size=count))
    return np.asarray(drawn, np.int64).reshape(shape)


def each_row(run: Any, given: np.ndarray) -> np.ndarray:
    """A function of a list of numbers, for each of the innermost rows."""
    rows = given.reshape(int(np.prod(given.shape[:-1])), -1) if given.size else given
    made = [run(row) for row in rows.tolist()] if given.size else []
    return np.asarray(made, np.int64).reshape(given.shape)


def count_real(row: list[int]) -> list[int]:
    return [sum(row[: k + 1]) - 1 if x else -1 for k, x in enumerate(row)]


def count_runs(row: list[int]) -> list[int]:
    found: list[int] = []
    for k, segment in enumerate(row):
        before = found[-1] if k and row[k - 1] == segment else -1
        found.append(before + 1 if segment > 0 else -1)
    return found


@cases(
    rows_of(st.integers(0, 1) | st.sampled_from([0, 1, 1, 1])),
    st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "uint32", "float32"]),
    ways,
    st.sampled_from([None, None, None, 2, -1, 127]),
)
def test_masks(mask, dtype, way, odd):
    if odd is not None and mask.size and dtype != "bool":
        mask.flat[mask.size // 2] = odd
    if dtype.startswith("u"):
        mask = np.abs(mask)
    run = functools.partial(
        positions.positions_from_mask, WAYS[way](mask.astype(dtype))
    )
    if dtype == "float32" and mask.size:
        return refused(PositionError, "mask as integers", run)
    if (mask > 1).any() or (mask < 0).any():
        return refused(PositionError, "a mask of 0 and 1", run)
    want = each_row(count_real, mask)
    if mask.size or way != "list":
        np.testing.assert_array_equal(run(), want)
    if dtype in ("bool", "int32"):
        np.testing.assert_array_equal(mask_in_graph(mask.astype(dtype)), want)
    return None


@cases(
    rows_of(st.integers(-1, 2) | st.sampled_from([LARGEST, -(2**31), 0, 1])),
    dtypes,
    ways,
)
def test_segments(ids, dtype, way):
    want = each_row(count_runs, ids)
    given = WAYS[way](ids.astype(dtype))
    if ids.size or way != "list":
        made = positions.positions_from_segment_ids(given)
        np.testing.assert_array_equal(made, want)
    np.testing.assert_array_equal(segments_in_graph(ids.astype(np.int32)), want)
