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
from pathlib import Path

import pytest

import jrope
from jrope.scalings import SCALINGS

# An annotation or a line such as [T, N, H], [*B, T], [] or [R/2].
_SHAPE = re.compile(r"\[[A-Za-z0-9*/ ,+().-]*\]|Array, \"")
_ARRAYS = re.compile(r"\b(Array|ArrayLike|ndarray)\b")


def modules():
    """Every public module but the demo, which is a program.

    A package below jrope that has `__all__` says with it what of its files is public.
    """
    found = ["jrope"]
    for each in pkgutil.walk_packages(jrope.__path__, "jrope."):
        parts = each.name.split(".")[1:]
        if any(part.startswith("_") for part in parts) or parts[0] == "demo":
            continue
        parent = importlib.import_module(each.name.rpartition(".")[0])
        if parent is jrope or not hasattr(parent, "__all__"):
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


def reference():
    """Modules of the page of reference, each with the names that it is limited to."""
    page = Path(__file__).parents[1] / "docs" / "pages" / "reference.md"
    parts = re.split(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for path, options in zip(parts[::2], parts[1::2], strict=True):
        limited = re.search(r"members: \[(.*?)\]", options, flags=re.DOTALL)
        found[path] = re.findall(r"\w+", limited[1]) if limited else None
    return found


@pytest.mark.parametrize("path", sorted({name.rpartition(".")[0] for name in IDS}))
def test_the_reference_shows_it(path):
    assert path in reference(), f"docs/pages/reference.md leaves out {path}"
    shown = reference()[path]
    own = [name.rpartition(".")[2] for name in IDS if name.rpartition(".")[0] == path]
    if shown is not None:
        assert set(own) <= set(shown)
