"""The config.json reader: both spellings, and errors that name the key."""

import numpy as np
import pytest

from jrope import config_from_hf
from jrope.scalings import Linear, Llama3

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}
V4 = {**BASE, "rope_theta": 1e4}


def read(config, **kwargs):
    made = config_from_hf(config, **kwargs)
    assert made is not None
    return made


def test_plain_config_of_either_spelling():
    v4 = read({**V4, "rope_scaling": None})
    v5 = read({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert v4 == v5 == read(V4)
    assert v4.head_dim == 32
    assert v4.max_position_embeddings == 512


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    ],
)
def test_spellings_of_the_type_agree(rope):
    assert read({**V4, **rope}) == read(
        {**V4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    )
    assert read({**V4, **rope}).scaling == Llama3(**LLAMA3)


def test_theta_is_kept_beside_a_scaling():
    scaled = read(
        {**V4, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 1}}
    )
    np.testing.assert_allclose(
        scaled.frequencies.inv_freq[1], 5e4 ** (-1 / 16), rtol=1e-15
    )


def test_layers_that_differ_in_the_newer_spelling():
    nested = {
        **BASE,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8},
            "no_rope": None,
        },
    }
    assert read(nested, layer_type="sliding_attention").rope_theta == 1e4
    full = read(nested, layer_type="full_attention")
    assert (full.rope_theta, full.scaling) == (1e6, Linear(factor=8))
    assert config_from_hf(nested, layer_type="no_rope") is None
    with pytest.raises(
        ValueError, match=r"layer_type must be one of \['full_att.* None"
    ):
        config_from_hf(nested)


def test_layers_that_differ_in_gemmas_spelling():
    gemma = {
        **BASE,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    sliding = read(gemma, layer_type="sliding_attention")
    assert (sliding.rope_theta, sliding.scaling.rope_type) == (1e4, "default")
    other = {**gemma, "rope_local_base_freq": 12345.0}
    assert read(other, layer_type="sliding_attention").rope_theta == 12345.0
    full = read(gemma, layer_type="full_attention")
    assert (full.rope_theta, full.scaling) == (1e6, Linear(factor=8.0))
    with pytest.raises(ValueError, match="layers differ, got None; layers_from_hf"):
        config_from_hf(gemma)


def test_a_layer_types_own_base_goes_before_the_models():
    # transformers' Gemma3TextConfig: the local base is 10000 where a config has none.
    gemma = {**BASE, "model_type": "gemma3_text", "rope_theta": 1e6}
    assert read(gemma, layer_type="sliding_attention").rope_theta == 1e4
    assert read(gemma, layer_type="full_attention").rope_theta == 1e6


def test_head_dim_absent_or_null():
    assert read({**V4, "head_dim": None}).head_dim == 32
    assert read({**V4, "head_dim": 64}).head_dim == 64


def test_partial_rotation():
    assert read({**V4, "partial_rotary_factor": 0.25}).layout.rotary_dim == 8


def test_a_config_object_is_read_through_to_dict():
    class Config:
        def to_dict(self):
            return V4

    assert read(Config()) == read(V4)


def test_pairing_by_model_type():
    assert not read({**V4, "model_type": "cohere"}).is_neox_style
    assert read({**V4, "model_type": "llama"}).is_neox_style


def test_table_length_can_be_chosen():
    assert read(V4, max_position_embeddings=64).max_position_embeddings == 64


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (BASE, ValueError, "must have 'rope_theta'"),
        (
            {"rope_theta": 1e4, "head_dim": 8},
            ValueError,
            "have 'max_position_embeddings'",
        ),
        ({**V4, "hidden_size": None}, ValueError, "must have 'hidden_size'"),
        ({**V4, "hidden_size": 130}, ValueError, "multiple of num_attention_heads"),
        ({**V4, "head_dim": "64"}, TypeError, "head_dim must be an int, got '64'"),
        ({**V4, "rope_theta": "big"}, TypeError, "rope_theta must be a number"),
        ({**V4, "partial_rotary_factor": 1.5}, ValueError, "at most 1, got 1.5"),
        ({**V4, "partial_rotary_factor": 0.3}, ValueError, "rotary_dim must be even"),
        (
            {**V4, "rope_scaling": "linear"},
            TypeError,
            "must be a mapping, got 'linear'",
        ),
        (
            {**V4, "rope_scaling": {"rope_type": "nosuch"}},
            ValueError,
            r"rope_type must be one of \[.*'default'.* got 'nosuch'",
        ),
        (
            {**V4, "rope_scaling": {"rope_type": "linear"}},
            ValueError,
            "'linear' must have the key 'factor'",
        ),
        (
            {**V4, "rope_scaling": {"rope_type": "linear", "factor": 2, "facto": 2}},
            ValueError,
            r"got unknown \['facto'\]; is a key misspelled",
        ),
        (
            {**V4, "rope_scaling": {"rope_type": "linear", "type": "llama3", **LLAMA3}},
            ValueError,
            "gives rope_type twice, and differently",
        ),
        (
            {**V4, "rope_parameters": {"rope_theta": 2e4}},
            ValueError,
            "rope_theta twice, and differently",
        ),
        (
            {**V4, "rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 4}},
            ValueError,
            "gives rope_parameters twice, and differently",
        ),
        (3, TypeError, "must be a mapping.* got int"),
    ],
)
def test_refusals(config, error, message):
    with pytest.raises(error, match=message):
        config_from_hf(config)


def test_layer_type_of_a_model_whose_layers_do_not_differ():
    with pytest.raises(ValueError, match="layer_type must be None.* got 'sliding_att"):
        config_from_hf(V4, layer_type="sliding_attention")
    assert read(V4, layer_type="full_attention") == read(V4)


def test_published_configs_that_leave_sizes_out():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    full = read({"text_config": text}, layer_type="full_attention")
    assert (full.head_dim, full.max_position_embeddings) == (256, 131072)
    assert (full.rope_theta, full.scaling) == (1e6, Linear(factor=8.0))
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71}
    assert read(falcon).max_position_embeddings == 2048
    unknown = {"head_dim": 8, "rope_theta": 1e4}
    assert read(unknown, max_position_embeddings=32).max_position_embeddings == 32


def test_rotated_parts_of_unknown_models_are_refused():
    config = {**V4, "model_type": "nosuch", "qk_rope_head_dim": 64}
    config["partial_rotary_factor"] = 1.0
    with pytest.raises(
        ValueError, match="names a part of the head.*'nosuch'.*new name"
    ):
        config_from_hf(config, is_neox_style=False)
    del config["model_type"]
    with pytest.raises(ValueError, match="model_type None .* model_type left out"):
        config_from_hf(config, is_neox_style=False)
    kimi = {**V4, "model_type": "kimi_k2", "qk_rope_head_dim": 64}
    kimi["rope_scaling"] = {"type": "yarn", "factor": 32.0, "mscale_all_dim": 1.0}
    assert read(kimi).scaling.rope_type == "deepseek_yarn"
    assert read(kimi).layout.rotary_dim == read(kimi).head_dim == 64
