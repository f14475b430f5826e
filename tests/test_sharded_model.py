"""A training step on a mesh: with rope it communicates what it does without."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache
from jrope.context_parallel import context_parallel_positions

CONFIG = RopeConfig(head_dim=16, rope_theta=1e4, max_position_embeddings=64)
BATCH, TOKENS, HEADS, WIDTH = 8, 16, 8, 32
MESHES = [(1, 8), (2, 4), (8, 1)]
SPECS = {
    "x": P("data"),
    "positions": P("data"),
    "qkv": P(None, None, "tensor"),
    "out": P("tensor"),
    "table": P(),
}
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(compute_cos_sin_cache(CONFIG))


def operands():
    def normal(*shape):
        return jnp.asarray(RNG.standard_normal(shape) / 8, jnp.float32)

    weights = {
        "qkv": normal(WIDTH, 3, HEADS, CONFIG.head_dim),
        "out": normal(HEADS, CONFIG.head_dim, WIDTH),
    }
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (BATCH, 1))
    return weights, normal(BATCH, TOKENS, WIDTH), jnp.asarray(positions)


def block(weights, x, positions, table, *, rotated, out_sharding=None):
    """Attention; each device's share of the heads where it is given one."""
    qkv = jnp.einsum("btd,dcnh->btcnh", x, weights["qkv"])
    query, key, value = (qkv[:, :, i] for i in range(3))
    if rotated:
        query, key = apply_rope(positions, query, key, table, layout=CONFIG.layout)
    scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
    mixed = jnp.einsum("bnts,bsnh->btnh", scores, value)
    return jnp.einsum("btnh,nhd->btd", mixed, weights["out"], out_sharding=out_sharding)


def loss(weights, x, positions, table, *, run):
    return jnp.mean((x + run(weights, x, positions, table)) ** 2)


def place(mesh, weights, x, positions, *, specs=SPECS):
    def put(name, array):
        return jax.device_put(array, NamedSharding(mesh, specs[name]))

    return (
        {name: put(name, array) for name, array in weights.items()},
        put("x", x),
        put("positions", positions),
        put("table", TABLE),
    )


def collectives(compiled):
    """How many of each kind there are in a compiled program."""
    pattern = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    return collections.Counter(re.findall(pattern + r"(?:-start)?\(", compiled))


def step_of(run):
    return jax.jit(jax.value_and_grad(functools.partial(loss, run=run)))


def compare(mesh, make_run):
    """Both programs' collectives, after the right value of the one that rotates."""
    args = operands()
    wanted = step_of(functools.partial(block, rotated=True))(*args, TABLE)
    on_mesh = place(mesh, *args)
    made = step_of(make_run(True))(*on_mesh)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    counts = [
        collectives(step_of(make_run(rotated)).lower(*on_mesh).compile().as_text())
        for rotated in (True, False)
    ]
    assert counts[0] == counts[1]
    return counts[0]


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_heads_over_tensor_and_tokens_over_data(shape, axis_type):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(axis_type,) * 2)
    out_sharding = P("data") if axis_type == AxisType.Explicit else None

    def make_run(rotated):
        return functools.partial(block, rotated=rotated, out_sharding=out_sharding)

    with jax.set_mesh(mesh):
        found = compare(mesh, make_run)
    assert found  # Reductions of the model's own: what is compared is not empty.


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_over_tensor_under_shard_map(shape, check_vma):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def make_run(rotated):
        def local(weights, x, positions, table):
            share = block(weights, x, positions, table, rotated=rotated)
            return lax.psum(share, "tensor")

        weights = {name: SPECS[name] for name in ("qkv", "out")}
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(weights, SPECS["x"], SPECS["positions"], SPECS["table"]),
            out_specs=SPECS["x"],
            check_vma=check_vma,
        )

    assert compare(mesh, make_run)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sequence_over_context(shape, axis_type):
    """The projection and the rotation of tokens that a mesh axis splits."""
    mesh = jax.make_mesh(shape, ("data", "context"), axis_types=(axis_type,) * 2)
    split = P("data", "context")
    specs = {**SPECS, "x": split, "positions": split, "qkv": P(), "out": P()}

    def make_run(rotated):
        def run(weights, x, positions, table):
            heads = jnp.einsum("btd,dnh->btnh", x, weights["qkv"][:, 0])
            if rotated:
                heads, _ = apply_rope(
                    positions, heads, None, table, layout=CONFIG.layout
                )
            return jnp.einsum("btnh,nhd->btd", heads, weights["out"])

        return run

    with jax.set_mesh(mesh):
        args = place(mesh, *operands(), specs=specs)
        counts = [
            collectives(step_of(make_run(rotated)).lower(*args).compile().as_text())
            for rotated in (True, False)
        ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scheme", ["contiguous", "zigzag"])
def test_context_parallel_attention_gathers_only_keys_and_values(check_vma, scheme):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    split = P("data", "context")

    def make_run(rotated):
        def local(weights, x, table):
            where = context_parallel_positions(
                TOKENS, lax.axis_index("context"), 4, scheme
            )[None]
            qkv = jnp.einsum("btd,dcnh->btcnh", x, weights["qkv"])
            query, key = qkv[:, :, 0], qkv[:, :, 1]
            if rotated:
                query, key = apply_rope(where, query, key, table, layout=CONFIG.layout)
            key, value = (
                lax.all_gather(part, "context", axis=1, tiled=True)
                for part in (key, qkv[:, :, 2])
            )
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
            mixed = jnp.einsum("bnts,bsnh->btnh", scores, value)
            return jnp.einsum("btnh,nhd->btd", mixed, weights["out"])

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), split, P()),
            out_specs=split,
            check_vma=check_vma,
        )
        return lambda weights, x, positions, table: mapped(weights, x, table)

    weights, x, positions = operands()
    counts = []
    for rotated in (True, False):
        lowered = step_of(make_run(rotated)).lower(weights, x, positions, TABLE)
        counts.append(collectives(lowered.compile().as_text()))
    assert counts[0] == counts[1]
    assert counts[0]["all-gather"] >= 2
