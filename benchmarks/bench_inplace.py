"""What turning heads in place gains on CPU: cpu_inplace beside the XLA route.

    python -m benchmarks.bench_inplace [--quick] [--json]

Queries and keys of a llama3-8b layer, rows gathered by position from a table within the
call. A *call* is one program, its operands donated or kept; a *step* is one turn of a
loop in a program, positions advancing, as inside a model. Both routes run in the same
interleaved rounds as a floor: a copy of the operands where they are kept, which any
route pays that writes fresh memory; else their negation, which XLA writes where it
reads. Values are checked first.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.timing import Plan, Timing, measure, stamp
from benchmarks.workloads import WORKLOADS
from jrope import RotaryLayout, apply_rope, compute_cos_sin_cache

ROUTES = ("xla", "cpu_inplace")
TOKENS, DTYPES = (1, 256, 8192), ("float32", "bfloat16", "float16")
MODES = ("step", "donated", "kept")
STEPS = 64


def layer(tokens: int, dtype: str, pairing: str) -> tuple[RotaryLayout, list[Any]]:
    """The layout, and positions, query, key and table of one layer."""
    workload = WORKLOADS["llama3-8b"]
    config = dataclasses.replace(workload.config, is_neox_style=pairing == "neox")
    # Room for the positions of a loop's last step.
    last = config.max_position_embeddings - STEPS
    positions = jnp.arange(tokens, dtype=jnp.int32) % last
    rng = np.random.default_rng(0)
    heads = [
        jnp.asarray(rng.standard_normal((tokens, count, config.head_dim)), dtype)
        for count in (workload.query_heads, workload.key_heads)
    ]
    table = jnp.asarray(compute_cos_sin_cache(config))
    return config.layout, [positions, *heads, table]


def rotation(layout: RotaryLayout, route: str) -> Callable[..., Any]:
    """Lookup and rotation by one route."""

    def run(positions, query, key, table):
        return apply_rope(
            positions,
            query,
            key,
            table,
            layout=layout,
            out_of_range="clip",
            implementation=route,
        )

    return run


def floor(mode: str) -> Callable[..., Any]:
    """What any elementwise operation on the same queries and keys costs."""
    one = jnp.copy if mode == "kept" else jnp.negative
    return lambda positions, query, key, table: (one(query), one(key))


def prepared(run: Callable[..., Any], mode: str, operands: list[Any]) -> Any:
    """A call without arguments, for `measure`."""
    positions, query, key, table = operands
    if mode == "kept":
        kept = jax.jit(run)
        return lambda: kept(*operands)
    if mode == "donated":
        donated = jax.jit(run, donate_argnums=(1, 2))
        held = [jnp.copy(query), jnp.copy(key)]

        def again() -> Any:
            held[:] = donated(positions, *held, table)
            return held

        return again

    def steps(positions, query, key, table):
        def turn(i, heads):
            return tuple(run(positions + i, *heads, table))

        return lax.fori_loop(0, STEPS, turn, (query, key))

    loop = jax.jit(steps)
    return lambda: loop(*operands)


def check(layout: RotaryLayout, operands: list[Any]) -> None:
    """Both routes must give one result."""
    first, second = (jax.jit(rotation(layout, route))(*operands) for route in ROUTES)
    for one, other in zip(first, second, strict=True):
        near = 2 * float(jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=near, atol=near
        )


def measure_cell(tokens: int, dtype: str, pairing: str, mode: str, plan: Plan) -> Any:
    """Times of one cell, and their ratios."""
    layout, operands = layer(tokens, dtype, pairing)
    check(layout, operands)
    runs = {route: rotation(layout, route) for route in ROUTES}
    runs["floor"] = floor(mode)
    calls = {name: prepared(run, mode, operands) for name, run in runs.items()}
    times = measure(calls, plan=plan, work=STEPS if mode == "step" else 1)
    return {
        "jax": jax.__version__,
        "tokens": tokens,
        "dtype": dtype,
        "pairing": pairing,
        "mode": mode,
        **ratios(times),
        "times": {name: time.as_json() for name, time in times.items()},
    }


def ratios(times: dict[str, Timing]) -> dict[str, float]:
    """Of medians: how much faster than XLA's route, and how far from the floor."""
    mine = times["cpu_inplace"].median
    return {
        "faster_than_xla": round(times["xla"].median / mine, 2),
        "over_floor": round(mine / times["floor"].median, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    plan = Plan(rounds=9, seconds=0.2 if options.quick else 1.5)
    tokens = TOKENS[:2] if options.quick else TOKENS
    dtypes = DTYPES[:2] if options.quick else DTYPES
    pairings = ("neox",) if options.quick else ("neox", "gptj")
    cells = []
    for case in itertools.product(tokens, dtypes, pairings, MODES):
        if case[0] == max(TOKENS) and case[-1] == "step":
            continue  # A minute a cell, for what a donated call shows.
        cells.append(measure_cell(*case, plan=plan))
        if not options.json:
            _print(cells[-1])
    made = stamp()
    made.versions["numba"] = importlib.metadata.version("numba")
    if options.json:
        print(json.dumps({"cells": cells, "stamp": dataclasses.asdict(made)}))


def _print(cell: dict[str, Any]) -> None:
    times = ", ".join(
        f"{name} {time['median_us']:.1f}" for name, time in cell["times"].items()
    )
    print(
        f"{cell['tokens']:5} {cell['dtype']:9} {cell['pairing']:5} {cell['mode']:8} "
        f"{cell['faster_than_xla']:5.2f} x faster than XLA, "
        f"{cell['over_floor']:5.2f} x the floor; us {times}",
        flush=True,
    )


if __name__ == "__main__":
    main()
