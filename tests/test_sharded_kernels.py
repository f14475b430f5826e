"""How a kernel's operands are split over a mesh, whatever way they came."""

import pytest

from pallas_kernels._sharded import agreed

HEADS, ROWS, CACHE = ("a0", "n0", "h0"), ("a0", "p"), ("g", "s", "n1", "h1")


@pytest.mark.parametrize(
    ("specs", "split"),
    [
        # The result decides, and rows follow.
        ([("x", "y"), (None,), (None,)], {"a0": ("x",), "n0": ("y",)}),
        ([(None, "x"), ("x",), (None,)], {"a0": (), "n0": ("x",)}),
        ([(("x", "y"),), ("y",), (None,)], {"a0": ("x", "y"), "n0": ()}),
        # No axis that must be whole is split, wherever it came split.
        ([(None, None, "x"), (None, "x"), ("x", "x")], {"a0": (), "n0": ()}),
        # Heads of two arrays may lie on one axis; two axes of one array may not.
        ([(None, "y"), (None,), (None, None, "y")], {"n0": ("y",), "n1": ("y",)}),
        ([(None,), ("x",), (None, None, "y", "x")], {"a0": (), "n1": ("y",)}),
    ],
)
def test_axes_of_one_name_are_split_alike(specs, split):
    axes = (HEADS, ROWS, CACHE)
    whole = ("h0", "h1", "p", "g", "s")
    found = agreed(zip(axes, specs, strict=True), axes=axes, whole=whole)
    assert {name: found[name] for name in split} == split
    assert all(found[name] == () for name in whole)
    for names in axes:
        used = [mesh for name in names for mesh in found[name]]
        assert len(used) == len(set(used))


def test_two_axes_of_one_array_share_no_mesh_axis():
    axes = (("t", "n"), ("n", "t"), ("t", "k"))
    specs = [(None, "x"), ("x", "y"), ("y", "x")]
    found = agreed(zip(axes, specs, strict=True), axes=axes, whole=())
    assert found == {"t": (), "n": ("x",), "k": ("x",)}
    specs = [("x",), (None, "y"), (None, ("x", "y"))]
    found = agreed(zip(axes, specs, strict=True), axes=axes, whole=())
    assert found == {"t": ("x",), "n": (), "k": ("y",)}
