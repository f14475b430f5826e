"""Every adapter in its stack's calling form, against the formulas of tests/oracle.py.

The forms are those of MaxText 0.2.5, tpu-inference 0.32, sglang-jax 0.0.2, gemma 4.0.1,
tunix 0.1.7, EasyDeL 0.3.0, equinox 0.13.8, bonsai (2026-03) and transformers 5.24;
test_stacks.py runs those whose packages can be installed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_cases import (
    BATCH,
    FLAT,
    LLAMA3,
    MROPE,
    ROWS_ERROR,
    SCALINGS,
    YARN,
    assert_turned,
    config,
    grid,
    heads,
    mrope_waves,
    waves,
)
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import RopeConfig
from jrope.adapters import (
    bonsai,
    easydel,
    equinox,
    gemma,
    hf,
    maxtext,
    sglang_jax,
    tpu_inference,
    tunix,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("scale", "share"), [(1.0, 1.0), (8.0, 1.0), (1.0, 0.25)])
def test_gemma(scale, share, dtype):
    for x in heads(2, 4, dtype=dtype):
        out = gemma.apply_rope(
            x,
            BATCH,
            base_frequency=1_000_000,
            scale_factor=scale,
            rope_proportion=share,
        )
        rope = {"rope_type": "proportional", "partial_rotary_factor": share}
        cos, sin = waves(BATCH / scale, 1e6, rope)
        assert_turned(out, x, cos, sin)


@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_tunix(rope):
    q, _ = heads(2, 4)
    out = tunix.apply_rope(q, BATCH, 32, 500_000, rope_scaling=rope)
    assert_turned(out, q, *waves(BATCH, rope=rope))
    assert_turned(tunix.apply_rope(q, BATCH, 32), q, *waves(BATCH, 1e6))


@pytest.mark.parametrize("ordering", ["split", "interleaved"])
@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_tpu_inference(rope, ordering):
    rope = None if rope is None else dict(rope)
    renamed = None if rope is None else dict(rope)
    if renamed:
        renamed["scale_factor"] = renamed.pop("factor")
    for x in heads(8, head_dim=48):
        out = tpu_inference.apply_rope(x, FLAT, 32, 5e5, renamed, ordering)
        assert out.shape == x.shape
        np.testing.assert_array_equal(out[..., 32:], 0)
        style = {"is_neox_style": ordering == "split"}
        assert_turned(out[..., :32], x[..., :32], *waves(FLAT, rope=rope), **style)


def test_tpu_inference_of_several_axes():
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4]}
    rope["mrope_interleaved"] = True
    q, _ = heads(8)
    out = tpu_inference.apply_rope(q, grid(8), 32, 5e5, rope)
    assert_turned(out, q, *mrope_waves(grid(8)))
    # A dict of type default with 1-D positions: unscaled, not smoothed as Llama 3.
    text = tpu_inference.apply_rope(q, FLAT, 32, 5e5, rope)
    assert_turned(text, q, *waves(FLAT))


def test_tpu_inference_of_given_rows():
    q, _ = heads(8)
    cos, sin = (wave.astype(np.float32) for wave in waves(FLAT[:4]))
    rows = jnp.stack([jnp.asarray(cos), jnp.asarray(sin)], -1)
    out = tpu_inference.apply_rope(q, rows, 32)
    assert_turned(out, q, np.tile(cos, (2, 1)), np.tile(sin, (2, 1)))


def test_tpu_inference_proportion():
    q, _ = heads(8)
    out = tpu_inference.apply_rope(q, FLAT, 32, 1e6, rope_proportion=0.25)
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert_turned(out, q, *waves(FLAT, 1e6, rope))


def test_tpu_inference_modules():
    q, k = heads(8)
    rope = tpu_inference.RotaryEmbedding(config(YARN))
    rope.initialize_cache()
    assert_turned(rope.apply_rope(FLAT, q), q, *waves(FLAT, rope=YARN))
    for out, x in zip(rope(q, k, FLAT), (q, k), strict=True):
        assert_turned(out, x, *waves(FLAT, rope=YARN))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_sglang_jax(rope, is_neox_style, flat):
    rotary_emb = sglang_jax.get_rope(
        32, 32, 8192, 500_000, is_neox_style, rope, jnp.bfloat16
    )
    q, k = heads(8)
    given = [x.reshape(8, -1) for x in (q, k)] if flat else (q, k)
    for out, x in zip(rotary_emb(FLAT, *given), (q, k), strict=True):
        turned = out.reshape(x.shape)
        style = {"is_neox_style": is_neox_style}
        assert_turned(turned, x, *waves(FLAT, rope=rope), **style)


def test_sglang_jax_part_of_a_head_and_padding():
    rotary_emb = sglang_jax.get_rope(32, 32, 8192, 5e5, partial_rotary_factor=0.5)
    q, k = heads(8)
    out, _ = rotary_emb(FLAT[:5], q, k)
    assert_turned(out[:5], q[:5], *waves(FLAT[:5], width=16))
    np.testing.assert_array_equal(out[5:], q[5:])


def test_sglang_jax_of_several_axes():
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4]}
    rope["mrope_interleaved"] = True
    rotary_emb = sglang_jax.get_rope(32, 32, 8192, 5e5, rope_scaling=rope)
    q, k = heads(8)
    _, out = rotary_emb(grid(8), q, k)
    assert_turned(out, k, *mrope_waves(grid(8)))


@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_maxtext(rope):
    rotary = maxtext.RotaryEmbedding(config(rope, is_neox_style=False))
    for x in heads(2, 4):
        out = rotary(x, BATCH)
        style = {"is_neox_style": False}
        assert_turned(out, x, *waves(BATCH, rope=rope), dtype=jnp.bfloat16, **style)
    kept = maxtext.RotaryEmbedding(MROPE, cast_as_fprop_dtype=False)
    q, _ = heads(2, 4)
    last = np.moveaxis(grid(2, 4), 0, -1)
    assert_turned(kept(q, last), q, *mrope_waves(grid(2, 4)))
    for text in (BATCH, BATCH[..., None]):
        assert_turned(kept(q, text), q, *waves(BATCH))


@pytest.mark.parametrize("rope", SCALINGS, ids=str)
def test_easydel(rope):
    rotary = easydel.RotaryEmbedding(config(rope))
    q, k = heads(2, 4)
    caches: Any = object()
    turned = rotary(query=q, key=k, positions=BATCH, frequencies=caches)
    for out, x in zip(turned, (q, k), strict=True):
        assert_turned(out, x, *waves(BATCH, rope=rope))
    later, _ = rotary(BATCH, q, k, np.int32(9))
    assert_turned(later, q, *waves(BATCH + 9, rope=rope))
    several = easydel.RotaryEmbedding(MROPE)
    out, _ = several(positions=grid(2, 4), query=q, key=k)
    assert_turned(out, q, *mrope_waves(grid(2, 4)))
    text, _ = several(positions=BATCH, query=q, key=k)
    assert_turned(text, q, *waves(BATCH))


def test_equinox():
    rope = equinox.RotaryPositionalEmbedding(config(theta=1e4))
    x = heads(8)[0]
    out = jax.vmap(rope, in_axes=1, out_axes=1)(x)
    assert_turned(out, x, *waves(np.arange(8), 1e4))
    placed = jax.vmap(lambda head: rope(head, positions=FLAT), 1, 1)(x)
    assert_turned(placed, x, *waves(FLAT, 1e4))
    assert jax.tree.leaves(rope) == []
    # equinox's own module gives the second of two bases the first one's rotation.
    other = equinox.RotaryPositionalEmbedding(config(theta=1e6))
    assert_turned(jax.vmap(other, 1, 1)(x), x, *waves(np.arange(8), 1e6))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_hf(is_neox_style, unsqueeze_dim):
    rotary_emb = hf.RotaryEmbedding(config(YARN, is_neox_style=is_neox_style))
    q, k = heads(2, 4, dtype=jnp.bfloat16)
    cos, sin = rotary_emb(q, BATCH)
    assert cos.shape == sin.shape == (2, 4, 32) and cos.dtype == jnp.float32
    right = waves(BATCH, rope=YARN)
    for wide, wave in zip((cos, sin), right, strict=True):
        repeated = (
            np.concatenate([wave, wave], -1)
            if is_neox_style
            else np.repeat(wave, 2, axis=-1)
        )
        np.testing.assert_allclose(wide, repeated, rtol=0, atol=3 * ROWS_ERROR)
    first, second = (x.swapaxes(1, 2) if unsqueeze_dim == 1 else x for x in (q, k))
    options = {"unsqueeze_dim": unsqueeze_dim, "is_neox_style": is_neox_style}
    turned = hf.apply_rotary_pos_emb(first, second, cos, sin, **options)
    for out, x in zip(turned, (q, k), strict=True):
        back = out.swapaxes(1, 2) if unsqueeze_dim == 1 else out
        assert_turned(back, x, *right, is_neox_style=is_neox_style)


def test_hf_part_of_a_head_and_several_axes():
    half = RopeConfig(
        head_dim=32, rotary_dim=16, rope_theta=5e5, max_position_embeddings=64
    )
    q, k = heads(2, 4)
    cos, sin = hf.RotaryEmbedding(half)(None, BATCH)
    out, _ = hf.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    assert_turned(out, q, *waves(BATCH, width=16))
    cos, sin = hf.RotaryEmbedding(MROPE)(None, grid(2, 4))
    out, _ = hf.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    assert_turned(out, q, *mrope_waves(grid(2, 4)))


def test_bonsai():
    sin, cos = bonsai.RoPE(config(LLAMA3))(BATCH)
    for x in heads(2, 4):
        assert_turned(bonsai.apply_rope(x, sin, cos), x, *waves(BATCH, rope=LLAMA3))


MODULES = [
    bonsai.RoPE,
    easydel.RotaryEmbedding,
    hf.RotaryEmbedding,
    maxtext.RotaryEmbedding,
    sglang_jax.RotaryEmbedding,
    tpu_inference.RotaryEmbedding,
]


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_no_array(module):
    assert jax.tree.leaves(nnx.state(module(config()))) == []


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_tokens_and_heads(axis_type):
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4]}
    rotary_emb = sglang_jax.get_rope(32, 32, 8192, 5e5, rope_scaling=rope)
    q, k = heads(8)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    expected = rotary_emb(grid(8), q, k)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("data", "tensor", None))
        given = [jax.device_put(x, split) for x in (q, k)]
        places = jax.device_put(grid(8), NamedSharding(mesh, P(None, "data")))
        turned = jax.jit(rotary_emb.__call__)(places, *given)
    for out, whole in zip(turned, expected, strict=True):
        np.testing.assert_array_equal(out, whole)
        assert out.sharding.is_equivalent_to(split, out.ndim)


def test_the_gradient_turns_back():
    x, _ = heads(2, 4)

    def loss(x):
        return jnp.sum(gemma.apply_rope(x, BATCH, base_frequency=1e4) ** 2)

    # A rotation keeps lengths.
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * x, rtol=1e-5, atol=1e-5)


def test_what_is_refused(unchecked):
    q, k = heads(8)
    batch = heads(2, 4)[0]
    with pytest.raises(ValueError, match="scale_factor must be at least 1, got 0.5"):
        gemma.apply_rope(batch, BATCH, base_frequency=10_000, scale_factor=0.5)
    with pytest.raises(
        ValueError, match="must be 'split' or 'interleaved', got 'halves'"
    ):
        order: Any = "halves"
        tpu_inference.apply_rope(q, FLAT, 32, rope_input_ordering=order)
    with pytest.raises(ValueError, match="must be 1 with rope_type 'yarn', got 0.5"):
        tpu_inference.apply_rope(q, FLAT, 32, 1e4, YARN, rope_proportion=0.5)
    with pytest.raises(ValueError, match=r"divisor of T = 8, got shape \(3, 16, 2\)"):
        tpu_inference.apply_rope(q, jnp.ones((3, 16, 2)), 32)
    with pytest.raises(ValueError, match="unknown.*'betafast'"):
        sglang_jax.get_rope(32, 32, 64, 1e4, True, YARN | {"betafast": 1})
    with pytest.raises(ValueError, match="use jrope.DualChunkTable"):
        sglang_jax.get_rope(32, 32, 64, 1e4, dual_chunk_attention_config={})
    with pytest.raises(ValueError, match="position must be given"):
        maxtext.RotaryEmbedding(config())(batch)
    with pytest.raises(ValueError, match="unsqueeze_dim must be 1 or 2, got 3"):
        hf.apply_rotary_pos_emb(q, k, q[:, 0], q[:, 0], unsqueeze_dim=3)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 64,
            "factor": 4.0,  # Pinned, but which factors a request takes is not.
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_what_depends_on_a_length_that_no_one_gives(rope):
    with pytest.raises(ValueError, match="must not depend on the model's length"):
        sglang_jax.get_rope(32, 32, 64, 1e4, True, rope)
