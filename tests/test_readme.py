"""README and documentation: Python runs as written, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "pages").glob("*.md")),
    *sorted((ROOT / "jrope").rglob("README.md")),
]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


# Blocks of these pages stand alone; those of the others build on those before them.
ALONE = ("README", "tour")
PROGRAMS = [
    *(
        pytest.param(block, id=f"{page.stem}-{i}")
        for page in PAGES
        if page.stem in ALONE
        for i, block in enumerate(blocks(page))
    ),
    *(
        pytest.param("\n".join(blocks(page)), id=page.stem)
        for page in PAGES
        if page.stem not in ALONE and blocks(page)
    ),
]
JOINED = [page for page in PAGES if page.stem not in ALONE and len(blocks(page)) > 1]


@pytest.mark.parametrize("page", JOINED, ids=lambda page: page.stem)
def test_a_page_says_that_its_blocks_build_on_each_other(page):
    start = page.read_text().partition("```python")[0]
    assert "on those before" in start.replace("\n", " ")


# The pages are read in the repository too, where no site has been built.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    paths = [link.partition("#")[0] for link in links if "://" not in link]
    assert [path for path in paths if not (page.parent / path).exists()] == []


# rasbt/LLMs-from-scratch#751
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
