"""The nnx shell: its table is data, wherever the module is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from oracle import rotate

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, layers_from_hf
from jrope.nnx import RotaryCache, RotaryEmbedding, fill_tables

CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=32)
TABLE = compute_cos_sin_cache(CONFIG)
LAYERS = 3


class Layer(nnx.Module):
    """A projection, then a rotation by rows that it is given."""

    def __init__(self, rngs):
        self.proj = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, rope, x, rows):
        return rope.rotate(self.proj(x), None, *rows)[0]


class Model(nnx.Module):
    """One table, some layers, rows looked up once."""

    def __init__(self, rngs):
        self.rope = RotaryEmbedding(CONFIG)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, positions, x):
        rows = self.rope.rows(positions)
        for layer in self.layers:
            x = layer(self.rope, x, rows)
        return x


POSITIONS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 4, 8)), jnp.float32)


def model():
    return Model(nnx.Rngs(0))


def call(module, positions, x):
    return module(positions, x)


def test_call_is_rows_then_rotate():
    rope = RotaryEmbedding(CONFIG)
    expected = apply_rope(POSITIONS, X, X, jnp.asarray(TABLE), layout=CONFIG.layout)
    for made, right in zip(rope(POSITIONS, X, X), expected, strict=True):
        np.testing.assert_array_equal(made, right)
    back, none = rope(POSITIONS, expected[0], None, inverse=True)
    np.testing.assert_allclose(back, X, rtol=0, atol=1e-6)
    assert none is None


def test_from_hf():
    hf_config = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 32}
    assert RotaryEmbedding.from_hf(hf_config).config == CONFIG
    nested = {**hf_config, "rope_parameters": {"rope": {}, "nope": None}}
    with pytest.raises(ValueError, match="layers of type 'nope' have no rotary"):
        RotaryEmbedding.from_hf(nested, layer_type="nope")
    with pytest.raises(ValueError, match="this model has no rotary embedding"):
        RotaryEmbedding.from_hf({**hf_config, "model_type": "jamba"})


def test_the_table_is_no_parameter():
    state = nnx.state(model())
    assert not jax.tree.leaves(nnx.filter_state(state, nnx.Param).get("rope", {}))
    tables = jax.tree.leaves(nnx.filter_state(state, RotaryCache))
    assert [table.shape for table in tables] == [TABLE.shape]


class Gemma(nnx.Module):
    """Layers of two bases, as docs/pages/layers.md holds them."""

    def __init__(self):
        config = {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 8}
        found = layers_from_hf(config, max_position_embeddings=32)
        per_layer = [each for each in found if each is not None]
        distinct = list(dict.fromkeys(per_layer))
        self.ropes = nnx.List([RotaryEmbedding(each) for each in distinct])
        self.which = tuple(distinct.index(each) for each in per_layer)

    def __call__(self, positions, x):
        rows = [rope.rows(positions) for rope in self.ropes]
        for i in self.which:
            x, _ = self.ropes[i].rotate(x, None, *rows[i])
        return x


def test_layers_of_two_bases_turn_by_their_own():
    graph, state = nnx.split(Gemma())
    assert len(jax.tree.leaves(state)) == 2
    turned = jax.jit(lambda state, *given: nnx.merge(graph, state)(*given))
    right = X
    for base in (1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4):
        angles = np.asarray(POSITIONS)[..., None] * base ** -(np.arange(4) / 4)
        right = rotate(right, np.cos(angles), np.sin(angles), is_neox_style=True)
    np.testing.assert_allclose(turned(state, POSITIONS, X), right, rtol=0, atol=1e-5)


# marin-community/levanter#504
def test_gradients_and_weight_decay_leave_the_table():
    module = model()
    optimizer = nnx.Optimizer(
        module, optax.adamw(1e-1, weight_decay=1e-1), wrt=nnx.Param
    )
    before = np.asarray(module.layers[0].proj.kernel[...])
    gradients = nnx.grad(lambda m: jnp.sum(m(POSITIONS, X) ** 2))(module)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its step counter.
        optimizer.update(module, gradients)
    assert not np.array_equal(module.layers[0].proj.kernel[...], before)
    np.testing.assert_array_equal(module.rope.cos_sin_cache[...], TABLE)


def test_checkpoint_with_the_documented_filter(tmp_path):
    module = model()
    kept = nnx.state(module, nnx.Not(RotaryCache))
    assert "rope" not in kept
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(kept))
        checkpointer.wait_until_finished()
        abstract = nnx.eval_shape(model)
        wanted = nnx.to_pure_dict(nnx.state(abstract, nnx.Not(RotaryCache)))
        restored = checkpointer.restore(tmp_path / "state", wanted)
    params = nnx.state(abstract, nnx.Not(RotaryCache))
    nnx.replace_by_pure_dict(params, restored)
    nnx.update(abstract, params)
    with pytest.raises(ValueError, match=r"filled before use.*fill_tables\(model\)"):
        abstract(POSITIONS, X)
    fill_tables(abstract)
    np.testing.assert_array_equal(abstract(POSITIONS, X), module(POSITIONS, X))


def test_a_cast_table_is_refused_and_can_be_filled_again(unchecked):
    module = model()
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(module))
    nnx.update(module, halved)
    with pytest.raises(TypeError, match="be float32, got bfloat16.*jrope.nnx.fill_tab"):
        module(POSITIONS, X)
    fill_tables(module)
    np.testing.assert_array_equal(module.rope.cos_sin_cache[...], TABLE)


@pytest.mark.parametrize(
    "jit",
    [
        nnx.jit,
        lambda f: nnx.jit(f, graph=False),
        lambda f: nnx.jit(f, graph_updates=False),
    ],
    ids=["graph", "tree", "graph-no-updates"],
)
def test_every_kind_of_jit(jit):
    module = model()
    np.testing.assert_allclose(
        jit(call)(module, POSITIONS, X), module(POSITIONS, X), rtol=0, atol=1e-6
    )


# marin-community/levanter#1290
def test_jax_jit_over_split_state_and_its_donation():
    module = model()
    expected = module(POSITIONS, X)
    graph, state = nnx.split(module)

    def step(state, positions, x):
        merged = nnx.merge(graph, state)
        return merged(positions, x), nnx.state(merged)

    donating = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        out, state = donating(state, POSITIONS, X)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(
        nnx.merge(graph, state).rope.cos_sin_cache[...], TABLE
    )


def stacked_layers():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs):
        return Layer(rngs)

    return make(nnx.Rngs(0))


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat):
    rope, layers = RotaryEmbedding(CONFIG), stacked_layers()
    rows = rope.rows(POSITIONS)

    def body(x, layer, rope, rows):
        return layer(rope, x, rows)

    body = nnx.remat(body) if remat else body
    scan = nnx.scan(
        body, in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry, length=LAYERS
    )
    graph, state = nnx.split(layers)
    expected = X
    for i in range(LAYERS):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        expected = layer(rope, expected, rows)
    np.testing.assert_allclose(scan(X, layers, rope, rows), expected, rtol=0, atol=1e-6)
    assert rope.cos_sin_cache[...].shape == TABLE.shape

    def loss(layers, rope):
        return jnp.sum(scan(X, layers, rope, rows) ** 2)

    gradient = nnx.grad(loss)(layers, rope)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


class Holder(nnx.Module):
    """A layer that holds a table of its own, as a careless stack would."""

    def __init__(self, rngs):
        self.proj = nnx.Linear(8, 8, rngs=rngs)
        self.rope = RotaryEmbedding(CONFIG)

    def __call__(self, positions, x):
        return self.rope(positions, self.proj(x), None)[0]


def test_vmap_over_layers_with_the_table_unstacked():
    axes = nnx.StateAxes({RotaryCache: None, ...: 0})
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Holder, out_axes=axes))
    layers = make(nnx.Rngs(0))
    assert layers.rope.cos_sin_cache[...].shape == TABLE.shape
    assert layers.proj.kernel[...].shape == (LAYERS, 8, 8)
    run = nnx.vmap(call, in_axes=(axes, None, None), out_axes=0)
    assert run(layers, POSITIONS, X).shape == (LAYERS, *X.shape)


def test_a_stacked_table_is_refused(unchecked):
    layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Holder))(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"got \(3, 32, 8\); .* stacked by vmap"):
        layers.rope.rows(POSITIONS)
    with pytest.raises(
        ValueError, match=r"got \(3, 32, 8\); was it stacked by nnx.vmap"
    ):
        fill_tables(layers)


def test_init_under_jit_bakes_nothing_in():
    big = RopeConfig(head_dim=128, rope_theta=1e4, max_position_embeddings=131072)
    text = jax.jit(lambda: nnx.state(RotaryEmbedding(big))).lower().as_text()
    assert len(text) < 50_000
    made = nnx.jit(model)()
    np.testing.assert_array_equal(made.rope.cos_sin_cache[...], TABLE)


# jax-ml/jax#10596
def test_a_jitted_layer_bakes_nothing_in():
    config = RopeConfig(head_dim=128, rope_theta=1e4, max_position_embeddings=131072)
    graph, state = nnx.split(RotaryEmbedding(config))
    x = jnp.zeros((1, 16, 8, 128), jnp.bfloat16)

    def layer(state, positions, x):
        return nnx.merge(graph, state)(positions, x, x)

    text = jax.jit(layer).lower(state, jnp.arange(16)[None], x).as_text()
    assert len(text) < 50_000


def test_fill_tables_keeps_the_sharding():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    module = model()
    held = jax.device_put(module.rope.cos_sin_cache[...], sharding)
    module.rope.cos_sin_cache.set_value(held)
    fill_tables(module)
    assert module.rope.cos_sin_cache[...].sharding == sharding


@pytest.mark.parametrize(
    ("config", "kwargs", "error", "message"),
    [
        (
            {"head_dim": 8},
            {},
            TypeError,
            "be a RopeConfig, got dict; config_from_hf",
        ),
        (CONFIG, {"out_of_range": "wrap"}, ValueError, "out_of_range must be one of"),
        (CONFIG, {"implementation": "x"}, ValueError, "implementation must be None or"),
    ],
)
def test_wrong_options_are_refused_at_once(unchecked, config, kwargs, error, message):
    with pytest.raises(error, match=message):
        RotaryEmbedding(config, **kwargs)
