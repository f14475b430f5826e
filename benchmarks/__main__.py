"""Runs the benchmarks one after the other and keeps what they find.

    python -m benchmarks [NAME ...]

Each writes `results/NAME.json`, and its rows once more as `results/NAME.csv`. Rows that
say their JAX are kept side by side: a run replaces those of its own minor version.
"""

import argparse
import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Bench:
    """One program.

    Args:
      module: of this package.
      arguments: for a run of all, which must end within 15 minutes on two cores.
    """

    module: str
    arguments: tuple[str, ...] = ()


# The one list: a benchmark's name, which its results have as well, and its program.
# The longest first, while nobody has turned away yet.
BENCHES: dict[str, Bench] = {
    "rope": Bench("bench_rope"),
    "recompile": Bench("bench_recompile"),
    "decode_step": Bench("bench_decode_step"),
    "train": Bench("bench_train"),
    "inplace": Bench("bench_inplace", ("--quick",)),
    "positions": Bench("bench_positions"),
    "precision": Bench("bench_precision"),
    "forms-quick": Bench("bench_forms", ("--quick",)),
}


def run(name: str) -> dict[str, Any]:
    """What a benchmark prints; its progress goes to our own standard error."""
    bench = BENCHES[name]
    command = [sys.executable, "-m", f"benchmarks.{bench.module}", "--json"]
    # On the CPU, which all goals are about; kernels have bench_gpu.
    found = subprocess.run(
        [*command, *bench.arguments],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(found.stdout)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Results with the rows and stamps of other JAX minor versions kept.

    What a run says of itself as a whole becomes a row of `runs`.
    """
    cells = new.get("cells", [])
    if not cells or "jax" not in cells[0]:
        return new
    version = cells[0]["jax"]
    stamps = {**old.get("stamps", {}), _minor(version): new["stamp"]}
    rest = {key: value for key, value in new.items() if key not in ("stamp", "cells")}
    run = {key: value for key, value in rest.items() if not isinstance(value, dict)}
    words = {key: value for key, value in rest.items() if key not in run}
    rows = {"cells": cells, "runs": [{"jax": version, **run}] if run else []}
    merged = {
        part: _by_version(old.get(part, []), new_rows, version)
        for part, new_rows in rows.items()
        if new_rows
    }
    return {"stamps": dict(sorted(stamps.items())), **words, **merged}


def _by_version(old: list[Any], new: list[Any], version: str) -> list[Any]:
    kept = [row for row in old if _minor(row["jax"]) != _minor(version)]
    return sorted(kept + new, key=lambda row: _numbers(row["jax"]))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


def store(name: str, found: dict[str, Any]) -> None:
    """Writes the JSON, a row a line, and the CSV."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    whole = merge(old, found)
    path.write_text(as_text(whole))
    rows = [
        {"part": part, **flat(row)}
        for part, value in whole.items()
        if isinstance(value, list)
        for row in value
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def as_text(whole: dict[str, Any]) -> str:
    """JSON in which each row of a list has a line, so that changes can be read."""
    parts = []
    for key, value in whole.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{" + ",\n".join(parts) + "}\n"


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A row without nested ones: their keys joined with dots."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            listed = isinstance(value, list)
            found[prefix + key] = "; ".join(map(str, value)) if listed else value
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs what is named, or all, and says what failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all if none"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - BENCHES.keys():
        parser.error(f"NAME must be one of {list(BENCHES)}, got {sorted(unknown)}")
    failed = []
    begin = time.monotonic()
    for name in options.names or BENCHES:
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            store(name, run(name))
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name} ended with status {error.returncode}")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"all: {time.monotonic() - begin:.0f} s; results are in {RESULTS}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
