"""Axis maps: every order by hand, by its source's rule, and through a rotation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import (
    RopeConfig,
    apply_rope,
    compute_cos_sin_cache,
    config_from_hf,
    mrope_axes,
)
from jrope._axes import AXIS_ORDERS
from jrope._model_types import MODEL_TYPES
from jrope.scalings import Default, Dynamic, Linear, Llama3, Yarn

# Sections of released models, one or more an order.
SECTIONS = {
    "chunked": [(16, 24, 24), (8, 12, 12), (16, 16, 16, 16), (20, 20, 24)],
    "interleaved": [(24, 20, 20), (11, 11, 10), (12, 10, 10)],
    "round_robin": [(8, 12, 12), (24, 20, 20), (1, 5, 3)],
    "balanced": [(24, 20, 20), (2, 3, 3), (16, 16), (9, 3)],
    "ernie": [(22, 22, 20), (6, 6, 4)],
}
CASES = [(order, section) for order, group in SECTIONS.items() for section in group]


def test_every_order_is_tried():
    assert set(SECTIONS) == set(AXIS_ORDERS)


@pytest.mark.parametrize(("order", "section"), CASES)
def test_every_axis_has_its_share(order, section):
    axes = mrope_axes(section, rotary_dim=2 * sum(section), order=order)
    counts = [axes.count(axis) for axis in range(len(section))]
    shares = section if order != "ernie" else (section[2], *section[:2])
    assert counts == list(shares)


def test_known_maps():
    # SGLang's test of GLM's order, and vLLM's of openPangu's.
    glm = [0, 1, 2] * 8 + [1, 1, 2, 1, 1, 2, 2, 2]
    assert list(mrope_axes((8, 12, 12), rotary_dim=64, order="round_robin")) == glm
    pangu = (0, 1, 2, 1, 2, 1, 2, 0)
    assert mrope_axes((2, 3, 3), rotary_dim=16, order="balanced") == pangu
    assert mrope_axes((2, 2), rotary_dim=8, order="balanced") == (0, 1, 0, 1)
    hand = (0, 1) * 4 + (0,) * 4
    assert mrope_axes((8, 4), rotary_dim=24, order="balanced") == hand
    ernie = mrope_axes((22, 22, 20), rotary_dim=128, order="ernie")
    assert ernie[:44:2] == (1,) * 22 and ernie[1:44:2] == (2,) * 22
    assert ernie[44:] == (0,) * 20


@pytest.mark.parametrize("section", [(24, 20, 20), (11, 11, 10)])
def test_interleaved_is_an_overwrite_of_strided_slices(section):
    # As transformers writes it: all of axis 0, then every third feature of the others.
    features = np.zeros(sum(section), int)
    for axis in (1, 2):
        features[axis : 3 * section[axis] : 3] = axis
    made = mrope_axes(section, rotary_dim=2 * sum(section), order="interleaved")
    assert made == tuple(features)


@pytest.mark.parametrize(
    ("order", "section", "message"),
    [
        ("interleaved", (8, 12, 12), "which would become .* 'round_robin'"),
        ("interleaved", (16, 16), "3 entries where mrope_interleaved is true"),
        ("balanced", (8, 8, 8, 8), r"2 or 3 entries in openPangu's order, got \(8, 8"),
        ("chunked", (16, 16, 0), "every entry of mrope_section must be at least 1"),
        ("ernie", (8, 12, 12), "as many frequencies for height as for width"),
        ("ernie", (16, 16), "3 entries in ERNIE's order"),
        ("spiral", (16, 16), "order must be one of .* got 'spiral'"),
        ("chunked", (16, 24, 24), r"sum to rotary_dim // 2 = 32, got \(16, 24, 24\)"),
    ],
)
def test_refused_sections(unchecked, order, section, message):
    with pytest.raises(ValueError, match=message):
        mrope_axes(section, rotary_dim=64, order=order)


SCALINGS = {
    "default": Default(),
    "linear": Linear(factor=2.0),
    "alpha": Dynamic(alpha=1000.0),
    "yarn": Yarn(factor=4.0, original_max_position_embeddings=64),
    "llama3": Llama3(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("order", "section"), CASES)
def test_a_rotation_by_several_axes(order, section, is_neox_style, scaling):
    width = 2 * sum(section)
    axes = mrope_axes(section, rotary_dim=width, order=order)
    config = RopeConfig(
        head_dim=width + 16,
        rotary_dim=width,
        rope_theta=1e4,
        max_position_embeddings=256,
        scaling=SCALINGS[scaling],
        is_neox_style=is_neox_style,
        axis_of_frequency=axes,
    )
    rng = np.random.default_rng(len(section))
    positions = rng.integers(0, 256, (len(section), 2, 5)).astype(np.int32)
    query = rng.standard_normal((2, 5, 3, config.head_dim)).astype(np.float32)
    table = compute_cos_sin_cache(config)
    turned, _ = apply_rope(
        jnp.asarray(positions),
        jnp.asarray(query),
        None,
        jnp.asarray(table),
        layout=config.layout,
    )
    # One frequency at a time, by the position of its own axis.
    half = width // 2
    cos, sin = np.empty((2, 2, 5, half))
    for i, axis in enumerate(axes):
        cos[..., i] = table[positions[axis], i]
        sin[..., i] = table[positions[axis], half + i]
    style = {"is_neox_style": is_neox_style}
    exact = oracle.rotate(query, cos, sin, **style)
    oracle.assert_within(
        turned, exact, oracle.bound(query, cos, sin, dtype="float32", **style)
    )


def read(model_type, rope, is_neox_style=None, **keys):
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
    config = {**sizes, "max_position_embeddings": 256, "rope_theta": 1e4, **keys}
    return config_from_hf(
        {**config, "model_type": model_type, "rope_scaling": rope},
        is_neox_style=is_neox_style,
    )


@pytest.mark.parametrize(
    ("model_type", "rope", "order", "section"),
    [
        ("qwen2_vl", {"type": "mrope", "mrope_section": [16, 24, 24]}, "chunked", None),
        ("qwen2_5_vl_text", None, "chunked", (16, 24, 24)),
        ("qwen3_vl_text", None, "interleaved", (24, 20, 20)),
        ("qwen3_vl_text", {"mrope_section": [24, 20, 20]}, "interleaved", None),
        ("ernie4_5_vl_moe_text", None, "ernie", (22, 22, 20)),
        ("ernie4_5_vl_moe_text", {"mrope_section": [24, 24, 16]}, "ernie", None),
        ("ernie4_5_moe_vl", {"mrope_section": [22, 22, 20]}, "ernie", None),
        (
            "qwen3_omni_moe_text",
            {"mrope_section": [24, 20, 20], "interleaved": True, "type": "default"},
            "interleaved",
            None,
        ),
        (
            "unheard_of",
            {"mrope_section": [24, 20, 20], "mrope_interleaved": False},
            "chunked",
            None,
        ),
        ("cosmos3_edge_text", None, "interleaved", (24, 20, 20)),
        ("Keye", {"mrope_section": [16, 24, 24]}, "chunked", None),
        ("glm4v_text", None, "chunked", (8, 12, 12)),
        (
            "glm4v_text",
            {"mrope_section": [8, 12, 12], "mrope_interleaved_glm": True},
            "round_robin",
            None,
        ),
        (
            "hunyuan_vl",
            {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [16, 16, 16, 16]},
            "chunked",
            (16, 16, 16, 16),
        ),
        (
            "hunyuan_vl_text",
            {"type": "dynamic", "alpha": 1000.0, "mrope_section": [20, 20, 24]},
            "chunked",
            None,
        ),
    ],
)
def test_axes_of_a_config(model_type, rope, order, section):
    keys = {}
    if model_type == "unheard_of":
        keys = {"is_neox_style": True, "partial_rotary_factor": 1.0}
    config = read(model_type, rope, **keys)
    assert config is not None
    section = section or tuple(rope["mrope_section"])
    width = config.layout.rotary_dim
    expected = mrope_axes(section, rotary_dim=width, order=order)
    assert config.axis_of_frequency == expected
    is_alpha = rope is not None and "alpha" in rope
    assert config.scaling == (Dynamic(alpha=1000.0) if is_alpha else Default())


def test_openpangu_says_it_by_its_type():
    rope = {
        "rope_type": "openpangu",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    config = config_from_hf(
        {
            "head_dim": 128,
            "rope_theta": 1e4,
            "max_position_embeddings": 256,
            "rope_parameters": rope,
        }
    )
    assert config is not None
    expected = mrope_axes((24, 20, 20), rotary_dim=128, order="balanced")
    assert config.axis_of_frequency == expected


@pytest.mark.parametrize(
    ("model_type", "rope", "error", "message"),
    [
        (
            "qwen2_vl",
            {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
            ValueError,
            "asks for 'interleaved' axes, but this model's code has them 'chunked'",
        ),
        (
            "qwen3_vl_text",
            {"mrope_section": [24, 20, 20], "mrope_interleaved": False},
            ValueError,
            "asks for 'chunked' axes, but this model's code has them 'interleaved'",
        ),
        (
            "hunyuan_vl",
            {"type": "xdrope", "alpha": 1000.0},
            ValueError,
            "rope_type 'xdrope' must have the key 'mrope_section'",
        ),
        (
            "hunyuan_vl",
            {
                "type": "xdrope",
                "alpha": 1000.0,
                "mrope_section": [32, 32],
                "xdrope_section": [16, 48],
            },
            ValueError,
            "gives mrope_section twice, and differently",
        ),
        (
            "hunyuan_vl",
            {
                "type": "openpangu",
                "mrope_section": [24, 40],
                "mrope_interleaved": False,
            },
            ValueError,
            "mrope_interleaved must be True with this rope_type, got False",
        ),
        (
            "llama",
            {"mrope_interleaved_glm": True},
            ValueError,
            "mrope_interleaved_glm must come with 'mrope_section'",
        ),
        (
            "llama",
            {"mrope_interleaved_glm": 1, "mrope_section": [8, 12, 12]},
            TypeError,
            "mrope_interleaved_glm must be a bool, got 1",
        ),
        (
            "llama",
            {"mrope_section": [0.25, 0.25, 0.5]},
            TypeError,
            "every entry of mrope_section must be an int, got 0.25",
        ),
        (
            "qwen3_omni_moe_text",
            {
                "mrope_section": [24, 20, 20],
                "interleaved": False,
                "mrope_interleaved": True,
            },
            ValueError,
            "gives mrope_interleaved twice, and differently",
        ),
        (
            "unheard_of",
            {"mrope_section": [22, 22, 20]},
            ValueError,
            "nor in what order its axes lie .*; for a vision encoder use jrope.vision",
        ),
        (
            "hunyuan_vl",
            {"type": "openpangu", "rope_type": "xdrope", "mrope_section": [24, 40]},
            ValueError,
            "differently",
        ),
        ("llama", {"mrope_section": 64}, TypeError, "must be a list of ints, got 64"),
    ],
)
def test_refused_configs(model_type, rope, error, message):
    with pytest.raises(error, match=message):
        read(model_type, rope)


# Yarn's correction range takes the original length, whatever the table's.
def test_yarn_with_sections_is_yarn_without():
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    keys = {"max_position_embeddings": 131072, "rope_theta": 1e6}
    both = read("qwen2_5_vl", {**yarn, "mrope_section": [16, 24, 24]}, **keys)
    alone = read("qwen2", yarn, **keys)
    assert both is not None and alone is not None
    assert dataclasses.replace(both, axis_of_frequency=None) == alone
    expected, factor = oracle.frequencies(
        "yarn", {"head_dim": 128, **keys, "rope_scaling": yarn}
    )
    made = both.frequencies
    np.testing.assert_allclose(made.inv_freq.astype(float), expected, rtol=1e-14)
    assert made.attention_factor == pytest.approx(factor, rel=1e-15)
    # Between frequency 23 and 40 they are mixed; by four times the length, 30 and 47.
    plain = 1e6 ** (-np.arange(64) / 64)
    mixed = (made.inv_freq < plain * 0.999) & (made.inv_freq > plain / 4 * 1.001)
    assert np.flatnonzero(mixed)[[0, -1]].tolist() == [24, 39]


def test_models_with_sections_have_an_order():
    for model in MODEL_TYPES.values():
        assert (model.mrope_section is None) == (model.mrope_order is None)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("qwen2_5_vl", "qwen2_5_vl_text"),
        ("qwen3_vl", "qwen3_vl_text"),
        ("glm4v", "glm4v_text"),
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        ("llama4", "llama4_text"),
    ],
)
@pytest.mark.parametrize("said", [{}, {"model_type": None}])
def test_a_nested_text_model_is_of_the_outer_type(outer, inner, said):
    text = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
    text |= {"max_position_embeddings": 256, "rope_theta": 1e6}
    nested = config_from_hf({"model_type": outer, "text_config": {**text, **said}})
    assert nested is not None
    assert nested == config_from_hf({**text, "model_type": inner})
    with pytest.raises(ValueError, match="model_type 'mistral3' is not one that"):
        config_from_hf({"model_type": "mistral3", "text_config": {**text, **said}})


def test_layers_that_do_not_attend_have_no_rotation():
    sizes = {"head_dim": 256, "max_position_embeddings": 64, "rope_theta": 1e4}
    config = {**sizes, "model_type": "qwen3_5_text"}
    assert config_from_hf(config, layer_type="linear_attention") is None
