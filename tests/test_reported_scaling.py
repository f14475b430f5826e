"""Faults that users reported elsewhere: scaling, length and precision.

Each test names its public thread; inputs and right values are in golden/bug_cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reported import SIZES, assert_frequencies, case, read, yarn_config

from jrope import (
    RopeConfig,
    RotaryLayout,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    lookup,
)
from jrope.scalings import Yarn


# huggingface/transformers#47435, ggml-org/llama.cpp#7118
def test_ratio_of_amplitudes_and_factor_on_the_softmax():
    golden = case("C17_C18")
    config = {**SIZES, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    for weights, scale, softmax in (
        ((0.707, 0.707), 1.0, golden["deepseek_v2_lite"]["softmax_mult"]),
        ((1.0, 1.0), 1.0, golden["deepseek_v3"]["softmax_mult"]),
        ((1.0, None), golden["mscale_only_1_0"]["value"], 1.0),
        ((0.707, 1.0), golden["mscale_0_707_all_1_0"], None),
    ):
        keys = {"mscale": weights[0], "mscale_all_dim": weights[1]}
        made = read({**config, "rope_scaling": {**rope, **keys}}).frequencies
        assert made.attention_factor == pytest.approx(scale, rel=1e-12)
        if softmax is not None:
            assert made.softmax_scale_factor == pytest.approx(softmax, rel=1e-12)


# ml-explore/mlx-lm#1507
def test_explicit_attention_factor_is_final():
    for row in case("C17_C18")["explicit_attention_factor"]:
        scaling = Yarn(
            factor=32.0,
            original_max_position_embeddings=4096,
            attention_factor=row["given"],
        )
        config = RopeConfig(
            head_dim=64, rope_theta=1e4, max_position_embeddings=8, scaling=scaling
        )
        assert config.frequencies.attention_factor == pytest.approx(row["used"])


# vllm-project/vllm#28244, apache/tvm#18576
def test_truncate_and_the_lowest_frequency():
    golden = case("C19_C20_C21")["gpt_oss"]
    for truncate in (True, False):
        config = yarn_config(150000.0, truncate=truncate)
        right = golden[f"inv_freq_truncate_{str(truncate).lower()}"]
        assert_frequencies(config, right)
        plain = 150000.0 ** (-62 / 64)
        assert float(config.frequencies.inv_freq[-1]) == pytest.approx(
            plain / 32, rel=1e-14
        )


# PaddlePaddle/PaddleFleet#678
@pytest.mark.parametrize("truncate", [True, False])
def test_equal_betas(truncate):
    config = yarn_config(5e4, beta_fast=1.0, beta_slow=1.0, truncate=truncate)
    golden = case("C19_C20_C21")["C21_kimi_beta_equal"]
    assert_frequencies(config, golden[f"truncate_{str(truncate).lower()}"])


def test_a_ramp_without_width_is_a_step():
    # Both betas name index 18.62: YaRN's guard makes the ramp 0.001 wide.
    config = yarn_config(5e4, beta_fast=1.2, beta_slow=1.2, truncate=False)
    plain = 5e4 ** (-np.arange(32) / 32)
    right = np.where(np.arange(32) <= 18, plain, plain / 32)
    np.testing.assert_allclose(
        config.frequencies.inv_freq.astype(float), right, rtol=1e-12
    )


# panbanda/higgs#31
def test_lengths_past_int16():
    golden = case("C22")
    rope = golden["config"]
    config = {**SIZES, "head_dim": rope.pop("head_dim"), "rope_scaling": rope}
    assert_frequencies(read(config), golden["inv_freq"])


# unslothai/unsloth#6197
def test_llama3_has_three_bands():
    golden = case("C23")
    rope = golden["config"]
    config = {**SIZES, "head_dim": golden["head_dim"], "rope_scaling": rope}
    made = read(config)
    assert_frequencies(made, golden["inv_freq"])
    ratio = made.frequencies.inv_freq / rope["rope_theta"] ** (-np.arange(32) / 32)
    np.testing.assert_allclose(ratio.astype(float), golden["ratio_to_plain"], rtol=1e-6)


# huggingface/transformers#46624, #27226
def test_dynamic_has_no_state():
    golden = case("C26")
    config = read(golden["config"])
    for call in golden["sequence_of_calls"]:
        assert_frequencies(config.for_length(call["seq_len"]), call["inv_freq"])


# huggingface/transformers#48960
def test_alpha_is_static():
    golden = case("C28")
    rope = {**golden["config"]}
    config = read({**SIZES, "head_dim": rope.pop("head_dim"), "rope_scaling": rope})
    for length in golden["must_equal_at_seq_len"]:
        assert_frequencies(config.for_length(length), golden["inv_freq"])


# unslothai/unsloth#10681, vllm-project/vllm#27414
def test_longrope_chooses_once_per_request():
    golden = case("C29_C30")
    config = read(golden["config"])
    for row in golden["selection"]:
        chosen = config.for_length(row["seq_len"])
        assert_frequencies(chosen, golden[row["use"]])
        assert chosen.frequencies.attention_factor == pytest.approx(
            golden["attention_scaling"]
        )


# sgl-project/sglang-jax#1472, EleutherAI/gpt-neox#1003, tinygrad/tinygrad#17885
def test_tables_are_exact_at_any_position_and_float32_always():
    golden = case("C33_C35_C37")
    positions = [p for p in golden["positions"] if p < 2**18]
    for x64 in (False, True):
        with jax.enable_x64(x64):
            config = RopeConfig(
                head_dim=golden["head_dim"],
                rope_theta=golden["theta"],
                max_position_embeddings=2**18,
            )
            table = compute_cos_sin_cache(config)
            assert table.dtype == np.float32
    right = np.array(golden["cos_float64"])[: len(positions)]
    np.testing.assert_allclose(
        table[positions][:, golden["pairs"]], right, rtol=0, atol=1e-7
    )


# tinygrad/tinygrad#17885, ml-explore/mlx#4157
def test_far_positions_have_exact_rows():
    golden = case("C33_C35_C37")
    config = RopeConfig(
        head_dim=golden["head_dim"],
        rope_theta=golden["theta"],
        max_position_embeddings=10485760,  # Llama 4 Scout's.
    )
    array = jnp.asarray(TwoLevelTable.compute(config))
    cos, _ = lookup(
        TwoLevelTable.wrap(config, array),
        np.array(golden["positions"], np.int32),
        layout=config.layout,
    )
    right = np.array(golden["cos_float64"])
    np.testing.assert_allclose(
        np.asarray(cos)[:, golden["pairs"]], right, rtol=0, atol=1.5e-7
    )


# huggingface/diffusers#13922, pytorch/pytorch#137774
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_float_positions_are_refused(dtype):
    table = jnp.ones((4, 4), jnp.float32)
    with pytest.raises(TypeError, match=f"must be integers, got {dtype}"):
        lookup(
            table,
            jnp.array([1], dtype),
            layout=RotaryLayout(head_dim=4, rotary_dim=4),
        )


# huggingface/transformers#24262, lucidrains/rotary-embedding-torch#9
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_output_dtype_is_the_input_dtype(dtype, x64):
    config = yarn_config(1e4, attention_factor=np.float64(1.25))
    with jax.enable_x64(x64):
        table = jnp.asarray(compute_cos_sin_cache(config))
        query = jnp.ones((3, 2, 64), dtype)
        out, _ = apply_rope(
            jnp.arange(3, dtype=jnp.int32), query, None, table, layout=config.layout
        )
    assert out.dtype == query.dtype
