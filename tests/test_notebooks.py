"""Notebooks are kept without outputs; `make notebooks` executes them."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    content = json.loads(path.read_text())
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def saved_pictures(path):
    """Names that a notebook's cells give to `drawing.save`."""
    tree = ast.parse("\n".join("".join(c["source"]) for c in cells(path, "code")))
    return [
        call.args[1].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "drawing.save"
        and isinstance(call.args[1], ast.Constant)
    ]


def test_there_are_five():
    assert [path.name[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_", "05_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == [], f"cell {cell['id']} has outputs"
        assert cell["execution_count"] is None, f"cell {cell['id']} has a number"
        assert cell["metadata"] == {}, f"cell {cell['id']} has metadata"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_what_the_reader_will_be_able_to_do(path):
    first = json.loads(path.read_text())["cells"][0]
    assert first["cell_type"] == "markdown"
    assert "After this notebook you can" in "".join(first["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_is_no_row_of_headings(path):
    lines = [
        line
        for cell in cells(path, "markdown")
        for line in "".join(cell["source"]).splitlines()
    ]
    assert [line for line in lines if line.startswith("# ") or line == "#"] == lines[:1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_pictures_are_in_the_documentation(path):
    names = saved_pictures(path)
    assert names
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for name in names:
        assert (PAGES / "pictures" / f"{name}.svg").is_file(), name
        assert f"(pictures/{name}.svg)" in pages, f"no page shows {name}"


def test_every_picture_has_a_notebook():
    drawn = {name for path in NOTEBOOKS for name in saved_pictures(path)}
    assert drawn == {path.stem for path in (PAGES / "pictures").glob("*.svg")}


@pytest.mark.parametrize(
    "path", sorted((PAGES / "pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_names_its_clips_by_their_order(path):
    """The names that matplotlib gives them differ from run to run."""
    text = path.read_text()
    used = list(dict.fromkeys(re.findall(r"url\(#(\w+)\)", text)))
    assert used == [f"clip{number}" for number in range(len(used))]
    assert set(re.findall(r'<clipPath id="(\w+)"', text)) == set(used)
