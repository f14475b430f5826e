"""How far position building is from its floors, and from the rules it replaces.

    python -m benchmarks.bench_positions [--quick] [--json]

Every case is timed in interleaved rounds with its floors (a numba fill and np.copyto of
the same array) and with the rules of others, see position_peers.py: vLLM's, the form of
the numba pull requests to vLLM, and transformers' own where the extra `peers` is there.
Values are checked first.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.position_cases import CASES, Case
from benchmarks.position_peers import (
    loop_rule,
    numba_fill,
    seed_form,
    transformers_rule,
    transformers_state,
    vllm_rule,
)
from benchmarks.timing import Plan, Timing, measure, stamp
from jrope.positions import BatchPositions, plan, spec

# Goals, as ratios of medians: engine to the floor, and vLLM's rule to the whole call.
GOALS = {"text360": (3.0, 8.0), "image324": (None, 12.0), "image10x324": (3.0, 40.0)}
GOALS |= {"video200": (1.7, 20.0), "av1296_200": (5.0, 20.0)}


def measure_case(case: Case, timing: Plan, *, transformers: bool) -> dict[str, Any]:
    """Times of one case, and their ratios."""
    out = np.empty((3, len(case.ids)), np.int32)
    prepared = plan(case.model, case.ids, **case.media)
    prepared.fill(out)
    np.testing.assert_array_equal(out, vllm_rule(case))
    source = out.copy()

    calls: dict[str, Callable[[], Any]] = {
        "engine": lambda: prepared.fill(out),
        "call": whole_call(case, out),
        "vllm rule": lambda: vllm_rule(case),
        "numba fill": lambda: numba_fill(out),
        "copyto": lambda: np.copyto(out, source),
    }
    if not case.together:
        np.testing.assert_array_equal(source, seed_form(case))
        calls["seed form"] = lambda: seed_form(case)
    if transformers:
        theirs = transformers_rule(case)
        same = plan(case.model, case.ids, advance="hf5", **case.media)
        np.testing.assert_array_equal(same.positions(), theirs())
        calls["transformers"] = theirs
    times = measure(calls, plan=timing)
    pairs = {
        "engine_over_floor": ("engine", "numba fill"),
        "call_over_vllm_rule": ("vllm rule", "call"),
        "call_over_seed_form": ("seed form", "call"),
        "call_over_transformers": ("transformers", "call"),
    }
    return {"name": case.name, "tokens": len(case.ids), **_result(times, pairs)}


def whole_call(case: Case, out: np.ndarray) -> Callable[[], None]:
    """Planning and filling as a user writes it: unpacking a dict would be a tenth."""
    names = {"plan": plan, "model": case.model, "ids": case.ids, "out": out}
    keywords = ", ".join(f"{name}={name}" for name in case.media)
    call = f"lambda: plan(model, ids, {keywords}).fill(out)"
    return eval(call, {**names, **case.media})


def _result(
    times: dict[str, Timing], pairs: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """Ratios of medians, those of minima, and the times.

    Where other programs run, a longer call is disturbed more often than a short one,
    and the medians' ratio is too large: then the minima say what the machine can do.
    """
    pairs = {key: pair for key, pair in pairs.items() if times.keys() >= {*pair}}
    medians = {key: times[a].median / times[b].median for key, (a, b) in pairs.items()}
    minima = {key: times[a].minimum / times[b].minimum for key, (a, b) in pairs.items()}
    return {
        **{key: round(ratio, 2) for key, ratio in medians.items()},
        "of_minima": {key: round(ratio, 2) for key, ratio in minima.items()},
        "times": {name: time.as_json() for name, time in times.items()},
    }


def _batch(requests: int, kind: str) -> tuple[BatchPositions, list[Any], np.ndarray]:
    """A running batch, its plans, and [slots, computed, scheduled]."""
    model = spec("qwen2_5_vl")
    image = next(case for case in CASES if case.name == "image324")
    batch = BatchPositions(model, requests, 2**16, max_position=2**15)
    with_image = plan(model, image.ids, **image.media)
    text = plan(model, image.ids[:18])
    plans = [
        with_image if kind != "text" and slot % 2 else text for slot in range(requests)
    ]
    for slot, made in enumerate(plans):
        batch.add(slot, made)
    step = np.array([np.arange(requests), [500] * requests, [1] * requests], np.int32)
    if kind == "6% prefill":
        step[1, ::16], step[2, ::16] = 0, 360
    return batch, plans, step


def measure_step(requests: int, kind: str, timing: Plan) -> dict[str, Any]:
    """Times of one step of a running batch."""
    batch, plans, step = _batch(requests, kind)
    slots, computed, scheduled = step
    wholes = [made.positions(dtype=np.int64) for made in plans]
    got = batch.step(slots, computed, scheduled)
    np.testing.assert_array_equal(got, loop_rule(plans, wholes, step))
    rows = np.empty((3, got.shape[1]), np.int32)
    delta = np.array([made.delta for made in plans], np.int32)
    source = got.copy()

    def add_into_rows() -> None:
        np.add(computed, delta, out=rows[0])
        rows[1:] = rows[0]

    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: batch.step(slots, computed, scheduled),
        "loop": lambda: loop_rule(plans, wholes, step),
        "copyto": lambda: np.copyto(rows, source),
    }
    if kind != "6% prefill":
        calls["np.add into rows"] = add_into_rows
    times = measure(calls, plan=timing)
    pairs = {
        "step_over_loop": ("loop", "step"),
        "step_over_add": ("step", "np.add into rows"),
    }
    named = {"requests": requests, "kind": kind, "tokens": got.shape[1]}
    return {**named, **_result(times, pairs)}


_FIRST_CALL = """
import time, numba
begin = time.perf_counter()
from jrope.positions import plan, spec
ids = [1, 151652, *[151655] * 4, 151653]
plan(spec("qwen2_vl"), [1, 2]).positions()
plan(spec("qwen2_vl"), ids, image_grid_thw=[[1, 4, 4]]).positions()
print(time.perf_counter() - begin)
"""


def first_call() -> dict[str, float]:
    """Seconds over importing numba, in a new process, with warm caches.

    Those of numba and, as an installed package has them, of Python's own bytecode.
    """
    command = [sys.executable, "-c", _FIRST_CALL]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        environment = {**os.environ, **caches}
        runs = [
            float(subprocess.check_output(command, env=environment)) for _ in range(12)
        ][2:]
    return {"min": round(min(runs), 3), "median": round(statistics.median(runs), 3)}


def _print(name: str, result: dict[str, Any], goals: dict[str, str]) -> None:
    """Times of one case, then every ratio with its goal."""
    times = result["times"]
    parts = [f"{key} {time['median_us']:.2f}" for key, time in times.items()]
    print(f"{name}: us {', '.join(parts)}")
    for key, minimum in result["of_minima"].items():
        goal = f", goal {goals[key]}" if key in goals else ""
        print(f"    {key} {result[key]} (of minima {minimum}{goal})")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    timing = Plan(rounds=15, seconds=0.4 if options.quick else 2.0)
    named = [case for case in CASES if not options.quick or case.name in GOALS]
    peer = transformers_state()
    there = not peer.startswith("skipped")
    cases = [measure_case(case, timing, transformers=there) for case in named]
    steps = [
        measure_step(requests, kind, timing)
        for requests in (1, 128, 1024)
        for kind in ("text", "mixed", "6% prefill")
    ]
    first = first_call()
    made = stamp()
    made.versions["numba"] = importlib.metadata.version("numba")
    if options.json:
        whole = {"cases": cases, "steps": steps, "first_call_seconds": first}
        whole |= {"transformers": peer, "stamp": dataclasses.asdict(made)}
        print(json.dumps(whole))
        return
    for result in cases:
        engine, call = GOALS.get(result["name"], (None, None))
        goals = {"engine_over_floor": f"<= {engine}"} if engine else {}
        goals |= {"call_over_vllm_rule": f">= {call}"} if call else {}
        _print(f"{result['name']} ({result['tokens']} tokens)", result, goals)
    for result in steps:
        _print(f"step, {result['requests']} {result['kind']}", result, {})
    print(f"first call in a new process, seconds: {first}")
    print(f"transformers: {peer}")


if __name__ == "__main__":
    main()
