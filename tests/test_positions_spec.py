"""Specs from names and configs, and positions of plain RoPE from ragged shapes."""

import dataclasses
import itertools
import json
import types
from pathlib import Path

import numpy as np
import pytest

from jrope.positions import (
    ALIASES,
    FAMILIES,
    NO_TOKEN,
    PositionError,
    PositionSpec,
    offsets_from_positions,
    plan,
    positions_from_indptr,
    positions_from_mask,
    positions_from_segment_ids,
    spec,
)


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(PositionError, match="unknown_family.*qwen2_vl.*'qwen9'"):
        spec("qwen9")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_aliases(name):
    assert spec(name) == FAMILIES[ALIASES[name]]


DEFAULTS = json.loads(
    (Path(__file__).parent / "golden/position_configs.json").read_text()
)
del DEFAULTS["about"]
# What the released files name otherwise than the config classes.
_OMNI = {
    "audio_token_id": 151675,
    "audio_start_token_id": 151669,
    "tokens_per_second": 13.0,
    "image_rate": 13.0,
}
RELEASED = {
    "qwen2_5_vl": {"tokens_per_second": 2.0},
    "exaone4_5": {"tokens_per_second": 2.0},
    "qwen3_omni_moe": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_ids_and_sizes_are_those_of_the_config_classes(name):
    by_class = spec(name, DEFAULTS[name])
    assert spec(name) == dataclasses.replace(by_class, **RELEASED.get(name, {}))


@pytest.mark.parametrize("name", ["opencua", "qwen2_5_vl"])
def test_keys_that_are_null_name_nothing(name):
    rate = {"tokens_per_second": None, "spatial_merge_size": None}
    config = {"image_token_id": None, "thinker_config": None, "vision_config": rate}
    assert spec(name, config) == spec(name, {})
    assert spec(name, {"vision_config": None}) == spec(name, {})


@pytest.mark.parametrize(
    ("family", "config", "error", "message"),
    [
        ("qwen2_vl", {"image_token_id": "7"}, TypeError, "image_token_id must be an i"),
        ("qwen2_vl", {"image_token_id": True}, TypeError, "must be an int, got True"),
        ("qwen2_vl", {"image_token_id": 7.5}, TypeError, "must be an int, got 7.5"),
        ("qwen2_vl", {"video_token_id": 10**400}, ValueError, "an int of 1329 bits"),
        ("qwen2_vl", {"vision_config": 3}, TypeError, "vision_config must be a mappi"),
        (
            *("qwen2_5_vl", {"vision_config": {"tokens_per_second": "2"}}),
            *(TypeError, "tokens_per_second must be a number, got '2'"),
        ),
        (
            *("qwen2_5_vl", {"vision_config": {"tokens_per_second": 0}}),
            *(ValueError, "tokens_per_second must be positive and less than"),
        ),
        (
            *("qwen2_5_omni", {"thinker_config": "x"}),
            *(TypeError, "thinker_config must be a mapping, got 'x'"),
        ),
        (
            *("qwen2_5_omni", {"position_id_per_seconds": float("nan")}),
            *(ValueError, "position_id_per_seconds must be positive"),
        ),
        (
            *("qwen2_5_omni", {"seconds_per_chunk": [2]}),
            *(TypeError, r"seconds_per_chunk must be a number, got \[2\]"),
        ),
        (
            *("qwen2_5_omni", {"seconds_per_chunk": 0.01}),
            *(ValueError, "audio_chunk must be at least 1, got 0"),
        ),
        (
            *("qwen2_5_omni", {"seconds_per_chunk": 2**30}),
            *(ValueError, "audio_chunk must be at most 2147483647"),
        ),
        (
            *("hunyuan_vl", {"rope_scaling": {"xdrope_section": 4}}),
            *(TypeError, "xdrope_section must be a list, got 4"),
        ),
        (
            *("hunyuan_vl", {"text_config": []}),
            *(TypeError, r"text_config must be a mapping, got \[\]"),
        ),
        (
            *("minicpmv4_7", {"image_start_id": 1, "newline_id": 2}),
            *(ValueError, "without image_end_id, slice_start_id, slice_end_id"),
        ),
    ],
)
def test_configs_that_do_not_hold(family, config, error, message):
    with pytest.raises(error, match=message):
        spec(family, config)


CONFIGS = [
    ("qwen2_5_vl", {"vision_config": {"tokens_per_second": 2}}, 2.0),
    ("qwen2_5_vl", {"vision_config": {}}, 4.0),
    ("qwen3_omni_moe", {"thinker_config": {"position_id_per_seconds": 13}}, 13.0),
    ("qwen3_omni_moe", {}, 25.0),
]


@pytest.mark.parametrize("family,config,rate", CONFIGS)
def test_rates_from_a_config(family, config, rate):
    assert spec(family, config).tokens_per_second == rate


def test_ids_and_sizes_from_a_config():
    config = {
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_config": {"spatial_merge_size": 3},
    }
    model = spec("qwen3_vl", config, video_token_id=9)
    assert (model.image_token_id, model.video_token_id) == (7, 9)
    assert model.spatial_merge_size == 3
    omni = {"seconds_per_chunk": 4, "audio_token_index": 11}
    model = spec("qwen2_5_omni", {"thinker_config": omni})
    assert (model.audio_token_id, model.audio_chunk) == (11, 100)
    with pytest.raises(TypeError, match="or a transformers config, got list"):
        spec("qwen2_vl", ["config.json"])
    with pytest.raises(
        TypeError, match=r"fields of PositionSpec, got \['tokens_per_s'"
    ):
        spec("qwen2_vl", tokens_per_s=3)


def test_a_config_object():
    config = {"model_type": "qwen2_vl", "image_token_id": 7}
    holder = types.SimpleNamespace(to_dict=lambda: config)
    assert spec("qwen2_vl", holder) == spec("qwen2_vl", config)
    assert "image_token_id=7" in repr(spec("qwen2_vl", config))
    assert str(NO_TOKEN) not in repr(spec("qwen2_vl"))


def test_a_config_of_another_rule():
    config = {"model_type": "qwen2_5_vl"}
    with pytest.raises(ValueError, match="must be 'qwen2_5_vl' for this config"):
        spec("qwen2_vl", config)
    # The same rule under another name, and a name that nobody knows.
    assert spec("paddleocr_vl", {"model_type": "qwen2_vl"}).axes == 3
    assert spec("qwen2_vl", {"model_type": "mine"}) == spec("qwen2_vl")
    assert spec("text", config).axes == 1


@pytest.mark.parametrize("axes", [3, 4])
def test_sections_say_how_many_axes(axes):
    config = {"rope_scaling": {"xdrope_section": [16] * axes}}
    model = spec("hunyuan_vl", config)
    assert model.axes == axes
    with pytest.raises(ValueError, match="3 or 4 entries"):
        spec("hunyuan_vl", {"rope_scaling": {"xdrope_section": [16] * 5}})


def test_a_canvas_from_a_config():
    names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id")
    config = {name: k for k, name in enumerate((*names, "newline_id"))}
    model = spec("minicpmv4_7", {**config, "downsample_mode": "4x"})
    assert model.canvas == (0, 1, 2, 3, 4) and model.spatial_merge_size == 2
    assert spec("minicpmv4_7", config).spatial_merge_size == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes": 0}, "axes must be at least 1"),
        ({"audio_chunk": 0}, "audio_chunk must be at least 1"),
        ({"layout": "grid"}, "layout must be one of"),
        ({"tokens_per_second": float("nan")}, "tokens_per_second must be positive"),
        ({"image_rate": float("inf")}, "image_rate must be positive"),
        ({"default_seconds": -1.0}, "default_seconds must be at least 0"),
        ({"row_t": 3}, "must be below axes=3"),
        ({"row_index": 3}, "must be below axes=3"),
        ({"row_h": -1}, "row_h must be at least 0"),
        ({"axes": 5}, "axes must be at most 4, got 5"),
        ({"axes": 10**9}, "axes must be at most 4, got 1000000000"),
        ({"axes": 4, "image_token_id": 7}, "axes=4 rows must be one of t, h, w and in"),
        ({"row_h": 0, "image_token_id": 7}, "or a row named twice"),
        ({"row_index": 2, "video_token_id": 7}, "axes=3 rows must be one of t, h, w"),
        ({"row_index": -2}, "row_index must be at least -1"),
        ({"image_token_id": 2**31}, "image_token_id must be at most 2147483647"),
        ({"canvas": (1, 2, 3, 4)}, "canvas must be the ids of <image>"),
        ({"canvas": [1, 2, 3, 4, 5]}, "canvas must be the ids of <image>"),
    ],
)
def test_specs_that_do_not_hold(wrong, message):
    with pytest.raises(ValueError, match=message):
        PositionSpec(family="mine", **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes": True}, "axes must be an int, got True"),
        ({"spatial_merge_size": 2.0}, "spatial_merge_size must be an int, got 2.0"),
        ({"video_token_id": None}, "video_token_id must be an int, got None"),
        ({"fractional": 1}, "fractional must be a bool, got 1"),
        ({"tokens_per_second": "2"}, "tokens_per_second must be a number, got '2'"),
        ({"image_rate": True}, "image_rate must be a number, got True"),
        ({"default_seconds": "1"}, "default_seconds must be a number, got '1'"),
        ({"row_w": 1.5}, "row_w must be an int, got 1.5"),
        ({"canvas": (1, 2, 3, 4, "5")}, "canvas must be an int, got '5'"),
    ],
)
def test_specs_of_other_types(wrong, message):
    with pytest.raises(TypeError, match=message):
        PositionSpec(family="mine", **wrong)


def test_the_limits_of_a_spec():
    made = PositionSpec(
        family="mine", axes=4, row_t=3, row_index=-1, default_seconds=0.0, audio_chunk=1
    )
    assert made.shape_code == 4
    assert PositionSpec(family="mine", image_token_id=2**31 - 1).fractional is False


@pytest.mark.parametrize("rows", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("family", ["qwen2_vl", "hunyuan_vl", "minicpmv4_7"])
def test_every_row_is_written_wherever_it_lies(family, rows):
    """On a buffer of garbage, for a scan and for a canvas."""
    names = ("row_t", "row_h", "row_w", "row_index")
    places = dict(zip(names, rows, strict=True))
    model, known = spec(family, axes=4, **places), spec(family)
    pads = [known.image_token_id] * (4 + known.extra_column * 2)
    opens, closes = (known.canvas or (5, 6))[:2]
    ids = [7, opens, *pads, closes]
    side = 2 * known.spatial_merge_size
    sizes = [[side, side] if known.canvas else [1, side, side]]
    made = plan(model, ids, image_grid_thw=sizes)
    out = np.full((4, len(ids)), -99, np.int32)
    made.fill(out)
    want = plan(known, ids, image_grid_thw=sizes).positions()
    for name in names[:3]:
        row = want[getattr(known, name)]
        np.testing.assert_array_equal(out[places[name]], row, name)
    index = out[places["row_index"]]
    np.testing.assert_array_equal(index[2:-1], np.arange(2, len(ids) - 1))
    assert made.max_position == out.max()


def test_indptr_and_back():
    indptr, offsets = [0, 1, 5, 5, 10], [4, 6, 9, 3]
    made = positions_from_indptr(indptr, offsets, size=12)
    assert made.tolist() == [4, 6, 7, 8, 9, 3, 4, 5, 6, 7, -1, -1]
    assert offsets_from_positions(indptr, made).tolist() == [4, 6, 0, 3]
    made[3] = 0
    with pytest.raises(PositionError, match="entry 1 at token 3"):
        offsets_from_positions(indptr, made)


@pytest.mark.parametrize(
    "code,arguments",
    [
        ("input", ([1, 2], [0])),
        ("input", ([0, 3, 2], [0, 0])),
        ("input", ([0, 3], [0, 0])),
        ("input", ([], [])),
        ("position_beyond_table", ([0, 3], [2**31 - 2])),
        ("capacity", ([0, 3], [0], 2)),
    ],
)
def test_indptr_that_is_refused(code, arguments):
    with pytest.raises(PositionError, match=code):
        positions_from_indptr(*arguments[:2], size=(*arguments, None)[2])
    with pytest.raises(PositionError, match="at least 3"):
        offsets_from_positions([0, 3], [1])


def test_masks_and_segments():
    assert positions_from_mask([True, False, True]).tolist() == [0, -1, 1]
    got = positions_from_segment_ids([[1, 1, 2, 0], [3, 4, 4, -1]])
    assert got.tolist() == [[0, 1, 0, -1], [0, 0, 1, -1]]
