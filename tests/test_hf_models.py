"""Real models' configs against the frequencies that transformers makes of them.

`JROPE_GOLDEN_CONFIGS=FILE pytest tests/test_hf_models.py` runs another file of the same
format.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jrope import config_from_hf, layers_from_hf, query_temperatures_from_hf

GOLDEN = Path(__file__).parent / "golden" / "model_configs.json"
MODELS = json.loads(Path(os.environ.get("JROPE_GOLDEN_CONFIGS", GOLDEN)).read_text())[
    "models"
]
ROWS = [
    pytest.param(
        {**model["config"], "model_type": model["model_type"]},
        expected,
        model["pairing"],
        id=f"{model['model']}:{expected['layer_type']}:{expected['when']}",
    )
    for model in MODELS
    for expected in model["expected"]
]


@pytest.mark.parametrize(("hf_config", "expected", "pairing"), ROWS)
def test_model(hf_config, expected, pairing):
    config = config_from_hf(hf_config, layer_type=expected["layer_type"])
    assert config is not None
    if expected["when"].startswith("seq_len="):
        config = config.for_length(int(expected["when"].removeprefix("seq_len=")))
    right = np.array(expected["inv_freq"])
    # The golden values are float32 arithmetic; where they are known to be off from the
    # exact formula by more than 4e-7 (Llama-3.2-3B, 4.09e-7), by that much.
    known = expected.get("max_rel_diff_vs_independent_float64", 0.0)
    np.testing.assert_allclose(
        config.frequencies.inv_freq.astype(np.float64),
        right,
        rtol=max(4e-7, 1.001 * known),
        atol=0,
    )
    assert config.frequencies.attention_factor == pytest.approx(
        expected["attention_scaling"], rel=1e-12
    )
    assert config.layout.rotary_dim == expected["rotary_dim"]
    assert config.head_dim == expected["head_dim"]
    assert config.is_neox_style == (pairing == "half")


def by_name(name):
    (model,) = (model for model in MODELS if model["model"] == name)
    return {**model["config"], "model_type": model["model_type"]}


@pytest.fixture(autouse=True)
def own_file(request):
    """Tests of single models need the file that comes with them."""
    if (
        request.node.originalname != "test_model"
        and "JROPE_GOLDEN_CONFIGS" in os.environ
    ):
        pytest.skip("another file of models is under test")


# huggingface/smollm#130
def test_smollm3_has_no_rope_in_every_fourth_layer():
    layers = layers_from_hf(by_name("SmolLM3-3B"))
    assert [i for i, layer in enumerate(layers) if layer is None] == [*range(3, 36, 4)]
    derived = {**by_name("SmolLM3-3B"), "no_rope_layers": None}
    assert layers_from_hf(derived) == layers


# huggingface/smollm#130
def test_cohere2_rotates_sliding_layers_alone():
    config = {**by_name("Command-R7B (Cohere2)"), "num_hidden_layers": 8}
    rotated = [layer is not None for layer in layers_from_hf(config)]
    assert rotated == [True, True, True, False] * 2
    assert config_from_hf(config, layer_type="full_attention") is None


# huggingface/smollm#130
def test_exaone4_rotates_all_layers_without_a_window():
    config = by_name("EXAONE-4.0-32B")
    hybrid = layers_from_hf(config)
    assert [layer is not None for layer in hybrid[:4]] == [True, True, True, False]
    small = {**config, "sliding_window": None}
    assert all(layer is not None for layer in layers_from_hf(small))


# Blaizzy/mlx-vlm#1709
def test_gemma3_needs_two_tables():
    config = {**by_name("Gemma-3-1B"), "num_hidden_layers": 26}
    layers = layers_from_hf(config)
    thetas = [layer.rope_theta for layer in layers if layer is not None]
    assert thetas[:6] == [1e4] * 5 + [1e6]
    assert len(set(layers)) == 2


# Blaizzy/mlx-vlm#1709
def test_modernbert_is_global_in_every_third_layer():
    config = {**by_name("ModernBERT-base"), "num_hidden_layers": 6}
    thetas = [layer.rope_theta for layer in layers_from_hf(config) if layer]
    assert thetas == [160000.0, 1e4, 1e4] * 2


def test_olmo3_scales_full_layers_alone():
    layers = layers_from_hf(by_name("OLMo-3.1-32B / OLMo-3-7B (yarn)"))
    types = [layer.scaling.rope_type for layer in layers if layer is not None]
    assert types[:4] == ["default"] * 3 + ["yarn"]


def test_deepseek_v4_turns_the_last_features_by_two_bases():
    config = by_name("DeepSeek-V4-Flash (main + compress)")
    types = ["heavily_compressed_attention", "sliding_attention"]
    layers = layers_from_hf({**config, "num_hidden_layers": 2, "layer_types": types})
    compress, main = layers
    assert compress is not None and main is not None
    assert (compress.rope_theta, main.rope_theta) == (160000.0, 10000.0)
    assert compress.layout.rotary_offset == 512 - 64
    assert compress.frequencies.attention_factor == 1.0


def test_deepseek_v3_has_a_softmax_factor_apart_from_the_table():
    config = config_from_hf(by_name("DeepSeek-V3"))
    assert config is not None
    assert config.frequencies.attention_factor == 1.0
    assert config.frequencies.softmax_scale_factor == pytest.approx(1.8738542070926265)
    yarn = config_from_hf(by_name("Ministral-3-8B"))
    assert yarn is not None
    assert yarn.frequencies.softmax_scale_factor == 1.0


def test_query_temperatures():
    ministral = {**by_name("Ministral-3-8B"), "num_hidden_layers": 2}
    found = query_temperatures_from_hf(ministral)
    assert [(t.scale, t.length, t.shift) for t in found if t] == [(0.1, 16384, 0)] * 2
    llama4 = {
        "model_type": "llama4_text",
        "head_dim": 128,
        "max_position_embeddings": 1024,
        "rope_theta": 5e5,
        "num_hidden_layers": 4,
    }
    found = query_temperatures_from_hf(llama4)
    assert found[:3] == [None] * 3
    last = found[3]
    assert last is not None
    assert (last.scale, last.length, last.shift) == (0.1, 8192, 1)
    off = {**llama4, "attn_temperature_tuning": False}
    assert query_temperatures_from_hf(off) == [None] * 4
    assert query_temperatures_from_hf(
        {**by_name("Qwen3-8B"), "num_hidden_layers": 1}
    ) == [None]
