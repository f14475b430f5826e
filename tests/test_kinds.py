"""Table kinds: rows of a million positions, of many tables, of chunks and of FoPE."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import (
    DualChunk,
    DualChunkTable,
    Fope,
    FopeTable,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    config_from_hf,
    lookup,
    rotate,
    stack_tables,
)
from jrope.nnx import RotaryEmbedding, fill_tables
from jrope.scalings import LongRope, Yarn

RNG = np.random.default_rng(0)
CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)


def exact_rows(config, positions):
    """cos and sin in float64, of angles reduced by whole turns beforehand."""
    turns = np.asarray(positions, np.longdouble)[:, None] * (
        config.frequencies.inv_freq / (2 * np.longdouble(np.pi))
    )
    # np.pi is rounded: the reduced angle needs the rest of it too.
    turns *= 1 - np.longdouble(1.2246467991473532e-16) / np.longdouble(np.pi)
    angles = ((turns - np.rint(turns)) * 2 * np.pi).astype(np.float64)
    factor = config.frequencies.attention_factor
    return np.cos(angles) * factor, np.sin(angles) * factor


def two_level(config):
    array = jnp.asarray(TwoLevelTable.compute(config))
    return TwoLevelTable.wrap(config, array)


@pytest.mark.parametrize("longest", [2**20, 2**24])
def test_two_levels_reach_far_in_little_memory(longest):
    config = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=longest)
    table = two_level(config)
    if longest == 2**20:
        assert table.cos_sin_cache.nbytes < 1.1 * 2**20
    positions = np.concatenate(
        [RNG.integers(0, longest, 2000), [0, 1023, 1024, 1025, longest - 1]]
    ).astype(np.int32)
    rows = jax.jit(lambda t, p: lookup(t, p, layout=config.layout))(table, positions)
    for made, right in zip(rows, exact_rows(config, positions), strict=True):
        np.testing.assert_allclose(made, right, rtol=0, atol=1.25 * 2**-23)


def test_two_levels_carry_the_attention_factor_once():
    scaling = Yarn(factor=4.0, original_max_position_embeddings=512)
    config = dataclasses.replace(
        CONFIG, max_position_embeddings=2048, scaling=scaling, head_dim=16, rotary_dim=8
    )
    positions = np.arange(2048, dtype=np.int32)
    cos, sin = lookup(two_level(config), positions, layout=config.layout)
    right = exact_rows(config, positions)
    # An amplitude between 1 and 2: a float32's unit is twice that of one below 1.
    assert 1 < config.frequencies.attention_factor < 2
    for made, exact in zip((cos, sin), right, strict=True):
        np.testing.assert_allclose(made, exact, rtol=0, atol=2 * 1.25 * 2**-23)


def test_two_levels_end_where_the_flat_table_does():
    table = two_level(dataclasses.replace(CONFIG, max_position_embeddings=1500))
    positions = jnp.array([-1, 1499, 1500, 2**31 - 1], jnp.int32)
    cos, _ = lookup(table, positions, layout=CONFIG.layout)
    assert np.isfinite(cos[:2]).all() and np.isnan(cos[2:]).all()
    clipped, _ = lookup(table, positions, layout=CONFIG.layout, out_of_range="clip")
    np.testing.assert_array_equal(clipped[1:], np.tile(clipped[1], (3, 1)))
    np.testing.assert_array_equal(cos[0], np.ones(4))


def test_two_levels_need_exact_angles():
    with pytest.raises(ValueError, match="angle_dtype='float64', got 'float32': fl"):
        two_level(dataclasses.replace(CONFIG, angle_dtype="float32"))


def test_a_layer_over_two_levels():
    rope = RotaryEmbedding(CONFIG, table="two_level")
    flat = RotaryEmbedding(CONFIG)
    query = jnp.asarray(RNG.standard_normal((64, 2, 8)), jnp.float32)
    for made, right in zip(
        rope(jnp.arange(64), query, query),
        flat(jnp.arange(64), query, query),
        strict=True,
    ):
        np.testing.assert_allclose(made, right, rtol=0, atol=2e-6)
    rope.cos_sin_cache.set_value(jnp.zeros_like(rope.cos_sin_cache.get_value()))
    fill_tables(rope)
    assert float(rope.rows(jnp.array([0]))[0][0, 0]) == 1.0


def test_unknown_kind(unchecked):
    wrong: Any = "deep"
    with pytest.raises(ValueError, match=r"one of \['flat', 'two_level'\], got 'deep'"):
        RotaryEmbedding(CONFIG, table=wrong)


def test_kinds_from_init_under_jit():
    made = jax.jit(
        lambda: RotaryEmbedding(CONFIG, table="two_level").cos_sin_cache[...]
    )()
    np.testing.assert_array_equal(made, TwoLevelTable.compute(CONFIG))


LONG = RopeConfig(
    head_dim=8,
    rope_theta=1e4,
    max_position_embeddings=128,
    scaling=LongRope(
        short_factor=(1.0, 1.1, 1.2, 1.3),
        long_factor=(2.0, 4.0, 8.0, 16.0),
        original_max_position_embeddings=32,
    ),
)


# vllm-project/vllm#27414
def test_a_batch_of_short_and_long_requests_equals_each_alone():
    short, long = LONG.for_length(32), LONG.for_length(33)
    assert short != long
    table = stack_tables([short, long])
    positions = RNG.integers(0, 32, (6, 5)).astype(np.int32)
    query = jnp.asarray(RNG.standard_normal((6, 5, 2, 8)), jnp.float32)
    which = np.array([0, 1, 1, 0, 1, 0])
    offset = np.array(table.starts, np.int32)[which][:, None]

    @jax.jit
    def mixed(table, positions, query, offset):
        return apply_rope(
            positions, query, None, table, layout=LONG.layout, row_offset=offset
        )[0]

    @jax.jit
    def alone(table, positions, query):
        return apply_rope(positions, query, None, table, layout=LONG.layout)[0]

    together = mixed(table, positions, query, offset)
    for i, request in enumerate(which):
        own = jnp.asarray(compute_cos_sin_cache((short, long)[request]))
        np.testing.assert_array_equal(together[i], alone(own, positions, query)[i])


def test_stacked_tables_have_their_own_ends():
    configs = [CONFIG, dataclasses.replace(CONFIG, max_position_embeddings=16)]
    table = stack_tables(configs)
    assert (table.starts, table.lengths) == ((0, 64), (64, 16))

    def read(position, offset, **kwargs):
        positions, offsets = jnp.array([position]), jnp.array([offset])
        cos, _ = lookup(
            table, positions, layout=CONFIG.layout, row_offset=offsets, **kwargs
        )
        return np.asarray(cos)[0]

    assert np.isfinite(read(63, 0)).all() and np.isnan(read(64, 0)).all()
    assert np.isfinite(read(15, 64)).all() and np.isnan(read(16, 64)).all()
    assert (
        np.isnan(read(0, 3)).all() and np.isnan(read(0, 3, out_of_range="clip")).all()
    )
    np.testing.assert_array_equal(
        read(99, 64, out_of_range="clip"), read(15, 64, out_of_range="clip")
    )
    np.testing.assert_array_equal(read(-1, 64), np.ones(4))


def test_refused_stacks():
    other = dataclasses.replace(CONFIG, is_neox_style=False)
    with pytest.raises(ValueError, match="must have equal layouts"):
        stack_tables([CONFIG, other])
    with pytest.raises(ValueError, match="must have equal layouts, got"):
        stack_tables([])
    with pytest.raises(TypeError, match="configs must be RopeConfigs, got int in it"):
        stack_tables([CONFIG, cast(RopeConfig, 1)])
    table = stack_tables(iter([CONFIG]))
    with pytest.raises(ValueError, match=r"row_offset must say .* \(0,\), got None"):
        lookup(table, jnp.arange(3), layout=CONFIG.layout)
    for shape in ((2,), (2, 1), (1, 3), (3, 1)):
        offset = jnp.zeros(shape, jnp.int32)
        with pytest.raises(ValueError, match="row_offset must broadcast to positions"):
            lookup(table, jnp.arange(3), layout=CONFIG.layout, row_offset=offset)
    flat = jnp.asarray(compute_cos_sin_cache(CONFIG))
    with pytest.raises(ValueError, match="row_offset must be None for a single table"):
        lookup(flat, jnp.arange(3), layout=CONFIG.layout, row_offset=jnp.zeros(3, int))


CHUNKED = dataclasses.replace(CONFIG, dual_chunk=DualChunk(chunk_size=12, local_size=4))


@pytest.mark.parametrize(
    ("form", "effective"),
    [
        ("key", lambda s: s % 8),
        ("query", lambda s: s % 8),
        ("query_succ", lambda s: np.minimum(s % 8 + 8, 12)),
        ("query_inter", lambda s: np.full_like(s, 12)),
        ("query_succ_critical", lambda s: s % 8 + 8),
        ("query_inter_critical", lambda s: s % 8 + 12),
    ],
)
def test_dual_chunk_forms(form, effective):
    table = DualChunkTable.from_config(CHUNKED)
    positions = np.arange(64, dtype=np.int32)
    rows = lookup(table.form(form), positions, layout=CHUNKED.layout)
    right = exact_rows(CONFIG, effective(positions))
    for made, exact in zip(rows, right, strict=True):
        np.testing.assert_allclose(made, exact, rtol=0, atol=2**-24)
    past, _ = lookup(table.form(form), jnp.array([64, -1]), layout=CHUNKED.layout)
    assert np.isnan(past[0]).all() and np.isfinite(past[1]).all()


def test_dual_chunk_refusals(unchecked):
    table = DualChunkTable.from_config(CHUNKED)
    with pytest.raises(ValueError, match="the form must be one of .*got 'value'"):
        table.form("value")
    with pytest.raises(ValueError, match="has no flat table; use jrope.DualChunkTable"):
        compute_cos_sin_cache(CHUNKED)
    with pytest.raises(ValueError, match="dual_chunk or fope has no two-level table"):
        TwoLevelTable.compute(CHUNKED)
    with pytest.raises(ValueError, match="must have dual_chunk for a dual-chunk table"):
        DualChunkTable.from_config(CONFIG)
    with pytest.raises(ValueError, match="local_size must be below chunk_size = 4"):
        DualChunk(chunk_size=4, local_size=4)


def test_dual_chunk_is_read_from_a_config():
    sizes = {"chunk_size": 262144, "local_size": 8192, "sparse_attention_config": {}}
    config = config_from_hf(
        {
            "model_type": "qwen2",
            "head_dim": 128,
            "rope_theta": 1e7,
            "max_position_embeddings": 1010000,
            "dual_chunk_attention_config": sizes,
        }
    )
    assert config is not None
    assert config.dual_chunk == DualChunk(chunk_size=262144, local_size=8192)
    with pytest.raises(TypeError, match="dual_chunk_attention_config must be a mappin"):
        config_from_hf(
            {
                "head_dim": 8,
                "rope_theta": 1e4,
                "max_position_embeddings": 8,
                "dual_chunk_attention_config": 3,
            }
        )


def fope_config(key_heads, kept):
    fope = Fope(num_inv_freq=kept, separate_heads=key_heads > 1)
    return dataclasses.replace(CONFIG, fope=fope)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_fope_mixes_waves_by_key_head(key_heads):
    kept = 3
    cos_mix, sin_mix = RNG.standard_normal((2, key_heads, kept, kept))
    table = FopeTable.from_config(
        fope_config(key_heads, kept),
        jnp.asarray(cos_mix, jnp.float32),
        jnp.asarray(sin_mix, jnp.float32),
    )
    positions = np.arange(10, dtype=np.int32)
    cos, sin = lookup(table, positions, layout=CONFIG.layout)
    assert cos.shape == (10, key_heads, 4)
    waves = exact_rows(CONFIG, positions)
    for made, wave, mix, tail in (
        (cos, waves[0], cos_mix, 1.0),
        (sin, waves[1], sin_mix, 0.0),
    ):
        right = np.einsum("tn,knm->tkm", wave[:, :kept], mix)
        np.testing.assert_allclose(made[..., :kept], right, rtol=0, atol=4e-6)
        np.testing.assert_array_equal(made[..., kept:], tail)
    query = jnp.asarray(RNG.standard_normal((10, 4, 8)), jnp.float32)
    grouped = table.group(query)
    turned, _ = rotate(grouped, None, cos, sin, layout=CONFIG.layout)
    right = oracle.rotate(np.asarray(grouped), cos, sin, is_neox_style=True)
    np.testing.assert_allclose(turned, right, rtol=0, atol=4e-6)


def test_fope_keeps_the_frequencies_that_turn_once():
    turning = int((CONFIG.frequencies.inv_freq > 2 * np.pi / 64).sum())
    eye = jnp.eye(turning, dtype=jnp.float32)[None]
    table = FopeTable.from_config(fope_config(1, None), eye, eye)
    assert table.cos_sin_cache.shape == (64, 2 * turning)


def test_fope_refusals():
    eye = jnp.eye(4, dtype=jnp.float32)[None]
    both = jnp.tile(eye, (2, 1, 1))
    for config, cos_mix, sin_mix, message in (
        (CONFIG, eye, eye, "the config must have fope"),
        (fope_config(1, 3), eye, eye, "n = 3 kept frequencies, got shape"),
        (fope_config(1, 4), eye, eye[:, :1, :1], "must have equal shapes, got"),
        (fope_config(1, 5), eye, eye, "num_inv_freq must be at most .* 4, got 5"),
        (fope_config(1, 4), both, both, "of one head where fope_sep_head is false"),
    ):
        with pytest.raises(ValueError, match=message):
            FopeTable.from_config(config, cos_mix, sin_mix)
    with pytest.raises(ValueError, match="multiple of FoPE's 2 key heads, got 3"):
        table = FopeTable.from_config(fope_config(2, 4), both, both)
        table.group(jnp.zeros((5, 3, 8), jnp.float32))
    with pytest.raises(ValueError, match="use jrope.FopeTable"):
        compute_cos_sin_cache(fope_config(1, 4))


def test_fope_is_read_from_a_config():
    rope = {"rope_type": "default", "use_fope": True, "fope_init_factor": 0.1}
    config = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64}
    made = config_from_hf({**config, "rope_scaling": {**rope, "num_inv_freq": 3}})
    assert made is not None
    assert made.fope == Fope(num_inv_freq=3)
    shared = {**rope, "fope_sep_head": False}
    made = config_from_hf({**config, "rope_scaling": shared})
    assert made is not None
    assert made.fope == Fope(separate_heads=False)
    off = {"rope_type": "default", "use_fope": False}
    made = config_from_hf({**config, "rope_scaling": off})
    assert made is not None and made.fope is None
    with pytest.raises(ValueError, match="num_inv_freq must come with use_fope"):
        config_from_hf({**config, "rope_scaling": {**off, "num_inv_freq": 3}})
    with pytest.raises(TypeError, match="use_fope must be a bool, got 'yes'"):
        config_from_hf({**config, "rope_scaling": {**rope, "use_fope": "yes"}})


def test_gradients_reach_fopes_coefficients():
    eye = jnp.eye(4, dtype=jnp.float32)[None]
    query = jnp.asarray(RNG.standard_normal((10, 1, 2, 8)), jnp.float32)

    def loss(cos_mix):
        table = FopeTable.from_config(fope_config(1, 4), cos_mix, eye)
        cos, sin = lookup(table, np.arange(10), layout=CONFIG.layout)
        return jnp.sum(rotate(query, None, cos, sin, layout=CONFIG.layout)[0] ** 2)

    gradient = jax.grad(loss)(eye)
    step = 1e-2 * jnp.ones_like(eye)
    slope = (loss(eye + step) - loss(eye - step)) / 2
    np.testing.assert_allclose(jnp.vdot(gradient, step), slope, rtol=1e-3)


@pytest.mark.parametrize(
    "table",
    [two_level(CONFIG), stack_tables([CONFIG]), DualChunkTable.from_config(CHUNKED)],
    ids=lambda table: type(table).__name__,
)
def test_kinds_are_passed_to_jit_as_data(table):
    leaves, tree = jax.tree.flatten(table)
    assert [leaf.dtype for leaf in leaves] == [jnp.float32]
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(table)
    assert jax.tree.structure(again) == tree
