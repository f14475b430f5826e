"""Faults that users reported elsewhere: multimodal positions and their sections.

Each test names its public thread; inputs and right values are in golden/bug_cases.
"""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from reported import case, read

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, lookup
from jrope.positions import BatchPositions, plan, spec

QWEN = spec("qwen2_vl")


def config_of(name):
    """A config with the sections of a golden entry."""
    golden = case("C53_C54_C55")[name]
    rope = {"rope_type": "default", "mrope_section": golden["section"]}
    width = golden.get("rotary_dim", 128)
    head_dim = golden.get("head_dim", 128)
    return golden, read(
        {
            "head_dim": head_dim,
            "rope_theta": golden["theta"],
            "max_position_embeddings": 64,
            "partial_rotary_factor": width / head_dim,
            "rope_scaling": {**rope, "mrope_interleaved": name != "qwen2_vl"},
        }
    )


def rows_of(config, positions):
    table = jnp.asarray(compute_cos_sin_cache(config))
    return lookup(table, np.array(positions, np.int32), layout=config.layout)


# alibaba/MNN#4133, Blaizzy/mlx-vlm#576, ollama/ollama#12807
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5_partial"])
def test_sections_in_runs_and_in_turn(name):
    golden, config = config_of(name)
    assert config.layout.axes_array().tolist() == golden["axis_per_frequency"]
    positions = [[p] for p in case("C53_C54_C55")["positions_thw"]]
    cos, sin = rows_of(config, positions)
    np.testing.assert_allclose(cos[0], golden["cos"], rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin[0], golden["sin"], rtol=0, atol=1e-7)


# AI-Hypercomputer/maxtext#4615
@pytest.mark.parametrize("head_dim", [16, 256])
def test_sections_leave_the_rest_of_a_partly_rotated_head(head_dim):
    if head_dim == 256:
        golden, config = config_of("qwen3_5_partial")
        rows = golden["cos"], golden["sin"]
    else:
        config = RopeConfig(
            head_dim=16,
            rotary_dim=4,
            rope_theta=1e4,
            max_position_embeddings=64,
            axis_of_frequency=(0, 1),
        )
        angles = np.array([7, 11 * 0.01])
        rows = np.cos(angles), np.sin(angles)
    axes = case("C53_C54_C55")["positions_thw"][: config.layout.position_axes]
    query = np.random.default_rng(0).standard_normal((1, 2, head_dim))
    query = query.astype(np.float32)
    table = jnp.asarray(compute_cos_sin_cache(config))
    turned, _ = apply_rope(
        np.array([[p] for p in axes]),
        jnp.asarray(query),
        None,
        table,
        layout=config.layout,
    )
    width = config.layout.rotary_dim
    cos, sin = (np.array(row)[None] for row in rows)
    right = oracle.rotate(query, cos, sin, is_neox_style=True)
    np.testing.assert_allclose(turned, right, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(turned[..., width:], query[..., width:])


# huggingface/transformers#40490, #40136, axolotl-ai-cloud/axolotl#3817
def test_axes_are_never_guessed_from_a_shape():
    """Three rows of five tokens are a batch, or three axes: the layout says which."""
    _, config = config_of("qwen2_vl")
    plain = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=64)
    table = jnp.asarray(compute_cos_sin_cache(config))
    positions = np.arange(15, dtype=np.int32).reshape(3, 5)
    query = jnp.ones((3, 5, 2, 128), jnp.float32)
    batch, _ = apply_rope(positions, query, None, table, layout=plain.layout)
    for i in range(3):
        alone, _ = apply_rope(positions[i], query[i], None, table, layout=plain.layout)
        np.testing.assert_array_equal(batch[i], alone)
    with pytest.raises(ValueError, match=r"positions"):
        apply_rope(positions, query, None, table, layout=config.layout)
    for shape in ((2, 5), (4, 2, 5), (5,)):
        with pytest.raises(ValueError, match="with A = 3"):
            rows_of(config, np.zeros(shape))
    assert rows_of(config, np.zeros((3, 2, 5)))[0].shape == (2, 5, 64)


# The same text on every axis is one-dimensional RoPE, whatever the order of the axes.
# QwenLM/Qwen3-VL#1800
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5_partial"])
def test_text_is_turned_as_without_axes(name):
    _, config = config_of(name)
    plain = RopeConfig(
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        rope_theta=config.rope_theta,
        max_position_embeddings=64,
    )
    for made, right in zip(
        rows_of(config, [range(9)] * 3), rows_of(plain, range(9)), strict=True
    ):
        np.testing.assert_array_equal(made, right)


# kekzl/imp#1174, huggingface/transformers#40154
@pytest.mark.parametrize("name", ["image_case", "wide_image"])
def test_an_image_costs_its_longer_side_and_decoding_goes_on_from_there(name):
    golden = case("C51_C56")[name]
    types = golden["token_types"]
    made = plan(
        QWEN,
        np.zeros(len(types), np.int32),
        token_types=types,
        image_grid_thw=[golden["image_grid_thw"]],
    )
    assert made.positions().tolist() == golden["positions"]
    assert made.delta == golden["delta"]
    after = golden.get("next_decode_position", len(types) + golden["delta"])
    batch = BatchPositions(QWEN, 1, max_tokens=1, max_position=64)
    batch.add(0, made)
    assert batch.step([0], [len(types)], [1]).tolist() == [[after]] * 3
    assert max(map(max, golden["positions"])) + 1 == after


# axolotl-ai-cloud/axolotl#3817, hiyouga/LlamaFactory#10283
def test_left_padding_does_not_shift_images():
    golden = case("C51_C56")["left_padded_batch"]
    right, deltas = golden["hf"]
    for row, (types, mask) in enumerate(
        zip(golden["token_types"], golden["mask"], strict=True)
    ):
        real = np.array(mask) == 1
        made = plan(
            QWEN,
            np.zeros(real.sum(), np.int32),
            token_types=np.array(types)[real],
            image_grid_thw=[[1, 4, 4]],
        )
        hf = np.array(right)[:, row][:, real]
        np.testing.assert_array_equal(made.positions(), hf)
        assert made.delta == np.ravel(deltas)[row]


# A video whose frames are grids of their own, with text between them.
# huggingface/transformers#40136
def test_frames_of_a_video_are_grids_of_their_own():
    golden = case("C53_C54_C55")["qwen3_vl_video"]
    frame = [1, *[2] * 4, 0]
    types = [0, *frame, *frame]
    positions = np.array(golden["positions"])
    assert positions.shape == (3, len(types))
    family = spec("qwen3_vl")
    ids = [7, *[family.vision_start_token_id, *[family.video_token_id] * 4, 8] * 2]
    made = plan(family, ids, video_grid_thw=[[2, 4, 4]])
    np.testing.assert_array_equal(made.positions(), positions)
    assert made.delta == golden["delta"]
