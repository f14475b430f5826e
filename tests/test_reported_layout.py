"""Faults that users reported elsewhere: layout, bounds and axes.

Each test names its public thread; inputs and right values are in golden/bug_cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reported import SIZES, case, read, yarn_config

from jrope import (
    RopeConfig,
    apply_rope,
    compute_cos_sin_cache,
    lookup,
    mrope_axes,
    rerope,
)
from jrope.scalings import Default, Llama3


def turn(x, position, config, **kwargs):
    table = jnp.asarray(compute_cos_sin_cache(config))
    query = jnp.asarray(x, jnp.float32)[None, None]
    out, _ = apply_rope(
        np.array([position]), query, None, table, layout=config.layout, **kwargs
    )
    return np.asarray(out)[0, 0]


# ggml-org/llama.cpp#3018, jzhang38/TinyLlama#24
def test_pairs_of_halves_and_of_neighbours():
    golden = case("C38_C39_C43")
    for is_neox_style, name in ((True, "half"), (False, "interleaved")):
        config = RopeConfig(
            head_dim=8,
            rope_theta=golden["theta"],
            max_position_embeddings=8,
            is_neox_style=is_neox_style,
        )
        turned = turn(golden["x"], golden["position"], config)
        np.testing.assert_allclose(turned, golden[name], rtol=2e-6)


# NVIDIA/Megatron-LM#7465, NVIDIA/TensorRT-LLM#16378
def test_position_0_is_the_identity_and_twice_is_another_position():
    golden = case("C38_C39_C43")
    for is_neox_style in (True, False):
        config = RopeConfig(
            head_dim=8,
            rope_theta=golden["theta"],
            max_position_embeddings=8,
            is_neox_style=is_neox_style,
        )
        here = np.float32(golden["x"])
        np.testing.assert_array_equal(turn(here, 0, config), here)
        once = turn(here, golden["position"], config)
        twice = turn(once, golden["position"], config)
        np.testing.assert_allclose(
            twice, turn(here, 2 * golden["position"], config), rtol=2e-6
        )
        if is_neox_style:
            np.testing.assert_allclose(twice, golden["applied_twice_WRONG"], rtol=2e-6)
            for wrong in ("mixed", "applied_twice", "cos_of_cos"):
                assert np.abs(once - golden[f"{wrong}_WRONG"]).max() > 0.1


# vllm-project/vllm#26995, huggingface/transformers#39687
def test_permuting_first_gives_the_same_in_another_order():
    golden = case("C38_C39_C43")
    config = RopeConfig(
        head_dim=8, rope_theta=golden["theta"], max_position_embeddings=8
    )
    permuted = np.array(golden["x"])[[0, 2, 4, 6, 1, 3, 5, 7]]
    turned = turn(permuted, golden["position"], config)
    np.testing.assert_allclose(turned, golden["deepseek_permute_then_half"], rtol=2e-6)


# pie-project/pie#603, microsoft/onnxruntime#22417
def test_partial_rotation_counts_from_its_own_width():
    golden = case("C40")
    for is_neox_style, name in ((True, "right"), (False, "right_interleaved")):
        config = RopeConfig(
            head_dim=8,
            rotary_dim=4,
            rope_theta=1e4,
            max_position_embeddings=8,
            is_neox_style=is_neox_style,
        )
        turned = turn(golden["x"], golden["position"], config)
        np.testing.assert_allclose(turned, golden[name], rtol=2e-6)
        np.testing.assert_array_equal(turned[4:], np.float32(golden["x"][4:]))


# huggingface/transformers#48648
@pytest.mark.parametrize("fields", [{"head_dim": 7}, {"head_dim": 10, "share": 0.3}])
def test_odd_widths_are_refused_at_once(fields):
    share = fields.pop("share", 1.0)
    config = {**SIZES, "rope_theta": 1e4, "partial_rotary_factor": share, **fields}
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        read(config)


# sgl-project/sglang#10788, jax-ml/jax#3774
def test_positions_past_the_table_never_read_its_last_row():
    golden = case("C44_C45")
    config = RopeConfig(
        head_dim=golden["head_dim"],
        rope_theta=1e4,
        max_position_embeddings=golden["table_len"],
    )
    table = jnp.asarray(compute_cos_sin_cache(config))
    positions = np.array(golden["positions"], np.int32)
    with pytest.raises(ValueError, match="below the table's 16 rows, got 17"):
        lookup(table, positions, layout=config.layout)
    read = jax.jit(lambda t, p: lookup(t, p, layout=config.layout)[0])
    rows = np.asarray(read(table, positions))
    np.testing.assert_allclose(rows[0], golden["clamped_row_15"]["cos"], atol=1e-7)
    assert np.isnan(rows[1:3]).all()
    np.testing.assert_array_equal(rows[3], np.ones(4))  # -1 is padding: row 0.


# unslothai/unsloth#3699, huggingface/transformers#26072
def test_left_padding():
    config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=8)
    table = jnp.asarray(compute_cos_sin_cache(config))
    mask = np.array(case("C44_C45")["left_pad"]["attention_mask"])
    positions = np.where(mask == 1, mask.cumsum(-1) - 1, -1)
    query = jnp.ones((2, 5, 1, 8), jnp.float32)

    def loss(query):
        out, _ = apply_rope(positions, query, None, table, layout=config.layout)
        return jnp.sum(out**2), out

    gradient, out = jax.grad(loss, has_aux=True)(query)
    np.testing.assert_array_equal(out[0, 2:], out[1, :3])
    assert np.isfinite(gradient).all()


# axolotl-ai-cloud/axolotl#131, NVIDIA/Megatron-LM#5243
def test_packed_and_context_parallel_positions_are_just_positions():
    golden = case("C47_C48")
    config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=8)
    table = jnp.asarray(compute_cos_sin_cache(config))
    query = jnp.asarray(
        np.random.default_rng(0).standard_normal((8, 1, 8)), jnp.float32
    )

    def run(positions, query):
        out, _ = apply_rope(
            np.array(positions), query, None, table, layout=config.layout
        )
        return np.asarray(out)

    packed = run(golden["reset_positions"], query)
    np.testing.assert_array_equal(packed[4:], run(range(4), query[4:]))
    for rank in ("rank0", "rank1"):
        mine = np.array(golden["packed_table"][rank])
        part = run(golden["per_sequence_table"][rank], query[mine])
        np.testing.assert_array_equal(part, packed[mine])


# rajveer43/VeloxQuant-MLX#148, antonellof/ferrox#229
def test_moving_cached_keys_uses_the_scaled_frequencies():
    golden = case("C84")
    rope, move = golden["config"], golden["move"]
    config = read(
        {
            **SIZES,
            "head_dim": golden["head_dim"],
            "max_position_embeddings": 16384,
            "rope_scaling": rope,
        }
    )
    shift = move["to_position"] - move["from_position"]
    np.testing.assert_allclose(
        shift * config.frequencies.inv_freq.astype(float),
        golden["delta_angles"],
        rtol=3e-7,
    )
    assert isinstance(config.scaling, Llama3)
    key = np.random.default_rng(0).standard_normal(64)
    table = jnp.asarray(compute_cos_sin_cache(config))
    cached = jnp.asarray(turn(key, move["from_position"], config))[None, None]
    moved = rerope(cached, np.array([shift]), table, layout=config.layout)
    right = turn(key, move["to_position"], config)
    np.testing.assert_allclose(np.asarray(moved)[0, 0], right, rtol=0, atol=2e-6)


def test_moving_cached_keys_keeps_their_amplitude():
    config = yarn_config(1e4)
    config = RopeConfig(
        head_dim=64,
        rope_theta=1e4,
        max_position_embeddings=64,
        scaling=config.scaling,
    )
    key = np.random.default_rng(0).standard_normal(64)
    table = jnp.asarray(compute_cos_sin_cache(config))
    cached = jnp.asarray(turn(key, 10, config))[None, None]
    for shift in (-10, 0, 53):
        moved = rerope(cached, np.array([shift]), table, layout=config.layout)
        right = turn(key, 10 + shift, config)
        np.testing.assert_allclose(np.asarray(moved)[0, 0], right, rtol=0, atol=3e-6)


# QwenLM/Qwen3-VL#1800, huggingface/transformers#42097
def test_axis_maps_of_both_orders():
    assert mrope_axes((2, 1, 1), rotary_dim=8) == (0, 0, 1, 2)
    turns = mrope_axes((24, 20, 20), rotary_dim=128, order="interleaved")
    assert turns[:6] == (0, 1, 2, 0, 1, 2)
    assert turns[60:] == (0, 0, 0, 0)
    assert [turns.count(axis) for axis in range(3)] == [24, 20, 20]
    with pytest.raises(ValueError, match=r"largest entry first.* \(8, 12, 12\), which"):
        mrope_axes((8, 12, 12), rotary_dim=64, order="interleaved")
    with pytest.raises(
        ValueError, match=r"sum to rotary_dim // 2 = 32, got \(16, 24, 2"
    ):
        mrope_axes((16, 24, 24), rotary_dim=64)
    with pytest.raises(ValueError, match="3 entries where mrope_interleaved is true"):
        mrope_axes((2, 2), rotary_dim=8, order="interleaved")


def test_default_scaling_is_the_default():
    assert (
        RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=8).scaling
        == Default()
    )
