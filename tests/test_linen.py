"""The linen shell: its table lies in `rope_cache`, wherever the module is taken."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache
from jrope.linen import RotaryEmbedding, rope_variables

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=32)
TABLE = compute_cos_sin_cache(CONFIG)
POSITIONS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 4, 8)), jnp.float32)
KEY = jax.random.key(0)
# Flax annotates these narrower than they are.
BROADCAST: Any = nn.broadcast
UNMAPPED: Any = (None, None)


def init(module: nn.Module, *args: Any) -> Any:
    return module.init(KEY, *args)


def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.apply(*args, **kwargs)


class Model(nn.Module):
    """One table, two layers, rows looked up once."""

    def setup(self):
        self.rope = RotaryEmbedding(CONFIG)
        self.layers = [nn.Dense(8) for _ in range(2)]

    def __call__(self, positions, x):
        rows = self.rope.rows(positions)
        for layer in self.layers:
            x, _ = self.rope.rotate(layer(x), None, *rows)
        return x


def test_call_is_rows_then_rotate():
    variables = {"rope_cache": rope_variables(CONFIG)}
    made = apply(RotaryEmbedding(CONFIG), variables, POSITIONS, X, X)
    right = apply_rope(POSITIONS, X, X, jnp.asarray(TABLE), layout=CONFIG.layout)
    for one, other in zip(made, right, strict=True):
        np.testing.assert_array_equal(one, other)
    back, none = apply(
        RotaryEmbedding(CONFIG), variables, POSITIONS, right[0], None, inverse=True
    )
    np.testing.assert_allclose(back, X, rtol=0, atol=1e-6)
    assert none is None


def test_from_hf():
    hf_config = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 32}
    assert RotaryEmbedding.from_hf(hf_config).config == CONFIG


def test_the_table_is_no_parameter():
    variables = init(Model(), POSITIONS, X)
    assert set(variables) == {"params", "rope_cache"}
    assert "rope" not in variables["params"]
    table = variables["rope_cache"]["rope"]["cos_sin_cache"]
    np.testing.assert_array_equal(table, TABLE)


# marin-community/levanter#504
def test_weight_decay_leaves_the_table():
    variables = init(Model(), POSITIONS, X)
    params, cache = variables["params"], variables["rope_cache"]
    transform = optax.adamw(1e-1, weight_decay=1e-1)

    def loss(params):
        out = apply(Model(), {"params": params, "rope_cache": cache}, POSITIONS, X)
        return jnp.sum(out**2)

    gradients = jax.grad(loss)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its step counter.
        updates, _ = transform.update(gradients, transform.init(params), params)
    stepped = {"params": optax.apply_updates(params, updates), "rope_cache": cache}
    out, mutated = apply(Model(), stepped, POSITIONS, X, mutable=True)
    np.testing.assert_array_equal(mutated["rope_cache"]["rope"]["cos_sin_cache"], TABLE)
    assert np.isfinite(out).all()


def test_checkpoint_of_params_holds_no_table(tmp_path):
    variables = init(Model(), POSITIONS, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", variables["params"])
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(Model().init, KEY, POSITIONS, X)
        params = checkpointer.restore(tmp_path / "params", shapes["params"])
    with pytest.raises(
        ValueError, match=r"at rope/cos_sin_cache, got none; put jrope.linen.rope_vari"
    ):
        apply(Model(), {"params": params}, POSITIONS, X)
    filled = {"params": params, "rope_cache": {"rope": rope_variables(CONFIG)}}
    np.testing.assert_array_equal(
        apply(Model(), filled, POSITIONS, X), apply(Model(), variables, POSITIONS, X)
    )


def test_an_absent_collection_at_the_top_level():
    with pytest.raises(ValueError, match="table at cos_sin_cache, got none"):
        apply(RotaryEmbedding(CONFIG), {}, POSITIONS, X, None)


def test_a_cast_table_is_refused(unchecked):
    variables = init(Model(), POSITIONS, X)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
    with pytest.raises(TypeError, match="be float32, got bfloat16.*linen.rope_variabl"):
        apply(Model(), halved, POSITIONS, X)


class Holder(nn.Module):
    """A layer that holds the embedding itself."""

    @nn.compact
    def __call__(self, x, positions):
        turned, _ = RotaryEmbedding(CONFIG, name="rope")(
            positions, nn.Dense(8, name="proj")(x), None
        )
        return turned, None


def lifted(remat):
    return nn.scan(
        nn.remat(Holder) if remat else Holder,
        variable_axes={"params": 0},
        variable_broadcast="rope_cache",
        split_rngs={"params": True},
        in_axes=BROADCAST,
        length=3,
    )()


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers_keeps_one_table(remat):
    stack = lifted(remat)
    variables = init(stack, X, POSITIONS)
    assert variables["rope_cache"]["rope"]["cos_sin_cache"].shape == TABLE.shape
    out, _ = apply(stack, variables, X, POSITIONS)
    kernels = variables["params"]["proj"]
    expected = X
    for i in range(3):
        projected = (
            expected @ kernels["kernel"][i] + kernels["bias"][i][None, None, None]
        )
        expected, _ = apply_rope(
            POSITIONS, projected, None, jnp.asarray(TABLE), layout=CONFIG.layout
        )
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)

    def loss(params):
        cache = variables["rope_cache"]
        out, _ = apply(stack, {"params": params, "rope_cache": cache}, X, POSITIONS)
        return jnp.sum(out**2)

    gradient = jax.grad(loss)(variables["params"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_vmap_over_layers_keeps_one_table():
    many = nn.vmap(
        Holder,
        variable_axes={"params": 0, "rope_cache": None},
        split_rngs={"params": True},
        in_axes=UNMAPPED,
        axis_size=3,
    )()
    variables = init(many, X, POSITIONS)
    assert variables["rope_cache"]["rope"]["cos_sin_cache"].shape == TABLE.shape
    out, _ = apply(many, variables, X, POSITIONS)
    assert out.shape == (3, *X.shape)


def test_init_under_jit_and_donated_variables():
    variables = jax.jit(Model().init)(KEY, POSITIONS, X)
    table = variables["rope_cache"]["rope"]["cos_sin_cache"]
    np.testing.assert_array_equal(table, TABLE)
    expected = apply(Model(), variables, POSITIONS, X)

    def step(variables, positions, x):
        return apply(Model(), variables, positions, x), variables

    donating = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        out, variables = donating(variables, POSITIONS, X)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


# jax-ml/jax#10596
def test_nothing_is_baked_into_the_program():
    config = RopeConfig(head_dim=128, rope_theta=1e4, max_position_embeddings=131072)
    module = RotaryEmbedding(config)
    x = jnp.zeros((1, 16, 8, 128), jnp.bfloat16)
    positions = jnp.arange(16)[None]
    variables = {"rope_cache": rope_variables(config)}
    text = jax.jit(module.apply).lower(variables, positions, x, x).as_text()
    assert len(text) < 50_000
    text = jax.jit(module.init).lower(KEY, positions, x, x).as_text()
    assert len(text) < 50_000
