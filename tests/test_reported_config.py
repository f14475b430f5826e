"""Faults that users reported elsewhere: reading a config.

Each test names its public thread; inputs and right values are in golden/bug_cases.
"""

import numpy as np
import oracle
import pytest
from reported import SIZES, assert_frequencies, case, read

from jrope import SCALINGS, layers_from_hf


# meta-llama/llama3#299, foundation-model-stack/foundation-model-stack#384
def test_type_key_of_either_spelling():
    golden = case("C01")
    config, rope = golden["config"], golden["config"]["rope_scaling"]
    values = {key: value for key, value in rope.items() if key != "rope_type"}
    for spelling in (
        {"rope_type": "llama3"},
        {"type": "llama3"},
        {"rope_type": "llama3", "type": "llama3"},
    ):
        assert_frequencies(
            read({**config, "rope_scaling": {**spelling, **values}}), golden["inv_freq"]
        )
    both = {"rope_type": "llama3", "type": "linear", **values}
    with pytest.raises(ValueError, match="rope_type twice, and differently"):
        read({**config, "rope_scaling": both})


# vllm-project/vllm#28542, huggingface/transformers#42593
def test_base_that_moved_into_rope_parameters():
    golden = case("C02")
    for spelling in ("config_v4", "config_v5"):
        config = {**golden[spelling], "max_position_embeddings": 64}
        assert_frequencies(read(config), golden["inv_freq"])
    del config["rope_parameters"]
    with pytest.raises(ValueError, match="config.json must have 'rope_theta'"):
        read(config)
    both = {**golden["config_v5"], "max_position_embeddings": 64, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_theta twice, and differently"):
        read(both)


# sgl-project/sglang#26187, sgl-project/SpecForge#651
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_under_either_key_keeps_its_base(key):
    golden = case("C03_C04_C05_C06")
    config = read({**SIZES, "head_dim": 16, key: golden["yarn"]})
    assert_frequencies(config, golden["inv_freq"])
    assert config.frequencies.attention_factor == golden["attention_scaling"]


# sgl-project/SpecForge#651
@pytest.mark.parametrize("rope_type", sorted(SCALINGS))
def test_every_scaling_starts_from_the_configs_own_base(rope_type):
    for hf_config in SCALINGS[rope_type].examples.values():
        config = {**hf_config, "rope_theta": 50000.0}
        rope = {**(config.pop("rope_scaling", None) or {})}
        rope.pop("rope_theta", None)
        config["rope_scaling"] = rope
        right, _ = oracle.frequencies(rope_type, config)
        assert_frequencies(read(config), right)


# NVIDIA-NeMo/Automodel#2652, huggingface/transformers#42513
def test_original_length_missing():
    golden = case("C03_C04_C05_C06")
    rope = {**golden["yarn"]}
    del rope["original_max_position_embeddings"]
    config = read({**SIZES, "head_dim": 16, "rope_scaling": rope})
    assert_frequencies(config, golden["C05_orig_missing_max_pos_512"]["inv_freq"])


# huggingface/transformers#40474: Phi-3 has it at the top level, and that one counts.
def test_original_length_at_the_top_level():
    golden = case("C29_C30")
    rope = {**golden["config"]["rope_scaling"], "original_max_position_embeddings": 64}
    config = {**golden["config"], "rope_scaling": rope}
    with pytest.raises(ValueError, match="original_max_position_embeddings twice"):
        read(config)
    phi3 = read({**config, "model_type": "phi3"})
    assert phi3.scaling == read({**golden["config"], "model_type": "phi3"}).scaling


# huggingface/transformers#38224, #40320
def test_explicit_factor_wins_over_the_ratio_of_lengths():
    golden = case("C03_C04_C05_C06")
    for factor, name in (
        (2.0, "C06_explicit_factor_2_with_max512_orig128"),
        (None, "C06b_factor_null"),
    ):
        rope = {**golden["yarn"], "factor": factor}
        config = read({**SIZES, "head_dim": 16, "rope_scaling": rope})
        assert_frequencies(config, golden[name]["inv_freq"])
        assert config.frequencies.attention_factor == golden[name]["attention_scaling"]


# ml-explore/mlx-lm#1698, vllm-project/vllm#30389, #12718
@pytest.mark.parametrize(
    ("config", "rotary_dim"),
    [
        ({"model_type": "glm", "head_dim": 128}, 64),
        ({"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64}, 64),
        ({"model_type": "phi", "head_dim": 80, "partial_rotary_factor": 0.4}, 32),
        ({"model_type": "gpt_neox", "head_dim": 96, "rotary_pct": 0.25}, 24),
        ({"model_type": "stablelm", "head_dim": 80}, 20),
        ({"model_type": "nemotron", "head_dim": 128}, 64),
        ({"model_type": "qwen3_next", "head_dim": 256}, 64),
        (
            {"head_dim": None, "hidden_size": 1024, "num_attention_heads": 16},
            64,
        ),
        (
            {"head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16},
            128,
        ),
    ],
)
def test_rotated_width(config, rotary_dim):
    config = {"rope_theta": 1e4, "max_position_embeddings": 64, **config}
    made = read(config)
    assert made.layout.rotary_dim == rotary_dim
    assert len(made.frequencies.inv_freq) == rotary_dim // 2


# huggingface/transformers#48652, #46912
@pytest.mark.parametrize(("share", "width"), [(0.25, 4), (0.5, 8), (1.0, 16)])
def test_frequencies_are_as_many_as_pairs_that_turn(share, width):
    config = {**SIZES, "model_type": "gpt_neox_japanese", "head_dim": 16}
    made = read({**config, "rotary_emb_base": 1e4, "rotary_pct": share})
    assert made.layout.rotary_dim == width
    assert_frequencies(made, 1e4 ** (-np.arange(0, width, 2) / width))


# vllm-project/vllm#30389
def test_contradictory_widths_and_unknown_model_types():
    config = {"rope_theta": 1e4, "max_position_embeddings": 64, "head_dim": 128}
    with pytest.raises(
        ValueError, match="width twice.* 64 features.*= 0.25 of head_di"
    ):
        read({**config, "rotary_dim": 64, "partial_rotary_factor": 0.25})
    unknown = {**config, "model_type": "nosuch"}
    with pytest.raises(ValueError, match="'nosuch' is not one .*give is_neox_style"):
        read(unknown)
    with pytest.raises(
        ValueError, match="does not say how much .*'partial_rotary_factor'"
    ):
        read(unknown, is_neox_style=True)
    unknown["partial_rotary_factor"] = 0.5
    assert read(unknown, is_neox_style=False).layout.rotary_dim == 64


# huggingface/transformers#36877, lablup/mlxcel#1688
def test_known_meaningless_keys_and_unknown_ones():
    rope = {"rope_type": "yarn", "factor": 4.0, "finetuned": True}
    read({**SIZES, "rope_theta": 1e4, "rope_scaling": rope})
    with pytest.raises(ValueError, match=r"got unknown \['foo'\]"):
        read({**SIZES, "rope_theta": 1e4, "rope_scaling": {**rope, "foo": 1}})
    with pytest.raises(ValueError, match="rope_type must be one of .*got 'nosuch'"):
        read({**SIZES, "rope_theta": 1e4, "rope_scaling": {"rope_type": "nosuch"}})


# ggml-org/llama.cpp#14367, Blaizzy/mlx-vlm#1709
def test_two_bases_with_scaling_on_the_global_layers_alone():
    golden = case("C14")
    config = {**golden["config"], "max_position_embeddings": 64}
    assert_frequencies(read(config, layer_type="sliding_attention"), golden["sliding"])
    assert_frequencies(read(config, layer_type="full_attention"), golden["full"])


# huggingface/transformers#43756, huggingface/smollm#130
def test_layers_without_rope_and_what_their_flag_means():
    golden = case("C15")
    config = {**SIZES, "rope_theta": 1e4, "num_hidden_layers": 8}
    config["no_rope_layers"] = golden["smollm3_first8"]
    rotated = [layer is not None for layer in layers_from_hf(config)]
    assert rotated == [bool(flag) for flag in golden["smollm3_first8"]]


# ml-explore/mlx-lm#1768, huggingface/transformers#34950
def test_multimodal_sections_whatever_the_type_is_called():
    config = {**SIZES, "head_dim": 128, "rope_theta": 1e4}
    section = {"mrope_section": [16, 24, 24]}
    old = read({**config, "rope_scaling": {"type": "mrope", **section}})
    new = read({**config, "rope_scaling": {"rope_type": "default", **section}})
    assert old == new
    assert old.axis_of_frequency == (0,) * 16 + (1,) * 24 + (2,) * 24
    with pytest.raises(ValueError, match="'mrope' must have the key 'mrope_section'"):
        read({**config, "rope_scaling": {"type": "mrope"}})
    with pytest.raises(ValueError, match="must come with 'mrope_section'"):
        read({**config, "rope_scaling": {"mrope_interleaved": True}})
