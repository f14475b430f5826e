"""Every reported fault is a test that names its thread, or says why it is none."""

import ast
import functools
import re
from pathlib import Path

import pytest
from reported import FOLDER

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| (C\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
THREAD = re.compile(r"([\w.-]+/[\w.-]+)?#(\d+)")
ROWS = ROW.findall((FOLDER / "README.md").read_text())
# 84 reports were collected; these are the kinds among them that were kept.
COUNT = 64


@functools.cache
def functions(name):
    """Every test of a file with the comment above it."""
    lines = (TESTS / name).read_text().splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        first = min(part.lineno for part in (node, *node.decorator_list)) - 1
        above = first
        while above and lines[above - 1].startswith("#"):
            above -= 1
        found[node.name] = "\n".join(lines[above:first])
    return found


def threads(text):
    """`owner/name#1, #2` as two threads of one repository."""
    repository, found = None, set()
    for named, number in THREAD.findall(text):
        repository = named or repository
        found.add((repository, number))
    return found


def test_no_case_is_missing_or_listed_twice():
    names = [name for name, *_ in ROWS]
    assert len(names) == len(set(names)) == COUNT
    in_files = {name for file in FOLDER.glob("*.json") for name in file.stem.split("_")}
    assert in_files <= set(names)


@pytest.mark.parametrize(("name", "kind", "thread", "tests"), ROWS)
def test_a_case_is_tested_where_it_says(name, kind, thread, tests):
    found = TEST.findall(tests)
    if not found:
        assert tests.startswith("none: ") and len(tests) > 40, tests
        return
    for file, test in found:
        comment = functions(file)[test]
        assert threads(comment) & threads(thread), f"{test} cites {comment!r}"
        assert not re.search(r"\bc\d\d\b", test), "tests are named by their kind"
