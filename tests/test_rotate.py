"""rotate: the bound of its error, its inverse, its shapes and its refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jrope import (
    SCALINGS,
    RopeConfig,
    RotaryLayout,
    apply_rope,
    compute_cos_sin_cache,
    config_from_hf,
    lookup,
    rotate,
    rotate_one,
)
from jrope._routes import routes_for
from jrope.scalings import Default, Frequencies

ROUTE_NAMES = [route.name for route in routes_for(jax.default_backend())]
DTYPES = ["float32", "bfloat16", "float16"]
RNG = np.random.default_rng(0)


def heads(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def setup(config, tokens=9):
    table = jnp.asarray(compute_cos_sin_cache(config))
    last = config.max_position_embeddings - 1
    positions = RNG.integers(0, last, tokens).astype(np.int32)
    positions[0], positions[-1] = 0, last
    return lookup(table, jnp.asarray(positions), layout=config.layout)


def assert_rotation(config, dtype, route):
    cos, sin = setup(config)
    shapes = ((9, 4, config.head_dim), (9, 1, config.head_dim))
    query, key = (heads(shape, dtype) for shape in shapes)
    turned = rotate(query, key, cos, sin, layout=config.layout, implementation=route)
    style = {"is_neox_style": config.is_neox_style, "offset": config.rotary_offset}
    for x, out in zip((query, key), turned, strict=True):
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        exact = oracle.rotate(np.asarray(x), cos, sin, **style)
        limit = oracle.bound(np.asarray(x), cos, sin, dtype=dtype, **style)
        oracle.assert_within(out, exact, limit)


# flashinfer-ai/flashinfer#585
@pytest.mark.parametrize("route", ROUTE_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_within_the_bound(route, dtype, is_neox_style, head_dim):
    for rotary_dim in sorted({2, 32, 64, 96, 128, head_dim}):
        if rotary_dim <= head_dim:
            config = RopeConfig(
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                is_neox_style=is_neox_style,
                rope_theta=1e4,
                max_position_embeddings=4096,
            )
            assert_rotation(config, dtype, route)


@pytest.mark.parametrize("route", ROUTE_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("offset", [1, 32, 64])
def test_within_the_bound_at_any_offset(route, dtype, is_neox_style, offset):
    config = RopeConfig(
        head_dim=96,
        rotary_dim=32,
        rotary_offset=offset,
        is_neox_style=is_neox_style,
        rope_theta=1e4,
        max_position_embeddings=4096,
    )
    assert_rotation(config, dtype, route)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("offset", [0, 5, 16])
def test_the_definition_is_within_the_bound(dtype, is_neox_style, offset):
    config = RopeConfig(head_dim=16, rope_theta=1e4, max_position_embeddings=64)
    cos, sin = setup(config, tokens=16)
    x = heads((16, 16, 32), dtype)  # As many tokens, and heads, as features turn.
    style = {"is_neox_style": is_neox_style}
    out = rotate_one(x, cos, sin, rotary_offset=offset, **style)
    exact = oracle.rotate(np.asarray(x), cos, sin, offset=offset, **style)
    limit = oracle.bound(np.asarray(x), cos, sin, dtype=dtype, offset=offset, **style)
    oracle.assert_within(out, exact, limit)


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
def test_the_definition_of_no_tokens(is_neox_style):
    row = jnp.zeros((0, 4))
    out = rotate_one(
        heads((0, 3, 32)), row, row, is_neox_style=is_neox_style, rotary_offset=5
    )
    assert out.shape == (0, 3, 32)


@pytest.mark.parametrize(
    ("half", "dtype", "rounded"),
    [
        (7, "float32", True),
        (8, "float32", False),
        (15, "float16", True),
        (16, "float16", False),
    ],
)
def test_wide_heads_do_not_pay_for_the_care_of_narrow_ones(half, dtype, rounded):
    row = jnp.ones((1, half))
    program = jax.make_jaxpr(functools.partial(rotate_one, is_neox_style=False))
    equations = program(heads((1, 1, 2 * half), dtype), row, row).jaxpr.eqns
    products = sum(equation.primitive.name == "mul" for equation in equations)
    assert (products > 4) is rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loud(Default):
    """A scaling with an amplitude that is not 1."""

    def frequencies(self, geometry):
        """The plain series, amplified."""
        plain = super().frequencies(geometry)
        return Frequencies(inv_freq=plain.inv_freq, attention_factor=1.375)


def scaled_configs():
    for rope_type, scaling in SCALINGS.items():
        for model, hf_config in scaling.examples.items():
            config = config_from_hf(hf_config, max_position_embeddings=4096)
            yield f"{rope_type}: {model}", config
    yield (
        "loud",
        RopeConfig(
            head_dim=64, rope_theta=1e4, max_position_embeddings=4096, scaling=Loud()
        ),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config", [pytest.param(config, id=name) for name, config in scaled_configs()]
)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
def test_inverse_undoes_rotate(config, dtype, is_neox_style):
    config = dataclasses.replace(config, is_neox_style=is_neox_style)
    cos, sin = setup(config)
    x = heads((9, 2, config.head_dim), dtype)
    there, _ = rotate(x, None, cos, sin, layout=config.layout)
    back, _ = rotate(there, None, cos, sin, layout=config.layout, inverse=True)
    # The first rotation's error, turned back, and the second one's own; the rows of the
    # second are divided by cos^2 + sin^2, which costs four more roundings of float32.
    energy = np.asarray(cos, np.float64) ** 2 + np.asarray(sin, np.float64) ** 2
    c, s = np.asarray(cos) / energy, -np.asarray(sin) / energy
    style = {"is_neox_style": is_neox_style}
    first = oracle.bound(np.asarray(x), cos, sin, dtype=dtype, **style)
    second = oracle.bound(np.asarray(there), c, s, dtype=dtype, **style)
    carried = [
        oracle.rotate(first, np.abs(c), sign * np.abs(s), **style) for sign in (1, -1)
    ]
    turned_size = np.abs(np.asarray(there).astype(np.float64))
    size = [
        oracle.rotate(turned_size, np.abs(c), sign * np.abs(s), **style)
        for sign in (1, -1)
    ]
    limit = np.maximum(*carried) + second + 4 * oracle.F32_EPS * np.maximum(*size)
    oracle.assert_within(back, np.asarray(x).astype(np.float64), limit)


def test_the_transpose_is_not_the_inverse():
    config = RopeConfig(
        head_dim=64, rope_theta=1e4, max_position_embeddings=4096, scaling=Loud()
    )
    cos, sin = setup(config)
    x = heads((9, 2, 64))
    there, _ = rotate(x, None, cos, sin, layout=config.layout)
    transposed, _ = rotate(there, None, cos, -sin, layout=config.layout)
    np.testing.assert_allclose(transposed, 1.375**2 * x, rtol=1e-5, atol=1e-6)


LAYOUT = RotaryLayout(head_dim=8, rotary_dim=8)
CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64)
TABLE = jnp.asarray(compute_cos_sin_cache(CONFIG))


@pytest.mark.parametrize("route", ROUTE_NAMES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,), (1, 1, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
def test_any_leading_axes(route, batch, tokens, flat):
    positions = jnp.asarray(RNG.integers(0, 64, (*batch, tokens)), jnp.int32)
    query, key = heads((*batch, tokens, 4, 8)), heads((*batch, tokens, 2, 8))
    by = {"layout": LAYOUT, "implementation": route}
    expected = apply_rope(positions, query, key, TABLE, **by)
    cos, sin = lookup(TABLE, positions, layout=LAYOUT)
    for x, out in zip((query, key), expected, strict=True):
        exact = oracle.rotate(np.asarray(x), cos, sin, is_neox_style=True)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6)
    if flat:
        flattened = apply_rope(
            positions,
            query.reshape(*batch, tokens, 32),
            key.reshape(*batch, tokens, 16),
            TABLE,
            **by,
        )
        for out, whole in zip(flattened, expected, strict=True):
            np.testing.assert_array_equal(out, whole.reshape(out.shape))


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_rows_are_shared_over_axes_of_length_one(route):
    query, by = heads((3, 5, 2, 8)), {"layout": LAYOUT, "implementation": route}
    one = apply_rope(jnp.arange(5)[None], query, None, TABLE, **by)[0]
    each = jnp.broadcast_to(jnp.arange(5)[None], (3, 5))
    np.testing.assert_array_equal(one, apply_rope(each, query, None, TABLE, **by)[0])


@pytest.mark.parametrize("route", ROUTE_NAMES)
def test_query_and_key_may_differ_in_dtype(route):
    query, key = heads((5, 2, 8), "bfloat16"), heads((5, 1, 8))
    by = {"layout": LAYOUT, "implementation": route}
    both = apply_rope(jnp.arange(5), query, key, TABLE, **by)
    assert [out.dtype for out in both] == [jnp.bfloat16, jnp.float32]


def test_shapes_of_the_relative_law():
    # The score of a query at p and a key at p + t depends on t alone.
    query, key = heads((1, 1, 8)), heads((1, 1, 8))

    def score(p, t):
        q, _ = apply_rope(np.array([p]), query, None, TABLE, layout=LAYOUT)
        k, _ = apply_rope(np.array([p + t]), key, None, TABLE, layout=LAYOUT)
        return float(jnp.sum(q * k))

    for shift in (0, 3, 17):
        np.testing.assert_allclose(score(0, shift), score(40, shift), rtol=1e-5)


def test_neox_is_a_permutation_of_gptj():
    gptj = dataclasses.replace(LAYOUT, is_neox_style=False)
    x = heads((5, 2, 8))
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    by_pairs, _ = apply_rope(jnp.arange(5), x[..., order], None, TABLE, layout=gptj)
    by_halves, _ = apply_rope(jnp.arange(5), x, None, TABLE, layout=LAYOUT)
    np.testing.assert_array_equal(by_pairs, by_halves[..., order])


def test_padding_beside_nan_rows_stays_finite():
    out, _ = apply_rope(
        jnp.array([-1, 63, 64]), heads((3, 2, 8)), None, TABLE, layout=LAYOUT
    )
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2]).all()


COS, SIN = lookup(TABLE, jnp.arange(5), layout=LAYOUT)
QUERY = heads((5, 2, 8))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"query": heads((2, 5, 8))},
            ValueError,
            r"are \(5,\) .*heads and tokens swap",
        ),
        (
            {"query": heads((5, 2, 16))},
            ValueError,
            r"with H = 8, got shape \(5, 2, 16\)",
        ),
        (
            {"query": heads((5, 12))},
            ValueError,
            r"\[\*B, T, N \* H\] with H = 8, got sh",
        ),
        (
            {"query": heads((3, 5, 2, 8))},
            ValueError,
            r"got shape \(3, 5, 2, 8\); .*positions\[None",
        ),
        (
            {"query": QUERY.astype(jnp.int32)},
            TypeError,
            "query must be one of .*got int32",
        ),
        (
            {"query": np.asarray(QUERY)},
            TypeError,
            "query must be a jax.Array, got ndarr",
        ),
        ({"key": heads((4, 2, 8))}, ValueError, r"key must be .* which are \(5,\)"),
        (
            {"cos": COS.astype(jnp.bfloat16)},
            TypeError,
            "cos must be float32, got bfloat1",
        ),
        ({"sin": SIN[:, :3]}, ValueError, r"R/2 = 4, got shapes \(5, 4\) and \(5, 3\)"),
        (
            {"implementation": "cudnn"},
            ValueError,
            "None or one of .*'xla'.* got 'cudnn'",
        ),
    ],
)
def test_refusals(unchecked, fields, error, message):
    given = {"query": QUERY, "key": None, "cos": COS, "sin": SIN, **fields}
    with pytest.raises(error, match=message):
        rotate(layout=LAYOUT, **given)


def test_a_config_is_no_layout(unchecked):
    wrong: Any = CONFIG
    with pytest.raises(TypeError, match="be a RotaryLayout, got RopeConfig; of a Rope"):
        rotate(QUERY, None, COS, SIN, layout=wrong)
    with pytest.raises(TypeError, match="be a RotaryLayout, got RopeConfig; of a Rope"):
        lookup(TABLE, jnp.arange(3), layout=wrong)


def test_complex_and_eight_bit_heads_are_refused(unchecked):
    for dtype in (jnp.complex64, jnp.float8_e4m3fn):
        with pytest.raises(TypeError, match="query must be one of"):
            rotate(QUERY.astype(dtype), None, COS, SIN, layout=LAYOUT)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((1, 4, 2, 8), (4, 4, 8)),  # As flattened heads: a batch of 4, one head.
        ((1, 5, 16), (4, 5, 8)),
        ((3, 4, 2, 8), (2, 4, 1, 8)),
        ((2, 4, 2, 8), (2, 5, 1, 8)),
    ],
)
def test_keys_of_other_tokens_than_the_query_are_refused(unchecked, query, key):
    tokens = 1 if query[1] != key[1] else query[1]
    rows = jnp.ones((1, tokens, 4))
    layout = RotaryLayout(head_dim=8, rotary_dim=8)
    with pytest.raises(ValueError, match=r"key must have the query's leading axes \["):
        rotate(jnp.ones(query), jnp.ones(key), rows, rows, layout=layout)
    for heads in (query, key):
        if len(heads) == 4:  # Each alone is whole.
            rotate(jnp.ones(heads), None, rows, rows, layout=layout)
