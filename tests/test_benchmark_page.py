"""The documentation's page of benchmarks is made from the results as they are."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from docs.benchmark_page import make_page, markdown_table, plain_tables

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STAMP = {
    "cpu": "a processor",
    "cores": 2,
    "load": 0.5,
    "versions": {"python": "3.12.1", "jax": "0.12.0"},
}


def test_every_file_has_a_section_with_its_command():
    page = make_page(RESULTS)
    files = sorted(RESULTS.glob("*.json"))
    assert page.count("\n## ") == len(files)
    for path in files:
        command = re.search(rf"python -m (\S+) --json > .*/{path.name}\n", page)
        module = command[1] if command else "benchmarks.__main__"
        assert command or f"\nmake bench ARGS={path.stem}\n" in page, path.name
        assert importlib.util.find_spec(module), module


def test_the_numbers_are_the_file_s():
    held = json.loads((RESULTS / "positions.json").read_text())
    first = held["cases"][0]
    row = next(
        line
        for line in make_page(RESULTS).splitlines()
        if line.startswith(f"| {first['name']} |")
    )
    assert f"| {first['call_over_vllm_rule']:.1f}x |" in row
    assert f"| {first['times']['call']['median_us']:.4g} |" in row


def test_a_new_file_is_shown_as_it_is(tmp_path):
    content = {
        "stamp": STAMP,
        "time_over_best_peer": 0.97,
        "steps": [{"layers": 12, "time": {"ours": 3.5}}, {"layers": 24, "ok": True}],
    }
    (tmp_path / "new_thing.json").write_text(json.dumps(content))
    page = make_page(tmp_path)
    assert "## New thing" in page
    assert "| time_over_best_peer | 0.97 |" in page
    assert "| layers | time: ours | ok |" in page
    assert "| 24 |  | yes |" in page
    assert "a processor, 2 of its cores, load 0.5" in page


def test_results_of_the_rotation(tmp_path):
    cell = {
        "jax": "0.12.0",
        "tokens": 256,
        "dtype": "float32",
        "pairing": "neox",
        "mode": "loop",
        "over_best_form": 1.01,
        "best_form": "form: swap",
        "over_copy": 1.2,
        "peers": {"slow": 3.0, "fast": 1.5},
        "median_us": {"jrope": 61.5},
        "misses": [],
    }
    missed = cell | {
        "jax": "0.10.2",
        "misses": ["faster: fast", "over_best_form > 1.05"],
        "hlo": {"jrope": ["fusion(a)", "fusion(b)"], "fast": ["fusion(c)"]},
    }
    older = STAMP | {"versions": {"jax": "0.10.2"}}
    stamps = {"0.10": older, "0.12": STAMP}
    content = {"stamps": stamps, "cells": [missed, cell]}
    (tmp_path / "rope.json").write_text(json.dumps(content))
    (tmp_path / "rope-misses.md").write_text("# Why\n\nBecause.\n\n## More\n")
    page = make_page(tmp_path)
    assert page.count("???") == 1
    assert 'JAX 0.10.2: faster: fast; over_best_form > 1.05"\n' in page
    assert "\n    fast\n    ```\n    fusion(c)\n    ```\n" in page
    assert "\n### Why\n\nBecause.\n\n#### More\n" in page
    assert "make bench ARGS=rope\n" in page
    assert "began; jax 0.10.2.*" in page and "jax 0.12.0.*" in page
    assert (
        "| 0.12.0 | 256 | float32 | neox | loop | 61.5 | 1.01x | `swap` | 1.20x "
        "| fast 1.5x | slow 3x |"
    ) in page


def test_a_file_that_has_changed_is_an_error(tmp_path):
    (tmp_path / "positions.json").write_text('{"cases": [{"name": "text"}]}')
    with pytest.raises(ValueError, match="positions.json must have what the section"):
        make_page(tmp_path)


def test_tables():
    assert markdown_table(["a", "b"], [["x|y", 12345], [None, 0.5]]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x\\|y | 12,345 |",
        "|  | 0.5 |",
    ]
    assert plain_tables({"rows": [1.5, 2.5]}).endswith("| 1.5 |\n| 2.5 |")
