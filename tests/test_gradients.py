"""Derivatives of every public operation, and what a backward pass keeps for them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.test_util import check_grads

from jrope import (
    Fope,
    FopeTable,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    lookup,
    rerope,
    rotate,
    rotate_one,
)
from jrope._routes import routes_for
from jrope.linen import RotaryEmbedding as LinenEmbedding
from jrope.nnx import RotaryEmbedding
from jrope.scalings import Yarn

RNG = np.random.default_rng(0)
CONFIG = RopeConfig(
    head_dim=8,
    rotary_dim=6,
    rotary_offset=1,
    rope_theta=1e4,
    max_position_embeddings=32,
    scaling=Yarn(factor=4.0, original_max_position_embeddings=8),
)
LAYOUT = CONFIG.layout
TABLE = jnp.asarray(compute_cos_sin_cache(CONFIG))
POSITIONS = jnp.asarray(RNG.integers(0, 32, (2, 5)), jnp.int32)
COS, SIN = lookup(TABLE, POSITIONS, layout=LAYOUT)
X = jnp.asarray(RNG.standard_normal((2, 5, 4, 8)), jnp.float32)
CT = jnp.asarray(RNG.standard_normal(X.shape), jnp.float32)
STYLE = {"is_neox_style": True, "rotary_offset": 1}


def inverse_rows():
    energy = np.asarray(COS, np.float64) ** 2 + np.asarray(SIN, np.float64) ** 2
    return COS / energy, -SIN / energy


def unit_rows():
    size = np.hypot(np.asarray(COS, np.float64), np.asarray(SIN, np.float64))
    return COS / size, SIN / size


def operations(route):
    """Each operation as a linear function of the heads, and its rows."""
    by = {"layout": LAYOUT, "implementation": route}
    return {
        f"rotate {route}": (lambda x: rotate(x, None, COS, SIN, **by)[0], (COS, SIN)),
        f"apply_rope {route}": (
            lambda x: apply_rope(POSITIONS, x, None, TABLE, **by)[0],
            (COS, SIN),
        ),
        f"inverse {route}": (
            lambda x: rotate(x, None, COS, SIN, inverse=True, **by)[0],
            inverse_rows(),
        ),
        f"rerope {route}": (lambda x: rerope(x, POSITIONS, TABLE, **by), unit_rows()),
    }


OPERATIONS = {"rotate_one": (lambda x: rotate_one(x, COS, SIN, **STYLE), (COS, SIN))}
for route in routes_for(jax.default_backend()):
    OPERATIONS |= operations(route.name)


def turned(x, rows, *, back=False):
    cos, sin = rows
    signed = -np.asarray(sin) if back else sin
    return oracle.rotate(np.asarray(x), cos, signed, is_neox_style=True, offset=1)


def by_scan(run):
    """The operation on one half of the heads after the other."""

    def scanned(x):
        parts = jnp.stack([x[:, :, :2], x[:, :, 2:]])
        _, outs = lax.scan(lambda carry, part: (carry, run(part)), None, parts)
        return jnp.concatenate([outs[0], outs[1]], axis=2)

    return scanned


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, by_scan])
def test_reverse_and_forward_of_every_operation(name, wrap):
    run, rows = OPERATIONS[name]
    run = wrap(run)
    gradient = jax.grad(lambda x: jnp.vdot(run(x), CT))(X)
    np.testing.assert_allclose(gradient, turned(CT, rows, back=True), rtol=0, atol=2e-6)
    out, tangent = jax.jvp(run, (X,), (CT,))
    np.testing.assert_allclose(out, turned(X, rows), rtol=0, atol=2e-6)
    np.testing.assert_allclose(tangent, turned(CT, rows), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_hessian_vector_products_and_vmap_of_grad(name):
    run, rows = OPERATIONS[name]
    # The Hessian of |run(x)|^2 / 2 is the operation and then its transpose.
    wanted = turned(turned(CT, rows), rows, back=True)

    def loss(x):
        return jnp.sum(run(x) ** 2) / 2

    _, product = jax.jvp(jax.grad(loss), (X,), (CT,))
    np.testing.assert_allclose(product, wanted, rtol=0, atol=2e-5)
    reverse = jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), CT))(X)
    np.testing.assert_allclose(reverse, wanted, rtol=0, atol=2e-5)
    many = jax.vmap(jax.grad(loss))(jnp.stack([X, CT]))
    for x, gradient in zip((X, CT), many, strict=True):
        wanted = turned(turned(x, rows), rows, back=True)
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-5)


def test_gradients_of_norm_weights():
    heads, cotangents = (X, X[:, :, :2]), (CT, CT[:, :, 2:])

    def normed(x, weight):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * weight

    def loss(weights):
        wide = weights[:, None, None, None]
        both = [normed(x, weight) for x, weight in zip(heads, wide, strict=True)]
        outs = rotate(both[0], both[1], COS, SIN, layout=LAYOUT)
        return sum(jnp.vdot(o, ct) for o, ct in zip(outs, cotangents, strict=True))

    gradient = jax.grad(loss)(jnp.asarray(RNG.uniform(0.5, 2, (2, 8)), jnp.float32))
    for x, ct, got in zip(heads, cotangents, gradient, strict=True):
        alone = normed(x, np.ones((1, 1, 1, 8), np.float32))
        wanted = np.sum(turned(ct, (COS, SIN), back=True) * alone, axis=(0, 1, 2))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


FOPE = RopeConfig(
    head_dim=8,
    rope_theta=1e4,
    max_position_embeddings=32,
    fope=Fope(num_inv_freq=3, separate_heads=True),
)
MIXES = jnp.asarray(RNG.standard_normal((2, 2, 3, 3)), jnp.float32)


def fope_heads(mixes, x):
    table = FopeTable.from_config(FOPE, mixes[0], mixes[1])
    cos, sin = lookup(table, POSITIONS, layout=FOPE.layout)
    grouped = table.group(x)
    return rotate(grouped, None, cos, sin, layout=FOPE.layout)[0].reshape(x.shape)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients_of_fopes_coefficients(wrap):
    def loss(mixes, x):
        # check_grads hands over NumPy arrays.
        return jnp.sum(jnp.sin(wrap(fope_heads)(jnp.asarray(mixes), jnp.asarray(x))))

    check_grads(loss, (MIXES, X), order=2, modes=["fwd", "rev"], rtol=2e-2, atol=2e-2)
    apart = jax.vmap(jax.grad(loss), in_axes=(None, 0))(MIXES, jnp.stack([X, CT]))
    for x, gradient in zip((X, CT), apart, strict=True):
        np.testing.assert_allclose(
            gradient, jax.grad(loss)(MIXES, x), rtol=0, atol=2e-5
        )


REFUSED = pytest.raises(
    TypeError, match="table must not be differentiated.*nnx.grad does.*rope_cache, out"
)


def rotated(table, x=X):
    return apply_rope(POSITIONS, x, None, table, layout=LAYOUT)[0]


def summed(table):
    return jnp.sum(rotated(table))


def scanned(table):
    return jnp.sum(lax.scan(lambda x, _: (rotated(table, x), None), X, length=2)[0])


@pytest.mark.parametrize(
    "ask",
    [
        jax.grad(summed),
        jax.grad(jax.jit(summed)),
        jax.grad(jax.checkpoint(summed)),
        jax.grad(scanned),
        lambda table: jax.jvp(summed, (table,), (table,)),
        lambda table: jax.vmap(jax.grad(summed))(table[None]),
    ],
    ids=["grad", "jit", "remat", "scan", "jvp", "vmap"],
)
def test_a_table_has_no_gradient_and_says_so(ask):
    with REFUSED:
        ask(TABLE)


def test_nor_have_the_tables_of_modules_and_kinds():
    def loss(variables):
        return jnp.sum(LinenEmbedding(CONFIG).apply(variables, POSITIONS, X, X)[0])

    with REFUSED:
        jax.grad(loss)({"rope_cache": {"cos_sin_cache": TABLE}})
    module = RotaryEmbedding(CONFIG)
    with REFUSED:
        jax.grad(lambda m: jnp.sum(m(POSITIONS, X, None)[0]))(module)
    with REFUSED:
        jax.grad(summed)(TwoLevelTable.from_config(CONFIG))
    with REFUSED:
        jax.grad(
            lambda table: jnp.sum(lookup(table, POSITIONS, layout=FOPE.layout)[0])
        )(FopeTable.from_config(FOPE, MIXES[0], MIXES[1]))
