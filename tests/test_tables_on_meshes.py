"""Tables of whole models: how many, where they lie, and what checkpoints hold."""

import dataclasses
import gc
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import RopeConfig, compute_cos_sin_cache
from jrope.linen import RotaryEmbedding as LinenEmbedding
from jrope.linen import rope_variables
from jrope.nnx import RotaryCache, RotaryEmbedding, fill_tables, place_tables

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
LONGER = dataclasses.replace(CONFIG, max_position_embeddings=256)
TABLE = compute_cos_sin_cache(CONFIG)
LAYERS = 6
POSITIONS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 4, 8)), jnp.float32)
KEY = jax.random.key(0)


class Model(nnx.Module):
    """Many layers, one table."""

    def __init__(self, config, rngs):
        self.rope = RotaryEmbedding(config)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, positions, x):
        rows = self.rope.rows(positions)
        for layer in self.layers:
            x, _ = self.rope.rotate(layer(x), None, *rows)
        return x


class LinenModel(nn.Module):
    """The same in linen."""

    config: RopeConfig

    def setup(self):
        self.rope = LinenEmbedding(self.config)
        self.layers = [nn.Dense(8) for _ in range(LAYERS)]

    def __call__(self, positions, x):
        rows = self.rope.rows(positions)
        for layer in self.layers:
            x, _ = self.rope.rotate(layer(x), None, *rows)
        return x


def model(config=CONFIG):
    return Model(config, nnx.Rngs(0))


def held_tables(shape):
    """Arrays of a shape that any device holds now."""
    gc.collect()
    return sum(array.shape == shape for array in jax.live_arrays())


def test_one_table_a_model_and_none_for_the_process():
    odd = dataclasses.replace(CONFIG, max_position_embeddings=61)
    shape = (61, 8)
    assert held_tables(shape) == 0
    module = model(odd)
    module(POSITIONS, X)
    assert held_tables(shape) == 1
    variables: Any = LinenModel(odd).init(KEY, POSITIONS, X)
    assert held_tables(shape) == 2
    del module, variables
    assert held_tables(shape) == 0


def on(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("rows_over", [None, "data"])
def test_tables_whole_or_split_by_rows(axis_type, rows_over):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    module = model()
    wanted = module(POSITIONS, X)
    place_tables(module, mesh, rows_over=rows_over)
    variables = rope_variables(CONFIG, mesh=mesh, rows_over=rows_over)
    for table in (module.rope.cos_sin_cache[...], variables["cos_sin_cache"]):
        held = {shard.data.shape[0] for shard in table.addressable_shards}
        assert held == {64 if rows_over is None else 8}
    graph, state = nnx.split(module)
    with jax.set_mesh(mesh):
        state = jax.tree.map(
            lambda leaf: leaf if leaf.shape == TABLE.shape else on(mesh, leaf), state
        )
        out = jax.jit(lambda s, p, x: nnx.merge(graph, s)(p, x))(
            state, on(mesh, POSITIONS, None, "data"), on(mesh, X, None, "data")
        )
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6)
    fill_tables(module)
    sharding = module.rope.cos_sin_cache[...].sharding
    assert sharding == variables["cos_sin_cache"].sharding


def test_choices_that_do_not_fit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"mesh's axes \('data',\), got 'x'"):
        place_tables(model(), mesh, rows_over="x")
    odd = dataclasses.replace(CONFIG, max_position_embeddings=61)
    with pytest.raises(ValueError, match="of the 8 devices of axis 'data', got 61"):
        rope_variables(odd, mesh=mesh, rows_over="data")
    with pytest.raises(ValueError, match="fill_tables"):
        place_tables(nnx.eval_shape(model), mesh)
    with pytest.raises(ValueError, match="rows_over='data' must come with a mesh"):
        rope_variables(CONFIG, rows_over="data")


def saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
    return path


def restored(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


@pytest.mark.parametrize("kept", [nnx.Not(RotaryCache), ...], ids=["without", "with"])
def test_nnx_checkpoints_without_and_with_tables(tmp_path, kept):
    module = model()
    path = saved(tmp_path / "state", nnx.to_pure_dict(nnx.state(module, kept)))
    again = nnx.eval_shape(model)
    wanted = nnx.state(again, kept)
    nnx.replace_by_pure_dict(wanted, restored(path, nnx.to_pure_dict(wanted)))
    nnx.update(again, wanted)
    if kept is not ...:
        fill_tables(again)
    np.testing.assert_array_equal(again.rope.cos_sin_cache[...], TABLE)
    np.testing.assert_array_equal(again(POSITIONS, X), module(POSITIONS, X))


def test_an_nnx_checkpoint_of_a_model_with_another_length(tmp_path):
    module = model()
    kept = nnx.Not(RotaryCache)
    path = saved(tmp_path / "state", nnx.to_pure_dict(nnx.state(module, kept)))
    longer = nnx.eval_shape(lambda: model(LONGER))
    wanted = nnx.state(longer, kept)
    nnx.replace_by_pure_dict(wanted, restored(path, nnx.to_pure_dict(wanted)))
    nnx.update(longer, wanted)
    fill_tables(longer)
    assert longer.rope.cos_sin_cache[...].shape == (256, 8)
    np.testing.assert_array_equal(longer(POSITIONS, X), module(POSITIONS, X))
    assert np.isfinite(longer(POSITIONS + 200, X)).all()


@pytest.mark.parametrize("collections", [("params",), ("params", "rope_cache")])
def test_linen_checkpoints_without_and_with_tables(tmp_path, collections):
    module = LinenModel(CONFIG)
    variables: Any = module.init(KEY, POSITIONS, X)
    path = saved(tmp_path / "v", {name: variables[name] for name in collections})
    shapes: Any = jax.eval_shape(module.init, KEY, POSITIONS, X)
    again = restored(path, {name: shapes[name] for name in collections})
    again.setdefault("rope_cache", {"rope": rope_variables(CONFIG)})
    np.testing.assert_array_equal(
        module.apply(again, POSITIONS, X), module.apply(variables, POSITIONS, X)
    )


def test_a_linen_checkpoint_of_a_model_with_another_length(tmp_path, unchecked):
    variables: Any = LinenModel(CONFIG).init(KEY, POSITIONS, X)
    path = saved(tmp_path / "params", variables["params"])
    longer = LinenModel(LONGER)
    shapes: Any = jax.eval_shape(longer.init, KEY, POSITIONS, X)
    params = restored(path, shapes["params"])
    again = {"params": params, "rope_cache": {"rope": rope_variables(LONGER)}}
    wanted = LinenModel(CONFIG).apply(variables, POSITIONS, X)
    np.testing.assert_array_equal(longer.apply(again, POSITIONS, X), wanted)
    stale = {"params": params, "rope_cache": variables["rope_cache"]}
    with pytest.raises(ValueError, match=r"\(256, 8\), got \(64, 8\); was it built"):
        longer.apply(stale, POSITIONS, X)
