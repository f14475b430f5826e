"""HpuRotaryEmbedding's calling form, against Habana's own formula; no plugin here."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jrope.hpu import HpuRotaryEmbedding, StepRows, prepare
from jrope.scalings import Linear

H, P = 16, 256
RNG = np.random.default_rng(0)


def habana(positions, x, *, rotary_dim=H, base=10000.0, is_neox_style=True):
    """Habana's layer in float64: full-width caches, rows by position, no slice.

    From vllm-hpu-extension's rotary_embed.py: cat((freqs, freqs)), then
    cos_cached[positions], then x * cos + rotate_half(x) * sin; PAIRWISE as its kernel's
    helper defines it.
    """
    x = np.asarray(x, np.float64)
    shape = x.shape
    freqs = np.arange(P)[:, None] / base ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    wide = np.tile(freqs, 2) if is_neox_style else np.repeat(freqs, 2, -1)
    index = np.asarray(positions).reshape(-1)
    cos, sin = (f(wide)[index][:, None] for f in (np.cos, np.sin))
    x = x.reshape(len(index), -1, H)
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    half = rotary_dim // 2
    if is_neox_style:
        partner = np.concatenate([-turned[..., half:], turned[..., :half]], -1)
    else:
        partner = np.stack([-turned[..., 1::2], turned[..., ::2]], -1)
        partner = partner.reshape(turned.shape)
    turned = turned * cos + partner * sin
    return np.concatenate([turned, kept], -1).reshape(shape)


def heads(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def assert_close(actual, exact):
    np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-6)


FORMS = {
    "1-D, 2-D": ((12,), (12,)),
    "2-D, 3-D": ((3, 4), (3, 4)),
    "2-D, 2-D": ((3, 4), (12,)),
    "1-D, 3-D of one sequence": ((12,), (1, 12)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [H, 8])
def test_every_calling_form(form, is_neox_style, rotary_dim):
    of_positions, tokens = FORMS[form]
    rope = HpuRotaryEmbedding(H, rotary_dim, P, is_neox_style=is_neox_style)
    # A context: positions start anywhere, and their largest is no shape.
    positions = np.asarray(RNG.integers(0, P, of_positions), np.int32)
    query, key = heads(*tokens, 4 * H), heads(*tokens, H)
    turned = rope(jnp.asarray(positions), query, key)
    for x, out in zip((query, key), turned, strict=True):
        assert out.shape == x.shape
        kind = {"rotary_dim": rotary_dim, "is_neox_style": is_neox_style}
        assert_close(out, habana(positions, x, **kind))


def test_positions_of_one_sequence_serve_a_batch():
    rope = HpuRotaryEmbedding(H, H, P)
    positions = np.arange(40, 46, dtype=np.int32)
    query, key = heads(3, 6, 4 * H), heads(3, 6, H)
    out, _ = rope(jnp.asarray(positions), query, key)
    assert_close(out, habana(np.tile(positions, (3, 1)), query))


@pytest.mark.parametrize(
    "shapes", [((12, 4, 2, H), (12, 1, 2, H)), ((12, 64), (1, 12, 16)), ((64,), (16,))]
)
@pytest.mark.usefixtures("unchecked")
def test_other_shapes_are_refused(shapes):
    rope = HpuRotaryEmbedding(H, H, P)
    with pytest.raises(ValueError, match=r"must both be \[T, N \* H\] or .*flattened"):
        rope(jnp.arange(12), *(heads(*shape) for shape in shapes))


@pytest.mark.parametrize("shape", [(), (1, 3, 4), (3, 1, 4)])
def test_positions_of_other_axes_are_refused(shape):
    rope = HpuRotaryEmbedding(H, H, P)
    for positions in (np.zeros(shape, np.int32), jnp.zeros(shape, jnp.int32)):
        with pytest.raises(ValueError, match=r"must be \[T\] or \[B, T\], got shape"):
            rope(positions, heads(12, 4 * H), heads(12, H))


def test_positions_past_the_table_read_its_last_row_and_padding_the_first():
    rope = HpuRotaryEmbedding(H, H, P)
    query, key = heads(4, 4 * H), heads(4, H)
    far = rope(jnp.asarray([P, P + 9, 2**31 - 1, -5], jnp.int32), query, key)
    assert_close(far[0], habana([P - 1] * 3 + [0], query))


def test_a_scaling():
    scaled = HpuRotaryEmbedding(H, H, P, scaling=Linear(factor=4.0))
    plain = HpuRotaryEmbedding(H, H, P)
    query, key = heads(5, 4 * H), heads(5, H)
    positions = jnp.arange(5, dtype=jnp.int32)
    chex.assert_trees_all_close(
        scaled(4 * positions, query, key), plain(positions, query, key), atol=1e-6
    )


class Model(nnx.Module):
    """Six layers of two bases, each with an embedding of its own, as in Habana's."""

    def __init__(self):
        bases = (1e4, 1e6, 1e4, 1e6, 1e4, 1e6)
        self.layers = nnx.List([HpuRotaryEmbedding(H, H, P, base) for base in bases])

    def __call__(self, positions, query, key):
        rows = prepare(self.layers, positions)
        for layer in self.layers:
            query, key = layer.rotate(rows, query, key)
        return query, key


def test_one_lookup_a_base_for_all_layers():
    graph, state = nnx.split(Model())
    query, key = heads(6, 4 * H), heads(6, H)
    positions = np.asarray([0, 7, 100, 101, 102, 250], np.int32)

    def step(state, positions, query, key):
        return nnx.merge(graph, state)(positions, query, key)

    jaxpr = jax.make_jaxpr(step)(state, positions, query, key)
    assert str(jaxpr).count("gather[") == 2
    text = jax.jit(step).trace(state, positions, query, key)
    text = text.lower(lowering_platforms=("hpu",)).as_text()
    assert text.count("stablehlo.gather<") == 2
    assert text.count('stablehlo.composite "jrope.apply_rope"') == 12
    exact = np.asarray(query)
    for base in (1e4, 1e6) * 3:
        exact = habana(positions, exact, base=base)
    np.testing.assert_allclose(
        jax.jit(step)(state, positions, query, key)[0], exact, rtol=0, atol=1e-5
    )


def test_rows_pass_through_jit_and_scan():
    layer = HpuRotaryEmbedding(H, H, P)
    rows = prepare([layer], jnp.arange(5))
    query, key = heads(5, 4 * H), heads(5, H)
    plain = layer.rotate(rows, query, key)
    passed = jax.jit(lambda rows: layer.rotate(rows, query, key))(rows)
    chex.assert_trees_all_equal(passed, plain)
    _, stacked = jax.lax.scan(
        lambda rows, _: (rows, layer.rotate(rows, query, key)[0]), rows, length=2
    )
    chex.assert_trees_all_equal(stacked[1], plain[0])


def test_rows_that_were_not_prepared_are_an_error():
    layer, other = HpuRotaryEmbedding(H, H, P), HpuRotaryEmbedding(H, H, P, 1e6)
    rows = prepare([other], jnp.arange(5))
    assert isinstance(rows, StepRows)
    with pytest.raises(ValueError, match="prepared for every layer's config, got 1"):
        layer.rotate(rows, heads(5, 4 * H), heads(5, H))


def test_a_thousand_steps_with_context_are_one_program(compilations):
    graph, state = nnx.split(HpuRotaryEmbedding(H, H, 4096))
    query, key = heads(4, 1, 2 * H), heads(4, 1, H)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, positions, query, key):
        return nnx.merge(graph, state)(positions, query, key)

    lengths = np.asarray([0, 17, 1000, 3095], np.int32)
    step(state, lengths[:, None].copy(), query, key)
    warm = len(compilations)
    for _ in range(1000):
        lengths += 1
        step(state, lengths[:, None].copy(), query, key)
    assert len(compilations) == warm
