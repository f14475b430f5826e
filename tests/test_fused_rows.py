"""jrope.fused: what a row stands for is not the kernels' business.

M-RoPE, float positions and scalings end in rows, or in a table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_oracle import NORMS, wide
from test_fused import K, N, T, implementation, parts, random, table_of
from test_fused_cache import FP8, by_slot

from jrope import RopeConfig, apply_rope, config_from_hf, fused, lookup, mrope_axes
from jrope.fused import QkNorm
from jrope.scalings import SCALINGS

__all__ = ["implementation"]

SECTIONS = (8, 12, 12)
CONFIG = RopeConfig(
    head_dim=64,
    rope_theta=1e4,
    max_position_embeddings=64,
    axis_of_frequency=mrope_axes(SECTIONS, rotary_dim=64),
)
PACKED = {"query_heads": N, "key_heads": K}


def _caches():
    return jnp.zeros((2, 2, 4, K, 64), "bfloat16")


# Each of positions or None, a packed buffer, a table or rows, and options.
OPERATIONS = {
    "qkv_rope": lambda p, x, t, **o: fused.qkv_rope(p, x, t, **PACKED, **o),
    "qkv_rope, packed": lambda p, x, t, **o: fused.qkv_rope(
        p, x, t, packed=True, **PACKED, **o
    ),
    "qk_norm_rope": lambda p, x, t, **o: fused.qk_norm_rope(
        p, *parts(x, CONFIG)[:2], t, norm=NORMS["qwen3"], **o
    ),
    "rope_append_kv": lambda p, x, t, **o: fused.rope_append_kv(
        p, x, t, jnp.arange(T), *_caches(), **PACKED, **o
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_axes_are_merged_once_before_the_operation(name, implementation):
    """The operation that is bound has rows, and the results of those rows."""
    run, table = OPERATIONS[name], table_of(CONFIG)
    rng = np.random.default_rng(0)
    positions = jnp.asarray(rng.integers(0, 64, (3, T)), jnp.int32)
    qkv = random((T, (N + 2 * K) * 64), "bfloat16")
    options = {"layout": CONFIG.layout, "implementation": implementation}

    def operation(positions, qkv, table):
        return run(positions, qkv, table, **options)

    rows = lookup(table, positions, layout=CONFIG.layout)
    got = jax.tree.leaves(operation(positions, qkv, table))
    want = jax.tree.leaves(operation(None, qkv, rows))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(wide(one), wide(other))
    other_axes = jax.tree.leaves(operation(positions[::-1], qkv, table))
    assert any((wide(x) != wide(y)).any() for x, y in zip(got, other_axes, strict=True))
    if implementation == "pallas":
        jaxpr = jax.make_jaxpr(operation)(positions, qkv, table)
        bound = [eqn for eqn in jaxpr.eqns if eqn.primitive.name.startswith("jrope_fu")]
        assert [eqn.params["operation"].source.gathered for eqn in bound] == [False]
        assert (3, T) not in [var.aval.shape for eqn in bound for var in eqn.invars]


@pytest.mark.parametrize("order", ["norm_rotate", "rotate_norm"])
def test_packed_operations_have_the_bits_of_separate_ones(order, implementation):
    """Rounded between norm and rotation, as layers are: see test_fused.py."""
    rng = np.random.default_rng(0)
    positions = jnp.asarray(rng.integers(0, 64, (3, T)), jnp.int32)
    qkv, weight = random((T, (N + 2 * K) * 64), "bfloat16"), random(64)
    options = {
        "layout": CONFIG.layout,
        "norm": QkNorm(epsilon=1e-6, order=order, rounded=True),
        "query_weight": weight,
        "key_weight": weight,
        "implementation": implementation,
    }
    rows = lookup(table_of(CONFIG), positions, layout=CONFIG.layout)
    query, key, value = parts(qkv, CONFIG)
    wanted = *fused.qk_norm_rope(None, query, key, rows, **options), value
    apart = fused.qkv_rope(None, qkv, rows, **PACKED, **options)
    packed = fused.qkv_rope(None, qkv, rows, packed=True, **PACKED, **options)
    cached_query, *caches = fused.rope_append_kv(
        None, qkv, rows, jnp.arange(T), *_caches(), **PACKED, **options
    )
    cached = cached_query, *(by_slot(cache, "NHD")[:T] for cache in caches)
    for outs in (apart, parts(packed, CONFIG), cached):
        for one, other in zip(outs, wanted, strict=True):
            np.testing.assert_array_equal(wide(one), wide(other))


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_a_moved_key_is_the_key_of_the_other_position(rope_type, implementation):
    """For every scaling, whatever amplitude its rows have; in float32 and in 8 bits."""
    hf_config = next(iter(SCALINGS[rope_type].examples.values()))
    config = config_from_hf(hf_config, max_position_embeddings=256)
    assert config is not None
    table, heads = table_of(config), 4
    options = {"layout": config.layout, "implementation": implementation}
    bare = random((T, heads, config.head_dim))
    old = np.array([200, 3, 17, 0, 63], np.int32)
    shifts = np.array([-200, 252, -17, 0, 60], np.int32)

    def rotated(positions):
        return apply_rope(positions, bare, None, table, layout=config.layout)[0]

    slots = jnp.arange(T)[::-1]
    cache = jnp.zeros((2, 4, heads, config.head_dim)).reshape(8, heads, -1)
    cache = cache.at[slots].set(rotated(old)).reshape(2, 4, heads, -1)
    (moved,) = fused.rerope_cache(shifts, cache, table, slots, **options)
    want = np.asarray(rotated(old + shifts))
    size = np.abs(want).max()
    got = by_slot(moved, "NHD")[slots]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * size)
    # Two roundings to 4 bits of the largest feature at the most, turned by 45 degrees.
    amax = jnp.abs(rotated(old)).max(-1)
    stored = (cache * 0).reshape(8, heads, -1).astype(FP8)
    narrow = (rotated(old) * (448 / amax)[..., None]).astype(FP8)
    stored = stored.at[slots].set(narrow).reshape(cache.shape)
    moved, new = fused.rerope_cache(
        shifts, stored, table, slots, key_amax=amax, **options
    )
    back = wide(by_slot(moved, "NHD")[slots]) * wide(new)[..., None] / 448
    np.testing.assert_allclose(back, want, rtol=0, atol=0.1 * size)
