"""README and documentation: their Python runs as written, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


# Blocks of the README stand alone; those of a page of the documentation build on those
# before them.
PROGRAMS = [
    *(
        pytest.param(block, id=f"README-{i}")
        for i, block in enumerate(blocks(PAGES[0]))
    ),
    *(
        pytest.param("\n".join(blocks(page)), id=page.stem)
        for page in PAGES[1:]
        if blocks(page)
    ),
]


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
