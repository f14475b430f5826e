"""Adapters: what computed rows cannot give, padding, and a position for each token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrope import (
    DualChunk,
    Fope,
    RopeConfig,
    apply_rope,
    compute_cos_sin_cache,
    flashinfer,
    hpu,
)
from jrope.adapters import (
    bonsai,
    easydel,
    equinox,
    gemma,
    hf,
    maxtext,
    sglang_jax,
    tpu_inference,
    tunix,
)
from jrope.scalings import Dynamic, LongRope

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
SHORT = {
    "longrope": LongRope(
        short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
        original_max_position_embeddings=16,
    ),
    "dynamic": Dynamic(factor=2.0, max_trained_positions=16),
}


def of_layer(module):
    """A config, positions [T] and heads [T, N, H] to turned heads [T, N, H]."""

    def turned(config, positions, x):
        return module(config)(positions[None], x[None], x[None])[0][0]

    return turned


def by_hf(config, positions, x):
    cos, sin = hf.RotaryEmbedding(config)(None, positions[None])
    return hf.apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]


def by_bonsai(config, positions, x):
    return bonsai.apply_rope(x[None], *bonsai.RoPE(config)(positions[None]))[0]


def by_maxtext(config, positions, x):
    layer = maxtext.RotaryEmbedding(config, cast_as_fprop_dtype=False)
    return layer(x[None], positions[None])[0]


def by_equinox(config, positions, x):
    rope = equinox.RotaryPositionalEmbedding(config)
    return jax.vmap(lambda head: rope(head, positions=positions), 1, 1)(x)


# Every adapter that is given a config.
OF_CONFIG = {
    "hf": by_hf,
    "bonsai": by_bonsai,
    "maxtext": by_maxtext,
    "easydel": of_layer(easydel.RotaryEmbedding),
    "equinox": by_equinox,
    "sglang_jax": lambda config, positions, x: sglang_jax.RotaryEmbedding(config)(
        positions, x, x
    )[0],
    "tpu_inference": lambda config, positions, x: tpu_inference.RotaryEmbedding(
        config
    ).apply_rope(positions, x),
    "tpu_inference module": lambda config, positions, x: tpu_inference.RotaryEmbedding(
        config
    )(x, x, positions)[0],
}
# Every calling form with a position for each token; sglang-jax's pads them.
OF_TOKENS = {name: call for name, call in OF_CONFIG.items() if name != "sglang_jax"} | {
    "gemma": lambda _, positions, x: gemma.apply_rope(
        x[None], positions[None], base_frequency=1e4
    ),
    "tunix": lambda _, positions, x: tunix.apply_rope(x[None], positions[None], 8),
    "tpu_inference function": lambda _, positions, x: tpu_inference.apply_rope(
        x, positions, 8
    ),
    "flashinfer": lambda _, positions, x: flashinfer.apply_rope_pos_ids(
        x, x, positions
    ),
    "flashinfer llama31": lambda _, positions, x: flashinfer.apply_llama31_rope_pos_ids(
        x, x, positions
    ),
    "flashinfer cache": lambda config, positions, x: (
        flashinfer.apply_rope_with_cos_sin_cache(
            positions,
            x.reshape(len(x), -1),
            x.reshape(len(x), -1),
            8,
            jnp.asarray(compute_cos_sin_cache(config)),
        )
    ),
    "hpu": lambda _, positions, x: hpu.HpuRotaryEmbedding(8, 8, 64)(
        positions, x.reshape(len(x), -1), x.reshape(len(x), -1)
    ),
    "hpu of a batch": lambda _, positions, x: hpu.HpuRotaryEmbedding(8, 8, 64)(
        positions[None], x.reshape(1, len(x), -1), x.reshape(1, len(x), -1)
    ),
}


def heads(tokens):
    return jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 2, 8)), "float32")


@pytest.mark.parametrize("name", OF_CONFIG)
@pytest.mark.parametrize(
    ("field", "table"),
    [
        ({"dual_chunk": DualChunk(chunk_size=8, local_size=2)}, "DualChunkTable"),
        ({"fope": Fope(num_inv_freq=2)}, "FopeTable"),
    ],
    ids=["dual_chunk", "fope"],
)
def test_computed_rows_are_of_no_other_kind_of_table(name, field, table):
    config = dataclasses.replace(CONFIG, **field)
    with pytest.raises(ValueError, match=f"has no flat table.* use jrope.{table}"):
        OF_CONFIG[name](config, np.array([20]), heads(1))


@pytest.mark.parametrize("name", OF_CONFIG)
@pytest.mark.parametrize("scaling", SHORT)
def test_computed_rows_past_the_longest_request_are_nan(name, scaling):
    config = dataclasses.replace(CONFIG, scaling=SHORT[scaling])
    places, x = np.array([-1, 15, 16, 63, 5000]), heads(5)
    turned = np.asarray(OF_CONFIG[name](config, jnp.asarray(places), x))
    assert np.isnan(turned[2:]).all()
    table = jnp.asarray(compute_cos_sin_cache(config))
    right, _ = apply_rope(places[:2], x[:2], None, table, layout=config.layout)
    np.testing.assert_allclose(turned[:2], right, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="below 16, the longest request .* got 16; .*"):
        OF_CONFIG[name](config, np.array([15, 16], np.uint8), x[:2])
    longer = config.for_length(64)
    assert np.isfinite(OF_CONFIG[name](longer, places, x)).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_offsets_do_not_move_padding(on_device):
    place = jnp.asarray if on_device else np.asarray
    rotary, x = easydel.RotaryEmbedding(CONFIG), heads(3)[None]
    places, offsets = place(np.array([[-1, 0, 5]])), place(np.array([[10]]))
    moved, _ = rotary(places, x, x, offsets)
    right, _ = rotary(np.array([[-1, 10, 15]]), x, x)
    np.testing.assert_array_equal(moved, right)
    np.testing.assert_array_equal(moved[0, 0], x[0, 0])


def test_a_sum_of_position_and_offset_past_int32_is_refused():
    rotary, x = easydel.RotaryEmbedding(CONFIG), heads(1)[None]
    with pytest.raises(ValueError, match="positions must fit int32, got 2147483648"):
        rotary(np.array([[1]]), x, x, np.array([[2**31 - 1]]))


@pytest.mark.parametrize("name", OF_TOKENS)
def test_one_position_is_not_for_many_tokens(name, unchecked):
    assert OF_TOKENS[name](CONFIG, jnp.array([3]), heads(1)) is not None
    with pytest.raises(ValueError, match="a position for each of the 4 tokens, got 1"):
        OF_TOKENS[name](CONFIG, jnp.array([3]), heads(4))


def test_images_without_patches():
    empty, rows = jnp.ones((0, 2, 8)), jnp.ones((0, 4, 2))
    assert tpu_inference.apply_rope(empty, rows, 8).shape == (0, 2, 8)
    with pytest.raises(ValueError, match=r"divisor of T = 3, got shape \(0, 4, 2\)"):
        tpu_inference.apply_rope(heads(3), rows, 8)
