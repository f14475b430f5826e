"""FlashInfer's calling forms, against the formulas of tests/oracle.py."""

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import RopeConfig, compute_cos_sin_cache, flashinfer, vllm

INDPTR = np.array([0, 3, 3, 8], np.int32)
OFFSETS = np.array([0, 9, 131_000], np.int32)
POSITIONS = np.array([0, 1, 2, *range(131_000, 131_005), -1], np.int32)
# FlashInfer's own signatures, version 0.2 to 0.7: name -> arguments and defaults.
PLAIN = {"rotary_dim": None, "interleave": False, "rope_scale": 1, "rope_theta": 1e4}
LLAMA = PLAIN | {
    "rope_scale": 8,
    "rope_theta": 5e5,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "old_context_len": 8192,
}
RAGGED = ("q", "k", "indptr", "offsets")
BY_ID = ("q", "k", "pos_ids")
CACHED = ("positions", "query", "key", "head_size", "cos_sin_cache")
FORMS = {
    "apply_rope": (RAGGED, PLAIN),
    "apply_rope_pos_ids": (BY_ID, PLAIN),
    "apply_llama31_rope": (RAGGED, LLAMA),
    "apply_llama31_rope_pos_ids": (BY_ID, LLAMA),
    "apply_rope_with_cos_sin_cache": (CACHED, {"is_neox": True}),
}


def heads(dtype=jnp.float32, head_dim=64):
    generator = np.random.default_rng(0)
    shapes = ((9, 4, head_dim), (9, 2, head_dim))
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def frequencies(name, width, options):
    options = FORMS[name][1] | options
    hf = {
        "head_dim": width,
        "rope_theta": options["rope_theta"],
        "max_position_embeddings": 1,
        "rope_scaling": {
            "factor": options["rope_scale"],
            "low_freq_factor": options.get("low_freq_factor"),
            "high_freq_factor": options.get("high_freq_factor"),
            "original_max_position_embeddings": options.get("old_context_len"),
        },
    }
    kind = "llama3" if "llama31" in name else "linear"
    return np.array(oracle.frequencies(kind, hf)[0], np.longdouble)


def assert_turned(outs, xs, freqs, *, interleave, positions=POSITIONS):
    angles = np.maximum(positions, 0)[:, None] * freqs
    cos, sin = np.cos(angles), np.sin(angles)
    for out, x in zip(outs, xs, strict=True):
        assert out.shape == x.shape and out.dtype == x.dtype
        wide = np.asarray(x, np.float64)
        style = {"is_neox_style": not interleave}
        exact = oracle.rotate(wide, cos, sin, **style)
        allowed = oracle.bound(wide, cos, sin, **style, dtype=x.dtype)
        # The rows' own error, 2^-23 each of cos and sin.
        width = 2 * freqs.size
        first, second = oracle.pairs(width, 0, not interleave)
        rows = np.zeros_like(wide)
        size = np.abs(wide[..., first]) + np.abs(wide[..., second])
        rows[..., first] = rows[..., second] = 2.0**-23 * size
        oracle.assert_within(out, exact, allowed + rows)


OPTIONS = [
    {},
    {"rotary_dim": 32, "interleave": True},
    {"rope_scale": 2.0, "rope_theta": 1e6},
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", sorted(FORMS)[:-1])
def test_against_the_formulas(name, options, dtype):
    q, k = heads(dtype)
    places = (INDPTR, OFFSETS) if FORMS[name][0] == RAGGED else (POSITIONS,)
    outs = getattr(flashinfer, name)(q, k, *places, **options)
    freqs = frequencies(name, options.get("rotary_dim", 64), options)
    assert_turned(outs, (q, k), freqs, interleave=options.get("interleave", False))


@pytest.mark.parametrize("is_neox", [True, False])
def test_with_a_cache(is_neox):
    config = RopeConfig(
        head_dim=64, rotary_dim=32, rope_theta=1e4, max_position_embeddings=64
    )
    table = jnp.asarray(compute_cos_sin_cache(config))
    q, k = heads()
    positions = np.array([0, 63, 5, 5, 1, 2, 3, 4, -1])
    outs = flashinfer.apply_rope_with_cos_sin_cache(
        positions, q.reshape(9, -1), k.reshape(9, -1), 64, table, is_neox
    )
    freqs = np.array(oracle.frequencies("default", _hf(32))[0])
    made = [out.reshape(x.shape) for out, x in zip(outs, (q, k), strict=True)]
    assert outs[0].shape == (9, 256)
    assert_turned(made, (q, k), freqs, interleave=not is_neox, positions=positions)


def _hf(width):
    return {"head_dim": width, "rope_theta": 1e4, "max_position_embeddings": 64}


@pytest.mark.parametrize("suffix", ["", "_inplace"])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_signatures(name, suffix):
    places, options = FORMS[name]
    parameters = inspect.signature(getattr(flashinfer, name + suffix)).parameters
    assert tuple(parameters) == (*places, *options)
    assert {key: parameters[key].default for key in options} == options
    assert name + suffix in flashinfer.__all__


@pytest.mark.parametrize("name", sorted(FORMS))
def test_in_place_names_donate(name):
    table = jnp.ones((131_100, 64), jnp.float32)
    arguments: dict[str, Any] = dict(zip(("q", "k"), heads(), strict=True))
    arguments |= {"indptr": INDPTR, "offsets": OFFSETS, "pos_ids": POSITIONS}
    arguments |= {"positions": POSITIONS, "head_size": 64, "cos_sin_cache": table}
    arguments |= {"query": heads()[0].reshape(9, -1), "key": heads()[1].reshape(9, -1)}
    given = {key: arguments[key] for key in FORMS[name][0]}
    expected = getattr(flashinfer, name)(**given)
    donated = [value for key, value in given.items() if key in ("q", "k")]
    donated += [value for key, value in given.items() if key in ("query", "key")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = getattr(flashinfer, name + "_inplace")(**given)
    for out, right in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, right)
    assert len(donated) == 2 and all(x.is_deleted() for x in donated)
    assert not table.is_deleted()


def test_one_program_for_any_lengths(compilations):
    q, k = heads()
    step = jax.jit(flashinfer.apply_rope)
    step(q, k, jnp.array([0, 4, 9]), jnp.array([0, 0]))
    before = len(compilations)
    step(q, k, jnp.array([0, 1, 8]), jnp.array([700, 2**30]))
    assert len(compilations) == before


def test_what_does_not_fit(unchecked):
    q, k = heads()
    host: Any = np.asarray(k)
    with pytest.raises(ValueError, match=r"q must be \[nnz, heads, head_dim\], got sh"):
        flashinfer.apply_rope_pos_ids(q.reshape(9, -1), k, POSITIONS)
    with pytest.raises(TypeError, match="k must be a jax.Array, got ndarray"):
        flashinfer.apply_rope_inplace(q, host, INDPTR, OFFSETS)
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        flashinfer.apply_rope_pos_ids(q, k, POSITIONS, 31)
    with pytest.raises(ValueError, match="at most head_dim = 64, got 0 .* 128"):
        flashinfer.apply_llama31_rope(q, k, INDPTR, OFFSETS, 128)
    with pytest.raises(ValueError, match=r"offsets must be \[requests\]"):
        flashinfer.apply_rope(q, k, INDPTR, OFFSETS[:2])
    with pytest.raises(ValueError, match="pos_ids must fit int32, got 4295098300"):
        flashinfer.apply_rope_pos_ids_inplace(q, k, POSITIONS.astype(np.int64) + 2**32)
    assert not q.is_deleted()


@pytest.mark.parametrize("suffix", ["", "_inplace"])
def test_a_cache_that_does_not_fit(unchecked, suffix):
    rotate = getattr(flashinfer, "apply_rope_with_cos_sin_cache" + suffix)
    q, k = (x.reshape(9, -1) for x in heads())
    table = jnp.ones((8, 64), jnp.float32)
    with pytest.raises(TypeError, match="table must be float32, got bfloat16"):
        rotate(POSITIONS, q, k, 64, table.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="below the table's 8 rows, got 131004"):
        rotate(POSITIONS, q, k, 64, table)
    with pytest.raises(ValueError, match=r"\[\*B, T, N \* H\] with H = 96, got shape"):
        rotate(np.arange(9) % 8, q, k, 96, table)
    turned, _ = rotate(jnp.asarray(POSITIONS), q, k, 64, table)
    assert np.isfinite(turned).all()  # On the device, the last row.


@pytest.mark.parametrize("form", ["apply_rope_pos_ids", "apply_rope_pos_ids_inplace"])
@pytest.mark.parametrize("name", ["rope_theta", "rotary_dim", "interleave"])
def test_arrays_where_the_program_is_made_by_the_value(unchecked, form, name):
    call = getattr(flashinfer, form)
    with pytest.raises(TypeError, match=f"{name} must be a Python number, .*array.it"):
        call(*heads(), POSITIONS, **{name: jnp.float32(4)})


def test_one_array_is_not_donated_twice():
    x, table = heads()[0], jnp.ones((16, 64))
    message = "query and key must be two arrays to be donated, got one twice"
    with pytest.raises(ValueError, match=message):
        flashinfer.apply_rope_pos_ids_inplace(x, x, POSITIONS)
    with pytest.raises(ValueError, match=message):
        vllm.rotary_embedding(np.zeros(9, int), x, x, 64, table, True)
    inside = jax.jit(lambda x: flashinfer.apply_rope_pos_ids_inplace(x, x, POSITIONS))
    np.testing.assert_array_equal(*inside(x))
