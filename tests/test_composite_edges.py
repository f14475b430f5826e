"""The composite form at its edges: symbolic shapes, no tokens, sharded rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrope import RotaryLayout, rotate

RNG = np.random.default_rng(0)
LAYOUTS = {
    "neox": RotaryLayout(head_dim=16, rotary_dim=16),
    "neox-leading": RotaryLayout(head_dim=16, rotary_dim=8),
    "gptj-trailing": RotaryLayout(
        head_dim=16, rotary_dim=8, rotary_offset=8, is_neox_style=False
    ),
    "neox-inside": RotaryLayout(head_dim=16, rotary_dim=8, rotary_offset=4),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def of(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SYMBOLIC = {"of the heads": (("b", 5), (3,)), "of another array": ((2, 5), ("b",))}


@pytest.mark.parametrize("case", SYMBOLIC)
@pytest.mark.usefixtures("unchecked")  # jaxtyping reads symbolic sizes as unequal.
def test_dimension_variables_leave_the_composite_where_jax_cannot_lower_it(case):
    layout = LAYOUTS["neox-leading"]
    (size,) = jax.export.symbolic_shape("b")
    of_tokens, of_other = (
        tuple(size if axis == "b" else axis for axis in axes) for axes in SYMBOLIC[case]
    )
    rows = of((*of_tokens, 4))

    def export(implementation=None, platforms=("hpu",)):
        def run(query, cos, sin, other):
            style = {"layout": layout, "implementation": implementation}
            return rotate(query, None, cos, sin, **style)[0], -other

        arrays = of((*of_tokens, 4, 16)), rows, rows, of(of_other)
        exported = jax.export.export(jax.jit(run), platforms=platforms)(*arrays)
        return exported.mlir_module().count("stablehlo.composite")

    if jax.__version_info__ < (0, 12):
        assert export() == 0
        with pytest.raises(ValueError, match="'composite' declines.*symbolic shapes"):
            export("composite")
    else:
        assert export() == export("composite") == 1
    assert export(platforms=("cpu",)) == export(platforms=("cpu", "hpu")) == 0


@each_layout
@pytest.mark.parametrize("axes", [(0, 2), (2, 0), (0,), (0, 0)])
def test_no_tokens_are_no_error(name, axes):
    layout = LAYOUTS[name]
    rows = jnp.zeros((*axes, layout.rotary_dim // 2))
    query = jnp.zeros((*axes, 4, 16), jnp.bfloat16)
    turned = rotate(
        *(query, None, rows, rows), layout=layout, implementation="composite"
    )[0]
    assert (turned.shape, turned.dtype) == (query.shape, query.dtype)


@each_layout
@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (P(), P("d")),
        (P("d"), P("m")),
        (P("d"), P()),
        (P(None, None, "m"), P("d", "m")),
        (P("d", None, "m"), P(None, "d")),
        (P(("d", "m")), P("d")),
    ],
)
def test_heads_keep_their_sharding_whatever_that_of_the_rows(name, heads, rows):
    layout = LAYOUTS[name]
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    angles = RNG.uniform(0, 6, (8, 4, layout.rotary_dim // 2))
    query = jnp.asarray(RNG.standard_normal((8, 4, 2, 16)), jnp.float32)
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))

    def one(query, cos, sin):
        style = {"layout": layout, "implementation": "composite"}
        return rotate(query, None, cos, sin, **style)[0]

    expected = one(query, cos, sin)
    with jax.set_mesh(mesh):
        query = jax.device_put(query, jax.NamedSharding(mesh, heads))
        laid = jax.device_put((cos, sin), jax.NamedSharding(mesh, rows))
        out = jax.jit(one)(query, *laid)
        np.testing.assert_array_equal(out, expected)
        assert out.sharding.is_equivalent_to(query.sharding, out.ndim)
        shared = jax.jit(one)(query, cos[:1], sin[:1])
        assert shared.sharding.is_equivalent_to(query.sharding, out.ndim)
