"""Train equals serve: a token's heads have the same bits whatever program turns them.

For narrow heads those are NumPy's: two rounded products and their rounded sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import (
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    lookup,
    rerope,
    rotate,
)
from jrope._products import rounds_products
from jrope._routes._forms import FORMS
from jrope.scalings import Yarn

LONGEST = 512
BATCH, TOKENS, HEADS = 2, 40, 3
# dtype, NeoX pairs, (H, R, offset); narrow heads are where compilers shuffle most.
WIDE = {
    "f32-neox": ("float32", True, (64, 64, 0)),
    "f32-gptj-partial": ("float32", False, (80, 32, 8)),
    "bf16-gptj": ("bfloat16", False, (128, 128, 0)),
    "bf16-neox-partial": ("bfloat16", True, (80, 32, 0)),
    "f32-neox-partial-16": ("float32", True, (64, 16, 0)),
    "bf16-gptj-16": ("bfloat16", False, (16, 16, 0)),
    "f16-gptj": ("float16", False, (32, 32, 0)),
}
NARROW = {
    "f32-gptj-8": ("float32", False, (8, 8, 0)),
    "f32-gptj-partial-4": ("float32", False, (12, 4, 8)),
    "f32-neox-6": ("float32", True, (6, 6, 0)),
    "bf16-neox-8": ("bfloat16", True, (8, 8, 0)),
    "f16-neox-16": ("float16", True, (16, 16, 0)),
    "f16-gptj-partial-22": ("float16", False, (32, 22, 0)),
}
CASES = WIDE | NARROW


def config_of(name):
    _, neox, (head_dim, rotary_dim, offset) = CASES[name]
    return RopeConfig(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rotary_offset=offset,
        is_neox_style=neox,
        rope_theta=1e4,
        max_position_embeddings=LONGEST,
        scaling=Yarn(factor=4.0, original_max_position_embeddings=128),
    )


@functools.cache
def case(name):
    dtype, _, (head_dim, _, offset) = CASES[name]
    config = config_of(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, TOKENS, HEADS, head_dim))
    # Pairs whose products cancel show any product that was not rounded.
    half = TOKENS // 2
    x[:, :half, :, offset + 1 :] = x[:, :half, :, offset : offset + 1]
    x = jnp.asarray(x, dtype)
    positions = rng.integers(0, LONGEST, (BATCH, TOKENS)).astype(np.int32)
    return config.layout, positions, x, compute_cos_sin_cache(config)


def ieee(layout, x, cos, sin):
    """The rotation in NumPy's float32, cast once."""
    out = np.asarray(x).astype(np.float32)
    half = layout.rotary_dim // 2
    pair = np.arange(half)
    first = layout.rotary_offset + (pair if layout.is_neox_style else 2 * pair)
    second = first + (half if layout.is_neox_style else 1)
    c, s = np.asarray(cos)[..., None, :], np.asarray(sin)[..., None, :]
    a, b = out[..., first], out[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out.astype(x.dtype)


def whole(run, positions, x, table):
    return jax.jit(run)(positions, x, table)


def by_tokens(lengths, pad_to=None):
    """Chunks one after the other, by one program for each length or padded to one."""

    def program(run, positions, x, table):
        # Cut on the host, where it costs no compilation.
        positions, x = np.asarray(positions), np.asarray(x)
        step, outs, start = jax.jit(run), [], 0
        for length in lengths:
            part = slice(start, start + length)
            extra = (0, 0 if pad_to is None else pad_to - length)
            chunk = np.pad(x[:, part], ((0, 0), extra, (0, 0), (0, 0)))
            where = np.pad(positions[:, part], ((0, 0), extra), constant_values=-1)
            turned = step(jnp.asarray(where), jnp.asarray(chunk), table)
            outs.append(np.asarray(turned)[:, :length])
            start += length
        return np.concatenate(outs, axis=1)

    return program


def random_chunks(run, positions, x, table):
    """Several ways to cut the tokens, each padded to its longest chunk."""
    rng = np.random.default_rng(x.shape[-1])
    outs = []
    for count in (2, 3, 5):
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), count, replace=False))
        lengths = np.diff([0, *cuts, TOKENS])
        outs.append(by_tokens(lengths, max(lengths))(run, positions, x, table))
    for out in outs[1:]:
        same_bits(out, outs[0])
    return outs[0]


def decode_by_scan(run, positions, x, table):
    @jax.jit
    def program(positions, x, table):
        def step(carry, token):
            where, heads = token
            return carry, run(where[:, None], heads[:, None], table)[:, 0]

        _, outs = lax.scan(step, 0, (positions.T, jnp.swapaxes(x, 0, 1)))
        return jnp.swapaxes(outs, 0, 1)

    return program(positions, x, table)


def ragged(run, positions, x, table):
    tokens = np.asarray(x).reshape(-1, *x.shape[2:])
    flat = jax.jit(run)(positions.reshape(-1), jnp.asarray(tokens), table)
    return np.asarray(flat).reshape(x.shape)


def head_by_head(run, positions, x, table):
    mapped = jax.vmap(
        lambda head, where, table: run(where, head[:, :, None], table)[:, :, 0],
        in_axes=(2, None, None),
        out_axes=2,
    )
    return jax.jit(mapped)(x, positions, table)


def heads_first(run, positions, x, table):
    turned = jax.jit(lambda *args: jnp.swapaxes(run(*args), 1, 2))
    return np.swapaxes(turned(positions, x, table), 1, 2)


def sliced_from_qkv(run, positions, x, table):
    width = x.shape[-1]
    packed = jnp.asarray(np.concatenate([x, x, x], axis=-1))
    step = jax.jit(lambda where, qkv, t: run(where, qkv[..., width : 2 * width], t))
    return step(positions, packed, table)


def training_step(run, positions, x, table):
    """Attention, its gradient and remat in one program; the heads are an extra."""

    @jax.jit
    def program(positions, x, table):
        @jax.checkpoint
        def loss(x):
            heads = run(positions, x, table)
            wide = heads.astype(jnp.float32)
            scores = jnp.einsum("btnh,bsnh->bnts", wide, wide)
            return jnp.sum(jnp.tanh(scores)), heads

        gradient, heads = jax.grad(loss, has_aux=True)(x)
        return heads, gradient

    return program(positions, x, table)[0]


def on_a_mesh(run, positions, x, table):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    args = jax.device_put((positions, x), sharding)
    return jax.jit(run)(*args, table)


PROGRAMS = {
    "eager": lambda run, *args: run(*args),
    "whole": whole,
    "decode": by_tokens([1] * TOKENS),
    "chunks": by_tokens([7, 16, 16, 1]),
    "padded chunks": by_tokens([7, 16, 16, 1], pad_to=24),
    "random chunks": random_chunks,
    "decode by scan": decode_by_scan,
    "ragged": ragged,
    "head by head": head_by_head,
    "heads first": heads_first,
    "sliced from qkv": sliced_from_qkv,
    "training step": training_step,
    "on a mesh": on_a_mesh,
}


def same_bits(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype
    differ = got.view(f"u{got.itemsize}") != wanted.view(f"u{got.itemsize}")
    assert not differ.any(), f"{differ.sum()} of {differ.size} elements"


def test_the_cases_lie_on_both_sides():
    for name, (dtype, _, (_, rotary_dim, _)) in CASES.items():
        assert rounds_products(rotary_dim, np.dtype(dtype)) == (name in NARROW)


@functools.cache
def wanted(name):
    """The bits of NumPy for narrow heads, and those of an eager call for others."""
    layout, positions, x, table = case(name)
    rows = np.split(table[positions], 2, axis=-1)
    if name in NARROW:
        return ieee(layout, x, *rows)
    return rotate(x, None, *map(jnp.asarray, rows), layout=layout)[0]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_every_program(name, program):
    layout, positions, x, table = case(name)

    def run(positions, x, table):
        return apply_rope(positions, x, None, table, layout=layout)[0]

    made = PROGRAMS[program](run, jnp.asarray(positions), x, jnp.asarray(table))
    same_bits(made, wanted(name))


@pytest.mark.parametrize("name", CASES)
def test_same_bits_by_every_form(name):
    layout, positions, x, table = case(name)

    @jax.jit
    def program(table, x):
        cos, sin = lookup(table, positions, layout=layout)
        style = {
            "is_neox_style": layout.is_neox_style,
            "rotary_offset": layout.rotary_offset,
        }
        return {form: turn(x, cos, sin, **style) for form, turn in FORMS.items()}

    for made in program(jnp.asarray(table), x).values():
        same_bits(made, wanted(name))


@pytest.mark.parametrize(
    "program", ["whole", "decode", "decode by scan", "heads first"]
)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_of_whatever_computes_rows(name, program):
    """The inverse, moved keys, and rows that are the sum of two angles."""
    layout, positions, x, table = case(name)
    where, table = jnp.asarray(positions), jnp.asarray(table)
    two_level = TwoLevelTable.from_config(config_of(name))

    def inverse(positions, x, table):
        cos, sin = lookup(table, positions, layout=layout)
        return rotate(x, None, cos, sin, layout=layout, inverse=True)[0]

    def moved(positions, x, table):
        return rerope(x, positions - 100, table, layout=layout)

    def summed(positions, x, table):
        return apply_rope(positions, x, None, table, layout=layout)[0]

    for run, kind in ((inverse, table), (moved, table), (summed, two_level)):
        same_bits(PROGRAMS[program](run, where, x, kind), run(where, x, kind))
