"""The benchmarks refuse a wrong rotation, and run as a list that keeps its results."""

import dataclasses
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as runner
from benchmarks import bench_decode_step, bench_recompile, bench_rope
from benchmarks.rope_cases import Cell, operands
from benchmarks.rope_peers import PEERS
from benchmarks.timing import Timing

FOLDER = pathlib.Path(runner.__file__).parent


@pytest.fixture(autouse=True)
def settings_of_the_peers():
    """They rely on promotions, which jrope's own tests refuse."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("dtype", bench_rope.DTYPES)
@pytest.mark.parametrize("neox", [True, False])
def test_every_candidate_is_the_rotation(dtype, neox):
    cell = Cell(dtype=dtype, is_neox_style=neox, partial=False, tokens=3)
    query, key, positions = operands(cell)
    with_pairing = {name for name, peer in PEERS.items() if neox in peer.pairings}
    found = bench_rope.candidates(cell)
    assert with_pairing | {"jrope"} <= found.keys()
    for name, candidate in found.items():
        got = candidate.step(query, key, candidate.state, positions)
        bench_rope.check(name, got, candidate, cell)


@pytest.mark.parametrize("name", ["jrope", "EasyDeL"])
def test_another_rotation_is_refused(name):
    cell = Cell(dtype="bfloat16", is_neox_style=True, partial=False, tokens=3)
    other = dataclasses.replace(cell, is_neox_style=False)
    query, key, positions = operands(cell)
    candidate = bench_rope.candidates(other)[name]
    got = candidate.step(query, key, candidate.state, positions)
    with pytest.raises(AssertionError, match=f"'{name}' is off by .* another rotation"):
        bench_rope.check(name, got, candidate, cell)
    with pytest.raises(AssertionError, match="gives float32"):
        bench_rope.check(name, (query.astype(jnp.float32), key), candidate, cell)


def test_programs_are_told_apart_but_not_by_their_names():
    text = (
        "HloModule a\n\nENTRY %main.1 (x: f32[2]) {\n  %x.1 = abs(%y), metadata={a}\n"
    )
    twin = text.replace("%x.1", "%z").replace("{a}", "{b}").replace("HloModule a", "H")
    assert bench_rope.canonical(text) == bench_rope.canonical(twin)
    assert bench_rope.canonical(text) != bench_rope.canonical(
        twin.replace("abs", "cos")
    )


def test_the_heart_of_a_program_is_its_loop_or_its_entry():
    cell = Cell(dtype="float32", is_neox_style=True, partial=False, tokens=1)
    for mode in bench_rope.MODES:
        made = bench_rope.programs(cell, mode)
        lines = bench_rope.heart(made.texts["jrope"])
        assert any("f32[1,32,128]" in line and "= " in line for line in lines)
        assert not any("metadata" in line or "parameter" in line for line in lines)


def timing(name: str, *seconds: float) -> Timing:
    return Timing(name=name, seconds=seconds)


def test_ratios_and_misses_of_a_cell():
    cell = Cell(dtype="float32", is_neox_style=True, partial=False, tokens=8192)
    times = {
        "jrope": timing("jrope", 2.6, 2.6),
        "form: swap": timing("form: swap", 2.4, 2.4),
        "gemma": timing("gemma", 9.0, 9.0),
        "complex": timing("complex", 2.5, 2.5),
        "floor: copy": timing("floor: copy", 2.1, 2.1),
        "floor: x*c": timing("floor: x*c", 2.0, 2.0),
    }
    names = {name: name for name in times} | {"form: concat": "jrope"}
    row = bench_rope.result(cell, "call", names, times, times)
    assert row["over_best_form"] == 1.08 and row["best_form"] == "form: swap"
    assert row["over_copy"] == 1.24 and row["forms"]["concat"] == 1
    assert row["peers"] == {"gemma": 3.46, "complex": 0.962}
    assert row["same_program"] == ["form: concat"]
    assert row["misses"] == [
        "over_best_form > 1.05",
        "over_copy > 1.2",
        "faster: complex",
    ]


def test_recompiling_forms_compile_for_every_length_and_ours_once():
    counts = {
        name: bench_recompile.run_case(name, 4)["compiles"]
        for name in bench_recompile.CASES
    }
    assert counts["jrope, decode"] == counts["jrope, prefill in chunks"] == 1
    assert counts["slice at a static start"] == counts["table cut to the length"] == 4


def test_a_step_that_turns_by_other_positions_is_refused():
    program = bench_decode_step.attention_program(2, has_axes=True)
    host = bench_decode_step.Host(2, has_axes=True)
    bench_decode_step.check(program, host)
    rotate = program.rotate
    assert rotate is not None
    shifted = dataclasses.replace(program, rotate=lambda rope: rotate(rope + 1))
    with pytest.raises(AssertionError, match="turns by other positions"):
        bench_decode_step.check(shifted, host)


def test_every_benchmark_without_a_gpu_is_in_the_list_and_takes_json():
    files = {path.stem for path in FOLDER.glob("bench_*.py")} - {"bench_gpu"}
    assert files == {bench.module for bench in runner.BENCHES.values()}
    for file in files:
        assert '"--json"' in (FOLDER / f"{file}.py").read_text(), file
        assert f"`{file}`" in (FOLDER / "README.md").read_text(), file


def test_results_of_two_jax_versions_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)

    def found(version: str, ratio: float) -> dict:
        cells = [{"jax": version, "peers": {"a": ratio}, "misses": ["x", "y"]}]
        return {
            "stamp": {"load": ratio},
            "shape": {"T": 1},
            "best": ratio,
            "cells": cells,
        }

    for version, ratio in (("0.12.0.1", 1.0), ("0.10.2", 2.0), ("0.12.1", 3.0)):
        runner.store("rope", found(version, ratio))
    whole = json.loads((tmp_path / "rope.json").read_text())
    assert [cell["jax"] for cell in whole["cells"]] == ["0.10.2", "0.12.1"]
    assert whole["stamps"] == {"0.10": {"load": 2.0}, "0.12": {"load": 3.0}}
    assert whole["shape"] == {"T": 1}
    assert whole["runs"] == [
        {"jax": "0.10.2", "best": 2.0},
        {"jax": "0.12.1", "best": 3.0},
    ]
    assert (tmp_path / "rope.csv").read_text().splitlines() == [
        "part,jax,peers.a,misses,best",
        "cells,0.10.2,2.0,x; y,",
        "cells,0.12.1,3.0,x; y,",
        "runs,0.10.2,,,2.0",
        "runs,0.12.1,,,3.0",
    ]


def test_the_runner_says_what_failed_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "BENCHES", {"a": runner.Bench("none")})
    monkeypatch.setattr(sys, "executable", "false")
    assert runner.main([]) == 1
    assert re.search("failed: a", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        runner.main(["b"])
    assert "NAME must be one of ['a'], got ['b']" in capsys.readouterr().err
