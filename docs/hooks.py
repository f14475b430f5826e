"""Pages that are made while the site is built, from files that live elsewhere."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# MkDocs loads this file by its path, so the folder beside it is no package yet.
sys.path.insert(0, str(ROOT))

from docs.benchmark_page import make_page  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the benchmarks and the changelog."""
    pages = {
        "benchmarks.md": make_page(ROOT / "benchmarks" / "results"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files
