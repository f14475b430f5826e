"""Table kinds: the operations for which a kind is not defined refuse it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from fused_oracle import NORMS

from jrope import (
    DualChunk,
    DualChunkTable,
    Fope,
    FopeTable,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    linen,
    rerope,
    stack_tables,
)
from jrope._kinds import FlatTable
from jrope.fused import qk_norm_rope, qkv_rope, rerope_cache, rope_append_kv

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
CHUNKED = dataclasses.replace(CONFIG, dual_chunk=DualChunk(chunk_size=12, local_size=4))
MIXED = dataclasses.replace(CONFIG, fope=Fope(num_inv_freq=2))
LAYOUT = CONFIG.layout
EYE = jnp.eye(2)[None]
HEADS = jnp.ones((3, 1, 8))
KINDS = {
    "flat": jnp.asarray(compute_cos_sin_cache(CONFIG)),
    "two_level": TwoLevelTable.from_config(CONFIG),
    "stacked": stack_tables([CONFIG, CONFIG]),
    "dual_chunk": DualChunkTable.from_config(CHUNKED),
    "fope": FopeTable.from_config(MIXED, EYE, EYE),
}
PACKED = {"layout": LAYOUT, "query_heads": 1, "key_heads": 1}
CACHE = jnp.ones((1, 4, 1, 8))
PLACES = np.arange(3, dtype=np.int32)
MOVES = {
    "rerope": lambda table: rerope(HEADS, PLACES, table, layout=LAYOUT),
    "rerope_cache": lambda table: rerope_cache(
        PLACES, CACHE, table, PLACES, layout=LAYOUT
    ),
}
TURNS = {
    "qkv_rope": lambda table: qkv_rope(PLACES, jnp.ones((3, 24)), table, **PACKED),
    # Axes of FoPE's rows, one for each position and key head, fit these tokens.
    "qkv_rope of two axes": lambda table: qkv_rope(
        PLACES, jnp.ones((3, 3, 24)), table, **PACKED
    ),
    "qk_norm_rope": lambda table: qk_norm_rope(
        PLACES, HEADS, HEADS, table, layout=LAYOUT, norm=NORMS["qwen3"]
    ),
    "rope_append_kv": lambda table: rope_append_kv(
        PLACES, jnp.ones((3, 24)), table, PLACES, CACHE, CACHE, **PACKED
    ),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("kind", ["flat", "two_level"])
def test_keys_are_moved_by_turns_that_add_up(name, kind):
    assert np.isfinite(MOVES[name](KINDS[kind])[0]).all()


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("kind", ["dual_chunk", "fope"])
def test_keys_are_not_moved_by_turns_that_do_not_add_up(name, kind):
    made = type(KINDS[kind]).__name__
    with pytest.raises(ValueError, match=f"whose turns add up, .* got {made}"):
        MOVES[name](KINDS[kind])


@pytest.mark.parametrize("name", [*MOVES, *TURNS])
def test_several_tables_in_one_need_an_operation_that_chooses(name):
    with pytest.raises(
        ValueError, match="must be a single one here, got a Stac.* table.starts"
    ):
        (MOVES | TURNS)[name](KINDS["stacked"])


@pytest.mark.parametrize("name", TURNS)
def test_rows_for_each_key_head_are_for_no_fused_operation(name):
    with pytest.raises(ValueError, match="one row a position for all heads, got a Fop"):
        TURNS[name](KINDS["fope"])


@pytest.mark.parametrize("kind", ["two_level", "dual_chunk"])
def test_fused_operations_turn_by_the_other_kinds(kind):
    query, *_ = TURNS["qkv_rope"](KINDS[kind])
    right, _ = apply_rope(PLACES, HEADS, None, KINDS[kind], layout=LAYOUT)
    np.testing.assert_allclose(query, right, rtol=0, atol=1e-6)


def test_kinds_of_one_config_are_told_by_their_rows():
    # A two-level array of 1024 + 2 rows would be as long as the flat one of 1026.
    for length in range(1, 4200):
        config = dataclasses.replace(CONFIG, max_position_embeddings=length)
        assert FlatTable.array_rows(config) != TwoLevelTable.array_rows(config)


@pytest.mark.parametrize("length", [1024, 1025, 1026, 1027])
@pytest.mark.parametrize("given", ["flat", "two_level"])
def test_another_kinds_table_is_refused(length, given):
    config = dataclasses.replace(CONFIG, max_position_embeddings=length)
    variables = {"rope_cache": linen.rope_variables(config, table=given)}
    places, heads = jnp.array([5, 1023, length - 1, length]), jnp.ones((4, 1, 8))
    for table in ("flat", "two_level"):
        rope = linen.RotaryEmbedding(config, table=table)
        if table != given:
            with pytest.raises(ValueError, match=f"table='{table}' must have shape"):
                rope.apply(variables, places, heads, None)
            continue
        turned, _ = rope.apply(variables, places, heads, None)
        flat = jnp.asarray(compute_cos_sin_cache(config))
        right, _ = apply_rope(places, heads, None, flat, layout=LAYOUT)
        np.testing.assert_allclose(turned, right, rtol=0, atol=2e-6)
        assert np.isnan(turned[3]).all()


def test_coefficients_of_no_head_or_of_no_floats_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"K at least 1 and .* got shape \(0, 2, 2\)"):
        FopeTable.from_config(MIXED, EYE[:0], EYE[:0])
    with pytest.raises(TypeError, match="coefficients must be floats, got complex64"):
        FopeTable.from_config(MIXED, EYE.astype("complex64"), EYE.astype("complex64"))
