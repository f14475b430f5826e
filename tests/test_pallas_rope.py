"""The rope kernel and its route, in Pallas' interpreter, against a float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jrope
from jrope._primitive import bind_rope
from jrope._routes import BY_NAME, Rotation, choose_route
from jrope._routes.pallas import PALLAS, PallasRoute
from pallas_kernels import OLDEST_JAX, jax_too_old

interpreted = pytest.mark.skipif(
    jax_too_old() is not None, reason=jax_too_old() or "this jax has Mosaic GPU"
)

# (N, K or None, H, R, offset, neox, dtype)
SHAPES = [
    (32, 8, 128, 128, 0, True, "bfloat16"),
    (28, 4, 128, 128, 0, True, "bfloat16"),
    (71, 1, 64, 64, 0, True, "bfloat16"),
    (4, 1, 256, 256, 0, True, "float16"),
    (16, 1, 64, 64, 0, False, "bfloat16"),
    (8, 8, 80, 32, 0, True, "float16"),
    (4, 4, 256, 64, 0, False, "bfloat16"),
    (3, 1, 96, 36, 4, True, "float32"),
    (6, 2, 192, 96, 96, False, "float16"),
    (3, None, 64, 10, 3, False, "bfloat16"),
    (2, 1, 64, 2, 1, True, "float32"),
    (32, 8, 256, 256, 0, True, "float32"),
]


def operands(shape, leading=(3,), row_leading=None):
    heads_q, heads_k, head_dim, rotary_dim, _, _, dtype = shape
    rng = np.random.default_rng(0)
    xs = [
        jnp.asarray(rng.standard_normal((*leading, heads, head_dim)), dtype)
        for heads in (heads_q, heads_k)
        if heads is not None
    ]
    # Amplitude 1.25 is an attention factor.
    angles = rng.uniform(0, 50, (*(row_leading or leading), rotary_dim // 2))
    cos, sin = (jnp.asarray(1.25 * f(angles), jnp.float32) for f in (np.cos, np.sin))
    return xs, (cos, sin)


def assert_turned(outs, xs, cos, sin, shape):
    *_, offset, neox, dtype = shape
    cos, sin = (np.asarray(row) for row in (cos, sin))
    style = {"is_neox_style": neox, "offset": offset}
    for out, x in zip(outs, xs, strict=True):
        assert out.dtype == x.dtype
        wide = np.asarray(x.astype(jnp.float32))
        exact = oracle.rotate(wide, cos, sin, **style)
        bound = oracle.bound(wide, cos, sin, dtype=dtype, **style)
        oracle.assert_within(out, exact, bound)


@interpreted
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_within_the_bound_of_a_float64_oracle(shape, in_place):
    from pallas_kernels import rope

    *_, rotary_dim, offset, neox, _ = shape
    xs, rows = operands(shape)
    options = {"is_neox_style": neox, "rotary_offset": offset, "in_place": in_place}
    if in_place and rotary_dim // 2 % 4:
        with pytest.raises(ValueError, match="do not turn them in place"):
            rope(xs, *rows, interpret=True, **options)
        return
    outs = jax.jit(lambda xs, rows: rope(xs, *rows, interpret=True, **options))(
        xs, rows
    )
    assert_turned(outs, xs, *rows, shape)


@interpreted
@pytest.mark.parametrize(
    ("leading", "row_leading"),
    [((2, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 3), (2, 1)), ((3, 2, 2), (1, 2, 1))],
)
def test_rows_are_shared_along_axes_of_length_1(leading, row_leading):
    from pallas_kernels import rope

    shape = (4, 2, 64, 64, 0, True, "float32")
    xs, rows = operands(shape, leading, row_leading)
    outs = rope(xs, *rows, is_neox_style=True, interpret=True)
    cos, sin = (np.broadcast_to(row, (*leading, 32)) for row in rows)
    assert_turned(outs, xs, cos, sin, shape)


@interpreted
def test_wrong_rows_and_heads_are_errors():
    from pallas_kernels import rope

    xs, rows = operands((4, 2, 64, 64, 0, True, "float32"))
    with pytest.raises(ValueError, match="or 1 where they are shared, got"):
        rope(xs, *(row[:2] for row in rows), is_neox_style=True, interpret=True)
    with pytest.raises(ValueError, match="operands must have the leading axes"):
        rope([xs[0], xs[1][:2]], *rows, is_neox_style=True, interpret=True)
    with pytest.raises(ValueError, match="rotary_offset . rotary_dim must be at most"):
        rope(xs, *rows, is_neox_style=True, rotary_offset=2, interpret=True)


@interpreted
def test_features_that_pass_are_untouched_by_inf_and_nan():
    from pallas_kernels import rope

    (x, _), rows = operands((4, 1, 64, 32, 8, True, "float32"))
    odd = jnp.asarray([jnp.inf, -0.0, jnp.nan, 1.0] * 2, jnp.float32)
    x = x.at[..., :8].set(odd).at[..., 56:].set(odd)
    for in_place, neox in itertools.product((True, False), repeat=2):
        options = {"is_neox_style": neox, "in_place": in_place}
        (out,) = rope([x], *rows, rotary_offset=8, interpret=True, **options)
        for part in (slice(0, 8), slice(56, 64)):
            assert (
                np.asarray(out[..., part]).tobytes()
                == np.asarray(x[..., part]).tobytes()
            )
        assert np.isfinite(out[..., 8:40]).all()


@pytest.fixture
def on_cpu(monkeypatch):
    """The route on this machine: `implementation="pallas"` is interpreted."""
    monkeypatch.setitem(BY_NAME, "cpu", (PallasRoute(interpret=True),))


def bind(xs, rows, shape, implementation="pallas"):
    *_, offset, neox, _ = shape
    return bind_rope(
        xs,
        *rows,
        is_neox_style=neox,
        rotary_offset=offset,
        implementation=implementation,
    )


ROUTED = [SHAPES[0], SHAPES[4], SHAPES[5]]


# huggingface/candle#3612
@interpreted
@pytest.mark.parametrize("shape", ROUTED)
def test_route_turns_and_differentiates_and_batches(on_cpu, shape):
    xs, rows = operands(shape, (2, 3))
    cotangents = [jnp.flip(x, -1) for x in xs]

    def run(implementation):
        def turned(*xs):
            return bind(xs, rows, shape, implementation)

        outs, pull = jax.vjp(turned, *xs)
        mapped = jax.vmap(lambda *xs: bind(xs, rows, shape, implementation), 2, 2)
        return outs, pull(cotangents), mapped(*(x[:, :, None] for x in xs))

    outs, gradients, mapped = jax.jit(run, static_argnums=0)("pallas")
    assert_turned(outs, xs, *rows, shape)
    assert_turned(gradients, cotangents, rows[0], -rows[1], shape)
    for got, out in zip(mapped, outs, strict=True):
        np.testing.assert_array_equal(got[:, :, 0], out)


@interpreted
def test_inverse_undoes_the_rotation(on_cpu):
    shape = (4, 1, 64, 64, 0, True, "float32")
    (query, key), (cos, sin) = operands(shape)
    layout = jrope.RotaryLayout(head_dim=64, rotary_dim=64)
    options = {"layout": layout, "implementation": "pallas"}
    turned = jrope.rotate(query, key, cos, sin, **options)
    back = jrope.rotate(*turned, cos, sin, inverse=True, **options)
    for got, want in zip(back, (query, key), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


MESH_SHAPE = (4, 4, 64, 32, 0, True, "float32")
HEADS, ROWS = PartitionSpec("b", "t", "n"), PartitionSpec("b", "t")
SPECS = ([HEADS, HEADS], (ROWS, ROWS))


def on_mesh():
    """A mesh, operands laid out on it, and the same in one place."""
    mesh = jax.make_mesh((2, 2, 2), ("b", "t", "n"), axis_types=(AxisType.Auto,) * 3)
    given = operands(MESH_SHAPE, (2, 4))
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), given, SPECS
    )
    return mesh, placed, given


def assert_on_mesh(mesh, outs, given):
    xs, (cos, sin) = given
    assert_turned(outs, xs, cos, sin, MESH_SHAPE)
    for out in outs:
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), out.ndim)


# jax-ml/jax#21855
@interpreted
def test_kernel_runs_under_shard_map(on_cpu):
    mesh, placed, given = on_mesh()
    run = jax.shard_map(
        lambda xs, rows: bind(xs, rows, MESH_SHAPE),
        mesh=mesh,
        in_specs=SPECS,
        out_specs=SPECS[0],
        check_vma=False,
    )
    xs, rows = placed
    assert_on_mesh(mesh, jax.jit(run)(xs, rows), given)


@interpreted
def test_each_device_turns_its_own_part(on_cpu, monkeypatch):
    """A stand-in for the kernel: JAX drops the interpreter's callbacks there."""
    parts = []

    def stand_in(route, *operands, is_neox_style, rotary_offset):
        *xs, cos, sin = operands
        parts.append([x.shape for x in operands])
        style = {"is_neox_style": is_neox_style, "rotary_offset": rotary_offset}
        return tuple(jrope.rotate_one(x, cos, sin, **style) for x in xs)

    monkeypatch.setattr(PallasRoute, "_turn", stand_in)
    mesh, placed, given = on_mesh()
    xs, rows = placed
    run = jax.jit(lambda xs, rows: bind(xs, rows, MESH_SHAPE))
    compiled = run.lower(xs, rows).compile()
    assert_on_mesh(mesh, compiled(xs, rows), given)
    assert parts[-1] == [(1, 2, 2, 64)] * 2 + [(1, 2, 16)] * 2
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
        assert collective not in str(compiled.as_text())


def rotation_of(platform="cuda", shape=(4, 2, 128), dtype="bfloat16", operands=1):
    return Rotation(
        platform=platform,
        xs=(jax.ShapeDtypeStruct(shape, dtype),) * operands,
        rows=jax.ShapeDtypeStruct((*shape[:-2], 16), jnp.float32),
        is_neox_style=True,
        rotary_offset=0,
    )


@interpreted
def test_cuda_keeps_xla_unless_the_kernel_is_named():
    assert choose_route(rotation_of(), None).name == "xla"
    assert choose_route(rotation_of(), "pallas") is PALLAS


@interpreted
@pytest.mark.parametrize(
    ("rotation", "reason"),
    [
        (rotation_of(shape=(4, 2, 100)), "head_dim must be one of .* got 100"),
        (rotation_of(dtype="float8_e5m2"), "dtype must be one of .* got float8_e5m2"),
        (rotation_of(operands=3), "a query and a key, got 3 operands"),
        (rotation_of(shape=(0, 2, 128)), "number of tokens must be known, got 0"),
    ],
)
def test_route_declines_with_a_reason(rotation, reason):
    with pytest.raises(ValueError, match=f"declines this rotation: .*{reason}"):
        choose_route(rotation, "pallas")


def test_an_old_jax_is_declined_with_the_reason(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    assert OLDEST_JAX == (0, 11, 2)
    with pytest.raises(ValueError, match=r"need jax >= 0\.11\.2, this is 0\.11\.1"):
        choose_route(rotation_of(), "pallas")


def test_other_platforms_have_no_such_route():
    with pytest.raises(ValueError, match="must be one of .* on platform 'cpu'"):
        choose_route(rotation_of(platform="cpu"), "pallas")
