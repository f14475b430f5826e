"""jrope.fused on every implementation, against float64 NumPy and separate layers."""

import itertools
from typing import Any

import fused_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_oracle import CONFIGS, NORMS, assert_close, turned, wide
from jax.sharding import AxisType, PartitionSpec

from jrope import (
    RopeConfig,
    TwoLevelTable,
    compute_cos_sin_cache,
    lookup,
    mrope_axes,
    rotate,
)
from jrope.fused import QkNorm, qk_norm_rope, qkv_rope
from jrope.fused._kernels import PLATFORMS, Kernels
from pallas_kernels import jax_too_old

RNG = np.random.default_rng(0)
N, K, T = 3, 2, 5
WEIGHTS = ("query_weight", "key_weight")


@pytest.fixture(params=["xla", "pallas"])
def implementation(request, monkeypatch):
    """Each way to run an operation; here the kernels are interpreted."""
    if request.param == "pallas":
        if jax_too_old() is not None:
            pytest.skip(str(jax_too_old()))
        monkeypatch.setitem(PLATFORMS, "cpu", Kernels(interpret=True))
    return request.param


def table_of(config):
    return jnp.asarray(compute_cos_sin_cache(config))


def random(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def case(name, dtype, leading=(T,)):
    """A config, positions with one padded, a packed buffer and two weights."""
    config = CONFIGS[name]
    positions = jnp.asarray(RNG.integers(0, 64, leading), jnp.int32)
    positions = positions.at[..., 0].set(-1)
    qkv = random((*leading, (N + 2 * K) * config.head_dim), dtype)
    return config, positions, qkv, random(config.head_dim), random(config.head_dim)


def parts(qkv, config):
    heads = qkv.reshape(*qkv.shape[:-1], N + 2 * K, config.head_dim)
    return heads[..., :N, :], heads[..., N : N + K, :], heads[..., N + K :, :]


def weights_of(norm, *weights):
    """None without a norm, and for Llama 4's, which has no weights."""
    if norm is None or norm.order == "rotate_norm":
        return {}
    return dict(zip(WEIGHTS, weights, strict=True))


@pytest.mark.parametrize(
    ("name", "norm", "dtype"),
    [
        ("neox", "none", "bfloat16"),
        ("neox", "qwen3", "float16"),
        ("neox", "llama4", "float32"),
        ("gptj-partial", "none", "float32"),
        ("gptj-partial", "gemma", "bfloat16"),
        ("yarn-partial", "none", "float16"),
        ("yarn-partial", "qwen3", "float32"),
        ("yarn-partial", "llama4", "bfloat16"),
    ],
)
def test_qkv_rope_against_float64(name, norm, dtype, implementation):
    config, positions, qkv, *weights = case(name, dtype)
    norm, table = NORMS[norm], table_of(config)
    given = weights_of(norm, *weights)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    options |= {"norm": norm, "implementation": implementation, **given}
    outs = qkv_rope(positions, qkv, table, **options)
    rows = np.split(np.asarray(table)[np.maximum(positions, 0)], 2, axis=-1)
    heads = parts(qkv, config)
    for out, x, of in zip(outs, heads, WEIGHTS, strict=False):
        assert out.dtype == qkv.dtype
        exact, error = turned(x, given.get(of), rows, norm, config.layout)
        assert_close(out, exact, error, dtype)
    np.testing.assert_array_equal(wide(outs[2]), wide(heads[2]))
    if implementation == "pallas" and name == "gptj-partial" and norm is not None:
        # A single head has 2 pairs before and 22 after those that turn.
        with pytest.raises(ValueError, match="cannot be rewritten in place by four"):
            qkv_rope(positions, qkv, table, packed=True, **options)
    else:
        packed = qkv_rope(positions, qkv, table, packed=True, **options)
        for out, part in zip(outs, parts(packed, config), strict=True):
            np.testing.assert_array_equal(wide(part), wide(out))
    given_rows = lookup(table, positions, layout=config.layout)
    for out, other in zip(
        outs, qkv_rope(None, qkv, given_rows, **options), strict=True
    ):
        np.testing.assert_array_equal(wide(other), wide(out))


@pytest.mark.parametrize(
    ("name", "norm", "gated"),
    [
        ("neox", "qwen3", True),
        ("neox", "llama4", False),
        ("gptj-partial", "gemma", True),
        ("yarn-partial", "llama4", True),
        ("yarn-partial", "gemma", False),
    ],
)
def test_qk_norm_rope_against_float64(name, norm, gated, implementation):
    config, positions, _, *weights = case(name, "bfloat16", (2, 3))
    norm, table = NORMS[norm], table_of(config)
    given = weights_of(norm, *weights)
    query = random((2, 3, N, config.head_dim * (1 + gated)), "bfloat16")
    key = random((2, 3, K, config.head_dim), "bfloat16")
    query_out, key_out, *gate = qk_norm_rope(
        positions,
        query,
        key,
        table,
        layout=config.layout,
        norm=norm,
        gated=gated,
        implementation=implementation,
        **given,
    )
    rows = np.split(np.asarray(table)[np.maximum(positions, 0)], 2, axis=-1)
    head = query[..., : config.head_dim]
    for out, x, of in zip((query_out, key_out), (head, key), WEIGHTS, strict=True):
        exact, error = turned(x, given.get(of), rows, norm, config.layout)
        assert_close(out, exact, error, "bfloat16")
    assert len(gate) == gated
    for out in gate:
        np.testing.assert_array_equal(wide(out), wide(query[..., config.head_dim :]))


@pytest.mark.parametrize("order", ["norm_rotate", "rotate_norm"])
def test_rounded_between_has_the_bits_of_separate_layers(order, implementation):
    """The layers: a norm computed in float32 and cast, and jrope.rotate."""
    config, positions, qkv, weight, _ = case("neox", "bfloat16", (16,))
    norm = QkNorm(epsilon=1e-6, order=order, rounded=True)
    layout, table = config.layout, table_of(config)
    query, key, _ = parts(qkv, config)
    options: dict[str, Any] = {"layout": layout, "implementation": implementation}

    def fused(query, key, table: Any = table, positions: Any = positions):
        return qk_norm_rope(
            positions,
            query,
            key,
            table,
            norm=norm,
            query_weight=weight,
            key_weight=weight,
            **options,
        )

    # The same norm alone: a rotation by nothing is exact.
    still = jnp.ones((16, 32), jnp.float32), jnp.zeros((16, 32), jnp.float32)

    def normed(*xs):
        return fused(*xs, table=still, positions=None)

    def rotated(query, key):
        return rotate(
            query, key, *lookup(table, positions, layout=layout), layout=layout
        )

    separate = (rotated, normed) if order == "rotate_norm" else (normed, rotated)
    got = fused(query, key)
    want = separate[1](*separate[0](query, key))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(wide(one), wide(other))
    free = qk_norm_rope(
        positions,
        query,
        key,
        table,
        query_weight=weight,
        key_weight=weight,
        norm=QkNorm(epsilon=1e-6, order=order),
        **options,
    )
    assert any((wide(x) != wide(y)).any() for x, y in zip(got, free, strict=True))


@pytest.mark.parametrize("out_of_range", ["nan", "clip"])
def test_positions_past_the_table(out_of_range, implementation):
    config = CONFIGS["neox"]
    table = table_of(config)
    qkv = random((4, (N + 2 * K) * 64))
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    options |= {"implementation": implementation}

    def run(positions, policy):
        positions = jnp.asarray(positions, jnp.int32)
        return qkv_rope(positions, qkv, table, out_of_range=policy, **options)

    query, key, value = run([63, 64, 2**31 - 1, -(2**31)], out_of_range)
    inside, _, _ = run([63, 63, 63, 0], "nan")
    past = np.isnan(np.asarray(query)).all((1, 2))
    if out_of_range == "nan":
        assert past.tolist() == [False, True, True, False]
        np.testing.assert_array_equal(query[::3], inside[::3])
    else:
        np.testing.assert_array_equal(query, inside)
    assert np.isnan(np.asarray(key)).all((1, 2)).tolist() == past.tolist()
    assert np.isfinite(value).all()


def test_multimodal_positions_and_other_tables_become_rows(implementation):
    """No kernel knows them: `lookup` merges the axes once."""
    config = RopeConfig(
        head_dim=64,
        rope_theta=1e4,
        max_position_embeddings=64,
        axis_of_frequency=mrope_axes((8, 12, 12), rotary_dim=64),
    )
    qkv = random((T, (N + 2 * K) * 64), "bfloat16")
    options = {"query_heads": N, "key_heads": K, "implementation": implementation}
    positions = jnp.asarray(RNG.integers(0, 64, (3, T)), jnp.int32)
    table = table_of(config)
    got = qkv_rope(positions, qkv, table, layout=config.layout, **options)
    rows = lookup(table, positions, layout=config.layout)
    want = rotate(*parts(qkv, config)[:2], *rows, layout=config.layout)
    for one, other in zip(got, want, strict=False):
        np.testing.assert_array_equal(wide(one), wide(other))
    plain = CONFIGS["neox"]
    two_level = TwoLevelTable.from_config(plain)
    got = qkv_rope(positions[0], qkv, two_level, layout=plain.layout, **options)
    rows = lookup(two_level, positions[0], layout=plain.layout)
    want = rotate(*parts(qkv, plain)[:2], *rows, layout=plain.layout)
    for one, other in zip(got, want, strict=False):
        np.testing.assert_array_equal(wide(one), wide(other))


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("neox", "none"),
        ("neox", "gemma"),
        ("gptj-partial", "qwen3"),
        ("yarn-partial", "llama4"),
    ],
)
def test_gradients_are_the_float64_oracles(name, norm, implementation):
    """By central differences of the oracle, weights included."""
    config, positions, qkv, *weights = case(name, "float32", (2,))
    norm, table = NORMS[norm], table_of(config)
    given = weights_of(norm, *weights)
    shapes = [(2, heads, config.head_dim) for heads in (N, K, K)]
    cotangents = [random(shape) for shape in shapes]

    def loss(qkv, given):
        outs = qkv_rope(
            positions,
            qkv,
            table,
            layout=config.layout,
            query_heads=N,
            key_heads=K,
            norm=norm,
            implementation=implementation,
            **given,
        )
        return sum(jnp.vdot(out, ct) for out, ct in zip(outs, cotangents, strict=True))

    rows = np.split(np.asarray(table)[np.maximum(positions, 0)], 2, axis=-1)

    def exact(qkv, given):
        query, key, value = parts(qkv, config)
        total = np.vdot(value, wide(cotangents[2]))
        for x, name, ct in zip(
            (query, key), ("query_weight", "key_weight"), cotangents, strict=False
        ):
            out, _ = turned(x, given.get(name), rows, norm, config.layout)
            total += np.vdot(out, wide(ct))
        return total

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(qkv, given)
    operands = jax.tree.map(wide, (qkv, given))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        step = jax.tree.map(
            lambda x, rng=rng: 1e-5 * rng.standard_normal(x.shape), operands
        )
        ahead, behind = (
            exact(*jax.tree.map(lambda x, d, s=sign: x + s * d, operands, step))
            for sign in (1, -1)
        )
        along = sum(
            np.vdot(wide(g), d)
            for g, d in zip(
                jax.tree.leaves(gradients), jax.tree.leaves(step), strict=True
            )
        )
        np.testing.assert_allclose(along, (ahead - behind) / 2, rtol=1e-4, atol=1e-8)


def test_forward_mode_and_vmap(implementation):
    config, positions, qkv, *_ = case("neox", "float32", (2, 3))
    table = table_of(config)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    options |= {"implementation": implementation}

    def run(positions, qkv):
        return qkv_rope(positions, qkv, table, **options)

    outs, dots = jax.jvp(lambda qkv: run(positions, qkv), (qkv,), (2 * qkv,))
    mapped = jax.vmap(run)(positions, qkv)
    shared = jax.vmap(run, in_axes=(None, 1), out_axes=1)(positions[0], qkv[0][:, None])
    for out, dot, each, one in zip(outs, dots, mapped, shared, strict=True):
        np.testing.assert_allclose(dot, 2 * out, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(each, out)
        np.testing.assert_array_equal(one[:, 0], out[0])


def test_vmap_over_a_table_is_refused_by_the_kernel():
    config, positions, qkv, *_ = case("neox", "float32")
    tables = jnp.stack([table_of(config)] * 2)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    with pytest.raises(NotImplementedError, match="mapped by vmap over axes of tokens"):
        jax.vmap(lambda table: qkv_rope(positions, qkv, table, **options))(tables)


@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    config, positions, qkv, *_ = case("neox", "float32", (4, 2))
    table = table_of(config)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}

    def run(positions, qkv, table):
        named = implementation if not check_vma else None
        return qkv_rope(positions, qkv, table, implementation=named, **options)

    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("b")
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(spec, spec, PartitionSpec()),
        out_specs=spec,
        check_vma=check_vma,
    )
    got = jax.jit(mapped)(positions, qkv, table)
    for one, other in zip(got, run(positions, qkv, table), strict=True):
        np.testing.assert_array_equal(one, other)


def test_none_is_the_definition_where_there_are_no_kernels():
    config, positions, qkv, *_ = case("neox", "float32")
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    table = table_of(config)
    got = qkv_rope(positions, qkv, table, **options)
    want = qkv_rope(positions, qkv, table, implementation="xla", **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="must be 'xla' on platform 'cpu', got 'pall"):
        qkv_rope(positions, qkv, table, implementation="pallas", **options)
    with jax.disable_jit():
        eager = qkv_rope(positions, qkv, table, **options)
    for one, other in zip(eager, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_each_axis_of_length_1_is_shared(implementation):
    config, positions, qkv, *_ = case("neox", "float32", (2, 3))
    table = table_of(config)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    options |= {"implementation": implementation}
    got = qkv_rope(positions[:1], qkv, table, **options)
    want = qkv_rope(jnp.stack([positions[0]] * 2), qkv, table, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_oracle_norm_is_the_papers():
    x = np.array([[3.0, 4.0]])
    np.testing.assert_allclose(
        fused_oracle.rms(x, np.array([1.0, 0.0]), 0.0, True),
        [[2 * 3 / np.sqrt(12.5), 4 / np.sqrt(12.5)]],
    )
    assert len(list(itertools.product(NORMS, CONFIGS))) == 12
