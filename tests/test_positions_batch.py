"""The batch buffer: slots, limits, padding, and handing steps to jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrope.positions import BatchPositions, PositionError, plan, spec

TEXT = spec("text")
QWEN = spec("qwen2_vl")
PAD = QWEN.image_token_id


def image(side: int):
    """One image of side x side tokens between a word and another."""
    ids = np.array([1, *[PAD] * side * side, 2], np.int32)
    return plan(QWEN, ids, image_grid_thw=[[1, 2 * side, 2 * side]])


def batch_of(*plans, **sizes):
    options = {"max_tokens": 64, "max_position": 1000, **sizes}
    batch = BatchPositions(plans[0].spec, max(len(plans), 2), **options)
    for slot, made in enumerate(plans):
        batch.add(slot, made)
    return batch


def test_prefill_chunk_prefix_resume_drafts_and_decode_in_one_step():
    whole = image(3)
    full = whole.positions(0, 40)
    batch = batch_of(*[whole] * 6)
    windows = [(0, 11), (4, 3), (9, 5), (20, 1), (15, 4), (7, 0)]
    computed, scheduled = np.array(windows).T
    got = batch.step(np.arange(6), computed, scheduled)
    want = np.concatenate([full[:, c : c + n] for c, n in windows], axis=1)
    np.testing.assert_array_equal(got, want)
    assert got.base is not None


def test_columns_past_the_step_are_padding():
    batch = batch_of(image(3), image(2))
    for computed, scheduled in (
        ([0, 0], [11, 6]),
        ([11, 6], [1, 1]),
        ([12, 7], [0, 0]),
    ):
        got = batch.step([0, 1], computed, scheduled)
        assert got.shape[1] == sum(scheduled)
        assert (batch.buffer[:, sum(scheduled) :] == -1).all()
    assert batch.step([], [], []).shape == (3, 0)


def test_slots_can_be_reused_and_swapped():
    batch = batch_of(image(3), plan(QWEN, [1, 2]))
    batch.swap(0, 1)
    np.testing.assert_array_equal(batch.step([1], [0], [11]), image(3).positions())
    batch.remove(1)
    batch.swap(0, 1)
    batch.add(0, image(2))
    np.testing.assert_array_equal(
        batch.step([1, 0], [0, 0], [2, 6]),
        np.concatenate([plan(QWEN, [1, 2]).positions(), image(2).positions()], axis=1),
    )


def test_the_store_of_tables_is_renewed_many_times():
    batch = BatchPositions(QWEN, 3, max_tokens=200, max_position=1000)
    for round_ in range(300):
        slot = round_ % 3
        if round_ >= 3:
            batch.remove(slot)
        batch.add(slot, image(1 + round_ % 7))
        for other in range(min(round_, 2) + 1):
            late = round_ - (slot - other) % 3
            if late >= 0:
                want = image(1 + late % 7).positions()
                got = batch.step([other], [0], [want.shape[1]])
                np.testing.assert_array_equal(got, want)
    assert batch._arena.shape[0] < 64


REFUSED = [
    ("slot", "entry 1: expected a slot of 0 to 1, got 2", ([0, 2], [0, 0], [1, 1])),
    ("slot", "got -1;", ([-1], [0], [1])),
    ("slot", "entry 0: .* got slot 1, which is empty", ([1], [0], [1])),
    ("input", "entry 0: expected computed of at least 0, got -3", ([0], [-3], [1])),
    ("input", "entry 0: expected scheduled of at least 0, got -1", ([0], [0], [-1])),
    ("input", "of computed as of slots, 1, got 2", ([0], [0, 0], [1])),
    ("input", "of scheduled as of slots, 1, got 3", ([0], [0], [1, 1, 1])),
    ("input", "shape \\[1, 1, 1\\]", ([[[0]]], [0], [1])),
    ("capacity", "expected 66, got 67", ([0], [0], [67])),
    ("position_beyond_table", "expected 99, got 100", ([0], [100], [7])),
    ("position_beyond_table", "entry 0", ([0], [2**31 - 2], [1])),
]


@pytest.mark.parametrize("code,message,step", REFUSED)
def test_a_refused_step_leaves_the_one_before(code, message, step):
    batch = batch_of(image(3), headroom=2, max_position=100)
    batch.step([0], [0], [11])
    before = batch.buffer.copy()
    with pytest.raises(PositionError, match=message) as caught:
        batch.step(*step)
    assert caught.value.code == code
    np.testing.assert_array_equal(batch.buffer, before)
    np.testing.assert_array_equal(batch.step([0], [11], [1]), [[5]] * 3)
    assert (batch.buffer[:, 1:] == -1).all()


def test_the_last_row_of_the_table_can_be_reached():
    batch = batch_of(image(3), max_position=100)
    assert batch.step([0], [105], [1])[0, 0] == 99


def test_slots_out_of_order_decode_within_the_same_limits():
    batch = batch_of(image(3), image(2), max_position=100)
    assert batch.step([1, 0], [8, 105], [1, 1]).tolist() == [[6, 99]] * 3
    with pytest.raises(PositionError, match="position_beyond_table entry 1"):
        batch.step([1, 0], [8, 106], [1, 1])
    got = batch.step([1, 0], [8, 10], [1, 1])
    np.testing.assert_array_equal(got[:, 1:], image(3).positions(10, 11))
    got = batch.step([1, 0], [8, 9], [1, 1])
    np.testing.assert_array_equal(got[:, 1:], image(3).positions(9, 10))


def test_plans_that_do_not_fit():
    batch = batch_of(image(3), max_position=7)
    with pytest.raises(PositionError, match="position_beyond_table.*at most 6, got 7"):
        batch.add(1, plan(QWEN, np.arange(8)))
    with pytest.raises(
        PositionError, match=r"slot 0 to be empty, got Pos.* in it; rem"
    ):
        batch.add(0, image(1))
    with pytest.raises(PositionError, match="slot: expected a slot of 0 to 1, got 5"):
        batch.add(5, image(1))
    with pytest.raises(
        PositionError, match="slot 1 to hold a request, got an empty slot; w"
    ):
        batch.remove(1)
    with pytest.raises(PositionError, match="a plan of qwen2_vl, got text"):
        batch.add(1, plan(TEXT, [1]))
    with pytest.raises(PositionError, match="got qwen3_omni_moe"):
        batch.add(1, plan(spec("qwen3_omni_moe"), [1]))


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "max_position"])
def test_sizes_must_be_positive(name):
    sizes = {"max_requests": 1, "max_tokens": 1, "max_position": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        BatchPositions(TEXT, **sizes)
    with pytest.raises(ValueError, match="headroom"):
        BatchPositions(TEXT, 1, 1, 1, headroom=-1)


def test_fractional_positions_have_a_buffer_of_floats():
    model = spec("qwen3_omni_moe")
    ids = [1, 151652, *[151656] * 2, 151653]
    made = plan(model, ids, video_grid_thw=[[2, 2, 2]], second_per_grid_ts=[0.1])
    batch = batch_of(made)
    got = batch.step([0], [0], [7])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, made.positions(0, 7))
    assert got[0, 3] == np.float32(2 + np.float32(0.1) * np.float32(13))


def test_images_are_generated_through_the_buffer():
    model = spec("glm_image")
    made = plan(model, [1, 16384], image_grid_thw=[[1, 2, 2]])
    batch = batch_of(made)
    got = [batch.step([0], [k], [1])[:, 0].tolist() for k in range(2, 8)]
    assert got == [[2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3], [4] * 3, [5] * 3]


def test_the_buffer_is_aligned():
    for tokens in range(1, 40, 7):
        batch = BatchPositions(QWEN, 1, tokens, 100)
        assert batch.buffer.ctypes.data % 64 == 0
        assert batch.buffer.flags.c_contiguous


def test_a_step_array_has_one_shape():
    batch = batch_of(plan(TEXT, [1, 2, 3]), headroom=3)
    shapes = set()
    for start, count in ((0, 3), (3, 1), (4, 2)):
        batch.step([0], [start], [count])
        made = batch.step_array()
        shapes.add((made.shape, made.dtype))
        assert not np.shares_memory(made, batch.buffer)
    assert shapes == {((67,), np.dtype(np.int32))}
    assert batch_of(image(1)).step_array().shape == (3, 64)


def test_a_step_array_for_a_smaller_program():
    batch = batch_of(image(1), image(1))
    batch.step([0, 1], [50, 90], [1, 1])
    made = batch.step_array(4)
    assert made.shape == (3, 4)
    np.testing.assert_array_equal(made, batch.buffer[:, :4])
    for columns in (1, 65):
        with pytest.raises(PositionError, match=f"and at most 64, .*got {columns}"):
            batch.step_array(columns)


@jax.jit
def slow_step(positions, weight):
    """Reads the positions late, after work that takes a while."""
    for _ in range(3):
        weight = weight @ weight * 1e-3
    late = (weight[0, 0] * 0).astype(jnp.int32)
    return positions + late


def test_refilling_while_steps_are_in_flight_changes_nothing():
    # max_tokens makes rows of 4096 bytes: every copy could be aligned by chance, and an
    # aligned array that is handed over is not copied by jax on CPU.
    batch = batch_of(image(3), max_tokens=1024, max_position=10**6)
    weight = jnp.eye(200, dtype=jnp.float32)
    slow_step(batch.step_array(), weight).block_until_ready()
    for _ in range(100):
        results, wanted = [], []
        for k in range(24):
            batch.step([0], [11 + k], [1 + k])
            wanted.append(batch.buffer.copy())
            results.append(slow_step(batch.step_array(), weight))
        for got, want in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
