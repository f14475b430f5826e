"""vLLM's get_rope and operations, against the formulas of tests/oracle.py."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from jrope import RopeConfig, compute_cos_sin_cache, vllm
from jrope.nnx import RotaryCache

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
ROWS_ERROR = 2.0**-24


def heads(tokens=6, head_dim=32, dtype=jnp.float32):
    generator = np.random.default_rng(0)
    shapes = ((tokens, 4, head_dim), (tokens, 2, head_dim))
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def angles(positions, rope, width, max_position=256):
    kind = rope.get("rope_type", "default")
    freqs, factor = oracle.frequencies(
        kind,
        {
            "head_dim": width,
            "rope_theta": rope.get("rope_theta", 10000.0),
            "max_position_embeddings": max_position,
            "rope_scaling": rope,
        },
    )
    turned = np.maximum(np.asarray(positions), 0)[..., None] * np.array(freqs)
    return factor * np.cos(turned), factor * np.sin(turned)


def assert_turned(out, x, cos, sin, **style):
    style = {"is_neox_style": True} | style
    assert out.shape == x.shape and out.dtype == x.dtype
    exact = oracle.rotate(x, cos, sin, **style)
    allowed = oracle.bound(x, cos, sin, **style, dtype=x.dtype)
    rows = 2 * ROWS_ERROR * np.abs(np.asarray(x, np.float64)).max()
    oracle.assert_within(out, exact, allowed + rows)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    "rope", [{}, {"rope_theta": 1e6}, YARN, LLAMA3], ids=lambda rope: str(rope)[:24]
)
def test_get_rope(rope, is_neox_style, flat):
    module = vllm.get_rope(32, 256, is_neox_style, rope, jnp.bfloat16)
    positions = np.array([0, 1, 40, 255, 7, -1])
    q, k = heads()
    given = [x.reshape(6, -1) for x in (q, k)] if flat else (q, k)
    cos, sin = angles(positions, rope, 32)
    outs = module(positions, *given)
    for out, given_x, x in zip(outs, given, (q, k), strict=True):
        assert out.shape == given_x.shape
        shaped = out.reshape(x.shape)
        assert_turned(shaped, x, cos, sin, is_neox_style=is_neox_style)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_dim": 16}},
        {"rotary_dim": 16},
        {"partial_rotary_factor": 0.5, "rope_scaling": {}, "base": 10000.0},
    ],
    ids=str,
)
def test_partial_rotation_by_every_name(options):
    q, _ = heads()
    out, none = vllm.get_rope(32, 256, **options)(np.arange(6), q, None)
    assert none is None
    cos, sin = angles(np.arange(6), {}, 16)
    assert_turned(out, q, cos, sin)
    np.testing.assert_array_equal(out[..., 16:], q[..., 16:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_and_its_text(interleaved):
    rope = {
        "rope_type": "default",
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": interleaved,
    }
    module = vllm.get_rope(32, 256, rope_parameters=rope)
    positions = np.random.default_rng(1).integers(0, 1000, (3, 6))
    chunked = [0] * 8 + [1] * 4 + [2] * 4
    # Qwen3-VL: heights at 1, 4, 7, 10 and widths at 2, 5, 8, 11.
    mixed = [0, 1, 2] * 4 + [0] * 4
    axes = mixed if interleaved else chunked
    every = [angles(row, {}, 32) for row in positions]
    cos, sin = (
        np.stack([every[axis][i][:, j] for j, axis in enumerate(axes)], -1)
        for i in range(2)
    )
    q, k = heads()
    assert_turned(module(positions, q, k)[0], q, cos, sin)
    text = module(positions[0], q, k)
    same = module(np.tile(positions[0], (3, 1)), q, k)
    for one, other in zip(text, same, strict=True):
        np.testing.assert_array_equal(one, other)


def test_mrope_with_yarn_keeps_the_trained_length():
    # vLLM takes four times the trained length in the correction range here.
    rope = YARN | {"mrope_section": [8, 4, 4]}
    q, k = heads()
    out, _ = vllm.get_rope(32, 64, rope_parameters=rope)(np.arange(6), q, k)
    assert_turned(out, q, *angles(np.arange(6), YARN, 32))


@pytest.mark.parametrize(
    ("rope", "rows"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        (YARN, 256),
        ({"rope_type": "ntk", "factor": 4.0}, 256),
        ({"mrope_section": [8, 4, 4]}, 256),
        (YARN | {"mrope_section": [8, 4, 4]}, 1024),
    ],
    ids=lambda value: str(value)[:40],
)
def test_at_least_the_rows_of_vllm(rope, rows):
    module = vllm.get_rope(32, 64, rope_parameters=rope)
    assert module.cos_sin_cache.get_value().shape == (rows, 32)


def test_the_longest_request_chooses_longrope_factors():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [3.0] * 16,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    q, _ = heads()
    for longest, divisors in ((64, "short_factor"), (256, "long_factor")):
        module = vllm.get_rope(32, 256, rope_parameters=rope, max_model_len=longest)
        out, _ = module(np.arange(6), q, None)
        chosen = rope | {"short_factor": rope[divisors]}
        assert_turned(out, q, *angles(np.arange(6), chosen, 32))


def test_past_the_table():
    module = vllm.get_rope(32, 64)
    q, k = heads()
    with pytest.raises(ValueError, match="below the table's 64 rows, got 64"):
        module(np.arange(59, 65), q, k)
    on_device, _ = module(jnp.arange(59, 65), q, k)
    assert np.isfinite(on_device).all()


def test_the_module_is_data():
    model = nnx.Dict(rope=vllm.get_rope(32, 4096))
    graph, state = nnx.split(model)
    assert isinstance(state["rope"]["cos_sin_cache"], RotaryCache)

    @jax.jit
    def step(state, positions, q, k):
        return nnx.merge(graph, state)["rope"](positions, q, k)

    q, k = heads()
    text = step.lower(state, jnp.arange(6), q, k).as_text()
    assert len(text) < 20_000


def test_get_rope_refuses(unchecked):
    older: Any = vllm.get_rope
    with pytest.raises(TypeError, match="older rotary_dim and base go by name"):
        older(64, 64, 4096, 10000)
    with pytest.raises(ValueError, match="must not both be given"):
        vllm.get_rope(64, 64, rope_parameters={}, rope_scaling={})
    with pytest.raises(ValueError, match="use jrope.DualChunkTable"):
        vllm.get_rope(64, 64, dual_chunk_attention_config={"chunk_size": 8})
    with pytest.raises(ValueError, match="unknown.*'typo'"):
        vllm.get_rope(64, 64, rope_parameters={"typo": 1})
    with pytest.raises(ValueError, match="rope_theta twice, and differently"):
        vllm.get_rope(64, 64, rope_parameters={"rope_theta": 1e4}, base=1e6)
    with pytest.raises(AttributeError, match="'jrope.vllm' has no attribute 'ropes'"):
        getattr(vllm, "ropes")  # noqa: B009


CONFIG = RopeConfig(
    head_dim=32, rotary_dim=16, rope_theta=1e4, max_position_embeddings=64
)
POSITIONS = np.array([0, 63, 5, 5, 1, -1])


def table():
    return jnp.asarray(compute_cos_sin_cache(CONFIG))


@pytest.mark.parametrize("shape", [(6, 4, 32), (6, 128), (2, 3, 4, 32), (2, 3, 128)])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("offset", [0, 16, 3])
def test_rotary_embedding(shape, is_neox, offset):
    x = heads()[0]
    whole = len(shape) - (shape[-1] == 32)
    positions = POSITIONS.reshape(shape[: whole - 1] if whole > 2 else (6,))
    query, none = vllm.rotary_embedding(
        positions, x.reshape(shape), None, 32, table(), is_neox, offset
    )
    assert none is None and query.shape == shape
    cos, sin = angles(POSITIONS, {}, 16)
    turned = query.reshape(6, 4, 32)
    x = heads()[0]
    assert_turned(turned, x, cos, sin, is_neox_style=is_neox, offset=offset)


def test_inverse_negates_the_sine():
    q, k = heads()
    back = vllm.rotary_embedding(POSITIONS, q, k, 32, table(), True, inverse=True)
    cos, sin = angles(POSITIONS, {}, 16)
    for out, x in zip(back, heads(), strict=True):
        assert_turned(out, x, cos, -sin)


def test_the_operations_donate():
    q, k = heads()
    vllm.rotary_embedding(POSITIONS, q, k, 32, table(), True)
    assert q.is_deleted() and k.is_deleted()
    q, k = heads()
    zeros = np.zeros(6, np.int32)
    vllm.batched_rotary_embedding(POSITIONS, q, k, 32, table(), True, 16, zeros)
    assert q.is_deleted() and k.is_deleted()


def test_inside_jit_nothing_is_lost():
    q, k = heads()

    @jax.jit
    def twice(q, k, cache):
        once = vllm.rotary_embedding(POSITIONS, q, k, 32, cache, True)
        return once, vllm.rotary_embedding(POSITIONS, q, k, 32, cache, True)

    one, other = twice(q, k, table())
    np.testing.assert_array_equal(one[0], other[0])
    assert not q.is_deleted()


def test_batched_rows_start_at_offsets():
    slow = RopeConfig(
        head_dim=32, rotary_dim=16, rope_theta=1e6, max_position_embeddings=32
    )
    both = jnp.concatenate([table(), jnp.asarray(compute_cos_sin_cache(slow))])
    starts = np.array([0, 0, 64, 64, 64, 64])
    out, _ = vllm.batched_rotary_embedding(
        POSITIONS, heads()[0], None, 32, both, True, 16, starts
    )
    fast, late = angles(POSITIONS, {}, 16), angles(POSITIONS, {"rope_theta": 1e6}, 16)
    rows = [np.where(starts[:, None], b, a) for a, b in zip(fast, late, strict=True)]
    assert_turned(out, heads()[0], *rows)


def test_a_position_and_an_offset_do_not_wrap_around():
    """Their sum past int32 reads the last row, as a position past the table does."""
    x = jnp.ones((1, 32))
    wanted, far = (
        vllm.batched_rotary_embedding(
            jnp.array([position]), x + 0, None, 32, table(), True, 16, jnp.array([40])
        )[0]
        for position in (23, 2**31 - 1)
    )
    np.testing.assert_array_equal(far, wanted)


@pytest.mark.parametrize("factor", [1e300, 1.7e308, 2.0**24 + 2])
def test_a_factor_whose_rows_int32_cannot_number(factor):
    rope = {"rope_type": "linear", "factor": factor}
    with pytest.raises(ValueError, match="factor times the trained length must fit"):
        vllm.get_rope(64, 128, rope_parameters=rope)


def test_operations_refuse(unchecked):
    q, k = heads()
    with pytest.raises(TypeError, match="table must be float32, got bfloat16"):
        cache = table().astype(jnp.bfloat16)
        vllm.rotary_embedding(POSITIONS, q, k, 32, cache, True)
    with pytest.raises(ValueError, match="below the table's 64 rows, got 64"):
        vllm.rotary_embedding(POSITIONS + 1, q, k, 32, table(), True)
    with pytest.raises(ValueError, match="must be at most head_dim = 32, got 20 . 16"):
        vllm.rotary_embedding(POSITIONS, q, k, 32, table(), True, 20)
    zeros = np.zeros(6, np.int32)
    with pytest.raises(ValueError, match="rot_dim must be the table's R = 16, got 32"):
        vllm.batched_rotary_embedding(POSITIONS, q, k, 32, table(), True, 32, zeros)
    with pytest.raises(ValueError, match=r"shape of positions, \(6,\), got \(2,\)"):
        vllm.batched_rotary_embedding(POSITIONS, q, k, 32, table(), True, 16, zeros[:2])
    with pytest.raises(ValueError, match="a position for each of the 6 tokens, got 1"):
        vllm.rotary_embedding(np.array([3]), q, k, 32, table(), True)
    assert not q.is_deleted()


def test_building_positions_loads_no_jax():
    code = (
        "import sys, jrope.vllm as v; v.get_next_input_positions(0, 1, 2);"
        "assert 'jax' not in sys.modules; v.get_rope; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
