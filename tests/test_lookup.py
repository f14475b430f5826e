"""lookup: which row each token reads, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrope import RopeConfig, RotaryLayout, compute_cos_sin_cache, lookup

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=32)
HOST_TABLE = compute_cos_sin_cache(CONFIG)
TABLE = jnp.asarray(HOST_TABLE)


def rows(positions, **kwargs):
    cos, sin = lookup(TABLE, positions, layout=CONFIG.layout, **kwargs)
    return np.concatenate([cos, sin], axis=-1)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), (0,), (2, 0)])
def test_rows_of_any_batch_shape(shape):
    positions = np.random.default_rng(0).integers(0, 32, shape).astype(np.int32)
    np.testing.assert_array_equal(rows(jnp.asarray(positions)), HOST_TABLE[positions])


@pytest.mark.parametrize("out_of_range", ["nan", "clip"])
def test_negative_positions_are_padding(out_of_range):
    read = rows(jnp.array([-1, -32, -(2**31)], jnp.int32), out_of_range=out_of_range)
    np.testing.assert_array_equal(read, np.tile(HOST_TABLE[0], (3, 1)))


def test_positions_past_the_table():
    past = jnp.array([31, 32, 2**31 - 1], jnp.int32)
    loud = rows(past)
    np.testing.assert_array_equal(loud[0], HOST_TABLE[31])
    assert np.isnan(loud[1:]).all()
    clipped = rows(past, out_of_range="clip")
    np.testing.assert_array_equal(clipped, np.tile(HOST_TABLE[31], (3, 1)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_narrower_integers_are_taken_everywhere(dtype):
    positions = np.array([0, 31, 5], dtype)
    expected = HOST_TABLE[[0, 31, 5]]
    np.testing.assert_array_equal(rows(jnp.asarray(positions)), expected)
    np.testing.assert_array_equal(rows(positions), expected)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_wider_integers_are_checked_on_the_host(dtype):
    np.testing.assert_array_equal(rows(np.array([7], dtype)), HOST_TABLE[[7]])
    with pytest.raises(ValueError, match="must fit int32, got 4294967295; was a padd"):
        rows(np.array([2**32 - 1], dtype))


def test_too_negative_positions():
    with pytest.raises(ValueError, match="must fit int32, got -2147483649"):
        rows(np.array([-(2**31) - 1], np.int64))


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (np.array([1.0]), TypeError, "positions must be integers, got float64"),
        (np.array([True]), TypeError, "positions must be integers, got bool"),
        (jnp.array([1.0], "bfloat16"), TypeError, "got bfloat16; lookup alone"),
        (jnp.array([True]), TypeError, "positions must be integers, got bool"),
        (jnp.array([1], jnp.uint32), TypeError, "must be int32, got uint32"),
        (jnp.array(1), ValueError, r"must be \[\*B, T\], got a scalar"),
    ],
)
def test_refused_positions(positions, error, message):
    with pytest.raises(error, match=message):
        rows(positions)


# flashinfer-ai/flashinfer#585
@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (
            TABLE.astype(jnp.bfloat16),
            TypeError,
            "be float32, got bfloat16; was the who",
        ),
        (TABLE[None], ValueError, r"be \[P, R\], got shape \(1, 32, 8\); was it stack"),
        (
            TABLE[:, :6],
            ValueError,
            "R = rotary_dim = 8, got rows of 6; was it built for",
        ),
        (
            jnp.tile(TABLE, 2),
            ValueError,
            "R = rotary_dim = 8, got rows of 16; was it built for",
        ),
        (HOST_TABLE, TypeError, "must be a jax.Array, got ndarray; move it to the dev"),
    ],
)
def test_refused_tables(unchecked, table, error, message):
    with pytest.raises(error, match=message):
        lookup(table, jnp.arange(3), layout=CONFIG.layout)


def test_unknown_policy(unchecked):
    with pytest.raises(ValueError, match=r"one of \('nan', 'clip'\), got 'wrap'"):
        rows([1], out_of_range="wrap")


MAPPED = RotaryLayout(head_dim=8, rotary_dim=8, axis_of_frequency=(2, 0, 1, 0))


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_each_frequency_reads_its_own_axis(shape):
    positions = np.random.default_rng(1).integers(0, 32, (3, *shape)).astype(np.int32)
    cos, sin = lookup(TABLE, jnp.asarray(positions), layout=MAPPED)
    for frequency, axis in enumerate((2, 0, 1, 0)):
        read = HOST_TABLE[positions[axis]]
        np.testing.assert_array_equal(cos[..., frequency], read[..., frequency])
        np.testing.assert_array_equal(sin[..., frequency], read[..., 4 + frequency])


def test_multimodal_positions_need_their_axis():
    with pytest.raises(ValueError, match=r"with A = 3, since.* got shape \(2, 5\)"):
        lookup(TABLE, jnp.zeros((2, 5), jnp.int32), layout=MAPPED)


def test_the_program_is_one_gather_an_axis():
    def step(table, positions):
        return lookup(table, positions, layout=CONFIG.layout, out_of_range="clip")

    text = jax.jit(step).lower(TABLE, jnp.arange(4)).as_text()
    assert text.count('"stablehlo.gather"') == 1
    assert "dynamic_slice" not in text
    assert "case" not in text
