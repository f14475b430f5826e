"""What a backward pass keeps of a rotation: this step's rows, once, and no heads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax import lax

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, lookup, rotate
from jrope.nnx import RotaryEmbedding

CONFIG = RopeConfig(head_dim=16, rope_theta=1e4, max_position_embeddings=64)
LAYOUT = CONFIG.layout
TABLE = jnp.asarray(compute_cos_sin_cache(CONFIG))
BATCH, TOKENS, HEADS = 2, 24, 4
POSITIONS = jnp.arange(TOKENS, dtype=jnp.int32)[None]
WIDTH = HEADS * CONFIG.head_dim
LAYERS = 5
# Two half-width rows of float32, for all layers.
ROWS = 2 * TOKENS * (CONFIG.head_dim // 2) * 4

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((BATCH, TOKENS, WIDTH)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.standard_normal((LAYERS, 3, WIDTH, WIDTH)) / 8, jnp.float32)


def residuals(run, *args):
    """The arrays that the backward pass of `run` keeps, arguments included."""
    _, backward = jax.vjp(run, *args)
    return [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "nbytes")]


def size(run, *args):
    return sum(leaf.nbytes for leaf in residuals(run, *args))


def no_rope(query, key):
    return query, key


def layer(x, weights, turn):
    """An attention whose queries and keys are needed by the backward pass."""
    query, key, value = (
        (x @ weights[i]).reshape(BATCH, TOKENS, HEADS, -1) for i in range(3)
    )
    query, key = turn(query, key)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    return jnp.einsum("bnts,bsnh->btnh", scores, value).reshape(x.shape)


def unrolled(turn, weights, x, wrap=lambda f: f):
    one = wrap(lambda x, w: layer(x, w, turn))
    for i in range(LAYERS):
        x = one(x, weights[i])
    return x


def by_scan(turn, weights, x, wrap=lambda f: f):
    one = wrap(lambda x, w: layer(x, w, turn))
    return lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]


def rows_then_rotate(stack, **kwargs):
    def run(weights, x):
        cos, sin = lookup(TABLE, POSITIONS, layout=LAYOUT)

        def turn(query, key):
            return rotate(query, key, cos, sin, layout=LAYOUT)

        return stack(turn, weights, x, **kwargs)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rotation_keeps_its_rows_and_no_heads(dtype):
    query = X.astype(dtype).reshape(BATCH, TOKENS, HEADS, -1)

    def run(query, key):
        for _ in range(LAYERS):
            query, key = apply_rope(POSITIONS, query, key, TABLE, layout=LAYOUT)
        return query, key

    kept = residuals(run, query, query)
    assert sum(leaf.nbytes for leaf in kept) <= LAYERS * ROWS
    assert {leaf.shape for leaf in kept} == {(1, TOKENS, 8)}
    once = residuals(lambda q: rotate(q, q, *rows(), layout=LAYOUT), query)
    assert [leaf.shape for leaf in once] == [(1, TOKENS, 8)] * 2


def rows():
    return lookup(TABLE, POSITIONS, layout=LAYOUT)


@pytest.mark.parametrize("stack", [unrolled, by_scan])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_rows_are_kept_once_however_many_layers(stack, jit, wrap):
    with_rope = jit(rows_then_rotate(stack, wrap=wrap))
    without = jit(lambda weights, x: stack(no_rope, weights, x, wrap=wrap))
    assert size(with_rope, WEIGHTS, X) - size(without, WEIGHTS, X) == ROWS


def test_rows_looked_up_in_every_layer_of_a_scan_are_hoisted():
    def turn(query, key):
        return apply_rope(POSITIONS, query, key, TABLE, layout=LAYOUT)

    with_rope = size(lambda w, x: by_scan(turn, w, x), WEIGHTS, X)
    without = size(lambda w, x: by_scan(no_rope, w, x), WEIGHTS, X)
    assert with_rope - without == ROWS


class Stack(nnx.Module):
    """Layers by nnx.scan, and one table."""

    def __init__(self):
        self.rope = RotaryEmbedding(CONFIG)
        self.weights = nnx.Param(WEIGHTS)

    def __call__(self, x, rotated):
        cos_sin = self.rope.rows(POSITIONS)

        def body(x, weights, rope, rows):
            turn = no_rope if not rotated else lambda q, k: rope.rotate(q, k, *rows)
            return layer(x, weights, turn)

        scan = nnx.scan(body, in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
        return scan(x, self.weights[...], self.rope, cos_sin)


def test_rows_are_kept_once_under_nnx_scan():
    model = Stack()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(rotated, params, x):
        # Variables made in this trace, which nnx.scan asks for.
        here = jax.tree.map(lambda table: table, rest)
        return nnx.merge(graph, params, here)(x, rotated)

    with_rope = size(lambda p, x: run(True, p, x), params, X)
    without = size(lambda p, x: run(False, p, x), params, X)
    assert with_rope - without == ROWS


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize("stack", [unrolled, by_scan])
def test_policies_know_the_results_by_name(stack):
    """Rotated queries and keys can be kept, each by its name, and nothing else."""
    heads = LAYERS * BATCH * TOKENS * WIDTH * 4

    def kept(*names):
        policy = POLICIES.save_only_these_names(*names)
        run = rows_then_rotate(
            stack, wrap=lambda f: jax.checkpoint(f, policy=policy, prevent_cse=False)
        )
        return size(run, WEIGHTS, X)

    nothing = kept("nosuch")
    assert kept("rope_query") - nothing == heads
    assert kept("rope_key") - nothing == heads
    # With both at hand the backward pass rotates nothing anew, but still turns back.
    assert kept("rope_query", "rope_key") - nothing == 2 * heads


def names(run, *args):
    """The names that policies see in the derivative of `run`."""
    text = str(jax.make_jaxpr(lambda *xs: jax.jvp(run, xs, xs))(*args))
    return re.findall(r"name=(rope_\w+)", text)


def test_each_operand_has_its_own_name():
    query = X.reshape(BATCH, TOKENS, HEADS, -1)
    cos, sin = rows()

    def both(query, key):
        return rotate(query, key, cos, sin, layout=LAYOUT)

    assert names(both, query, query) == ["rope_query", "rope_key"]
    assert names(jax.jit(both), query, query) == ["rope_query", "rope_key"]
    mapped = jax.vmap(both, in_axes=(None, 0), out_axes=(None, 0))
    assert sorted(names(mapped, query, query[None])) == ["rope_key", "rope_query"]


def test_the_linear_transpose_of_a_rotation():
    query = X.reshape(BATCH, TOKENS, HEADS, -1)
    cos, sin = rows()
    (back,) = jax.linear_transpose(
        lambda q: rotate(q, None, cos, sin, layout=LAYOUT)[0], query
    )(query)
    wanted = oracle.rotate(np.asarray(query), cos, -np.asarray(sin), is_neox_style=True)
    np.testing.assert_allclose(back, wanted, rtol=0, atol=1e-6)
