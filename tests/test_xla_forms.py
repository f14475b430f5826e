"""Every form of the rotation against a float64 oracle, its twins and the compiler."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from benchmarks.workloads import WORKLOADS
from jrope._primitive import bind_rope
from jrope._routes import xla
from jrope._routes._forms import FORMS
from jrope._routes._route import Rotation
from jrope._routes.xla import CHOICES, choose_form

DTYPES = ("float32", "bfloat16", "float16")
# (H, R, offset): full, partial in front, partial at an odd offset.
PLACES = ((64, 64, 0), (80, 32, 0), (14, 8, 3))
Rotate = Callable[[Array, Array, Array], Array]


def operands(
    dtype: str, place: tuple[int, int, int], tokens: int = 7
) -> tuple[Array, Array, Array]:
    head_dim, rotary_dim, _ = place
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, tokens, 3, head_dim)).astype(np.float32)
    # The second batch entry has rows of its own; amplitude 1.25 is an attention factor.
    angles = rng.uniform(0, 50, (2, tokens, rotary_dim // 2))
    cos, sin = (
        jnp.asarray(1.25 * wave(angles), jnp.float32) for wave in (np.cos, np.sin)
    )
    return jnp.asarray(x, dtype), cos, sin


def oracle(
    x: Array, cos: Array, sin: Array, neox: bool, offset: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rotation in float64, and |x1 c| + |x2 s| of each result."""
    exact = np.asarray(x.astype(jnp.float32)).astype(np.float64)
    c, s = (np.asarray(row).astype(np.float64)[..., None, :] for row in (cos, sin))
    half = c.shape[-1]
    pair = np.arange(half)
    first = offset + (pair if neox else 2 * pair)
    second = first + (half if neox else 1)
    a, b = exact[..., first], exact[..., second]
    size = np.zeros_like(exact)
    out = exact.copy()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    size[..., first] = np.abs(a * c) + np.abs(b * s)
    size[..., second] = np.abs(b * c) + np.abs(a * s)
    return out, size


def half_ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between neighbours of `dtype` at each value."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values), float(info.tiny))))
    return 0.5 * 2.0 ** (exponent - info.nmant)


@functools.cache
def turned(form: str, dtype: str) -> dict[tuple[bool, tuple[int, int, int]], Array]:
    """Every pairing and place by one form, in one program: compiling is what costs."""
    cases = list(itertools.product((True, False), PLACES))

    @jax.jit
    def program(inputs):
        return [
            FORMS[form](*inputs[i], is_neox_style=neox, rotary_offset=place[2])
            for i, (neox, place) in enumerate(cases)
        ]

    outs = program([operands(dtype, place) for _, place in cases])
    return dict(zip(cases, outs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", sorted(FORMS))
def test_form_is_within_the_bound_of_a_float64_oracle(form, dtype):
    for (neox, place), got in turned(form, dtype).items():
        x, cos, sin = operands(dtype, place)
        want, size = oracle(x, cos, sin, neox, place[2])
        assert got.dtype == x.dtype
        error = np.abs(np.asarray(got.astype(jnp.float32)).astype(np.float64) - want)
        bound = half_ulp(want, dtype) + 2 * 2.0**-24 * size
        assert (error <= bound).all(), (neox, place, (error / bound).max())
        passing = size == 0
        assert passing.any() == (place[0] != place[1])
        assert (error[passing] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", sorted(FORMS))
def test_all_forms_give_the_same_bits_when_jitted(form, dtype):
    for case, want in turned("concat", dtype).items():
        got = turned(form, dtype)[case]
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), case


def moved(form: str, axes: tuple[int, int], tokens: int, heads: int) -> None:
    """The result with two axes swapped, within the oracle's bound."""
    x, cos, sin = operands("float32", (12, 8, 0), tokens)
    x = x[:, :, :heads]

    @jax.jit
    def program(x, cos, sin):
        return jnp.swapaxes(FORMS[form](x, cos, sin, is_neox_style=True), *axes)

    want, size = oracle(x, cos, sin, True, 0)
    got = np.swapaxes(np.asarray(program(x, cos, sin)), *axes)
    assert (np.abs(got - want) <= half_ulp(want, "float32") + 2.0**-23 * size).all()


SOUND = sorted(
    form for form in FORMS if form != "swap_update" or jax.__version_info__ >= (0, 12)
)


@pytest.mark.parametrize("form", SOUND)
def test_axes_that_move_at_no_cost(form):
    """XLA:CPU once overwrote features of a decode step that it had yet to read."""
    for axes, tokens, heads in (((1, 2), 1, 3), ((1, 2), 7, 1), ((2, 3), 7, 1)):
        moved(form, axes, tokens, heads)


def test_no_choice_is_a_form_that_this_jax_miscompiles(monkeypatch):
    for version in ((0, 10), (0, 11)):
        monkeypatch.setattr(jax, "__version_info__", (*version, 0))
        shapes = [jax.ShapeDtypeStruct((t, 2, 16), d) for t in (1, 99) for d in DTYPES]
        chosen = {
            choose_form(rotation_of(x, half, neox), x)
            for x, half, neox in itertools.product(shapes, (4, 8), (True, False))
        }
        assert "swap_update" not in chosen


@pytest.mark.parametrize("form", sorted(FORMS))
def test_features_that_pass_are_untouched_by_inf_and_nan(form):
    x, cos, sin = operands("float32", (14, 8, 3))
    passing = jnp.asarray([jnp.inf, -0.0, jnp.nan], jnp.float32)
    x = x.at[..., :3].set(passing).at[..., 11:].set(passing)

    @jax.jit
    def program(*inputs):
        turn = functools.partial(FORMS[form], rotary_offset=3)
        return [turn(*inputs, is_neox_style=neox) for neox in (True, False)]

    for got in program(x, cos, sin):
        for part in (slice(0, 3), slice(11, 14)):
            assert np.array_equal(got[..., part], x[..., part], equal_nan=True)
            assert np.array_equal(np.signbit(got[..., part]), np.signbit(x[..., part]))
        assert np.isfinite(got[..., 3:11]).all()


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_is_right_between_a_product_and_a_scatter(dtype, neox):
    """XLA:CPU may rewrite a temporary in place while it still reads of it."""
    x, cos, sin = (each[0] for each in operands(dtype, (80, 32, 0)))
    pages, places = jnp.arange(7) // 4, jnp.arange(7) % 4
    style = {"is_neox_style": neox, "rotary_offset": 0}

    def between(turn, x, cos, sin):
        cache = jnp.zeros((2, 4, 3, 80), x.dtype)
        return cache.at[pages, places].set(turn(jax.nn.silu(x), cos, sin))

    def chosen(x, cos, sin):
        return bind_rope([x], cos, sin, **style, implementation="xla")[0]

    definition = functools.partial(FORMS["concat"], **style)
    got, want = (
        jax.jit(functools.partial(between, turn))(x, cos, sin)
        for turn in (chosen, definition)
    )
    # Products of 16 bits are rounded or not, as the compiler likes.
    few = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=few, atol=few
    )


@pytest.fixture
def rotation(request, monkeypatch) -> Rotate:
    """A new function that rotates by the primitive, whose XLA route uses one form."""
    choices = dict.fromkeys(CHOICES, (xla.Choice(form=request.param),))
    monkeypatch.setattr(xla, "CHOICES", choices)

    def rotate(x: Array, cos: Array, sin: Array) -> Array:
        (out,) = bind_rope(
            [x], cos, sin, is_neox_style=False, rotary_offset=3, implementation="xla"
        )
        return out

    return rotate


@pytest.mark.parametrize("rotation", sorted(FORMS), indirect=True)
def test_form_runs_under_scan_vmap_and_grad(rotation):
    @jax.jit
    def program(x, cos, sin):
        want, pull = jax.vjp(lambda x: rotation(x, cos, sin), x)
        _, scanned = lax.scan(
            lambda _, row: (None, rotation(*row)), None, (x, cos, sin)
        )
        over_heads = jax.vmap(rotation, in_axes=(2, None, None), out_axes=2)
        mapped = over_heads(x[:, :, :, None], cos, sin)[:, :, :, 0]
        return want, scanned, mapped, pull(want)[0]

    x, cos, sin = operands("float32", (14, 8, 3))
    want, scanned, mapped, back = program(x, cos, sin)
    np.testing.assert_array_equal(scanned, want)
    np.testing.assert_array_equal(mapped, want)
    # Rotated there and back: the square of the amplitude 1.25.
    wanted = np.asarray(x).copy()
    wanted[..., 3:11] *= 1.5625
    np.testing.assert_allclose(back, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rotation", sorted(FORMS), indirect=True)
def test_form_keeps_the_sharding_of_meshes(rotation):
    inputs = operands("float32", (14, 8, 3))
    want = turned("concat", "float32")[False, (14, 8, 3)]
    shards = 2 if len(jax.devices()) > 1 else 1
    spec = PartitionSpec("b")
    mesh = jax.make_mesh((shards,), ("b",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        got = jax.jit(rotation)(*(jax.device_put(each, spec) for each in inputs))
        assert got.sharding.spec[0] == "b"
        np.testing.assert_array_equal(got, want)
    mesh = jax.make_mesh((shards,), ("b",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(rotation, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(*inputs), want)


def rotation_of(
    x: jax.ShapeDtypeStruct, half: int, neox: bool, platform: str = "cpu"
) -> Rotation:
    return Rotation(
        platform=platform,
        xs=(x,),
        rows=jax.ShapeDtypeStruct((*x.shape[:-2], half), jnp.float32),
        is_neox_style=neox,
        rotary_offset=0,
    )


def chosen_temporary(dtype: str, neox: bool, partial: bool, tokens: int) -> float:
    """Temporaries of the chosen form as compiled, over the size of its operand."""
    layout = WORKLOADS["llama3-8b"].config.layout
    head_dim = layout.head_dim
    half = head_dim // 4 if partial else head_dim // 2
    x = jax.ShapeDtypeStruct((tokens, 32, head_dim), dtype)
    rotation = rotation_of(x, half, neox)
    form = FORMS[choose_form(rotation, x)]
    compiled = (
        jax.jit(functools.partial(form, is_neox_style=neox))
        .lower(x, rotation.rows, rotation.rows)
        .compile()
    )
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes / (x.size * x.dtype.itemsize)


# A few hundred tokens of 16 bits and NeoX pairs may trade temporaries, which a cache
# holds, for time.
TEMPORARIES = [
    *itertools.product(("float32", "bfloat16"), (True, False), (2048,)),
    *(("float32", True, 256), ("float32", False, 256), ("bfloat16", False, 256)),
]


@pytest.mark.parametrize(("dtype", "neox", "tokens"), TEMPORARIES)
def test_chosen_form_has_no_full_size_temporary(dtype, neox, tokens):
    # Rows widened to a head are 1/8 of a 16-bit operand with 32 heads, 1/16 of float32.
    assert chosen_temporary(dtype, neox, False, tokens) < 0.2
    # An update in place of half of each head holds that half.
    assert chosen_temporary(dtype, neox, True, tokens) < 0.75


def test_temporaries_of_the_definition_are_seen(monkeypatch):
    """The test above can fail: it does with the definition forced."""
    monkeypatch.setattr(xla, "CHOICES", {})
    assert chosen_temporary("float32", True, False, 256) >= 1
    with pytest.raises(AssertionError):
        test_chosen_form_has_no_full_size_temporary("float32", True, 256)


def test_unmeasured_platforms_get_the_definition_and_newer_jax_the_newest_row(
    monkeypatch,
):
    x = jax.ShapeDtypeStruct((4, 2, 16), jnp.float32)
    assert choose_form(rotation_of(x, 8, True, platform="tpu"), x) == "concat"
    newest = max(row.since for row in CHOICES["cpu"])
    for version in (newest, (99, 0)):
        monkeypatch.setattr(jax, "__version_info__", (*version, 0))
        chosen = {
            choose_form(rotation_of(x, half, neox), x)
            for half, neox in itertools.product((8, 4), (True, False))
        }
        rows = [row for row in CHOICES["cpu"] if row.since == newest]
        assert chosen <= {row.form for row in rows}


@pytest.mark.parametrize(
    ("tokens", "key_heads", "half", "neox", "form"),
    [
        (2048, 2, 8, True, "select"),
        (2048, 2, 4, True, "stack"),
        (2048, 2, 4, False, "stack"),
        (2048, 2, 8, False, "concat"),
        (2048, 1, 8, True, "concat"),
        (2048, None, 4, True, "concat"),
        (2049, 2, 4, True, "concat"),
    ],
)
def test_choices_on_cuda(tokens, key_heads, half, neox, form):
    """`make gpu` compares them with what XLA compiles."""
    query = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.bfloat16)
    rotation = rotation_of(query, half, neox, platform="cuda")
    if key_heads is not None:
        key = jax.ShapeDtypeStruct((tokens, key_heads, 16), jnp.bfloat16)
        rotation = dataclasses.replace(rotation, xs=(query, key))
    assert choose_form(rotation, query) == form


@pytest.mark.parametrize("version", sorted({row.since for row in CHOICES["cpu"]}))
def test_every_choice_is_a_form_and_decides_some_case(version, monkeypatch):
    """A row that an earlier one hides on every JAX would be dead data."""
    monkeypatch.setattr(jax, "__version_info__", (*version, 0))
    rows = [row for row in CHOICES["cpu"] if row.since == version]
    first = set()
    for dtype, neox, half, tokens in itertools.product(
        (*DTYPES, "float64"), (True, False), (8, 4), (1, 2048, 2049, 2**18)
    ):
        x = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
        x = jax.ShapeDtypeStruct(
            x.shape, np.dtype(dtype) if dtype == "float64" else dtype
        )
        rotation = rotation_of(x, half, neox)
        first.add(next(row for row in CHOICES["cpu"] if row.covers(rotation, x)))
    assert set(rows) <= first
    assert {row.form for row in rows} <= set(FORMS)


@pytest.mark.parametrize(("tokens", "is_small"), [(2048, True), (2049, False)])
def test_the_largest_operand_decides_for_all(tokens, is_small, monkeypatch):
    """Two forms in one program would hold the rows twice."""
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    query = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((tokens, 1, 16), jnp.float32)
    rotation = dataclasses.replace(rotation_of(query, 8, True), xs=(query, key))
    form = "concat_held" if is_small else "swap_bits"
    assert {choose_form(rotation, x) for x in rotation.xs} == {form}
