"""Tables against 60-digit arithmetic, and the laws that exact tables keep."""

import dataclasses

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jrope import (
    QueryTemperature,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    config_from_hf,
    lookup,
    query_temperature,
)
from jrope.scalings import SCALINGS, Default, Dynamic, Ntk, Proportional, Yarn

RNG = np.random.default_rng(0)


def exact_rows(config, positions):
    """cos and sin of position * inv_freq in 60 digits, times the attention factor."""
    factor = mpmath.mpf(float(config.frequencies.attention_factor))
    for position in positions:
        for column, freq in enumerate(config.frequencies.inv_freq):
            # A long double is the sum of two doubles.
            high = float(freq)
            angle = int(position) * (mpmath.mpf(high) + float(freq - high))
            yield position, column, mpmath.cos(angle) * factor
            half = len(config.frequencies.inv_freq)
            yield position, column + half, mpmath.sin(angle) * factor


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="no extended precision on this platform"
)
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_every_entry_is_rounded_once(rope_type):
    hf_config = next(iter(SCALINGS[rope_type].examples.values()))
    config = config_from_hf(hf_config, max_position_embeddings=131072)
    assert config is not None
    table = compute_cos_sin_cache(config)
    last = config.longest_request - 1
    positions = [0, 1, last, *RNG.integers(0, last, 20)]
    with mpmath.workdps(60):
        for position, column, exact in exact_rows(config, positions):
            ulp = np.spacing(np.float32(abs(exact)))
            error = abs(mpmath.mpf(float(table[position, column])) - exact)
            assert error <= 0.5001 * float(ulp), (position, column)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_the_series_is_exact(theta):
    config = RopeConfig(head_dim=128, rope_theta=theta, max_position_embeddings=1)
    with mpmath.workdps(60):
        for i, freq in enumerate(config.frequencies.inv_freq):
            right = mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / 128)
            made = mpmath.mpf(float(freq)) + float(freq - float(freq))
            assert abs(made / right - 1) < 4 * float(np.finfo(np.longdouble).eps)


@pytest.mark.parametrize("start", [0, 32_000, 1_000_000])
def test_scores_depend_on_the_distance_alone(start):
    config = RopeConfig(head_dim=64, rope_theta=1e6, max_position_embeddings=start + 32)
    table = jnp.asarray(compute_cos_sin_cache(config))
    query, key = (
        jnp.asarray(RNG.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2)
    )

    def score(p, s):
        q, _ = apply_rope(np.array([p]), query, None, table, layout=config.layout)
        k, _ = apply_rope(np.array([s]), key, None, table, layout=config.layout)
        return float(jnp.vdot(q, k))

    size = float(jnp.linalg.norm(query) * jnp.linalg.norm(key))
    for distance in (0, 1, 17):
        near, far = score(distance, 0), score(start + distance, start)
        assert abs(near - far) <= 4e-7 * size


@pytest.mark.parametrize(("length", "drift"), [(32_768, 1.7e-3), (1_000_000, 5.6e-2)])
def test_float32_angles_drift_with_the_position(length, drift):
    config = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=length)
    positions = RNG.integers(length // 2, length, 400).astype(np.int32)
    inv_freq = np.longdouble(1e6) ** (-np.arange(64, dtype=np.longdouble) / 64)
    exact = np.cos(positions[:, None] * inv_freq)
    product = positions[:, None].astype(np.float32) * inv_freq.astype(np.float32)
    usual = np.abs(np.cos(product.astype(np.float64)) - exact).max()
    assert drift / 2 < usual < 2 * drift
    table = TwoLevelTable.from_config(config)
    ours, _ = lookup(table, jnp.asarray(positions), layout=config.layout)
    assert np.abs(np.asarray(ours) - exact).max() < 2.0**-22


def test_proportional_of_full_width_is_the_default():
    config = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=8)
    whole = dataclasses.replace(config, scaling=Proportional())
    np.testing.assert_array_equal(
        whole.frequencies.inv_freq, config.frequencies.inv_freq
    )


def test_closed_values():
    def factor(**fields):
        scaling = Yarn(original_max_position_embeddings=4096, **fields)
        config = RopeConfig(
            head_dim=64, rope_theta=1e4, max_position_embeddings=8, scaling=scaling
        )
        return config.frequencies.attention_factor

    assert factor(factor=4.0) == pytest.approx(1.13863, abs=5e-6)
    assert factor(factor=128.0, attention_factor=1.4852) == 1.4852
    assert factor(factor=16.0, mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(factor=1.0) == 1.0


def test_the_two_rules_of_dynamic_differ_within_the_trained_length():
    def first(scaling):
        config = RopeConfig(
            head_dim=8, rope_theta=1e4, max_position_embeddings=64, scaling=scaling
        )
        return config.for_length(16).frequencies.inv_freq

    plain = first(Default())
    np.testing.assert_array_equal(first(Dynamic(factor=2.0)), plain)
    constant = first(Dynamic(factor=2.0, base_rule="constant"))
    # s = factor * L: the base grows by 2 * 2 - 1 to the power of R / (R - 2).
    right = (1e4 * 3 ** (8 / 6)) ** (-np.arange(4) / 4)
    np.testing.assert_allclose(constant.astype(float), right, rtol=1e-14)


@pytest.mark.parametrize("mixed_b", [None, 0.625])
def test_ntk_divides_the_lowest_frequency_by_its_factor(mixed_b):
    scaling = Ntk(factor=4.0, mixed_b=mixed_b)
    config = RopeConfig(
        head_dim=64, rope_theta=1e4, max_position_embeddings=8, scaling=scaling
    )
    lowest = 1e4 ** (-62 / 64)
    assert float(config.frequencies.inv_freq[-1]) == pytest.approx(lowest / 4)


def test_query_temperature_is_the_reference_formula():
    positions = np.array([0, 8190, 8191, 8192, 100_000], np.int32)
    llama4 = QueryTemperature(scale=0.1, length=8192, shift=1)
    right = np.log(np.floor((positions + 1.0) / 8192) + 1) * 0.1 + 1
    np.testing.assert_allclose(
        query_temperature(jnp.asarray(positions), llama4), right, rtol=2e-7
    )
    ministral = QueryTemperature(scale=0.1, length=16384)
    right = 1 + 0.1 * np.log(1 + np.floor(positions / 16384))
    np.testing.assert_allclose(
        query_temperature(jnp.asarray(positions), ministral), right, rtol=2e-7
    )
    padding = query_temperature(jnp.array([-1, -9000]), ministral)
    np.testing.assert_array_equal(padding, [1, 1])


LARGEST = 2**31 - 1


@pytest.mark.parametrize("length", [1, 2, 3, 8192, 2**30, LARGEST - 1, LARGEST])
@pytest.mark.parametrize("shift", [0, 1, 10, 2**30, LARGEST - 1, LARGEST])
def test_query_temperature_near_the_largest_int32(length, shift):
    """No sum on the way wraps around: against whole numbers of any size."""
    temperature = QueryTemperature(scale=1.0, length=length, shift=shift)
    edges = [0, 1, length - 1, length, LARGEST - shift, LARGEST - 10, LARGEST]
    places = sorted({x for x in edges if x <= LARGEST} | {-1, -shift, -LARGEST - 1})
    steps = [max((x + shift) // length, 0) for x in places]
    made = query_temperature(np.array(places, np.int32), temperature)
    right = 1 + np.log1p(np.array(steps, np.float64))
    np.testing.assert_allclose(made, right, rtol=3e-7)


@pytest.mark.parametrize("field", ["length", "shift"])
def test_a_query_temperature_of_lengths_that_int32_cannot_number(field):
    with pytest.raises(ValueError, match=f"temperature's {field} must fit int32"):
        QueryTemperature(**{"scale": 1.0, "length": 8, field: 2**31})
