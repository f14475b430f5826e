"""Executes every notebook in this folder: `make notebooks`. A failing cell fails it.

The notebooks draw their pictures into docs/pages/pictures. Their outputs go nowhere, or
into the folder that `--keep` names.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def main() -> int:
    """Runs the notebooks one after the other; the exit status."""
    parser = argparse.ArgumentParser(description="Executes the notebooks.")
    parser.add_argument("--only", default="", help="those whose names begin so")
    parser.add_argument("--keep", type=Path, help="a folder for them and their outputs")
    options = parser.parse_args()
    notebooks = sorted(FOLDER.glob(f"{options.only}*.ipynb"))
    if not notebooks:
        parser.error(f"--only must be how a notebook's name begins: {options.only!r}")
    for path in notebooks:
        start = time.perf_counter()
        notebook = execute(path)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, options.keep / path.name)
    print(f"{len(notebooks)} notebooks ran")
    return 0


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; the file stays as it is."""
    client = NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return client.execute()


if __name__ == "__main__":
    sys.exit(main())
