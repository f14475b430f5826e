"""Claims about other projects in the documentation name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
TESTS = {
    name: path.name
    for path in (ROOT / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
}


def table_rows(text, head):
    """Rows of the tables whose heading line begins so, each a list of cells."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith(head):
            found += [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [row for row in found if not set(row[0]) <= set("-")]


COMPARED = table_rows((PAGES / "comparison.md").read_text(), "| | jrope")[1:]
FAULTS = [
    row
    for head in ("| project", "| what transformers does")
    for row in table_rows((PAGES / "peers.md").read_text(), head)
    if row[-1].startswith("`test_")
]


def test_the_tables_are_found():
    assert len(COMPARED) >= 10 and len(FAULTS) >= 12


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row[0])
def test_a_row_of_the_comparison_is_proved(row):
    named = re.findall(r"`([\w.]*)::(test_\w+)`", row[-1])
    assert named, f"no test beside {row[0]!r}"
    file = ""
    for given, name in named:
        file = given or file
        assert TESTS.get(name) == file, f"{file} has no {name}"


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[1])
def test_a_fault_of_a_peer_is_shown(row):
    assert row[-1].strip("`") in TESTS


def test_the_readme_says_what_the_page_says():
    said = {tuple(row[:6]) for row in COMPARED}
    readme = table_rows((ROOT / "README.md").read_text(), "| | jrope")[1:]
    assert len(readme) >= 5
    for row in readme:
        assert tuple(row) in said, row[0]
