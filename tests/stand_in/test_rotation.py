"""Rotations on the stand-in: right, static, differentiable, sharded, compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import assert_static, composites

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, lookup, rotate

pytestmark = pytest.mark.hpu
RNG = np.random.default_rng(0)
B, T, N, H, ROWS = 2, 8, 4, 64, 128
CONFIG = RopeConfig(head_dim=H, rope_theta=1e4, max_position_embeddings=ROWS)
TABLE = compute_cos_sin_cache(CONFIG)


def heads(dtype="float32", tokens=T):
    return jnp.asarray(RNG.standard_normal((B, tokens, N, H)), dtype)


def positions(tokens=T):
    return RNG.integers(0, ROWS, (B, tokens)).astype(np.int32)


@jax.jit
def turn(table, where, x):
    return apply_rope(where, x, None, table, layout=CONFIG.layout, out_of_range="clip")[
        0
    ]


def exact(where, x, *, config=CONFIG, table=TABLE):
    half = config.layout.rotary_dim // 2
    rows = np.asarray(table)[where]
    return oracle.rotate(
        np.asarray(x),
        rows[..., :half],
        rows[..., half:],
        is_neox_style=config.is_neox_style,
        offset=config.rotary_offset,
    )


def test_the_default_backend_is_the_stand_in(stand_in, hpu):
    assert jax.default_backend() == hpu.platform == hpu.client.platform == "hpu"
    assert hpu.device_kind == "stand-in"
    before = stand_in.executions
    jax.block_until_ready(jnp.arange(3) + 1)
    assert stand_in.executions > before


@pytest.mark.parametrize("rotary_dim", [H, 32])
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_within_the_bound(hpu, dtype, is_neox_style, rotary_dim):
    config = RopeConfig(
        head_dim=H,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        rope_theta=1e4,
        max_position_embeddings=ROWS,
    )
    table = compute_cos_sin_cache(config)
    where, x = positions(), heads(dtype)

    @jax.jit
    def run(table, where, x):
        return apply_rope(
            where, x, None, table, layout=config.layout, out_of_range="clip"
        )[0]

    out = run(jnp.asarray(table), where, x)
    assert out.dtype == x.dtype and out.devices() == {hpu}
    half, rows = rotary_dim // 2, table[where]
    style = {"is_neox_style": is_neox_style, "offset": 0}
    limit = oracle.bound(
        np.asarray(x), rows[..., :half], rows[..., half:], dtype=dtype, **style
    )
    oracle.assert_within(out, exact(where, x, config=config, table=table), limit)


def test_the_program_that_the_plugin_received(stand_in):
    jax.clear_caches()
    before = len(stand_in.programs)
    turn(jnp.asarray(TABLE), positions(), heads("bfloat16"))
    (text,) = stand_in.texts_since(before)
    assert_static(text)
    rows = f"{B}x{T}x1x{H}xf32"
    assert composites(text) == [(f"{B}x{T}x{N}x{H}xbf16", rows, rows, 0, 1)]
    assert text.count("stablehlo.gather<") == 1


def test_new_positions_do_not_compile_and_a_new_length_does_once(stand_in):
    table, x = jnp.asarray(TABLE), heads()
    turn(table, positions(), x)
    compiled, ran = len(stand_in.programs), stand_in.executions
    for _ in range(5):
        jax.block_until_ready(turn(table, positions(), x))
    assert len(stand_in.programs) == compiled
    assert stand_in.executions >= ran + 5
    for _ in range(3):
        turn(table, positions(3), heads(tokens=3))
    assert len(stand_in.texts_since(compiled)) == 1


def test_positions_past_the_table_read_its_last_row():
    table, x = jnp.asarray(TABLE), heads()
    far = np.full((B, T), ROWS + 50, np.int32)
    np.testing.assert_array_equal(
        turn(table, far, x), turn(table, np.full_like(far, ROWS - 1), x)
    )


def test_gradient_and_hessian_vector_product():
    table, where, x = jnp.asarray(TABLE), positions(), heads()

    def loss(x):
        return jnp.sum(turn(table, where, x) ** 2)

    gradient, product = jax.jvp(jax.jit(jax.grad(loss)), (x,), (x,))
    for result in (gradient, product):
        np.testing.assert_allclose(result, 2 * np.asarray(x), rtol=0, atol=2e-5)


def test_derivatives_of_the_rows():
    """d/dcos of <rotate(x), w> is x1 w1 + x2 w2, and of sin x1 w2 - x2 w1."""
    x, weight = heads(), heads()
    cos, sin = lookup(jnp.asarray(TABLE), positions(), layout=CONFIG.layout)

    def inner(cos, sin):
        turned = rotate(x, None, cos, sin, layout=CONFIG.layout)[0]
        return jnp.vdot(turned, weight)

    a, b = np.split(np.asarray(x, np.float64), 2, -1)
    c, d = np.split(np.asarray(weight, np.float64), 2, -1)
    expected = (a * c + b * d).sum(-2), (a * d - b * c).sum(-2)
    for gradient, wanted in zip(
        jax.grad(inner, argnums=(0, 1))(cos, sin), expected, strict=True
    ):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-5)


def test_vmap():
    table, where, x = jnp.asarray(TABLE), positions(), heads()
    mapped = jax.vmap(turn, in_axes=(None, 0, 0))(table, where, x)
    np.testing.assert_allclose(mapped, exact(where, x), rtol=0, atol=2e-6)


def test_shard_map_over_two_devices():
    table, where, x = jnp.asarray(TABLE), positions(), heads()
    mesh = jax.make_mesh(
        (2,), ("b",), devices=jax.devices("hpu")[:2], axis_types=(AxisType.Auto,)
    )
    mapped = jax.shard_map(
        turn, mesh=mesh, in_specs=(P(), P("b"), P("b")), out_specs=P("b")
    )
    out = jax.jit(mapped)(table, where, x)
    assert len(out.devices()) == 2
    np.testing.assert_allclose(out, exact(where, x), rtol=0, atol=2e-6)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(table, where, x) ** 2)))(x)
    np.testing.assert_allclose(gradient, 2 * np.asarray(x), rtol=0, atol=2e-5)


def test_the_same_function_on_the_processors_own_backend(stand_in, cpu):
    where, x = positions(), np.asarray(heads())
    arguments = jax.device_put((TABLE, where, x), cpu)
    before = len(stand_in.programs)
    out = turn(*arguments)
    assert out.devices() == {cpu} and len(stand_in.programs) == before
    np.testing.assert_allclose(out, exact(where, x), rtol=0, atol=2e-6)


def test_one_export_for_both_platforms_called_on_both(hpu, cpu):
    where, x = positions(), np.asarray(heads())
    exported = jax.export.export(turn, platforms=["cpu", "hpu"])(TABLE, where, x)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "hpu")
    for device in (hpu, cpu):
        out = again.call(*jax.device_put((TABLE, where, x), device))
        assert out.devices() == {device}
        np.testing.assert_allclose(out, exact(where, x), rtol=0, atol=2e-6)


def test_an_export_for_the_stand_in_alone_keeps_the_composite(stand_in):
    where, x = positions(), heads()
    exported = jax.export.export(turn, platforms=["hpu"])(TABLE, where, x)
    before = len(stand_in.programs)
    out = jax.export.deserialize(exported.serialize()).call(TABLE, where, x)
    assert len(composites("\n".join(stand_in.texts_since(before)))) == 1
    np.testing.assert_allclose(out, exact(where, x), rtol=0, atol=2e-6)
