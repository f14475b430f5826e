"""Pages that are made while the site is built, and what the written ones need for it.

Pages are also read in the repository, so nothing that only MkDocs understands stands in
them: links lead to files, and what hides a page's contents is here.
"""

import json
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# MkDocs loads this file by its path, so the folder beside it is no package yet.
sys.path.insert(0, str(ROOT))

from docs import benchmark_page, benchmark_pictures, transforms_page  # noqa: E402

# Files of the repository that a page links to, and the page that the site has instead.
PAGE_OF_FILE = {"../../benchmarks/README.md": "benchmarks.md"}
# Pages with tables that need the whole width.
WIDE = ("benchmarks.md", "comparison.md", "peers.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the benchmarks, the table of transforms and the changelog."""
    made = {
        benchmark_page.PICTURE.format(name=name): benchmark_pictures.draw(
            name, json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        )
        for name in benchmark_pictures.PICTURES
    }
    made |= {
        "benchmarks.md": benchmark_page.make_page(RESULTS),
        "transforms.md": transforms_page.make_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Leads links to the site's own pages, and gives wide tables room."""
    del config, files
    if page.file.src_path in WIDE:
        page.meta["hide"] = ["toc"]
    for path, link in PAGE_OF_FILE.items():
        markdown = markdown.replace(f"]({path})", f"]({link})")
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fails where an example was taken for a quotation: see fenced_examples.py."""
    del config, files
    if "<blockquote>\n<blockquote>" in html:
        raise PluginError(
            f"{page.file.src_path} must show examples as code, got quotations; does "
            f"one stand without an empty line before it?"
        )
    return html
