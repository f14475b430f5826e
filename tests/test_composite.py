"""The composite form, without a plugin: the program, its bits and its options."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import assert_static, composites, operations

from jrope import RotaryLayout, apply_rope, rotate
from jrope._routes import ROUTES, Rotation, choose_route, routes_for
from jrope._routes.composite import (
    COMPOSITE,
    COMPOSITE_NARROW_ROWS,
    FullWidthRoute,
    definition,
)
from jrope._routes.xla import XLA

RNG = np.random.default_rng(0)
LAYOUTS = {
    "neox": RotaryLayout(head_dim=16, rotary_dim=16),
    "gptj": RotaryLayout(head_dim=16, rotary_dim=16, is_neox_style=False),
    "neox-leading": RotaryLayout(head_dim=16, rotary_dim=8),
    "gptj-trailing": RotaryLayout(
        head_dim=16, rotary_dim=8, rotary_offset=8, is_neox_style=False
    ),
    "neox-inside": RotaryLayout(head_dim=16, rotary_dim=8, rotary_offset=4),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def of(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def lowered(function, *arguments, platform="hpu"):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def step_program(layout, dtype="bfloat16", platform="hpu"):
    """The program of a lookup and a rotation of query and key."""

    def step(table, positions, query, key):
        return apply_rope(
            positions, query, key, table, layout=layout, out_of_range="clip"
        )

    table, positions = of((64, layout.rotary_dim)), of((2, 5), "int32")
    heads = [of((2, 5, n, layout.head_dim), dtype) for n in (4, 1)]
    return lowered(step, table, positions, *heads, platform=platform)


def rows_and_heads(layout, dtype="float32"):
    angles = RNG.uniform(0, 6, (2, 5, layout.rotary_dim // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    query, key = (
        jnp.asarray(RNG.standard_normal((2, 5, n, layout.head_dim)), dtype)
        for n in (4, 1)
    )
    return query, key, cos, sin


def style(layout):
    return {"is_neox_style": layout.is_neox_style, "offset": layout.rotary_offset}


@each_layout
@pytest.mark.parametrize("platform", ["hpu", "habana", "nosuch"])
def test_an_unknown_platform_receives_two_composites(name, platform):
    layout = LAYOUTS[name]
    text = step_program(layout, platform=platform)
    assert_static(text)
    rows, mode = f"2x5x1x{layout.rotary_dim}xf32", 0 if layout.is_neox_style else 1
    assert composites(text) == [
        (f"2x5x{n}x{layout.rotary_dim}xbf16", rows, rows, mode, 1) for n in (4, 1)
    ]
    assert text.count("stablehlo.gather<") == 1


@each_layout
def test_partial_rotation_cuts_contiguous_slices(name):
    main = step_program(LAYOUTS[name]).split("func.func private")[0]
    slices = [line for line in main.splitlines() if "stablehlo.slice" in line]
    assert slices
    for line in slices:
        cuts = [cut.split(":") for cut in re.findall(r"\d+(?::\d+)+", line)]
        assert all(len(cut) == 2 and int(cut[0]) < int(cut[1]) for cut in cuts), line


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_a_platform_of_xla_receives_none(platform):
    assert "composite" not in operations(
        step_program(LAYOUTS["neox"], "float32", platform)
    )


def test_multimodal_positions_add_a_selection_only():
    layout = dataclasses.replace(LAYOUTS["neox"], axis_of_frequency=(0, 1, 2, 0) * 2)

    def step(table, positions, query):
        return apply_rope(
            positions, query, None, table, layout=layout, out_of_range="clip"
        )[0]

    text = lowered(
        step, of((64, 16)), of((3, 2, 5), "int32"), of((2, 5, 4, 16), "bfloat16")
    )
    assert_static(text, allowed={"select"})
    assert text.count("stablehlo.gather<") == 3


@each_layout
def test_backward_is_composites_and_arithmetic(name):
    layout = LAYOUTS[name]

    def loss(query, key, cos, sin):
        turned = rotate(query, key, cos, sin, layout=layout)
        return sum(jnp.vdot(x, x) for x in turned)

    query, key, cos, sin = rows_and_heads(layout)
    text = lowered(jax.grad(loss, argnums=(0, 1)), query, key, cos, sin)
    assert_static(text, allowed={"dot_general"})
    assert len(composites(text)) == 4


@each_layout
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bits_are_those_of_the_definition(name, dtype):
    layout = LAYOUTS[name]
    query, key, cos, sin = rows_and_heads(layout, dtype)
    turned = rotate(query, key, cos, sin, layout=layout, implementation="composite")
    plain = rotate(query, key, cos, sin, layout=layout, implementation="xla")
    chex.assert_trees_all_equal(turned, plain)
    for x, out in zip((query, key), turned, strict=True):
        x = np.asarray(x)
        exact = oracle.rotate(x, cos, sin, **style(layout))
        limit = oracle.bound(x, cos, sin, dtype=dtype, **style(layout))
        oracle.assert_within(out, exact, limit)


@each_layout
def test_rows_that_are_shared_stay_narrow(name):
    layout = LAYOUTS[name]
    query, _, cos, sin = rows_and_heads(layout)

    def one(query, cos, sin):
        return rotate(query, None, cos, sin, layout=layout)[0]

    (found,) = composites(lowered(one, query, cos[:1], sin[:1]))
    assert found[1] == found[2] == f"1x5x1x{layout.rotary_dim}xf32"
    turned = rotate(
        *(query, None, cos[:1], sin[:1]), layout=layout, implementation="composite"
    )[0]
    exact = oracle.rotate(np.asarray(query), cos[:1], sin[:1], **style(layout))
    np.testing.assert_allclose(turned, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_rows_come_in_the_dtype_of_x(monkeypatch, dtype):
    monkeypatch.setitem(ROUTES, "cpu", (COMPOSITE_NARROW_ROWS,))
    monkeypatch.setitem(ROUTES, "hpu", (COMPOSITE_NARROW_ROWS,))
    jax.clear_caches()
    layout = LAYOUTS["neox"]
    query, key, cos, sin = rows_and_heads(layout, dtype)
    found = composites(step_program(layout, dtype))
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    assert [entry[1] for entry in found] == [f"2x5x1x16x{short}"] * 2

    # The oracle rounds the rows itself; all that comes after is within the bound.
    turned = rotate(query, key, cos, sin, layout=layout)[0]
    rounded = [
        np.asarray(row).astype(ml_dtypes.finfo(dtype).dtype) for row in (cos, sin)
    ]
    rounded = [row.astype(np.float32) for row in rounded]
    x = np.asarray(query)
    exact = oracle.rotate(x, *rounded, **style(layout))
    limit = oracle.bound(x, *rounded, dtype=dtype, **style(layout))
    oracle.assert_within(turned, exact, limit)
    jax.clear_caches()


def test_narrow_rows_are_never_chosen_unasked():
    for platform in ("cpu", "hpu", "nosuch"):
        assert COMPOSITE_NARROW_ROWS not in routes_for(platform)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        rotate(
            *rows_and_heads(LAYOUTS["neox"]),
            layout=LAYOUTS["neox"],
            implementation="composite_narrow_rows",
        )


@each_layout
def test_derivatives_and_batching_are_the_primitives(name):
    layout = LAYOUTS[name]
    query, _, cos, sin = rows_and_heads(layout)

    def one(query, cos, sin):
        return rotate(query, None, cos, sin, layout=layout, implementation="composite")[
            0
        ]

    def loss(query):
        return jnp.sum(jax.vmap(one)(query, cos, sin) ** 2)

    gradient, product = jax.jvp(jax.grad(loss), (query,), (query,))
    for result in (gradient, product):
        np.testing.assert_allclose(result, 2 * query, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type):
    layout = LAYOUTS["gptj"]
    query, _, cos, sin = rows_and_heads(layout)

    def one(query, cos, sin):
        return rotate(query, None, cos, sin, layout=layout, implementation="composite")[
            0
        ]

    expected = one(query, cos, sin)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(
            (query, cos, sin), jax.sharding.NamedSharding(mesh, P("data"))
        )
        out = jax.jit(one)(*placed)
        np.testing.assert_array_equal(out, expected)
        assert out.sharding.is_equivalent_to(placed[0].sharding, out.ndim)
        mapped = jax.shard_map(one, in_specs=P("data"), out_specs=P("data"))
        np.testing.assert_array_equal(jax.jit(mapped)(*placed), expected)


def test_several_platforms_at_once_get_the_definition():
    layout = LAYOUTS["neox"]
    arrays = rows_and_heads(layout)
    run = jax.jit(lambda *a: rotate(*a, layout=layout))
    exported = jax.export.export(run, platforms=["cpu", "hpu"])(*arrays)
    assert "stablehlo.composite" not in exported.mlir_module()
    chex.assert_trees_all_equal(exported.call(*arrays), run(*arrays))
    rotation = Rotation(
        platform="hpu",
        xs=(of((2, 5, 4, 16)),),
        rows=of((2, 5, 8)),
        is_neox_style=True,
        rotary_offset=0,
        is_multi_platform=True,
    )
    assert choose_route(rotation, None) is XLA
    with pytest.raises(ValueError, match="'composite' declines.*platform's index"):
        choose_route(rotation, "composite")


def test_an_export_for_one_platform_keeps_the_composite():
    layout = LAYOUTS["neox"]
    run = jax.jit(lambda *a: rotate(*a, layout=layout))
    exported = jax.export.export(run, platforms=["hpu"])(*rows_and_heads(layout))
    assert len(composites(exported.mlir_module())) == 2


@each_layout
def test_a_kernel_in_full_width_form_is_a_route(name, monkeypatch):
    """The form `y = x * cos + partner(x) * sin` of full-width kernels."""
    layout = LAYOUTS[name]

    def kernel(x, cos, sin, *, mode):
        half = x.shape[-1] // 2
        if mode == 0:
            partner = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
        else:
            partner = jnp.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)
        wide = [jnp.broadcast_to(row, x.shape) for row in (cos, sin)]
        return x * wide[0] + partner * wide[1]

    route = FullWidthRoute(name="mine", kernel=kernel)
    monkeypatch.setitem(ROUTES, "cpu", (route,))
    jax.clear_caches()
    query, key, cos, sin = rows_and_heads(layout)
    turned = rotate(query, key, cos, sin, layout=layout, implementation="mine")
    for x, out in zip((query, key), turned, strict=True):
        exact = oracle.rotate(np.asarray(x), cos, sin, **style(layout))
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6)
    jax.clear_caches()


def test_the_definition_reads_the_first_of_each_pair_of_rows():
    x = jnp.asarray([[[3.0, 4.0]]])
    cos, sin = jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))
    for mode in (0, 1):
        assert definition(x, cos, sin, mode=mode).tolist() == [[[-4.0, 3.0]]]


def test_the_composite_is_the_route_of_every_other_platform():
    assert routes_for("hpu") == routes_for("nosuch") == (COMPOSITE, XLA)
    assert routes_for("cpu")[:2] == (XLA, COMPOSITE)


def test_a_kernel_that_changes_the_shape_is_named():
    def cut(x, cos, sin, *, mode):
        return x[..., :4]

    route = FullWidthRoute(name="cutter", kernel=cut)
    layout = RotaryLayout(head_dim=8, rotary_dim=8)
    ROUTES["cpu"] = (route,)
    try:
        with pytest.raises(ValueError, match=r"'cutter' must return \(2, 1, 8\) of"):
            rotate(
                jnp.ones((2, 1, 8)),
                None,
                *jnp.ones((2, 2, 4)),
                layout=layout,
                implementation="cutter",
            )
    finally:
        del ROUTES["cpu"]
