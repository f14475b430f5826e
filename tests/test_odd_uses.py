"""Uses that once gave wrong numbers or another library's error, by kind."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from jrope import (
    QueryTemperature,
    RopeConfig,
    apply_rope,
    compute_cos_sin_cache,
    config_from_hf,
    layers_from_hf,
    lookup,
    permute_pairing,
    query_temperature,
    rerope,
    rotate,
)
from jrope.linen import RotaryEmbedding as LinenEmbedding
from jrope.linen import rope_variables
from jrope.nnx import RotaryEmbedding, fill_tables
from jrope.scalings import Dynamic, Yarn

CONFIG = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=4096)
LAYOUT = CONFIG.layout
TABLE = jnp.asarray(compute_cos_sin_cache(CONFIG))
POSITIONS = jnp.arange(300, dtype=jnp.int32)[None]
COS, SIN = lookup(TABLE, POSITIONS, layout=LAYOUT)
QUERY = jnp.asarray(
    np.random.default_rng(0).standard_normal((1, 300, 3, 64)), "float32"
)


def test_tables_of_another_kind_or_length_are_refused(unchecked):
    module = LinenEmbedding(CONFIG, table="two_level")
    with pytest.raises(ValueError, match=r"\(1028, 64\), got \(4096, 64\); was it"):
        module.apply({"rope_cache": rope_variables(CONFIG)}, POSITIONS, QUERY, None)
    longer = dataclasses.replace(CONFIG, max_position_embeddings=8192)
    rope = RotaryEmbedding(longer)
    nnx.update(rope, nnx.state(RotaryEmbedding(CONFIG)))
    with pytest.raises(ValueError, match=r"\(8192, 64\), got \(4096, 64\)"):
        rope(POSITIONS, QUERY, None)


def test_with_jit_disabled():
    right = oracle.rotate(np.asarray(QUERY), COS, SIN, is_neox_style=True)
    with jax.disable_jit():
        out, _ = apply_rope(POSITIONS, QUERY, None, TABLE, layout=LAYOUT)
    np.testing.assert_allclose(out, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("which", ["cos", "sin"])
def test_vmap_over_one_of_the_rows(which):
    given = {"cos": COS, "sin": SIN}

    def one(row):
        rows = {**given, which: row}
        return rotate(QUERY, None, rows["cos"], rows["sin"], layout=LAYOUT)[0]

    out = jax.vmap(one)(jnp.stack([given[which], 2 * given[which]]))
    for i, factor in enumerate((1, 2)):
        rows = {**given, which: factor * given[which]}
        right = oracle.rotate(
            np.asarray(QUERY), rows["cos"], rows["sin"], is_neox_style=True
        )
        np.testing.assert_allclose(out[i], right, rtol=0, atol=4e-6)


SIZES = {
    "head_dim": 64,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    "switched_off",
    [
        {"model_type": "jamba"},
        {"model_type": "falcon", "alibi": True},
        {"model_type": "granitemoehybrid", "position_embedding_type": "nope"},
        {"model_type": "granitemoehybrid"},
        {"model_type": "esm", "position_embedding_type": "absolute"},
        {"model_type": "zamba2", "use_mem_rope": False},
    ],
)
def test_models_without_rope_or_with_it_switched_off(switched_off):
    config = {**SIZES, **switched_off}
    assert config_from_hf(config) is None
    assert layers_from_hf(config) == [None, None]


@pytest.mark.parametrize(
    "switched_on",
    [
        {"model_type": "falcon"},
        {"model_type": "granitemoehybrid", "position_embedding_type": "rope"},
        {"model_type": "esm", "position_embedding_type": "rotary"},
        {"model_type": "zamba2", "use_mem_rope": True},
    ],
)
def test_models_with_rope_switched_on(switched_on):
    assert config_from_hf({**SIZES, **switched_on}) is not None


@pytest.mark.parametrize("kind", ["linear_attention", "conv"])
def test_layers_that_do_not_attend_have_no_rope(kind):
    config = {**SIZES, "model_type": "qwen3_next", "layer_types": [kind]}
    config |= {"layer_types": [kind, "full_attention"]}
    rotated = [layer is not None for layer in layers_from_hf(config)]
    assert rotated == [False, True]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_fill_tables_under_a_mesh(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        rope = nnx.eval_shape(lambda: RotaryEmbedding(CONFIG))
        fill_tables(rope)
    np.testing.assert_array_equal(rope.cos_sin_cache[...], TABLE)


def test_filled_tables_of_equal_configs_can_be_donated():
    pair = nnx.List([RotaryEmbedding(CONFIG), RotaryEmbedding(CONFIG)])
    fill_tables(pair)
    graph, state = nnx.split(pair)
    step = jax.jit(lambda s: nnx.state(nnx.merge(graph, s)), donate_argnums=0)
    step(step(state))


def test_export_with_a_symbolic_number_of_tokens():
    (tokens,) = jax.export.symbolic_shape("t")

    def run(query, cos, sin):
        return rotate(query, None, cos, sin, layout=LAYOUT)[0]

    row = jax.ShapeDtypeStruct((tokens, 32), jnp.float32)
    query = jax.ShapeDtypeStruct((tokens, 3, 64), jnp.float32)
    exported = jax.export.export(jax.jit(run))(query, row, row)
    np.testing.assert_allclose(
        exported.call(QUERY[0], COS[0], SIN[0]),
        oracle.rotate(np.asarray(QUERY[0]), COS[0], SIN[0], is_neox_style=True),
        rtol=0,
        atol=2e-6,
    )


def test_own_frequencies_are_for_one_length():
    own = tuple(float(f) for f in CONFIG.frequencies.inv_freq)
    config = dataclasses.replace(CONFIG, scaling=Dynamic(factor=2.0), inv_freq=own)
    with pytest.raises(ValueError, match="inv_freq must be None for frequencies that"):
        config.for_length(9000)
    fixed = dataclasses.replace(CONFIG, inv_freq=own)
    assert fixed.for_length(9000) == fixed


def test_query_temperature_at_the_ends_of_int32():
    llama4 = QueryTemperature(scale=0.1, length=8192, shift=1)
    far = 2**31 - 1
    right = np.log(np.floor((far + 1.0) / 8192) + 1) * 0.1 + 1
    made = query_temperature(jnp.array([far, -(2**31)], jnp.int32), llama4)
    np.testing.assert_allclose(made, [right, 1.0], rtol=3e-7)
    with pytest.raises(ValueError, match="must fit int32, got 4294975487"):
        query_temperature(np.array([2**32 + 8191]), llama4)
    with pytest.raises(TypeError, match="positions must be integers, got float32"):
        query_temperature(jnp.array([1.0]), llama4)


def test_inverse_of_float64_heads_and_of_tiny_amplitudes():
    tiny = Yarn(factor=4.0, original_max_position_embeddings=64, attention_factor=1e-20)
    config = dataclasses.replace(CONFIG, scaling=tiny)
    cos, sin = lookup(
        jnp.asarray(compute_cos_sin_cache(config)), POSITIONS, layout=LAYOUT
    )
    there, _ = rotate(QUERY, None, cos, sin, layout=LAYOUT)
    back, _ = rotate(there, None, cos, sin, layout=LAYOUT, inverse=True)
    np.testing.assert_allclose(back, QUERY, rtol=2e-6, atol=2e-6)
    with jax.enable_x64(True):
        wide = QUERY.astype(jnp.float64)
        there, _ = rotate(wide, None, COS, SIN, layout=LAYOUT)
        back, _ = rotate(there, None, COS, SIN, layout=LAYOUT, inverse=True)
        np.testing.assert_allclose(back, wide, rtol=0, atol=1e-14)


def test_shifts_too_far_to_move_a_key():
    with pytest.raises(
        ValueError, match="below the table's 4096 rows, got -4096; a sh"
    ):
        rerope(QUERY, np.full((1, 300), -4096), TABLE, layout=LAYOUT)
    rerope(QUERY, np.full((1, 300), -4095), TABLE, layout=LAYOUT)
    far = jnp.full((1, 300), -(2**31), jnp.int32)
    assert np.isnan(rerope(QUERY, far, TABLE, layout=LAYOUT)).all()
    several = dataclasses.replace(LAYOUT, axis_of_frequency=(0, 1) * 16)
    with pytest.raises(ValueError, match="along one axis; this layout has several"):
        rerope(QUERY, far, TABLE, layout=several)


def test_a_config_is_no_layout(unchecked):
    message = "must be a RotaryLayout, got RopeConfig; of a RopeConfig it is config.lay"
    wrong: dict[str, Any] = {"layout": CONFIG}
    with pytest.raises(TypeError, match=message):
        rerope(QUERY, POSITIONS, TABLE, **wrong)
    with pytest.raises(TypeError, match=message):
        permute_pairing(np.ones(64), **wrong, from_="neox", to="gptj")


def test_a_table_without_rows(unchecked):
    with pytest.raises(ValueError, match=r"a row for position 0, got shape \(0, 64\)"):
        lookup(TABLE[:0], POSITIONS, layout=LAYOUT)


def test_a_table_as_an_argument_of_what_is_differentiated():
    def total(query, table):
        return apply_rope(POSITIONS, query, None, table, layout=LAYOUT)[0].sum()

    with pytest.raises(TypeError, match="pass it through jax.lax.stop_gradient"):
        jax.grad(total, argnums=1)(QUERY, TABLE)
    grad = jax.grad(lambda query, table: total(query, lax.stop_gradient(table)), (0, 1))
    assert not grad(QUERY, TABLE)[1].any()


def test_one_flattened_head_and_a_shared_axis_are_ambiguous():
    square = QUERY[0, :3]  # [T, N, H] with T = N, for rows [1, T, R/2].
    with pytest.raises(ValueError, match="the two cannot be told apart"):
        apply_rope(jnp.arange(3)[None], square, None, TABLE, layout=LAYOUT)
    with pytest.raises(ValueError, match="key must be .* the two cannot be told apart"):
        rerope(square, jnp.arange(3)[None], TABLE, layout=LAYOUT)


def test_errors_of_rerope_speak_of_its_key(unchecked):
    for wrong, error in ((QUERY[..., :5], ValueError), (QUERY > 0, TypeError)):
        with pytest.raises(error, match="^key must be "):
            rerope(wrong, POSITIONS, TABLE, layout=LAYOUT)


def test_the_bits_of_eager_and_jitted_calls():
    def inverse(query, cos, sin):
        return rotate(query, None, cos, sin, layout=LAYOUT, inverse=True)[0]

    def move(query):
        return rerope(query, POSITIONS - 7, TABLE, layout=LAYOUT)

    for run, args in ((inverse, (QUERY, COS, SIN)), (move, (QUERY,))):
        np.testing.assert_array_equal(run(*args), jax.jit(run)(*args))
    far = RotaryEmbedding(CONFIG, table="two_level")
    for eager, jitted in zip(
        far.rows(POSITIONS), jax.jit(lambda p: far.rows(p))(POSITIONS), strict=True
    ):
        np.testing.assert_array_equal(eager, jitted)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"rope_interleave": "false"}, TypeError, "rope_interleave must be a bool"),
        ({"no_rope_layers": ["0", "1"]}, TypeError, "must be a list of 0 and 1"),
        ({"no_rope_layers": 5}, TypeError, "must be a list of 0 and 1, got 5"),
        ({"layer_types": "full"}, TypeError, "must be a list of strings, got 'full'"),
        ({"layer_types": 5}, TypeError, "must be a list of strings, got 5"),
        ({"model_type": ["llama"]}, TypeError, "model_type must be a string"),
        ({"rope_scaling": False}, TypeError, "rope_scaling must be a mapping, got Fal"),
        ({"rope_scaling": []}, TypeError, r"rope_scaling must be a mapping, got \[\]"),
        ({"rope_theta": float("nan")}, ValueError, "rope_theta must be finite"),
        ({"rope_theta": 10**400}, ValueError, "rope_theta must be finite.*got inf"),
        ({"num_hidden_layers": 10**9}, ValueError, "must be at most 65536"),
        ({"head_dim": 10**9}, ValueError, "head_dim must be at most 65536"),
        (
            {
                "rope_scaling": {
                    "rope_type": "telechat3-yarn",
                    "original_max_position_embeddings": 16,
                    "mscale": 1.0,
                    "mscale_all_dim": 2.0,
                }
            },
            ValueError,
            "mscale must be None under telechat3-yarn.* got 1.0; is it plain yarn",
        ),
        (
            {"text_config": {**SIZES, "rope_theta": 1e4}, "rope_theta": 1e6},
            ValueError,
            "rope_theta must stand in text_config.* got 1000000.0 beside it",
        ),
    ],
)
def test_values_that_were_taken_in_silence(config, error, message):
    with pytest.raises(error, match=message):
        layers_from_hf({**SIZES, "rope_theta": 1e4, **config})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"head_dim": np.uint8(200)},
            TypeError,
            "must be an int, got np.uint8",
        ),
        (
            {"dual_chunk": {"chunk_size": 4}},
            TypeError,
            "must be a DualChunk, got",
        ),
        (
            {"rope_theta": 1e-300, "angle_dtype": "float32"},
            ValueError,
            "be finite and ",
        ),
        (
            {"scaling": Yarn(factor=2.0, mscale=1e300, mscale_all_dim=1.0)},
            ValueError,
            "a positive f",
        ),
        ({"scaling": Yarn(factor=2.0), "rope_theta": 1}, ValueError, "must not be 1"),
        ({"axis_of_frequency": (200,) * 32}, ValueError, "be at most 15, got 200"),
    ],
)
def test_configs_that_made_nonsense(fields, error, message):
    with pytest.raises(error, match=message):
        RopeConfig(
            **{
                "head_dim": 64,
                "rope_theta": 1e4,
                "max_position_embeddings": 64,
                **fields,
            }
        )


def test_a_replaced_head_width_rotates_whole():
    wider = dataclasses.replace(CONFIG, head_dim=128)
    assert wider.layout.rotary_dim == 128
