"""Meshes: the rotation follows its operands' sharding and adds no communication."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import (
    RopeConfig,
    RotaryLayout,
    apply_rope,
    compute_cos_sin_cache,
    rotate,
)
from jrope._routes import routes_for

CONFIG = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=64)
LAYOUT = CONFIG.layout
RNG = np.random.default_rng(0)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def operands():
    table = jnp.asarray(compute_cos_sin_cache(CONFIG))
    positions = jnp.asarray(RNG.integers(0, 64, (8, 8)), jnp.int32)
    query = jnp.asarray(RNG.standard_normal((8, 8, 16, 64)), jnp.float32)
    key = jnp.asarray(RNG.standard_normal((8, 8, 8, 64)), jnp.float32)
    return positions, query, key, table


@pytest.fixture(params=[route.name for route in routes_for(jax.default_backend())])
def route(request):
    """The name of each route that this machine can run."""
    return request.param


@pytest.fixture
def run(route):
    """The rotation by that route."""
    return functools.partial(apply_rope, layout=LAYOUT, implementation=route)


def squares(run, query, positions, key, table):
    return jnp.sum(run(positions, query, key, table)[0] ** 2)


def placed(mesh, arrays):
    specs = (P("data"), P("data", None, "heads"), P("data", None, "heads"), P())
    return [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_plain_jit_keeps_the_sharding_without_a_collective(run, shape, axis_type):
    arrays = operands()
    expected = run(*arrays)
    mesh = jax.make_mesh(shape, ("data", "heads"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, arrays)
        step = jax.jit(run)
        outs = step(*on_mesh)
        for out, whole, given in zip(outs, expected, on_mesh[1:3], strict=True):
            np.testing.assert_array_equal(out, whole)
            assert out.sharding.is_equivalent_to(given.sharding, out.ndim)
        text = step.lower(*on_mesh).compile().as_text()
        assert text
        assert not [name for name in COLLECTIVES if name in text]
        positions, query, key, table = on_mesh
        backward = jax.jit(jax.grad(functools.partial(squares, run)))
        gradient = backward(query, positions, key, table)
        np.testing.assert_allclose(gradient, 2 * arrays[1], rtol=1e-5, atol=1e-6)
        assert gradient.sharding.is_equivalent_to(query.sharding, query.ndim)
        text = backward.lower(query, positions, key, table).compile().as_text()
        assert text
        assert not [name for name in COLLECTIVES if name in text]


# jax-ml/jax#21855
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(run, check_vma):
    arrays = operands()
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    spec = P("data", None, "heads")
    step = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P("data"), spec, spec, P()),
            out_specs=(spec, spec),
            check_vma=check_vma,
        )
    )
    for out, whole in zip(step(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(out, whole)
    positions, query, key, table = arrays
    gradient = jax.grad(lambda q: jnp.sum(step(positions, q, key, table)[0] ** 2))(
        query
    )
    np.testing.assert_allclose(gradient, 2 * query, rtol=1e-5, atol=1e-6)


def test_shard_map_of_replicated_heads_over_split_positions(run):
    positions, query, _, table = operands()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(positions, query, table):
        return run(positions, query, None, table)[0]

    out = jax.shard_map(
        step, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )(positions, query[:1], table)
    expected = step(positions, jnp.broadcast_to(query[:1], query.shape), table)
    np.testing.assert_array_equal(out, expected)


def test_features_split_over_explicit_axes_are_refused(run):
    positions, query, _, table = operands()
    mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(query, NamedSharding(mesh, P(None, None, None, "heads")))
        with pytest.raises(ValueError, match="query's features must not be split over"):
            jax.jit(run)(positions, split, split, table)


# Layouts that do not belong together; there are as many tokens as devices in one.
LAYOUTS = {
    "heads against tokens": ((None, "x"), (None, "x"), ("x",)),
    "tokens against whole rows": (("x",), ("x",), ()),
    "heads against whole rows": ((None, "x"), (), ()),
    "whole heads against split rows": ((), (), ("x",)),
    "rows split over features": ((), (), (None, "x")),
    "query and key apart": (("x",), (None, "x"), ()),
    "two axes": ((None, "y"), (("x", "y"),), ("y",)),
}


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_operands_that_are_split_unlike_one_another(route, axis_type, layouts, tokens):
    if axis_type is AxisType.Explicit and route != "cpu_inplace":
        pytest.skip("programs without a kernel: JAX itself refuses some of these")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    angles = RNG.uniform(0, 9, (tokens, 16))
    whole = [RNG.standard_normal((tokens, 8, 32)) for _ in range(2)]
    arrays = [*whole, np.cos(angles), np.sin(angles)]
    specs = (*layouts, layouts[-1])
    on_mesh = [
        jax.device_put(jnp.asarray(array, "float32"), NamedSharding(mesh, P(*spec)))
        for array, spec in zip(arrays, specs, strict=True)
    ]
    layout = RotaryLayout(head_dim=32, rotary_dim=32)
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(rotate, layout=layout, implementation=route))
        outs = run(*on_mesh)
    for out, x in zip(outs, whole, strict=True):
        np.testing.assert_allclose(out, rotated(x, angles), atol=1e-5)


def rotated(x, angles):
    """In float64, as complex numbers."""
    pairs = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
