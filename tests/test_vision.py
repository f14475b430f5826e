"""Two-dimensional RoPE of vision encoders: configs, positions and rotations.

Against transformers itself: tests/test_peers_vision.py.
"""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import (
    RopeConfig,
    apply_rope,
    compute_cos_sin_cache,
    vision_config_from_hf,
)
from jrope.positions import PositionError, vision_positions
from jrope.scalings import Axial

QWEN2_VL = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {
        "model_type": "qwen2_vl",
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
    },
}
QWEN25_OMNI = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "hidden_size": 1280,
            "num_heads": 16,
        },
    },
}
MISTRAL3 = {
    "model_type": "mistral3",
    "vision_config": {
        "model_type": "pixtral",
        "head_dim": 64,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "image_size": 1540,
        "patch_size": 14,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    },
}
LLAMA4 = {
    "model_type": "llama4",
    "vision_config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 1408,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "rope_theta": 10000,
    },
}


PIXTRAL = {"model_type": "pixtral", "head_dim": 64, "patch_size": 14}


@pytest.mark.parametrize(
    ("hf_config", "head_dim", "rows", "order", "is_neox_style"),
    [
        (QWEN2_VL, 80, 8192, "shared", True),
        (QWEN25_OMNI, 80, 8192, "shared", True),
        (MISTRAL3, 64, 110, "dealt", True),
        (LLAMA4, 88, 25, "shared", False),
    ],
    ids=["qwen2_vl", "omni", "pixtral", "llama4"],
)
def test_configs(hf_config, head_dim, rows, order, is_neox_style):
    for given in (hf_config, {**hf_config.get("vision_config", hf_config)}):
        config = vision_config_from_hf(given)
        assert config.head_dim == config.layout.rotary_dim == head_dim
        assert config.max_position_embeddings == rows
        assert config.scaling == Axial(order=order)
        assert config.is_neox_style is is_neox_style
        quarter = head_dim // 4
        assert config.axis_of_frequency == (0,) * quarter + (1,) * quarter
    assert vision_config_from_hf(hf_config, max_position_embeddings=7) == (
        RopeConfig(
            head_dim=head_dim,
            rope_theta=1e4,
            max_position_embeddings=7,
            scaling=Axial(order=order),
            is_neox_style=is_neox_style,
            axis_of_frequency=config.axis_of_frequency,
        )
    )


def test_frequencies():
    shared = vision_config_from_hf(QWEN2_VL).frequencies.inv_freq.astype(float)
    for i in range(20):
        expected = 1e4 ** (-2 * i / 40)
        assert shared[i] == shared[20 + i] == pytest.approx(expected, rel=1e-14)
    dealt = vision_config_from_hf(MISTRAL3).frequencies.inv_freq.astype(float)
    for i in range(16):
        assert dealt[i] == pytest.approx(1e4 ** (-4 * i / 64), rel=1e-14)
        assert dealt[16 + i] == pytest.approx(1e4 ** (-(4 * i + 2) / 64), rel=1e-14)


@pytest.mark.parametrize(
    ("hf_config", "error", "message"),
    [
        ({"model_type": "siglip"}, ValueError, "vision encoder must be one of .*'sigl"),
        ({}, ValueError, "must be one of .* got None in a config of None"),
        (
            {"model_type": "qwen2_5_vl", "vision_config": None},
            TypeError,
            "vision_config must be a mapping, got None",
        ),
        (
            {"model_type": "qwen2_5_vl", "hidden_size": 64, "vocab_size": 9},
            ValueError,
            "must have 'vision_config' or be a vision encoder's, got one of a lang",
        ),
        (
            {
                "model_type": "qwen3_vl",
                "vision_config": {"model_type": "siglip_vision_model"},
            },
            ValueError,
            "one of .*'siglip_vision_model' in a config of 'qwen3_vl'",
        ),
        (
            {**PIXTRAL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            ValueError,
            r"has a base alone, got \['rope_scaling'\]",
        ),
        (
            {**PIXTRAL, "rope_parameters": {"type": "axial", "factor": 4.0}},
            ValueError,
            r"has a base alone, got \['factor'\]",
        ),
        (
            {**PIXTRAL, "rope_parameters": {"type": "yarn"}},
            ValueError,
            "must be 'axial' or 'default', got 'yarn'",
        ),
        (
            {**PIXTRAL, "rope_parameters": [1]},
            TypeError,
            r"rope_parameters must be a mapping, got \[1\]",
        ),
        (
            {**PIXTRAL, "image_size": []},
            TypeError,
            r"image_size and patch_size must be an int, got \[\]",
        ),
        ({"model_type": "qwen3_vl", "num_heads": 4}, ValueError, "have 'hidden_size'"),
        (
            {"model_type": "qwen3_vl", "hidden_size": 30, "num_heads": 4},
            ValueError,
            "hidden_size must be a multiple of the vision encoder's heads .* 30 and 4",
        ),
        (
            {"model_type": "qwen3_vl", "hidden_size": 24, "num_heads": 4},
            ValueError,
            "rotary_dim must be a multiple of 4 for two position axes, got 6",
        ),
        (
            {"model_type": "pixtral", "head_dim": 64},
            ValueError,
            "must have 'patch_size'",
        ),
        (
            {
                "model_type": "pixtral",
                "head_dim": 64,
                "patch_size": 14,
                "rope_parameters": {"rope_type": "yarn"},
            },
            ValueError,
            "must be 'axial' or 'default', got 'yarn'",
        ),
        (
            {
                "model_type": "pixtral",
                "head_dim": 64,
                "patch_size": 14,
                "rope_theta": 1e4,
                "rope_parameters": {"rope_theta": 1e5},
            },
            ValueError,
            "gives rope_theta twice, and differently",
        ),
    ],
)
def test_refused_configs(hf_config, error, message):
    with pytest.raises(error, match=message):
        vision_config_from_hf(hf_config)


def slow_positions(grids, order, merge=1):
    """Patch by patch."""
    made = []
    for frames, height, width in grids:
        for _ in range(frames):
            if order == "merge_blocks":
                made += [
                    (top + r, left + c)
                    for top in range(0, height, merge)
                    for left in range(0, width, merge)
                    for r in range(merge)
                    for c in range(merge)
                ]
            elif order == "row_major":
                made += [(r, c) for r in range(height) for c in range(width)]
            else:
                made += [(c + 1, r + 1) for r in range(height) for c in range(width)]
                made.append((0, 0))
    return np.array(made).reshape(-1, 2).T


GRIDS = [(1, 4, 6), (3, 2, 2), (1, 12, 2), (2, 6, 4)]


@pytest.mark.parametrize(
    ("order", "merge"),
    [("merge_blocks", 2), ("merge_blocks", 1), ("row_major", None)]
    + [("one_based_with_cls", None)],
)
def test_positions(order, merge):
    made = vision_positions(np.array(GRIDS), order=order, spatial_merge_size=merge)
    assert made.dtype == np.int32
    np.testing.assert_array_equal(made, slow_positions(GRIDS, order, merge))


def test_no_pictures_no_patches():
    assert vision_positions([], order="row_major").shape == (2, 0)


@pytest.mark.parametrize(
    ("grids", "kwargs", "error", "message"),
    [
        ([[1, 3, 4]], {"spatial_merge_size": 2}, PositionError, "multiples of 2, got"),
        ([[1, 2, 2], [0, 2, 2]], {}, PositionError, "grid_nonpositive entry 1"),
        ([[1, 2]], {}, PositionError, r"shape \[n, 3\], got shape \[1, 2\]"),
        ([[1.0, 2, 2]], {}, PositionError, "as integers"),
        ([[1, 2, 2]], {"spatial_merge_size": 0}, ValueError, "at least 1"),
        ([[1, 2, 2]], {"order": "spiral"}, ValueError, "one of .* got 'spiral'"),
        (
            [[1, 2, 2]],
            {"order": "row_major", "spatial_merge_size": 2},
            ValueError,
            "for no other order, got 2 with 'row_major'",
        ),
        (
            [[1, 2, 2]],
            {"spatial_merge_size": None},
            ValueError,
            "given for 'merge_blocks', .* got None with 'merge_blocks'",
        ),
    ],
)
def test_refused_positions(grids, kwargs, error, message):
    with pytest.raises(error, match=message):
        vision_positions(
            grids, **{"order": "merge_blocks", "spatial_merge_size": 1, **kwargs}
        )


@pytest.mark.parametrize(
    ("hf_config", "order", "merge"),
    [
        (QWEN2_VL, "merge_blocks", 2),
        (MISTRAL3, "row_major", None),
        (LLAMA4, "one_based_with_cls", None),
    ],
    ids=["qwen2_vl", "pixtral", "llama4"],
)
def test_rotations(hf_config, order, merge):
    config = vision_config_from_hf(hf_config)
    positions = vision_positions(GRIDS, order=order, spatial_merge_size=merge)
    rng = np.random.default_rng(3)
    query = rng.standard_normal((positions.shape[1], 2, config.head_dim))
    query = query.astype(np.float32)
    table = jnp.asarray(compute_cos_sin_cache(config))
    turned, _ = apply_rope(
        jnp.asarray(positions), jnp.asarray(query), None, table, layout=config.layout
    )
    quarter = config.head_dim // 4
    own = np.concatenate([np.tile(axis, (quarter, 1)).T for axis in positions], axis=1)
    angles = own * config.frequencies.inv_freq.astype(float)
    style = {"is_neox_style": config.is_neox_style}
    cos, sin = np.cos(angles), np.sin(angles)
    exact = oracle.rotate(query, cos, sin, **style)
    limit = oracle.bound(query, cos, sin, dtype="float32", **style)
    # The table's own rounding comes on top of the rotation's.
    limit += oracle.F32_EPS * np.abs(query).max() * 2
    oracle.assert_within(turned, exact, limit)
