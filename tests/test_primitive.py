"""rope_p under JAX's transformations, and the program that each platform receives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.test_util import check_grads

import jrope
from jrope import RopeConfig, compute_cos_sin_cache, lookup
from jrope._primitive import PRIMITIVES
from jrope._routes import ROUTES, Rotation, choose_route, routes_for
from jrope._routes.xla import XLA

RNG = np.random.default_rng(0)
CONFIGS = {
    "neox": RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=32),
    "gptj-partial": RopeConfig(
        head_dim=8,
        rotary_dim=4,
        rotary_offset=2,
        is_neox_style=False,
        rope_theta=1e4,
        max_position_embeddings=32,
    ),
}
pytestmark = pytest.mark.parametrize("name", CONFIGS)


ROUTE_NAMES = [route.name for route in routes_for(jax.default_backend())]


@pytest.fixture(params=ROUTE_NAMES)
def rotate(request):
    """`jrope.rotate` by each route that this machine can run."""
    return functools.partial(jrope.rotate, implementation=request.param)


def case(name):
    config, rng = CONFIGS[name], np.random.default_rng(0)
    table = jnp.asarray(compute_cos_sin_cache(config))
    positions = jnp.asarray(rng.integers(0, 32, (2, 5)), jnp.int32)
    query = jnp.asarray(rng.standard_normal((2, 5, 4, 8)), jnp.float32)
    key = jnp.asarray(rng.standard_normal((2, 5, 2, 8)), jnp.float32)
    return config.layout, query, key, *lookup(table, positions, layout=config.layout)


def exact(name, x, cos, sin):
    layout = CONFIGS[name].layout
    style = {"is_neox_style": layout.is_neox_style, "offset": layout.rotary_offset}
    return oracle.rotate(np.asarray(x), np.asarray(cos), np.asarray(sin), **style)


def test_eager_and_jit_have_the_same_bits(rotate, name):
    layout, *arrays = case(name)
    eager = rotate(*arrays, layout=layout)
    jitted = jax.jit(lambda *a: rotate(*a, layout=layout))(*arrays)
    chex.assert_trees_all_equal(eager, jitted)


def test_query_and_key_are_one_bind(rotate, name):
    layout, *arrays = case(name)
    jaxpr = jax.make_jaxpr(lambda *a: rotate(*a, layout=layout))(*arrays)
    assert len([eqn for eqn in jaxpr.eqns if eqn.primitive in PRIMITIVES]) == 1


# huggingface/candle#3612
def test_derivatives_of_both_modes_and_orders(rotate, name):
    layout, *arrays = case(name)

    def run(*arrays):  # check_grads hands over NumPy arrays.
        return rotate(*map(jnp.asarray, arrays), layout=layout)

    check_grads(run, arrays, order=2, modes=["fwd", "rev"], rtol=2e-3, atol=2e-3)


def test_gradient_is_the_rotation_back(rotate, name):
    layout, query, key, cos, sin = case(name)
    cotangent = jnp.asarray(RNG.standard_normal(query.shape), jnp.float32)

    def inner(query):
        return jnp.vdot(rotate(query, key, cos, sin, layout=layout)[0], cotangent)

    np.testing.assert_allclose(
        jax.grad(inner)(query), exact(name, cotangent, cos, -sin), rtol=0, atol=1e-6
    )


def test_gradient_for_one_operand_binds_one(rotate, name):
    layout, query, key, cos, sin = case(name)

    def loss(key):
        return sum(jnp.sum(x * x) for x in rotate(query, key, cos, sin, layout=layout))

    np.testing.assert_allclose(jax.grad(loss)(key), 2 * key, rtol=1e-5, atol=1e-6)


def test_hessian_vector_product(rotate, name):
    layout, query, key, cos, sin = case(name)

    def loss(query):
        return jnp.sum(rotate(query, key, cos, sin, layout=layout)[0] ** 2)

    _, product = jax.jvp(jax.grad(loss), (query,), (query,))
    np.testing.assert_allclose(product, 2 * query, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_each_axis_of_query_and_rows(rotate, name, axis):
    layout, query, _, cos, sin = case(name)

    def one(query, cos, sin):
        return rotate(query, None, cos, sin, layout=layout)[0]

    out = jax.vmap(one, in_axes=axis, out_axes=axis)(query, cos, sin)
    np.testing.assert_allclose(out, exact(name, query, cos, sin), rtol=0, atol=1e-6)


def test_vmap_over_heads(rotate, name):
    layout, query, _, cos, sin = case(name)

    def one(query):
        return rotate(query[:, :, None], None, cos, sin, layout=layout)[0][:, :, 0]

    out = jax.vmap(one, in_axes=2, out_axes=2)(query)
    np.testing.assert_allclose(out, exact(name, query, cos, sin), rtol=0, atol=1e-6)


def test_vmap_of_rows_alone_maps_every_output(rotate, name):
    layout, query, key, cos, sin = case(name)
    outs = jax.vmap(lambda c, s: rotate(query[0], key[0], c, s, layout=layout))(
        cos, sin
    )
    for x, out in zip((query, key), outs, strict=True):
        both = np.stack([x[0], x[0]])
        np.testing.assert_allclose(out, exact(name, both, cos, sin), rtol=0, atol=1e-6)


def test_vmap_of_query_alone_leaves_key_unmapped(rotate, name):
    layout, query, key, cos, sin = case(name)

    def one(query):
        return rotate(query, key[0], cos[0], sin[0], layout=layout)

    turned_query, turned_key = jax.vmap(one, out_axes=(0, None))(query)
    rows = (np.stack([row[0], row[0]]) for row in (cos, sin))
    np.testing.assert_allclose(
        turned_query, exact(name, query, *rows), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        turned_key, exact(name, key[0], cos[0], sin[0]), rtol=0, atol=1e-6
    )


def test_vmap_of_grad_and_grad_of_vmap(rotate, name):
    layout, query, _, cos, sin = case(name)

    def loss(query, cos, sin):
        return jnp.sum(rotate(query, None, cos, sin, layout=layout)[0] ** 2)

    inside = jax.vmap(jax.grad(loss))(query, cos, sin)
    outside = jax.grad(lambda q: jnp.sum(jax.vmap(loss)(q, cos, sin)))(query)
    for gradient in (inside, outside):
        np.testing.assert_allclose(gradient, 2 * query, rtol=1e-5, atol=1e-6)


# jax-ml/jax#9836
def test_scan_and_remat(rotate, name):
    layout, query, _, cos, sin = case(name)

    @jax.checkpoint
    def turn(carry, rows):
        return rotate(carry, None, *rows, layout=layout)[0], None

    def run(query):
        return lax.scan(turn, query, (cos[:, None], sin[:, None]))[0]

    expected = query
    for c, s in zip(cos, sin, strict=True):
        both = (np.stack([row, row]) for row in (c, s))
        expected = exact(name, expected, *both)
    np.testing.assert_allclose(run(query), expected, rtol=0, atol=2e-6)
    gradient = jax.grad(lambda q: jnp.sum(run(q) ** 2))(query)
    np.testing.assert_allclose(gradient, 2 * query, rtol=1e-5, atol=1e-6)


def test_linear_in_the_rows_only_through_jvp(rotate, name):
    layout, query, _, cos, sin = case(name)
    with pytest.raises(NotImplementedError, match="not in its rows"):
        jax.linear_transpose(
            lambda cos: rotate(query, None, cos, sin, layout=layout)[0], cos
        )(query)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu", "nosuch"])
def test_lowers_for_platforms_that_are_not_there(name, platform):
    layout, *arrays = case(name)
    traced = jax.jit(lambda *a: jrope.rotate(*a, layout=layout)).trace(*arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.multiply" in text
    for unwanted in ("stablehlo.case", "custom_call", "tensor<?", "f64", "complex"):
        assert unwanted not in text


def test_one_export_for_many_platforms(name):
    layout, *arrays = case(name)
    run = jax.jit(lambda *a: jrope.rotate(*a, layout=layout))
    exported = jax.export.export(run, platforms=["cpu", "cuda", "nosuch"])(*arrays)
    chex.assert_trees_all_equal(exported.call(*arrays), run(*arrays))


class Stubborn:
    """A route that never takes a case."""

    name = "stubborn"

    def declines(self, rotation: Rotation) -> str:
        return f"{rotation.tokens} tokens are too many"

    def run(self, rotation, xs, cos, sin):
        raise AssertionError("a route that declines must not run")


class Doubling:
    """A route that can be told from the others by its result."""

    name = "doubling"

    def declines(self, rotation: Rotation) -> None:
        return None

    def run(self, rotation, xs, cos, sin):
        return tuple(x + x for x in xs)


def test_routes_are_asked_in_order_and_named_ones_obeyed(name, monkeypatch):
    layout, *arrays = case(name)
    monkeypatch.setitem(ROUTES, "cpu", (Stubborn(), Doubling()))

    def run(implementation):
        jax.clear_caches()
        return jrope.rotate(*arrays, layout=layout, implementation=implementation)

    plain = run("xla")
    chex.assert_trees_all_equal(run(None), tuple(x + x for x in arrays[:2]))
    chex.assert_trees_all_equal(run("doubling"), tuple(x + x for x in arrays[:2]))
    np.testing.assert_allclose(plain[0], exact(name, arrays[0], *arrays[2:]), atol=1e-6)
    with pytest.raises(
        ValueError, match="'stubborn' declines.* 10 tokens are too many"
    ):
        run("stubborn")
    jax.clear_caches()


def test_a_route_of_another_platform_is_an_error(name):
    layout, query, _, cos, _ = case(name)
    rotation = Rotation(
        platform="tpu",
        xs=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        rows=jax.ShapeDtypeStruct(cos.shape, cos.dtype),
        is_neox_style=layout.is_neox_style,
        rotary_offset=layout.rotary_offset,
    )
    assert choose_route(rotation, None) is XLA
    with pytest.raises(
        ValueError, match=r"one of \['xla', 'composite'\] on platform 'tpu'"
    ):
        choose_route(rotation, "mosaic")
