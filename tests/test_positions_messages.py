"""What errors of the position builders say: where, what must hold, what came."""

import numpy as np
import pytest

from jrope.positions import (
    BatchPositions,
    PositionError,
    offsets_from_positions,
    plan,
    positions_from_indptr,
    positions_from_mask,
    positions_from_segment_ids,
    spec,
    vision_positions,
    warmup,
)

QWEN, OMNI = spec("qwen2_vl"), spec("qwen3_omni_moe")
CANVAS = spec("minicpmv4_7")
PICTURE = [5, 151700, *[151655] * 4, 151701]
FILM = [5, 151700, *[151656] * 4, 151701]
MOST = 2**26
FAR = 2**31 - 1
ROWS = np.zeros((3, 3), np.int32)


def text(family=QWEN, tokens=3):
    return plan(family, [1] * tokens)


def batch(*plans):
    made = BatchPositions(QWEN, 2, max_tokens=4, max_position=10, headroom=2)
    for slot, held in enumerate(plans):
        made.add(slot, held)
    return made


def refused(call, message):
    """The part before the likely cause, word for word; returns the error."""
    with pytest.raises(PositionError) as caught:
        call()
    assert str(caught.value).split("; ")[0] == message
    return caught.value


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        (text, (np.zeros((3, 3), np.float32),), "int32 or int64, got float32"),
        (lambda: text(OMNI), (ROWS.copy(),), "float32, got int32"),
        (text, (ROWS[:2].copy(),), "3 rows, got 2"),
        (text, (ROWS.copy(), 2, 1), "0 <= start <= stop < 2^31, got 2, 1"),
        (text, (ROWS.copy(), -1, 1), "0 <= start <= stop < 2^31, got -1, 1"),
        (text, (ROWS.copy(), 0, FAR), f"0 <= start <= stop < 2^31, got 0, {FAR}"),
        (
            text,
            (ROWS.copy(), 0, 3, 1),
            "3 columns from column 1 on, got 3 columns in all",
        ),
        (text, (ROWS[..., None].copy(),), "[3, columns], got shape [3, 3, 1]"),
    ],
)
def test_windows(made, arguments, message):
    warmup([np.int32, np.float32])
    code = "out_dtype" if "float32" in message else "out_shape"
    refused(lambda: made().fill(*arguments), f"{code}: expected {message}")
    assert not np.any(arguments[0])


def test_the_last_window_of_all():
    assert text().positions(FAR - 2, FAR - 1).tolist() == [[FAR - 2]] * 3
    refused(
        lambda: text().positions(0, MOST + 1),
        f"too_long: expected at most {MOST} positions, got {MOST + 1}",
    )


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        (PICTURE, None, "too_few_grids image 0 at token 2: expected 1, got 0"),
        (PICTURE, [[8, 8]] * 3, "too_many_grids image 1: expected 1, got 3"),
        (PICTURE, [[8, 4]], "token_count image 0 at token 2: expected 2, got 4"),
        (PICTURE, [[8, 12]], "token_count image 0 at token 2: expected 6, got 4"),
        (
            [*PICTURE, *PICTURE[1:]],
            [[8, 8], [4, 8]],
            "token_count image 1 at token 8: expected 2, got 4",
        ),
        (
            PICTURE[2:],
            [[8, 8]],
            "token_count at token 0: expected a start marker before a picture's "
            "tokens, got none",
        ),
        (PICTURE[:-1], [[8, 12]], "truncated image 0 at token 2: expected 6, got 4"),
        (PICTURE[:-1], [[8, 4]], "token_count image 0 at token 2: expected 2, got 4"),
        (
            PICTURE,
            [[8, 9]],
            "grid_not_divisible image 0 at token 2: expected 4, got [8, 9]",
        ),
        (
            PICTURE,
            [[9, 8]],
            "grid_not_divisible image 0 at token 2: expected 4, got [9, 8]",
        ),
        (
            PICTURE,
            [[8, 0]],
            "grid_nonpositive image 0 at token 2: expected 1, got [8, 0]",
        ),
        (
            PICTURE,
            [[0, 8]],
            "grid_nonpositive image 0 at token 2: expected 1, got [0, 8]",
        ),
    ],
)
def test_a_canvas(ids, sizes, message):
    error = refused(lambda: plan(CANVAS, ids, image_grid_thw=sizes), message)
    cut = str(error).endswith("; a canvas cannot be clipped")
    assert cut is (error.code == "truncated")
    # The same of a video, where the tokens are a video's.
    ids = [151656 if token == 151655 else token for token in ids]
    video = message.replace("image", "video")
    refused(lambda: plan(CANVAS, ids, video_grid_thw=sizes), video)


def test_a_canvas_counts_images_and_videos_apart():
    ids = [*PICTURE, *FILM[1:], *PICTURE[1:]]
    images, videos = [[8, 8], [4, 16]], [[16, 4]]
    got = plan(CANVAS, ids, image_grid_thw=images, video_grid_thw=videos).positions()
    assert got[1, 2:6].tolist() == [1, 1, 2, 2]
    assert got[2, 2:6].tolist() == [1, 2, 1, 2]
    # The second picture begins at 4, and is a column of four.
    assert got[1, 8:12].tolist() == [4, 5, 6, 7]
    assert got[2, 8:12].tolist() == [4] * 4
    assert got[1, 14:18].tolist() == [9] * 4
    assert got[2, 14:18].tolist() == [9, 10, 11, 12]


def test_slots():
    none = "expected a slot of 0 to 1, got"
    for slot in (-1, 2):
        refused(lambda slot=slot: batch().add(slot, text()), f"slot: {none} {slot}")
        refused(lambda slot=slot: batch().remove(slot), f"slot: {none} {slot}")
        refused(lambda slot=slot: batch().swap(0, slot), f"slot: {none} {slot}")
        refused(lambda slot=slot: batch().swap(slot, 0), f"slot: {none} {slot}")
        refused(
            lambda slot=slot: batch(text()).step([0, slot], [0, 0], [1, 1]),
            f"slot entry 1: {none} {slot}",
        )
    error = refused(
        lambda: batch().remove(1),
        "slot: expected slot 1 to hold a request, got an empty slot",
    )
    assert str(error).endswith("was its request removed before, or never added?")
    error = refused(
        lambda: batch(text()).add(0, text()),
        "slot: expected slot 0 to be empty, got PositionPlan(qwen2_vl, num_tokens=3, "
        "delta=0, segments=0) in it",
    )
    assert str(error).endswith("remove the request that it holds first")
    error = refused(
        lambda: batch(text()).step([0, 1], [0, 0], [1, 1]),
        "slot entry 1: expected the slot of a request, got slot 1, which is empty",
    )
    assert str(error).endswith("was its request removed, or never added?")


def test_plans_that_a_batch_does_not_take():
    error = refused(
        lambda: batch(text(), text(OMNI)),
        "out_shape entry 1: expected a plan of qwen2_vl, got qwen3_omni_moe",
    )
    assert str(error).endswith("was the batch made for another model's spec?")
    refused(
        lambda: batch(text(), text(tokens=11)),
        "position_beyond_table entry 1: expected at most 9, got 10",
    )
    assert batch(text(tokens=10)).step([0], [9], [1]).tolist() == [[9]] * 3


@pytest.mark.parametrize(
    ("slots", "computed", "scheduled", "message"),
    [
        (
            *([1, 0], [0, -1], [1, 1]),
            "input entry 1: expected computed of at least 0, got -1",
        ),
        (
            *([1, 0], [0, 0], [1, -2]),
            "input entry 1: expected scheduled of at least 0, got -2",
        ),
        ([1, 0], [0, 0], [4, 3], "capacity: expected 6, got 7"),
        ([1, 0], [9, 10], [1, 1], "position_beyond_table entry 1: expected 9, got 10"),
        ([1, 0], [3, 8], [1, 3], "position_beyond_table entry 1: expected 9, got 10"),
        (
            *([1, 0], [3, 3, 3], [1, 1]),
            "input: expected as many entries of computed as of slots, 2, got 3",
        ),
        (
            *([1, 0], [3, 3], [1]),
            "input: expected as many entries of scheduled as of slots, 2, got 1",
        ),
    ],
)
def test_steps(slots, computed, scheduled, message):
    made = batch(text(), text())
    before = made.step([0], [0], [2]).copy()
    refused(lambda: made.step(slots, computed, scheduled), message)
    np.testing.assert_array_equal(made.buffer[:, :2], before)
    np.testing.assert_array_equal(made.buffer[:, 2:], -1)


def test_columns_of_a_step():
    made = batch(text())
    made.step([0], [0], [5])
    assert [made.step_array(n).shape for n in (5, 6)] == [(3, 5), (3, 6)]
    for columns in (4, 7):
        refused(
            lambda columns=columns: made.step_array(columns),
            "capacity: expected at least 5 columns, the step's tokens, and at most 6, "
            f"the buffer's, got {columns}",
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: positions_from_indptr([0, 2], [1], size=1),
            "capacity: expected 2 columns, got 1",
        ),
        (
            lambda: positions_from_indptr([0, 2], [FAR]),
            f"position_beyond_table: expected positions within int32, got {FAR + 1}",
        ),
        (
            lambda: positions_from_indptr([0, 2], [1, 2]),
            "input: expected 1 offsets, got 2",
        ),
        (
            lambda: positions_from_indptr([0, 2], []),
            "input: expected 1 offsets, got 0",
        ),
        (
            lambda: positions_from_indptr([1, 2], [1]),
            "input: expected indptr ascending from 0, got [1, 2]",
        ),
        (
            lambda: positions_from_indptr([0, 2, 1], [1, 2]),
            "input: expected indptr ascending from 0, got [0, 2, 1]",
        ),
        (
            lambda: positions_from_indptr([-1, *range(20)], []),
            "input: expected indptr ascending from 0, got [-1, 0, 1, 2, 3, 4, 5, 6]",
        ),
        (
            lambda: positions_from_indptr([], []),
            "input: expected indptr ascending from 0, got []",
        ),
        (
            lambda: positions_from_indptr([0, MOST + 1], [0]),
            f"too_long: expected a batch of at most {MOST}, got {MOST + 1}",
        ),
        (
            lambda: offsets_from_positions([0, 2, 5], [4, 5, 6, 7, 9]),
            "input entry 1 at token 4: expected one more than the position before, "
            "got 9",
        ),
        (
            lambda: offsets_from_positions([0, 2, 4], [4, 6, 1, 2]),
            "input entry 0 at token 1: expected one more than the position before, "
            "got 6",
        ),
        (
            lambda: offsets_from_positions([0, 2, 5], [4, 5, 6, 7]),
            "input: expected at least 5 positions, got 4",
        ),
        (
            lambda: positions_from_mask([[0, 1], [1, 2]]),
            "input: expected a mask of 0 and 1, got 2",
        ),
        (
            lambda: positions_from_mask([0, -1, 1]),
            "input: expected a mask of 0 and 1, got -1",
        ),
        (
            lambda: positions_from_mask(np.array(1)),
            "input: expected mask of shape [*B, T], got a scalar",
        ),
        (
            lambda: positions_from_segment_ids(np.array(1)),
            "input: expected segment_ids of shape [*B, T], got a scalar",
        ),
        (
            lambda: vision_positions([[1, 4, 4], [1, 4, 0]], order="row_major"),
            "grid_nonpositive entry 1: expected 1, got [1, 4, 0]",
        ),
        (
            lambda: vision_positions(
                [[1, 4, 4], [1, 6, 4]], order="merge_blocks", spatial_merge_size=4
            ),
            "grid_not_divisible entry 1: expected H and W in multiples of 4, "
            "got [6, 4]",
        ),
        (
            lambda: vision_positions(
                [[3, 4, 4], [1, 4, 6]], order="merge_blocks", spatial_merge_size=4
            ),
            "grid_not_divisible entry 1: expected H and W in multiples of 4, "
            "got [4, 6]",
        ),
        (
            lambda: vision_positions([[MOST, 1, 1], [1, 1, 1]], order="row_major"),
            f"too_long: expected patches of at most {MOST}, got {MOST + 1}",
        ),
    ],
)
def test_arrays(call, message):
    refused(call, message)


def test_arrays_at_their_limits():
    assert positions_from_indptr([0, 1], [FAR]).tolist() == [FAR]
    assert positions_from_indptr([0, 2], [1], size=2).tolist() == [1, 2]
    assert positions_from_indptr([0], [], size=0).tolist() == []
    assert positions_from_indptr([0, 0, 2], [7, 3], size=3).tolist() == [3, 4, -1]
    assert offsets_from_positions([0, 0, 2], [4, 5]).tolist() == [0, 4]
    assert offsets_from_positions([0, 2], [4, 5, 99]).tolist() == [4]
    got = positions_from_segment_ids([[-1, 0, 1, 1], [2, 3, 3, 2]])
    assert got.tolist() == [[-1, -1, 0, 1], [0, 0, 1, 0]]
