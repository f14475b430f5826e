"""Rows without a table, against 60-digit arithmetic and against the table's rows."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jrope import RopeConfig, TwoLevelTable, compute_cos_sin_cache, lookup, rotate
from jrope._phases import phase_rows
from jrope.scalings import Llama3, Yarn

BOUND = 2.0**-23
CONFIGS = {
    "default": RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=64),
    "theta 5e6": RopeConfig(head_dim=256, rope_theta=5e6, max_position_embeddings=64),
    "llama3": RopeConfig(
        head_dim=64,
        rope_theta=5e5,
        max_position_embeddings=64,
        scaling=Llama3(
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "yarn, its attention factor 1.14": RopeConfig(
        head_dim=64,
        rope_theta=1e6,
        max_position_embeddings=64,
        rotary_dim=32,
        scaling=Yarn(factor=4.0, original_max_position_embeddings=32768),
    ),
    "several axes": RopeConfig(
        head_dim=8,
        rope_theta=1e4,
        max_position_embeddings=64,
        axis_of_frequency=(0, 2, 1, 0),
    ),
}


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def frequency(config, i):
    """From the series, in 60 digits, where the config has no scaling."""
    return mpmath.mpf(config.rope_theta) ** (-mpmath.mpf(2 * i) / config.head_dim)


@pytest.mark.parametrize("name", ["default", "theta 5e6"])
@pytest.mark.parametrize("length", [2**12, 2**17, 2**20, 2**31])
def test_waves_at_any_position(name, length):
    config = CONFIGS[name]
    generator = np.random.default_rng(length)
    positions = generator.integers(length // 2, length, 24).astype(np.int32)
    positions[0], positions[1] = 0, length - 1
    cos, sin = map(np.asarray, phase_rows(jnp.asarray(positions), config))
    for i in range(0, config.head_dim // 2, 5):
        for token, position in enumerate(positions):
            angle = int(position) * frequency(config, i)
            assert abs(mpmath.cos(angle) - float(cos[token, i])) < BOUND
            assert abs(mpmath.sin(angle) - float(sin[token, i])) < BOUND


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_rows_are_the_tables(name):
    config = CONFIGS[name]
    shape = (3, 2, 9) if config.axis_of_frequency else (2, 9)
    positions = np.random.default_rng(0).integers(-3, 64, shape).astype(np.int32)
    table = jnp.asarray(compute_cos_sin_cache(config))
    for made, row in zip(
        phase_rows(positions, config),
        lookup(table, positions, layout=config.layout),
        strict=True,
    ):
        assert made.shape == row.shape and made.dtype == jnp.float32
        np.testing.assert_allclose(made, row, rtol=0, atol=2 * BOUND + 2.0**-25)


def test_far_rows_are_a_two_level_tables():
    config = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=2**24)
    positions = np.array([2**20 + 7, 2**24 - 1], np.int32)
    rows = lookup(TwoLevelTable.from_config(config), positions, layout=config.layout)
    for made, row in zip(phase_rows(positions, config), rows, strict=True):
        np.testing.assert_allclose(made, row, rtol=0, atol=2 * BOUND)


def test_eager_bits_are_the_jitted_ones():
    config = CONFIGS["default"]
    positions = jnp.arange(1000, 1256, dtype=jnp.int32)
    eager = phase_rows(positions, config)
    jitted = jax.jit(lambda p: phase_rows(p, config))(positions)
    for one, other in zip(eager, jitted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_program_holds_frequencies_and_no_table():
    config = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=131072)
    step = jax.jit(lambda p: phase_rows(p, config))
    assert len(step.lower(jnp.arange(4, dtype=jnp.int32)).as_text()) < 20_000


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_waves_are_made_once_for_all_heads(dtype):
    config = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=131072)

    @jax.jit
    def step(positions, q, k):
        rows = phase_rows(positions, config)
        return rotate(q, k, *rows, layout=config.layout)

    q, k = jnp.ones((256, 32, 128), dtype), jnp.ones((256, 8, 128), dtype)
    compiled = step.lower(jnp.arange(256, dtype=jnp.int32), q, k).compile()
    text = compiled.as_text()
    assert text is not None
    waves = [block for block in text.split("\n\n") if " cosine(" in block]
    assert waves and not [block for block in waves if "256,32,128]" in block]


def test_positions_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\[A, \*B, T\] with A = 3.*got shape \(9,\)"):
        phase_rows(jnp.arange(9, dtype=jnp.int32), CONFIGS["several axes"])
    with pytest.raises(TypeError, match="positions must be integers, got float32"):
        phase_rows(jnp.ones(3), CONFIGS["default"])


def test_float32_angles_have_a_table():
    config = RopeConfig(
        head_dim=8, rope_theta=1e4, max_position_embeddings=8, angle_dtype="float32"
    )
    with pytest.raises(ValueError, match="must have angle_dtype='float64', got 'float"):
        phase_rows(jnp.arange(3, dtype=jnp.int32), config)
