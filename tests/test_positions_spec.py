"""Specs from names and configs, and positions of plain RoPE from ragged shapes."""

import types

import pytest

from jrope.positions import (
    ALIASES,
    FAMILIES,
    NO_TOKEN,
    PositionError,
    PositionSpec,
    offsets_from_positions,
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
    "wrong,message",
    [
        ({"axes": 0}, "axes must be an int of at least 1"),
        ({"layout": "grid"}, "layout must be one of"),
        ({"tokens_per_second": float("nan")}, "tokens_per_second must be positive"),
        ({"row_t": 3}, "must be below axes=3"),
        ({"image_token_id": 2**31}, "image_token_id must fit into int32"),
    ],
)
def test_specs_that_do_not_hold(wrong, message):
    with pytest.raises(ValueError, match=message):
        PositionSpec(family="mine", **wrong)


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
