"""vLLM's calling forms: its results for golden prompts, and its decode rule."""

import subprocess
import sys
import types
from typing import Any

import numpy as np
import positions_golden
import pytest

from jrope import vllm
from jrope.positions import PositionError, spec


def arguments(row):
    media = row.media
    return {
        "input_tokens": row.ids,
        "image_grid_thw": media.get("image_grid_thw"),
        "video_grid_thw": media.get("video_grid_thw"),
        "second_per_grid_ts": media.get("second_per_grid_ts"),
        "audio_feature_lengths": media.get("audio_lengths"),
        "use_audio_in_video": True,
    }


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_golden_prompts(family):
    count = 0
    for row in positions_golden.rows(family):
        if row.positions is None:
            continue
        made, delta = vllm.get_input_positions_tensor(
            hf_config=spec(family), **arguments(row)
        )
        assert made.dtype == np.int64
        np.testing.assert_array_equal(made, row.positions, err_msg=row.name)
        assert delta == row.delta
        lists, again = vllm.get_input_positions(
            hf_config=spec(family), context_len=3, seq_len=-1, **arguments(row)
        )
        assert lists == row.positions[:, 3:-1].tolist()
        assert again == delta
        count += 1
    assert count > 20


def test_omni_is_cut_to_whole_numbers():
    compared = 0
    for row in positions_golden.rows("qwen3_omni_moe"):
        if "pos_int" in row.others:
            made, _ = vllm.get_input_positions_tensor(
                hf_config={
                    "model_type": "qwen3_omni_moe",
                    "position_id_per_seconds": 13,
                },
                **arguments(row),
            )
            np.testing.assert_array_equal(made, row.others["pos_int"])
            compared += 1
    assert compared > 10


IDS = [7, 151652, *[151655] * 4, 151653, 8]
CONFIG = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}}


@pytest.mark.parametrize("context_len", [0, 4, 8, 11])
@pytest.mark.parametrize("seq_len", [None, 0, 5, 8, 99])
def test_any_slice(context_len, seq_len):
    whole, _ = vllm.get_input_positions_tensor(IDS, CONFIG, [[1, 4, 4]], [])
    part, delta = vllm.get_input_positions(
        IDS, CONFIG, [[1, 4, 4]], None, None, context_len, seq_len
    )
    assert part == whole[:, context_len:seq_len].tolist()
    assert delta == -2


def test_config_objects():
    holder = types.SimpleNamespace(to_dict=lambda: CONFIG)
    made = vllm.get_input_positions(IDS, holder, [[1, 4, 4]], [])
    assert made == vllm.get_input_positions(IDS, CONFIG, [[1, 4, 4]], [])
    with pytest.raises(TypeError, match="mapping, a transformers config or a Position"):
        vllm.get_input_positions(IDS, object(), [[1, 4, 4]], [])
    with pytest.raises(PositionError, match="unknown_family.*'llama'"):
        vllm.get_input_positions(IDS, {"model_type": "llama"}, [[1, 4, 4]], [])


def test_next_positions_follow_the_delta():
    _, delta = vllm.get_input_positions(IDS, CONFIG, [[1, 4, 4]], [])
    first = vllm.get_next_input_positions(delta, len(IDS), len(IDS) + 2)
    assert first == [[6, 7]] * 3
    for axes in (1, 3, 4):
        for dtype in (np.int32, np.int64):
            out = np.full((axes, 6), -1, dtype)
            vllm.get_next_input_positions_tensor(out, 2, delta, len(IDS), 3)
            assert out.tolist() == [[-1, -1, 6, 7, 8, -1]] * axes


def test_next_positions_that_do_not_fit():
    out = np.full((3, 4), -1, np.int32)
    with pytest.raises(PositionError, match="3 columns from column 2 on, got 4"):
        vllm.get_next_input_positions_tensor(out, 2, 0, 8, 3)
    with pytest.raises(PositionError, match="out_dtype"):
        vllm.get_next_input_positions_tensor(out.astype(np.float32), 0, 0, 8, 3)
    assert (out == -1).all()
    for rows in (0, 5, 10**6):
        wide = np.full((rows, 1), -1, np.int32)
        with pytest.raises(PositionError, match=f"3 rows, got {rows}"):
            vllm.get_next_input_positions_tensor(wide, 0, 0, 8, 1)


def test_numbers_that_are_not_positions():
    out = np.full((3, 4), 9, np.int32)
    for delta in (2**33, 2**31 - 2):
        with pytest.raises(PositionError, match=r"start <= stop < 2\^31"):
            vllm.get_next_input_positions_tensor(out, 0, delta, 0, 4)
    call: Any = vllm.get_next_input_positions_tensor
    for wrong in ((0, -2.5, 7, 3), ("1", 0, 0, 1), (0, 0, 1.0, 1), (0, 0, 0, 1.5)):
        with pytest.raises(TypeError):
            call(out, *wrong)
    for buffer in ([[1]], np.zeros((), np.int32)):
        with pytest.raises(PositionError, match="out_dtype|out_shape"):
            call(buffer, 0, 0, 0, 1)
    assert (out == 9).all()
    narrow: Any = (np.uint8(3), np.uint8(254), np.uint8(255))
    assert vllm.get_next_input_positions(*narrow) == [[257]] * 3


def test_no_jax_is_loaded():
    code = "import sys, jrope.vllm; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
