"""Every public name says what it is: shapes, errors, and an example that runs.

The examples are doctests, which the test run collects from the modules. What is asked
here is that they are there.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import pydoc
import re
import textwrap

import pytest

import jrope
from jrope.scalings import SCALINGS

# An annotation or a line such as [T, N, H], [*B, T], [] or [R/2].
_SHAPE = re.compile(r"\[[A-Za-z0-9*/ ,+().-]*\]|Array, \"")
_ARRAYS = re.compile(r"\b(Array|ArrayLike|ndarray)\b")


def modules():
    """Every public module but the demo, which is a program."""
    found = ["jrope"]
    for each in pkgutil.walk_packages(jrope.__path__, "jrope."):
        parts = each.name.split(".")[1:]
        if not any(part.startswith("_") for part in parts) and parts[0] != "demo":
            found.append(each.name)
    return found


def public_names():
    """Qualified name and object of everything public that has a docstring of its own.

    A name that two modules have is listed once, under the shorter path.
    """
    held, seen = [], set()
    for path in sorted(modules(), key=lambda name: (name.count("."), name)):
        module = importlib.import_module(path)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == path
        ]
        for name in names:
            value = getattr(module, name)
            is_own = inspect.isfunction(value) or inspect.isclass(value)
            if is_own and id(value) not in seen and name != "main":
                seen.add(id(value))
                held.append((f"{path}.{name}", value))
    return held


NAMES = public_names()
IDS = [name for name, _ in NAMES]


def source(value):
    """The body that can raise: a function's, or a class's own constructor."""
    if inspect.isclass(value):
        own = value.__dict__
        made = dataclasses.is_dataclass(value) or getattr(value, "_is_protocol", False)
        value = own.get("__post_init__") if made else own.get("__init__")
    return "" if value is None else textwrap.dedent(inspect.getsource(value))


def raises(value):
    """Whether the body raises or calls what checks."""
    tree = ast.parse(source(value) or "pass")
    called = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree)) or any(
        name.lstrip("_").startswith("check") for name in called
    )


def annotations(value):
    """What a function takes and gives, or a class's constructor takes, as text."""
    try:
        return str(inspect.signature(value))
    except ValueError:  # A protocol or an exception of C.
        return ""


def test_modules_are_found():
    assert {"jrope.nnx", "jrope.fused", "jrope.adapters.gemma"} <= set(modules())
    assert {"jrope.rotate", "jrope.positions.plan", "jrope.vllm.get_rope"} <= set(IDS)
    assert len(NAMES) > 100


@pytest.mark.parametrize(("name", "value"), NAMES, ids=IDS)
def test_there_is_an_example(name, value):
    assert ">>> " in (inspect.getdoc(value) or ""), f"{name} has no example"


@pytest.mark.parametrize(("name", "value"), NAMES, ids=IDS)
def test_shapes_are_said(name, value):
    text = f"{inspect.getdoc(value)} {annotations(value)}"
    if _ARRAYS.search(annotations(value)):
        assert _SHAPE.search(text), f"{name} takes arrays and says no shape"


@pytest.mark.parametrize(("name", "value"), NAMES, ids=IDS)
def test_errors_are_said(name, value):
    if raises(value):
        assert "Raises:" in (inspect.getdoc(value) or ""), f"{name} says no errors"


@pytest.mark.parametrize("rope_type", sorted(SCALINGS))
def test_a_scaling_names_its_source(rope_type):
    assert "Source:" in (SCALINGS[rope_type].__doc__ or "")


@pytest.mark.parametrize(("name", "value"), NAMES, ids=IDS)
def test_arguments_are_described(name, value):
    """Each argument of a function has a line, unless it has one argument at most."""
    if not inspect.isfunction(value):
        return
    doc = inspect.getdoc(value) or ""
    taken = list(inspect.signature(value).parameters)
    if len(taken) < 2 or "are those of `" in doc or "with positions as lists" in doc:
        return
    for argument in taken:
        assert re.search(rf"\b{argument}\b", doc), f"{name} does not say {argument}"


def test_pydoc_shows_every_name_and_the_map_of_modules():
    page = pydoc.plain(pydoc.render_doc(jrope))
    for name in jrope.__all__:
        assert name in page or name == "__version__", name
    assert f"VERSION\n    {jrope.__version__}" in page
    for path in modules():
        parts = path.split(".")
        shown = ".".join(parts[:2])  # Adapters are listed as one.
        assert shown in page, f"the package's text leaves out {shown}"
