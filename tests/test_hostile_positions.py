"""Prompts, grids and sizes that no model has: refused by name, before allocation."""

import contextlib
import copy
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from jrope import positions_jax
from jrope.positions import (
    FAMILIES,
    NO_TOKEN,
    BatchPositions,
    PositionError,
    offsets_from_positions,
    plan,
    plan_from_spans,
    positions_from_indptr,
    positions_from_mask,
    positions_from_segment_ids,
    spec,
    vision_positions,
    warmup,
)
from jrope.positions._media import audio_tokens

QWEN, TEXT = spec("qwen2_vl"), spec("text")
MOST = 2**26
LARGEST = 2**31 - 1
IDS = [1, 151652, *[151655] * 4, 151653]


@contextlib.contextmanager
def little_memory():
    """Fails if more than a megabyte was allocated meanwhile."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.fixture
def no_memory():
    """The same for a whole test."""
    with little_memory():
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compilers take memory of their own."""
    warmup()


# Of one number each: 10^8 tokens that take no memory themselves.
LONG = {
    "int32": np.broadcast_to(np.int32(7), (10**8,)),
    "int64": np.broadcast_to(np.int64(7), (10**8,)),
    "list-like": range(10**8),
    "a batch of one": np.broadcast_to(np.int32(7), (1, 10**8)),
}


@pytest.mark.parametrize("ids", LONG.values(), ids=LONG)
def test_a_hundred_million_tokens_are_refused_before_allocation(ids, no_memory):
    others: list[Any] = [
        {},
        {"image_grid_thw": [[1, 4, 4]]},
        {"token_types": ids},
    ]
    for given in others:
        with pytest.raises(PositionError, match=r"too_long: .* got 100000000; more"):
            plan(QWEN, ids, **given)


@pytest.mark.parametrize("grids", [None, np.array([[1, 4, 4]], np.int32)])
def test_the_compiled_scan_refuses_them_as_well(grids):
    ids = np.zeros(MOST + 1, np.int32)
    with pytest.raises(PositionError, match=f"too_long: .* got {MOST + 1}"):
        plan(QWEN, ids, image_grid_thw=grids)
    assert plan(QWEN, ids[1:]).num_tokens == MOST


def test_everything_else_that_says_a_length(no_memory):
    with pytest.raises(PositionError, match="too_long: expected at most 67108864 pos"):
        plan(TEXT, [1]).positions(0, LARGEST)
    with pytest.raises(PositionError, match="too_long: expected a batch of at most"):
        positions_from_indptr([0, LARGEST], [0])
    with pytest.raises(PositionError, match="too_long"):
        offsets_from_positions([0, LARGEST], np.broadcast_to(np.int32(0), (LARGEST,)))
    for mask in (np.broadcast_to(True, (10**8,)), LONG["int64"]):
        with pytest.raises(PositionError, match="too_long"):
            positions_from_mask(mask)
    with pytest.raises(PositionError, match="too_long"):
        positions_from_segment_ids(LONG["int64"])
    with pytest.raises(PositionError, match="too_long"):
        plan(QWEN, IDS, second_per_grid_ts=np.broadcast_to(1.0, (10**8,)))
    with pytest.raises(PositionError, match="too_long"):
        plan(spec("qwen2_5_omni"), IDS, audio_lengths=LONG["int32"])


@pytest.mark.parametrize("tokens", [10**8, 2**31, 2**62, -1, 1.5, "4", True, None])
def test_prompts_by_their_length_alone(tokens, no_memory):
    with pytest.raises((ValueError, TypeError), match="num_tokens must be "):
        plan_from_spans(QWEN, tokens, [(1, 0, 4)], image_grid_thw=[[1, 4, 4]])


# Span's length, grid, seconds, audio length, and the code of what is wrong.
SOUND = [
    (20, (10**9, 4, 4), 1e-9, 200, "token_count"),
    (20, (10**9, 4, 4), 1.0, 200, "seconds_invalid"),
    (20, (4, 2**30, 2**30), 1.0, 200, "token_count"),
    (LARGEST - 2, (4, 2**30, 2**30), 1.0, 200, "token_count"),
    (20, (LARGEST, 2**30, 2**30), 0.0, LARGEST, "token_count"),
    (20, (4, 4, 4), 1.0, 2 * 10**8, "token_count"),
    (20, (4, 4, 4), 1.0, -(2**31), "token_count"),
    (20, (4, -4, 4), 1.0, 200, "grid_nonpositive"),
    (20, (0, 4, 4), 1.0, 200, "grid_nonpositive"),
    (20, (4, 5, 4), 1.0, 200, "grid_not_divisible"),
    (20, (4, 4, 4), np.inf, 200, "seconds_invalid"),
    (20, (4, 4, 4), np.nan, 200, "seconds_invalid"),
    (20, (4, 4, 4), -1.0, 200, "seconds_invalid"),
    (20, (4, 4, 4), 3e38, 200, "seconds_invalid"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("truncate", ["error", "clip"])
@pytest.mark.parametrize("case", SOUND, ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_videos_with_sound_are_checked_before_any_work(
    family, case, truncate, no_memory
):
    length, grid, seconds, audio, code = case
    with pytest.raises(PositionError) as caught:
        plan_from_spans(
            spec(family),
            100,
            [(4, 2, length)],
            video_grid_thw=[grid],
            second_per_grid_ts=[seconds],
            audio_lengths=[audio],
            truncate=truncate,
        )
    assert caught.value.code == code
    assert caught.value.kind == ("audio" if audio < 0 else "video")


@pytest.mark.parametrize("grid", [(2**26, 4, 4), (1, 2**14, 2**14), (2, 2, 2)])
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_of_a_clipped_video_with_sound_only_its_part_is_laid_out(family, grid):
    model, audio = spec(family), LARGEST // 8
    cells = grid[0] * grid[1] * grid[2] // 4
    sounds = audio_tokens(audio, model.rule)
    with little_memory():
        made = plan_from_spans(
            model,
            100,
            [(4, 2, cells + sounds + 2)],
            video_grid_thw=[grid],
            second_per_grid_ts=[0.0],
            audio_lengths=[audio],
            truncate="clip",
        )
    assert made.positions().shape == (3, 100)


GRIDS = [
    (1, 2**16, 2**16),
    (2, 2**15, 2**16),
    (2**16, 2**16, 2),
    (4, 2**15, 2**15),
    (2**20, 2**20, 2**20),
    (LARGEST, 2, 2),
    (LARGEST, LARGEST, LARGEST),
    (LARGEST - 1, LARGEST - 1, LARGEST - 1),
    (2**31, 2, 2),
    (2**63 - 1, 2, 2),
    (2**64, 2, 2),
    (-1, 4, 4),
    (-5, 4, 4),
    (-(2**31), 4, 4),
    (1, -(2**31), 4),
    (0, 4, 4),
]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_grids_whose_product_overflows(family, grid):
    family = spec(family)
    media = {"image_grid_thw": family.image_token_id}
    if family.canvas is None:
        media["video_grid_thw"] = family.video_token_id
    sizes = grid[1:] if family.canvas is not None else grid
    for name, pad in media.items():
        if pad == NO_TOKEN:
            continue
        with little_memory(), pytest.raises(PositionError):
            given: Any = {name: [sizes]}
            plan(family, [1, *[pad] * 9, 2], **given)


@pytest.mark.parametrize(
    "grid", [(1, 2**16, 2**16), (LARGEST, 2, 2), (2, 2**15, 2**15)]
)
def test_patches_of_a_vision_encoder(grid, no_memory):
    with pytest.raises(PositionError, match="too_long: expected patches of at most"):
        vision_positions([grid], order="row_major")
    many = np.broadcast_to(np.array([1, 2**10, 2**10], np.int32), (65, 3))
    with pytest.raises(PositionError, match="too_long"):
        vision_positions(many, order="row_major")


def test_more_media_than_tokens_take_no_room():
    many = np.ones(10**7, np.int32)
    with little_memory(), pytest.raises(PositionError, match="too_many_audio_lengths"):
        plan(spec("qwen2_5_omni"), [1], audio_lengths=many)


EMPTY = [[], []]
ODD = ["x", 3, 1.5, object(), np.array(3), [[1, 4], [3]], EMPTY, [[1.5, 2, 2]], [{}]]


@pytest.mark.parametrize("odd", ODD, ids=[type(odd).__name__ for odd in ODD])
@pytest.mark.parametrize(
    "name",
    ["image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_lengths", "ids"],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_omni", "glm_image"])
def test_inputs_of_any_type(family, name, odd):
    ids, given = [7], {name: odd}
    if name == "ids":
        ids, given = odd, {}
    try:
        made = plan(spec(family), ids, **given)
    except PositionError as error:
        assert error.code == "input", error
        return
    # GLM-Image has no use for some of them, and empty lists hold nothing.
    assert made.num_tokens == 1 and (family == "glm_image" or odd is EMPTY)


def test_a_familys_name_is_no_spec():
    name: Any = "qwen2_vl"
    for call in (
        lambda: plan(name, [1]),
        lambda: plan_from_spans(name, 1, []),
        lambda: BatchPositions(name, 1, 1, 1),
    ):
        with pytest.raises(
            TypeError, match=r"got str; is jrope.positions.spec\('qwen2"
        ):
            call()
    with pytest.raises(TypeError, match="spec must be a PositionSpec, got NoneType$"):
        nothing: Any = None
        plan(nothing, [1])
    wrong: list[Any] = [[], {}, None, 3]
    for family in wrong:
        with pytest.raises(PositionError, match="unknown_family"):
            spec(family)


SIZES = {"max_requests": 2, "max_tokens": 8, "max_position": 100, "headroom": 1}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [1.5, "3", None, True, [1], np.nan, 2**31, 2**62])
def test_sizes_of_a_batch(name, size, no_memory):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        BatchPositions(QWEN, **{**SIZES, name: size})
    assert BatchPositions(QWEN, **{**SIZES, name: np.int64(1)}).capacity >= 1


def test_slots_and_plans_of_any_type():
    batch: Any = BatchPositions(TEXT, **SIZES)
    made = plan(TEXT, [1])
    for slot in (1.5, "0", None, [0], True, np.nan):
        for call in (
            lambda slot=slot: batch.add(slot, made),
            lambda slot=slot: batch.remove(slot),
            lambda slot=slot: batch.swap(0, slot),
        ):
            with pytest.raises(TypeError, match="a slot must be an int, got"):
                call()
    with pytest.raises(TypeError, match="plan must be a PositionPlan.* got NoneType"):
        batch.add(0, None)
    with pytest.raises(TypeError, match="columns must be an int, got 1.5"):
        batch.step_array(1.5)
    batch.add(np.int64(0), made)


def test_windows_of_any_type():
    made: Any = plan(TEXT, [1, 2])
    out = np.zeros((1, 2), np.int32)
    for window in (("x", 2), (0, 1.5), (0, [2])):
        with pytest.raises(TypeError, match="start, stop and out_offset must be ints"):
            made.positions(*window)
        with pytest.raises(TypeError, match="start, stop and out_offset must be ints"):
            made.fill(out, *window)


def test_messages_end():
    with pytest.raises(PositionError) as caught:
        plan_from_spans(QWEN, 4, [(9, 0, 4)] * 10_000)
    assert len(str(caught.value)) < 600


# hiyouga/LlamaFactory#7754: masks of packed rows number their documents.
@pytest.mark.parametrize("module", [positions_jax, None], ids=["jax", "host"])
def test_masks_of_packed_rows_are_not_read_as_one_document(module):
    of_mask, of_segments = positions_from_mask, positions_from_segment_ids
    if module is not None:
        of_mask = module.positions_from_mask
        of_segments = module.positions_from_segment_ids
    mask = [1, 1, 2, 2, 2, 0]
    with pytest.raises(ValueError, match="Then use positions_from_segment_ids"):
        of_mask(mask)
    assert np.asarray(of_segments(np.array(mask, np.int32))).tolist() == [
        *(0, 1),
        *(0, 1, 2),
        -1,
    ]
    # Added to scores, 0 is a real token and -inf is none.
    with pytest.raises((TypeError, ValueError), match="integers"):
        of_mask(np.array([0.0, -np.inf]))
    with pytest.raises(ValueError, match="scalar"):
        of_mask(np.array(True))


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_omni_moe"])
def test_a_batch_travels_and_shares_nothing(family, how):
    family = spec(family)
    ids = [1, family.vision_start_token_id, *[family.image_token_id] * 4, 2]
    made = plan(family, ids, image_grid_thw=np.array([[1, 4, 4]], np.int32))
    batch = BatchPositions(family, 2, max_tokens=16, max_position=99, headroom=3)
    batch.add(1, made)
    step = np.array([[1], [0], [9]], np.int32)
    want = batch.step(*step).copy()
    ways = {
        "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
    }
    other = ways[how](batch)
    np.testing.assert_array_equal(other.step_array(), batch.step_array())
    assert other.buffer.ctypes.data % 64 == 0
    other.add(0, plan(family, [1, 2, 3]))
    other.step([0], [0], [3])
    # What the other did is not seen here.
    np.testing.assert_array_equal(batch.step_array()[:, :9], want)
    np.testing.assert_array_equal(batch.step(*step), want)
    with pytest.raises(PositionError, match="a request"):
        batch.remove(0)
    np.testing.assert_array_equal(other.step(*step), want)
