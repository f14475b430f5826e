"""RopeConfig and the table that it becomes."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jrope import RopeConfig, compute_cos_sin_cache
from jrope.nnx import RotaryEmbedding
from jrope.scalings import Dynamic, Linear, LongRope, Proportional


def config(**fields):
    return RopeConfig(
        **{"head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 4100, **fields}
    )


def test_configs_are_values():
    assert config() == config()
    assert hash(config(scaling=Linear(factor=2.0))) == hash(
        config(scaling=Linear(factor=2.0))
    )
    assert config() != config(rope_theta=1e6)
    assert config().layout.rotary_dim == 64


@pytest.mark.parametrize("row", [0, 1, 4095, 4096, 4099])
def test_exact_table_is_rounded_once(row):
    # Row by row from Python's own exact-enough arithmetic: 64-bit angles, one rounding.
    table = compute_cos_sin_cache(config())
    assert table.dtype == np.float32
    assert table.shape == (4100, 64)
    for i in range(32):
        angle = row * 10000.0 ** (-2 * i / 64)
        for column, value in ((i, math.cos(angle)), (32 + i, math.sin(angle))):
            exact_ulp = np.spacing(np.float32(abs(value)))
            # Half a unit, and what 64-bit angles cost near a zero of cos or sin.
            assert abs(float(table[row, column]) - value) <= 0.5 * exact_ulp + 1e-12


def test_float32_angles_follow_hugging_face():
    table = compute_cos_sin_cache(config(angle_dtype="float32"))
    inv_freq = config().frequencies.inv_freq.astype(np.float32)
    angles = np.arange(4100, dtype=np.float32)[:, None] * inv_freq[None, :]
    np.testing.assert_allclose(
        table[:, :32], np.cos(angles.astype(np.float64)), rtol=0, atol=2**-25
    )
    exact = compute_cos_sin_cache(config())
    # The known price of float32 angles at 4k: about 2e-4.
    assert 2e-5 < np.abs(table - exact).max() < 5e-4


def test_a_checkpoints_own_frequencies_win():
    own = tuple(float(i) for i in range(32))
    made = config(inv_freq=own, scaling=Linear(factor=4.0))
    np.testing.assert_array_equal(made.frequencies.inv_freq, own)
    table = compute_cos_sin_cache(made)
    assert table[1, 1] == np.float32(math.cos(1.0))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rope_theta": "1e4"}, TypeError, "rope_theta must be a number, got '1e4'"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta must be finite and above 0"),
        ({"max_position_embeddings": 0}, ValueError, "must be at least 1, got 0"),
        ({"max_position_embeddings": 2**31}, ValueError, "must fit int32 positions"),
        ({"scaling": "linear"}, TypeError, "must be a jrope Scaling, got 'linear'"),
        ({"angle_dtype": "bfloat16"}, ValueError, "'float64' or 'float32', got 'bfl"),
        ({"rotary_dim": 80}, ValueError, "at most head_dim = 64"),
        ({"inv_freq": [1.0] * 32}, TypeError, "must be a tuple of floats.* got list"),
        ({"inv_freq": (1.0,) * 31}, ValueError, "rotary_dim // 2 = 32 entries, got 31"),
        ({"inv_freq": (math.nan,) * 32}, ValueError, "finite and not negative"),
        ({"inv_freq": (-1.0,) * 32}, ValueError, "finite and not negative"),
        ({"inv_freq": (10**400,) * 32}, ValueError, "finite and not negative"),
        ({"inv_freq": ("1",) * 32}, TypeError, "inv_freq must be .*got '1' in it"),
        ({"inv_freq": (None,) * 32}, TypeError, "inv_freq must be .*got None in it"),
        ({"inv_freq": (1j,) * 32}, TypeError, "inv_freq must be .*got 1j in it"),
        ({"inv_freq": (True,) * 32}, TypeError, "inv_freq must be .*got True in it"),
        (
            {"inv_freq": tuple(jnp.ones(32))},
            *(TypeError, r"got Array\(1., dtype=float32\) in it; use tuple"),
        ),
    ],
)
def test_refusals(fields, error, message):
    with pytest.raises(error, match=message):
        config(**fields)


def test_the_last_position_of_int32_has_a_row():
    assert config(max_position_embeddings=2**31 - 1).longest_request == 2**31 - 1


@pytest.mark.parametrize("kind", ["flat", "two_level"])
def test_rows_past_the_longest_request_are_nan(kind):
    # LongRoPE's short list and dynamic NTK without a length are for short requests.
    long = LongRope(
        short_factor=(1.0,) * 32,
        long_factor=(2.0,) * 32,
        original_max_position_embeddings=2048,
    )
    dynamic = Dynamic(factor=2.0, max_trained_positions=2048)
    for scaling in (long, dynamic):
        made = config(scaling=scaling)
        assert made.longest_request == 2048
        last = made.max_position_embeddings - 1
        for out_of_range in ("nan", "clip"):
            rope = RotaryEmbedding(made, table=kind, out_of_range=out_of_range)
            for dtype in ("int32", "float32"):
                cos, _ = rope.rows(jnp.array([2047, 2048, last, last + 1], dtype))
                assert np.isfinite(cos[0]).all() and np.isnan(cos[1:]).all()
        rope = RotaryEmbedding(made, table=kind)
        for dtype in ("int32", "float32"):
            with pytest.raises(
                ValueError, match="below the table's 2048 rows, got 204"
            ):
                rope.rows(np.array([2048], dtype))
        whole = RotaryEmbedding(made.for_length(4100), table=kind)
        assert np.isfinite(whole.rows(jnp.array([4099]))[0]).all()


def test_scalings_are_checked_against_the_widths_at_once():
    scaling = LongRope(
        short_factor=(1.0,) * 31,
        long_factor=(2.0,) * 32,
        original_max_position_embeddings=2048,
    )
    with pytest.raises(ValueError, match="rotary_dim // 2 = 32 entries, got 31"):
        config(scaling=scaling)
    with pytest.raises(ValueError, match="must be head_dim = 64 under proportional"):
        config(scaling=Proportional(), rotary_dim=32)
    with pytest.raises(ValueError, match="above 2 under dynamic scaling.* got 2"):
        config(scaling=Dynamic(factor=2.0), rotary_dim=2)
