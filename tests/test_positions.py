"""Plans: inputs of all kinds, what is refused, and how it is said."""

import pickle
from typing import Any

import numpy as np
import pytest

from jrope.positions import (
    FAMILIES,
    PositionError,
    _jit,
    plan,
    plan_from_spans,
    spec,
    warmup,
)
from jrope.positions._canvas import _stretched
from jrope.positions._errors import CODES
from jrope.positions._jit import INTERPRETED

QWEN = spec("qwen2_vl")
PAD = QWEN.image_token_id
IDS = np.array([5, 6, 151652, *[PAD] * 6, 151653, 7], np.int32)
GRIDS = np.array([[1, 4, 6]], np.int32)
WANT = plan(QWEN, IDS, image_grid_thw=GRIDS).positions()


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


INPUTS = {
    "lists": (IDS.tolist(), GRIDS.tolist()),
    "int64": (IDS.astype(np.int64), GRIDS.astype(np.int64)),
    "uint32": (IDS.astype(np.uint32), GRIDS.astype(np.uint16)),
    "read-only": (read_only(IDS), read_only(GRIDS)),
    "non-contiguous": (np.repeat(IDS, 2)[::2], np.asfortranarray(np.tile(GRIDS, 2))),
    "one row": (IDS[None], GRIDS),
    "unaligned": (
        np.frombuffer(b"x" + IDS.tobytes(), np.uint8)[1:].view(np.int32),
        GRIDS,
    ),
}


@pytest.mark.parametrize("kind", sorted(INPUTS))
def test_every_kind_of_input(kind):
    ids, grids = INPUTS[kind]
    if kind == "non-contiguous":
        grids = grids[:, :3]
    made = plan(QWEN, ids, image_grid_thw=grids)
    np.testing.assert_array_equal(made.positions(), WANT)
    text = np.asarray(ids)[..., :3].reshape(-1)[:2]
    assert plan(QWEN, text).is_text_only


def test_inputs_are_left_alone():
    ids, grids = IDS.copy(), GRIDS.copy()
    plan(QWEN, ids, image_grid_thw=grids, token_types=(ids == PAD).astype(np.int8))
    np.testing.assert_array_equal(ids, IDS)
    np.testing.assert_array_equal(grids, GRIDS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_text_stores_nothing(family, tokens):
    # Above every family's ids of media.
    ids = np.arange(2**20, 2**20 + tokens, dtype=np.int32)
    made = plan(spec(family), ids)
    assert made.is_text_only and made.table is None
    assert made.delta == 0 and made.max_position == tokens - 1
    want = np.broadcast_to(np.arange(tokens), (made.axes, tokens))
    np.testing.assert_array_equal(made.positions(), want)


def test_nothing_at_all():
    made = plan(QWEN, [])
    assert made.positions().shape == (3, 0) and made.delta == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_output_types(dtype):
    made = plan(QWEN, IDS, image_grid_thw=GRIDS)
    np.testing.assert_array_equal(made.positions(dtype=dtype), WANT)
    assert made.positions(dtype=dtype).dtype == dtype


def test_into_a_part_of_a_larger_buffer():
    made = plan(QWEN, IDS, image_grid_thw=GRIDS)
    buffer = np.full((5, 40), -7, np.int32)
    made.fill(buffer[1:4, 10:30], out_offset=2)
    np.testing.assert_array_equal(buffer[1:4, 12 : 12 + len(IDS)], WANT)
    assert (buffer[[0, 4]] == -7).all() and (buffer[:, 12 + len(IDS) :] == -7).all()


def test_one_axis_may_go_into_a_vector():
    out = np.zeros(4, np.int32)
    plan(spec("text"), [3, 4, 5]).fill(out, start=2, stop=6)
    assert out.tolist() == [2, 3, 4, 5]


def test_a_plan_travels():
    made = plan(QWEN, IDS, image_grid_thw=GRIDS)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.positions(), WANT)
    assert again.delta == made.delta
    assert repr(made) == "PositionPlan(qwen2_vl, num_tokens=11, delta=-3, segments=1)"


OUTPUTS = [
    ("out_shape", "expected 3 rows, got 2", np.zeros((2, 20), np.int32), {}),
    ("out_shape", "expected 11 columns from column 0", np.zeros((3, 10), np.int32), {}),
    ("out_shape", "from column -1", np.zeros((3, 20), np.int32), {"out_offset": -1}),
    ("out_shape", "0 <= start", np.zeros((3, 20), np.int32), {"start": -1}),
    ("out_shape", "0 <= start", np.zeros((3, 20), np.int32), {"start": 4, "stop": 3}),
    ("out_shape", "shape \\[20\\]", np.zeros(20, np.int32), {}),
    ("out_dtype", "array of int32 or .* float64", np.zeros((3, 20)), {}),
    ("out_dtype", "got float32", np.zeros((3, 20), np.float32), {}),
    ("out_dtype", "got list", [[0] * 20] * 3, {}),
    ("out_dtype", "a writable array", read_only(np.zeros((3, 20), np.int32)), {}),
]


@pytest.mark.parametrize("code,message,out,window", OUTPUTS)
@pytest.mark.parametrize("ids", [IDS, np.arange(11, dtype=np.int32)])
def test_outputs_that_do_not_fit(code, message, out, window, ids):
    warmup([np.int32, np.float32])
    made = plan(QWEN, ids, image_grid_thw=GRIDS if PAD in ids else None)
    with pytest.raises(PositionError, match=message) as caught:
        made.fill(out, **window)
    assert caught.value.code == code
    assert not np.any(out)


def test_fractional_positions_need_floats():
    model = spec("qwen3_omni_moe")
    with pytest.raises(PositionError, match="out_dtype"):
        plan(model, [1, 2]).fill(np.zeros((3, 2), np.int32))
    assert plan(model, [1, 2]).positions().dtype == np.float32


VIDEO = [1, 151652, *[151656] * 8, 151653]
BAD = [
    ("input", "shape \\[2, 11\\]", {"input_ids": np.stack([IDS, IDS])}),
    ("input", "input_ids as integers", {"input_ids": IDS.astype(np.float32)}),
    ("input", "within int32", {"input_ids": IDS.astype(np.int64) + 2**32}),
    ("input", "a ragged list", {"input_ids": [[1], [2, 3]]}),
    ("input", "shape \\[n, 3\\]", {"image_grid_thw": [[4, 6]]}),
    ("input", "11 token_types", {"token_types": [0, 1]}),
    ("input", "kinds \\[0, 1, 2\\]", {"token_types": [3] * 11}),
    ("too_few_grids", "image 0 at token 3", {"image_grid_thw": None}),
    ("too_many_grids", "expected 1, got 2", {"image_grid_thw": [[1, 4, 6]] * 2}),
    ("token_count", "expected 4, got 6", {"image_grid_thw": [[1, 4, 4]]}),
    ("token_count", "expected 9, got 6", {"image_grid_thw": [[1, 6, 6]]}),
    ("token_count", "got 6", {"image_grid_thw": [[2**31 - 2] * 3]}),
    ("token_count", "expected 6, got 5", {"input_ids": np.delete(IDS, 4)}),
    ("token_count", "expected 6, got 7", {"input_ids": np.insert(IDS, 4, PAD)}),
    ("truncated", "expected 6, got 5", {"input_ids": IDS[:8]}),
    ("grid_not_divisible", "expected 2, got 5", {"image_grid_thw": [[1, 5, 6]]}),
    ("grid_nonpositive", "expected 1, got -4", {"image_grid_thw": [[1, -4, 6]]}),
    ("truncated", "truncate='clip'", {"input_ids": IDS[:7]}),
]


@pytest.mark.parametrize("advance", ["max", "hf5"])
@pytest.mark.parametrize("code,message,change", BAD)
def test_what_is_refused(code, message, change, advance):
    arguments: dict[str, Any] = {"input_ids": IDS, "image_grid_thw": GRIDS, **change}
    with pytest.raises(PositionError, match=message) as caught:
        plan(QWEN, **arguments, advance=advance)
    assert caught.value.code == code


@pytest.mark.parametrize("offset", [0, 1, 7, 15])
@pytest.mark.parametrize("side", [18, 50])
def test_every_token_of_a_medium_is_looked_at(side, offset):
    count, grids = side * side, np.array([[1, 2 * side, 2 * side]], np.int32)
    memory = np.full(offset + count + 2, PAD, np.int32)
    ids = memory[offset:]
    ids[0] = ids[-1] = 5
    assert plan(QWEN, ids, image_grid_thw=grids).delta == side - count
    for k in {*range(1, 40), *range(1, count, 97), *range(count - 40, count + 1)}:
        ids[k] = 6
        with pytest.raises(PositionError, match="token_count|too_few_grids"):
            plan(QWEN, ids, image_grid_thw=grids)
        ids[k] = PAD


SECONDS = [
    ("seconds_invalid", [np.nan]),
    ("seconds_invalid", [-0.5]),
    ("seconds_invalid", [np.inf]),
    ("seconds_invalid", [1e30]),
    ("seconds_invalid", [1e300]),
    ("seconds_invalid", [1.073e9]),
    ("too_many_seconds", [1.0, 1.0]),
    ("input", [[1.0]]),
    ("input", ["x"]),
]


@pytest.mark.parametrize("code,seconds", SECONDS)
def test_seconds_that_are_refused(code, seconds):
    with pytest.raises(PositionError, match=code):
        plan(
            spec("qwen2_5_vl"),
            VIDEO,
            video_grid_thw=[[2, 4, 4]],
            second_per_grid_ts=seconds,
        )


def test_whole_positions_stay_whole_where_float32_does_not():
    # The second frame lies at 2^24 + 2, the largest position.
    grids, far = [[2, 4, 4]], 2**24
    made = plan(
        spec("qwen2_5_vl"),
        VIDEO,
        video_grid_thw=grids,
        second_per_grid_ts=[far / 2],
    )
    assert made.positions()[0].tolist() == [0, 1, *[2] * 4, *[far + 2] * 4, far + 3]
    assert made.delta == far + 4 - len(VIDEO)


def test_seconds_for_some_videos_only():
    ids = [*VIDEO, *VIDEO]
    with pytest.raises(PositionError, match="too_few_seconds video 1"):
        plan(
            spec("qwen2_5_vl"),
            ids,
            video_grid_thw=[[2, 4, 4]] * 2,
            second_per_grid_ts=[1.0],
        )


def test_a_default_for_seconds():
    model = spec("qwen2_5_omni", default_seconds=1.0)
    got = plan(model, VIDEO, video_grid_thw=[[2, 4, 4]]).positions()
    assert got[0, 2:11].tolist() == [2, 2, 2, 2, 27, 27, 27, 27, 28]


AV = [151652, 151647, *[151656] * 4, *[151646] * 5, 151648, 151653, 9]
SOUND: dict[str, Any] = {
    "video_grid_thw": [[1, 4, 4]],
    "second_per_grid_ts": [1.0],
    "audio_lengths": [20],
}


# vllm-project/vllm#16878
def test_audio_in_video_can_be_switched_off():
    model = spec("qwen2_5_omni")
    together = plan(model, AV, **SOUND).positions()
    apart = plan(model, AV, use_audio_in_video=False, **SOUND).positions()
    assert together[0, :3].tolist() == [0, 0, 1]
    assert apart[0, :3].tolist() == [0, 1, 2]
    same = plan(model, AV, use_audio_in_video=True, **SOUND).positions()
    np.testing.assert_array_equal(same, together)


@pytest.mark.parametrize(
    "code,change,ids",
    [
        ("token_count audio 0", {"audio_lengths": [24]}, AV),
        ("token_count video 0", {"video_grid_thw": [[1, 4, 8]]}, AV),
        ("truncated", {}, AV[:8]),
        ("too_few_audio_lengths audio 0", {"audio_lengths": None}, AV),
        ("too_many_audio_lengths", {"audio_lengths": [20, 20]}, AV),
        ("token_count audio 0", {"audio_lengths": [-3]}, AV),
        ("too_few_grids video 0", {"video_grid_thw": None}, AV),
        ("too_few_seconds video 0", {"second_per_grid_ts": None}, AV),
    ],
)
def test_a_video_and_its_sound_are_counted(code, change, ids):
    with pytest.raises(PositionError, match=code):
        plan(spec("qwen2_5_omni"), ids, **{**SOUND, **change})


def test_frames_that_are_missing():
    model = spec("qwen3_vl")
    with pytest.raises(PositionError, match="truncated video 0: expected 3, got 2"):
        plan(model, VIDEO, video_grid_thw=[[3, 4, 4]])
    ids = [*[151656] * 4, PAD, *[151656] * 4]
    with pytest.raises(PositionError, match="token_count image 0"):
        plan(model, ids, video_grid_thw=[[2, 4, 4]], image_grid_thw=[[1, 2, 2]])


@pytest.mark.parametrize("word", [{"advance": "min"}, {"truncate": 1}])
def test_words_that_are_no_choice(word):
    with pytest.raises(ValueError, match="must be one of"):
        plan(QWEN, IDS, image_grid_thw=GRIDS, **word)


@pytest.mark.parametrize(
    "spans",
    [[(1, 3, 9)], [(1, -1, 6)], [(1, 3, 6), (1, 5, 2)], [(0, 3, 6)], [(4, 3, 6)]],
)
def test_spans_that_are_refused(spans):
    with pytest.raises(PositionError, match="input|token_count"):
        plan_from_spans(QWEN, len(IDS), spans, image_grid_thw=GRIDS)


def test_images_to_be_generated():
    model = spec("glm_image")
    ids = [1, 2, 16384]
    made = plan(model, ids, image_grid_thw=[[1, 2, 3], [1, 1, 2]])
    got = made.positions(0, 13)
    assert got[0].tolist() == [0, 1, 2, 3, 3, *[5] * 6, 8, 9]
    assert got[1].tolist() == [0, 1, 2, 3, 3, 5, 5, 5, 6, 6, 6, 8, 9]
    assert got[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    assert made.delta == 0 and made.num_planned == 11
    with pytest.raises(PositionError, match="grid_nonpositive image 0"):
        plan(model, ids, image_grid_thw=[[1, 0, 3]])
    with pytest.raises(PositionError, match="capacity image 0"):
        plan(model, ids, image_grid_thw=[[1, 2**30, 2**30]])
    # Neither alone is too large.
    for grid in ([1, 30_000, 40_000], [1, 1, 2**30]):
        with pytest.raises(
            PositionError, match="capacity image 1: expected 2147483647"
        ):
            plan(model, ids, image_grid_thw=[grid, grid])


def test_a_canvas_is_checked_as_well():
    model = spec("minicpmv4_7")
    ids = [5, 151700, *[151655] * 4, 151701]
    assert plan(model, ids, image_grid_thw=[[8, 8]]).delta == -3
    for code, grids, tokens in (
        ("too_few_grids", None, ids),
        ("too_many_grids", [[8, 8]] * 2, ids),
        ("token_count", [[8, 4]], ids),
        ("token_count", [[8, 8]], ids[2:]),
        ("truncated", [[8, 8]], ids[:4]),
        ("grid_not_divisible", [[8, 9]], ids),
        ("grid_nonpositive", [[8, 0]], ids),
    ):
        with pytest.raises(PositionError, match=code):
            plan(model, tokens, image_grid_thw=grids)


def test_a_large_canvas_is_a_grid_like_a_small_one():
    ids = [5, 151700, *[151655] * 400, 151701]
    made = plan(spec("minicpmv4_7"), ids, image_grid_thw=[[80, 80]])
    assert made.table is not None and len(made.table) < 2 * 20
    got = made.positions()
    np.testing.assert_array_equal(got[1, 2:402], 1 + np.arange(400) // 20)
    np.testing.assert_array_equal(got[2, 2:402], 1 + np.arange(400) % 20)


# Of torch 2.13: torch.linspace(0, size - 1, count).round().
@pytest.mark.parametrize(
    ("count", "size", "wanted"),
    [
        (4, 9, [0, 3, 5, 8]),
        (15, 32, [0, 2, 4, 7, 9, 11, 13, 16, 18, 20, 22, 24, 27, 29, 31]),
        (15, 118, [0, 8, 17, 25, 33, 42, 50, 59, 67, 75, 84, 92, 100, 109, 117]),
    ],
)
def test_halves_of_a_stretched_slice_are_rounded_as_torch_does(count, size, wanted):
    assert _stretched(count, size).tolist() == wanted


def test_every_code_is_raised_by_a_kernel_or_a_check():
    assert all(CODES.values())
    error = PositionError("capacity", index=2, expected=3, got=4)
    assert str(error).startswith("capacity entry 2: expected 3, got 4; more than")
    assert (error.code, error.index, error.expected, error.got) == ("capacity", 2, 3, 4)


def test_warmup_prepares_all_that_a_call_needs(monkeypatch):
    warmup([np.int32, np.int64, np.float32])
    if INTERPRETED:
        return
    monkeypatch.setattr(_jit, "_compiled", None)
    for kind in INPUTS:
        ids, grids = INPUTS[kind]
        made = plan(
            QWEN, ids, image_grid_thw=grids[:, :3] if kind[:3] == "non" else grids
        )
        for dtype in (np.int32, np.int64):
            made.positions(dtype=dtype)
