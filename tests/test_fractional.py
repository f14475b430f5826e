"""Positions between whole ones: rows against extended precision, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import (
    DualChunk,
    DualChunkTable,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    lookup,
    mrope_axes,
    stack_tables,
)
from jrope.nnx import RotaryEmbedding
from jrope.scalings import Linear, Yarn

ROWS = 40000
CONFIG = RopeConfig(
    head_dim=64,
    rope_theta=1e6,
    max_position_embeddings=ROWS,
    axis_of_frequency=mrope_axes((12, 10, 10), rotary_dim=64, order="interleaved"),
)
YARN = dataclasses.replace(
    CONFIG, scaling=Yarn(factor=4.0, original_max_position_embeddings=10000)
)
# The row's own rounding, the frequency's, the small angle's and the product's.
BOUND = 3 * oracle.F32_EPS


def table_of(config, kind="flat"):
    if kind == "two_level":
        return TwoLevelTable.from_config(config)
    return jnp.asarray(compute_cos_sin_cache(config))


def exact_rows(config, positions):
    """cos and sin in extended precision, each frequency by its own axis."""
    turning = config.frequencies.inv_freq
    own = np.asarray(positions, np.longdouble)[list(config.axis_of_frequency)]
    angles = np.moveaxis(own, 0, -1) * turning
    amplitude = config.frequencies.attention_factor
    return amplitude * np.cos(angles), amplitude * np.sin(angles)


def some_positions():
    rng = np.random.default_rng(0)
    positions = rng.uniform(0, ROWS - 1, (3, 500)).astype(np.float32)
    positions[:, :4] = [[0, 0.5, ROWS - 1, ROWS - 0.5]] * 3
    return positions


@pytest.mark.parametrize("config", [CONFIG, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("kind", ["flat", "two_level"])
def test_rows_between_rows(config, kind):
    positions = some_positions()
    made = lookup(table_of(config, kind), jnp.asarray(positions), layout=config.layout)
    amplitude = config.frequencies.attention_factor
    limit = amplitude * (BOUND + (1.25 * 2.0**-23 if kind == "two_level" else 0))
    for ours, right in zip(made, exact_rows(config, positions), strict=True):
        assert np.abs(np.asarray(ours) - right).max() < limit


def test_the_usual_product_would_be_off_by_a_thousand_times_more():
    positions = some_positions()
    product = positions[..., None] * CONFIG.frequencies.inv_freq.astype(np.float32)
    usual = np.cos(product[0, :, :1].astype(float))
    right = exact_rows(CONFIG, positions)[0][:, :1]
    assert np.abs(usual - right).max() < 1e-6  # Frequency 1 has an exact product.
    usual = np.cos(product[1, :, 1].astype(float))
    assert np.abs(usual - exact_rows(CONFIG, positions)[0][:, 1]).max() > 1e-3


@pytest.mark.parametrize("out_of_range", ["nan", "clip"])
def test_whole_positions_read_the_integers_rows(out_of_range):
    whole = np.array([[0, 7, 39999, -1, -5], [3, 3, 3, -1, -5], [9, 8, 7, -1, -5]])
    table = table_of(CONFIG)
    kwargs = {"layout": CONFIG.layout, "out_of_range": out_of_range}
    rows = lookup(table, jnp.asarray(whole, jnp.int32), **kwargs)
    floats = lookup(table, jnp.asarray(whole, jnp.float32), **kwargs)
    np.testing.assert_array_equal(floats, rows)
    negative = lookup(table, jnp.full((3, 1), -0.25, jnp.float32), **kwargs)
    np.testing.assert_array_equal(negative, np.asarray(rows)[:, 3:4])


def test_past_the_table():
    past = jnp.asarray([[40000.0, 4e9, np.inf, np.nan]] * 3, jnp.float32)
    table = table_of(CONFIG)
    cos, sin = lookup(table, past, layout=CONFIG.layout)
    assert np.isnan(cos).all() and np.isnan(sin).all()
    cos, _ = lookup(table, past, layout=CONFIG.layout, out_of_range="clip")
    last = np.tile(compute_cos_sin_cache(CONFIG)[-1, :32], (3, 1))
    np.testing.assert_array_equal(cos[:3], last)
    assert np.isnan(cos[3]).all()


def test_one_program_whatever_the_fractions():
    traces = []

    @jax.jit
    def step(table, positions):
        traces.append(1)
        return lookup(table, positions, layout=CONFIG.layout)

    for start in (0.0, 0.3, 123.4):
        step(table_of(CONFIG), jnp.full((3, 8), start, jnp.float32))
    assert len(traces) == 1


def test_through_a_layer():
    plain = dataclasses.replace(CONFIG, axis_of_frequency=None)
    rope = RotaryEmbedding(plain)
    query = jnp.asarray(np.random.default_rng(1).standard_normal((4, 2, 64)), "float32")
    positions = np.array([0.0, 1.5, 2.25, 3.0], np.float32)
    turned, _ = rope(positions, query, None)
    angles = positions[:, None].astype(float) * plain.frequencies.inv_freq.astype(float)
    exact = oracle.rotate(query, np.cos(angles), np.sin(angles), is_neox_style=True)
    np.testing.assert_allclose(turned, exact, rtol=0, atol=2e-5)


def test_tables_without_rows_between_are_refused():
    config = RopeConfig(
        head_dim=8,
        rope_theta=1e4,
        max_position_embeddings=64,
        dual_chunk=DualChunk(chunk_size=16, local_size=4),
    )
    half = np.array([0.5], np.float32)
    with pytest.raises(ValueError, match="flat or a two-level .* DualChunkTable"):
        lookup(DualChunkTable.from_config(config), half, layout=config.layout)
    plain = dataclasses.replace(config, dual_chunk=None)
    with pytest.raises(ValueError, match="flat or a two-level .* got StackedTable"):
        lookup(stack_tables([plain]), half, layout=plain.layout, row_offset=0)
    with pytest.raises(ValueError, match="of two rows or more, got FlatTable with 1"):
        lookup(table_of(plain)[:1], half, layout=plain.layout)
    cos, sin = lookup(table_of(plain)[:2], half, layout=plain.layout)
    angles = 0.5 * plain.frequencies.inv_freq[None].astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", [64.0, np.nan, np.inf])
def test_host_positions_are_checked(wrong):
    plain = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
    bad = np.array([0.5, wrong], np.float32)
    with pytest.raises(ValueError, match=f"below the table's 64 rows, got {wrong}"):
        lookup(table_of(plain), bad, layout=plain.layout)


def test_swapped_arguments_are_told(unchecked):
    plain = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
    query = jnp.ones((4, 2, 8), jnp.float32)
    with pytest.raises(TypeError, match="got int32; the order of arguments is posit"):
        apply_rope(query, jnp.arange(4), None, table_of(plain), layout=plain.layout)
    with pytest.raises(TypeError, match="got int32; the order of arguments is posit"):
        apply_rope(query, query, jnp.arange(4), table_of(plain), layout=plain.layout)


@pytest.mark.parametrize("position", [0.0, -0.0, 0.5, 3.0])
def test_the_gradient_of_a_position(position):
    plain = dataclasses.replace(CONFIG, axis_of_frequency=None)
    table = table_of(plain)

    def total(positions):
        return sum(row.sum() for row in lookup(table, positions, layout=plain.layout))

    made = jax.grad(total)(jnp.array([position], jnp.float32))
    frequencies = plain.frequencies.inv_freq.astype(float)
    angles = position * frequencies
    right = np.sum(frequencies * (np.cos(angles) - np.sin(angles)))
    np.testing.assert_allclose(made, [right], rtol=1e-5)


def test_infinity_is_no_surprise_to_a_debugger():
    plain = dataclasses.replace(CONFIG, axis_of_frequency=None)
    far = jnp.array([jnp.inf], jnp.float32)
    table = table_of(plain)
    with jax.debug_nans(True):
        cos, _ = lookup(table, far, layout=plain.layout, out_of_range="clip")
    np.testing.assert_array_equal(cos[0], table[-1, :32])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 0.01},
        {"scaling": Linear(factor=0.2)},
        {"angle_dtype": "float32"},
    ],
)
def test_layers_refuse_what_a_table_cannot_tell(changes):
    rope = RotaryEmbedding(
        dataclasses.replace(CONFIG, axis_of_frequency=None, **changes)
    )
    rope.rows(np.array([3]))
    with pytest.raises(ValueError, match="must come with frequencies below pi and"):
        rope.rows(np.array([0.5], np.float32))
