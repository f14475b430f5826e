"""Positions built in the graph: equal to the host's, of static shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrope import positions, positions_jax


def loop(indptr, offsets, size):
    made = [-1] * size
    for r, offset in enumerate(offsets):
        for i, token in enumerate(range(indptr[r], indptr[r + 1])):
            made[token] = offset + i
    return made


def some_batch(rng):
    lengths = rng.integers(0, 6, rng.integers(1, 7))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return indptr, rng.integers(0, 1000, len(lengths)).astype(np.int32)


def test_indptr_against_a_loop_and_the_host():
    rng = np.random.default_rng(0)
    for _ in range(25):  # Each is a shape to compile; test_fuzz_ragged draws more.
        indptr, offsets = some_batch(rng)
        size = int(indptr[-1]) + int(rng.integers(0, 4))
        made = positions_jax.positions_from_indptr(indptr, offsets, size=size)
        assert made.tolist() == loop(indptr, offsets, size)
        host = positions.positions_from_indptr(indptr, offsets, size=size)
        np.testing.assert_array_equal(made, host)
        back, holds = positions_jax.offsets_from_positions(indptr, made)
        assert bool(holds)
        np.testing.assert_array_equal(
            back, positions.offsets_from_positions(indptr, host)
        )


def test_one_program_for_every_mix_of_requests():
    traces = []

    @jax.jit
    def step(indptr, offsets):
        traces.append(1)
        return positions_jax.positions_from_indptr(indptr, offsets, size=16)

    mixes = ([0, 1, 5, 10], [0, 16, 16, 16], [0, 0, 0, 0], [0, 0, 7, 7])
    for indptr in mixes:
        offsets = [4, 6, 3]
        made = step(jnp.array(indptr), jnp.array(offsets))
        assert made.tolist() == loop(indptr, offsets, 16)
    assert len(traces) == 1
    text = step.lower(jnp.array(mixes[0]), jnp.array([4, 6, 3])).as_text()
    assert "while" not in text and "dynamic_slice" not in text


def test_a_batch_on_the_device_that_is_too_long_is_cut_at_the_end():
    made = positions_jax.positions_from_indptr(
        jnp.array([0, 2, 9]), np.array([5, 0]), size=4
    )
    assert made.tolist() == [5, 6, 0, 1]
    _, holds = positions_jax.offsets_from_positions(np.array([0, 2, 9]), made)
    assert not holds


def test_the_inverse_sees_what_does_not_count_up():
    indptr = np.array([0, 2, 4])
    for wrong in ([4, 6, 1, 2], [4, 5, 2, 1], [4, 5, 1, 1]):
        _, holds = positions_jax.offsets_from_positions(indptr, jnp.array(wrong))
        assert not holds
    padded = jnp.array([4, 5, 1, 2, -1, -1])
    offsets, holds = positions_jax.offsets_from_positions(indptr, padded)
    assert offsets.tolist() == [4, 1] and holds


def test_nothing():
    none = jnp.zeros(0, jnp.int32)
    made = positions_jax.positions_from_indptr(np.array([0]), none, size=3)
    assert made.tolist() == [-1, -1, -1]
    offsets, holds = positions_jax.offsets_from_positions(np.array([0, 0]), none)
    assert offsets.tolist() == [0] and holds
    assert positions_jax.positions_from_segment_ids(none).shape == (0,)
    assert positions_jax.positions_from_mask(none).shape == (0,)


@pytest.mark.parametrize("shape", [(12,), (3, 9), (2, 2, 5)])
def test_masks_and_segments_against_the_host(shape):
    rng = np.random.default_rng(len(shape))
    for _ in range(20):
        mask = rng.integers(0, 2, shape)
        ids = np.sort(rng.integers(-1, 4, shape), axis=-1).astype(np.int32)
        mixed = rng.integers(0, 3, shape).astype(np.int32)
        np.testing.assert_array_equal(
            jax.jit(positions_jax.positions_from_mask)(mask),
            positions.positions_from_mask(mask),
        )
        for segments in (ids, mixed):
            np.testing.assert_array_equal(
                jax.jit(positions_jax.positions_from_segment_ids)(jnp.array(segments)),
                positions.positions_from_segment_ids(segments),
            )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (([0, 1], [1, 2]), ValueError, r"be \[requests\] = \(1,\) .* got shape \(2,\)"),
        (([], []), (TypeError, ValueError), "indptr must be"),
        (([[0, 1]], [1]), ValueError, r"\[requests \+ 1\], got shape \(1, 2\)"),
        (([0.0, 1.0], [1]), TypeError, "indptr must be integers, got float64"),
        (([0, 1], [2**40]), ValueError, "offsets must fit int32"),
        (([1, 2], [0]), ValueError, r"indptr must ascend from 0, got \[1, 2\]"),
        (([0, 3, 2], [0, 0]), ValueError, r"indptr must ascend from 0, got \[0, 3, 2"),
        (([0, 2, 5], [0, 0]), ValueError, "indptr must end at 4 or before.* got 5"),
        (([0, 3], [2**31 - 3]), None, ""),
        (([0, 0, 1], [2**31 - 1] * 2), None, ""),
        (([0, 3], [2**31 - 2]), ValueError, "must fit int32, got up to 2147483648"),
        (([0, 1, 4], [0, 2**31 - 1]), ValueError, "got up to 2147483649"),
    ],
)
def test_refused(unchecked, call, error, message):
    if error is None:
        made = positions_jax.positions_from_indptr(*map(np.array, call), size=4)
        assert made.max() == 2**31 - 1
        return
    with pytest.raises(error, match=message):
        positions_jax.positions_from_indptr(*map(np.array, call), size=4)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (
            [[0, 3], [1, 3]],
            r"cu_seqlens must ascend from 0, got \[\[0, 3\], \[1, 3\]\]",
        ),
        ([[0, 2, 1]], "cu_seqlens must ascend from 0"),
        ([[0, 3], [0, 5]], "cu_seqlens must end at 4 or before, .* got 5"),
        (np.array([0, 3, 2], np.uint32), "cu_seqlens must ascend from 0"),
    ],
)
def test_packed_rows_that_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        positions_jax.positions_from_cu_seqlens(starts, size=4)


@pytest.mark.parametrize(
    ("indptr", "positions_"),
    [
        ([2, 4, 6], [-1, -1, 5, 6, 1, 2, -1, -1]),
        ([0, 5, 3], [1, 2, 3, 4, 5, 6, 7, 8]),
        ([0, 20, 6], [1, 2, 3, 4, 5, 6, 7, 8]),
        ([-5, -4, -1], [1, 2, 3, 4, 5, 6, 7, 8]),
        ([0, 3], [2**31 - 1, -(2**31), -(2**31) + 1]),
    ],
)
def test_the_inverse_refuses_what_the_host_refuses(indptr, positions_):
    _, holds = positions_jax.offsets_from_positions(
        np.array(indptr), np.array(positions_)
    )
    assert not holds
    with pytest.raises(positions.PositionError):
        positions.offsets_from_positions(np.array(indptr), np.array(positions_))


def test_counts_on_the_device_stop_at_the_largest_int32():
    """Past it they would begin at the smallest, which is padding."""
    last = 2**31 - 1
    made = positions_jax.positions_from_indptr(
        jnp.array([0, 3, 5]), jnp.array([last - 1, -4]), size=6
    )
    assert made.tolist() == [last - 1, last, last, -4, -3, -1]
    _, holds = positions_jax.offsets_from_positions(jnp.array([0, 3, 5]), made)
    assert not holds


ONE = np.array([0, 1])


@pytest.mark.parametrize("size", [None, 5.0, -1, True])
def test_sizes_that_are_not(unchecked, size):
    with pytest.raises(
        TypeError, match="size must be an int of at least 0, and static"
    ):
        positions_jax.positions_from_indptr(ONE, ONE[1:], size=size)


def test_a_size_inside_jit():
    with pytest.raises(TypeError, match="and static, got .*; is it a value inside jit"):
        jax.jit(lambda n: positions_jax.positions_from_indptr(ONE, ONE[1:], size=n))(4)


def test_empty_lists_are_lists_of_integers(unchecked):
    zero: Any = [0]
    none: Any = []
    nested: Any = [[], []]
    assert positions_jax.positions_from_indptr(zero, none, size=2).tolist() == [-1, -1]
    for call in (
        positions_jax.positions_from_mask,
        positions_jax.positions_from_segment_ids,
    ):
        assert call(none).shape == (0,) and call(nested).shape == (2, 0)
        with pytest.raises(TypeError, match="integers, got float64"):
            call(np.zeros(0))
    offsets, holds = positions_jax.offsets_from_positions(zero, none)
    assert offsets.shape == (0,) and holds
    _, holds = positions_jax.offsets_from_positions(zero, np.array([5, 6]))
    assert holds


def test_scalars_are_refused():
    for call in (
        positions_jax.positions_from_mask,
        positions_jax.positions_from_segment_ids,
    ):
        with pytest.raises(ValueError, match=r"must be \[\*B, T\], got a scalar"):
            call(jnp.int32(1))


def test_wide_integers_on_the_device_are_refused_by_their_own_name():
    with jax.enable_x64(True):
        wide = jnp.array([0, 3], jnp.int64)
        calls = {
            "indptr": lambda: positions_jax.positions_from_indptr(wide, wide, size=3),
            "segment_ids": lambda: positions_jax.positions_from_segment_ids(wide),
            "cu_seqlens": lambda: positions_jax.positions_from_cu_seqlens(wide, size=3),
        }
        for name, call in calls.items():
            message = rf"{name} on the device .* {name}\.astype\(jnp\.int32\)"
            with pytest.raises(TypeError, match=message):
                call()
