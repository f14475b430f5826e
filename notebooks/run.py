"""Executes every notebook in this folder: `make notebooks`. A failing cell fails it."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> int:
    """Runs the notebooks one after the other; the exit status."""
    notebooks = sorted(Path(__file__).parent.glob("*.ipynb"))
    for path in notebooks:
        print(f"running {path.name}")
        NotebookClient(
            nbformat.read(path, as_version=4), timeout=600, kernel_name="python3"
        ).execute()
    print(f"{len(notebooks)} notebooks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
