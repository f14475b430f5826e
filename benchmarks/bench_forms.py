"""Which way to write the rotation is fastest: the source of the XLA route's choices.

    python -m benchmarks.bench_forms [--quick] [--json]

Every form is timed as one call of a jitted function and inside one jit over a loop of
advancing positions, lookup included, which is how a server runs it. Values are checked
first: all forms must give the same bits.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.rope_cases import (
    FLOORS,
    MODEL,
    ROWS,
    TOKENS,
    Cell,
    Step,
    copy,
    loop_of,
    multiply,
    operands,
)
from benchmarks.timing import Plan, Stamp, Timing, measure, stamp
from jrope import compute_cos_sin_cache, lookup
from jrope._routes._forms import FORMS, Form
from jrope._routes._route import Rotation
from jrope._routes.xla import choose_form

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured in one cell.

    Args:
      cell: the case.
      chosen: the form that the XLA route uses for it here.
      call: times of one call, by form.
      loop: times of one step inside a loop, by form.
    """

    cell: Cell
    chosen: str
    call: dict[str, Timing]
    loop: dict[str, Timing]

    def best(self, mode: str) -> str:
        """The form with the least minimum in "call" or "loop"."""
        times: dict[str, Timing] = getattr(self, mode)
        return min(FORMS, key=lambda form: times[form].minimum)

    def cost(self, form: str) -> float:
        """How far from the best of each mode: the geometric mean of the two ratios."""
        ratios = [
            times[form].minimum / times[self.best(mode)].minimum
            for mode, times in (("call", self.call), ("loop", self.loop))
        ]
        return math.sqrt(math.prod(ratios))

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        modes = {"call": self.call, "loop": self.loop}
        return {
            **dataclasses.asdict(self.cell),
            "chosen": self.chosen,
            "cost": {form: round(self.cost(form), 2) for form in FORMS},
            **{
                mode: {name: timing.as_json() for name, timing in times.items()}
                for mode, times in modes.items()
            },
        }


def run_cell(cell: Cell, plan: Plan) -> Result:
    """Checks and times every form in one cell."""
    query, key, positions = operands(cell)
    config = dataclasses.replace(cell.config, max_position_embeddings=ROWS)
    table = jnp.asarray(compute_cos_sin_cache(config))
    given = (query, key, table, positions)
    steps: dict[str, Step] = {
        name: functools.partial(_step, form, cell) for name, form in FORMS.items()
    }
    calls = {name: jax.jit(step) for name, step in steps.items()}
    _check(calls, given)
    floors: tuple[Step, Step] = (copy, multiply)
    steps |= dict(zip(FLOORS, floors, strict=True))
    calls |= {name: jax.jit(steps[name]) for name in FLOORS}
    loops = {name: jax.jit(loop_of(step)) for name, step in steps.items()}
    # A copy inside a loop is removed by the compiler: there the floor is a product.
    del loops[FLOORS[0]]

    def bound(functions: dict[str, Any], *more: int) -> dict[str, Callable[[], Any]]:
        return {
            name: functools.partial(function, *given, *more)
            for name, function in functions.items()
        }

    return Result(
        cell=cell,
        chosen=chosen_form(cell),
        call=measure(bound(calls), plan=plan),
        loop=measure(bound(loops, cell.steps), plan=plan, work=cell.steps),
    )


def _step(
    form: Form, cell: Cell, query: Array, key: Array, table: Array, positions: Array
) -> tuple[Array, Array]:
    layout = cell.config.layout
    cos, sin = lookup(table, positions, layout=layout)
    turn = functools.partial(
        form, is_neox_style=layout.is_neox_style, rotary_offset=layout.rotary_offset
    )
    return turn(query, cos, sin), turn(key, cos, sin)


def _check(calls: dict[str, Any], given: tuple[Array, ...]) -> None:
    """Raises unless every form gives the bits of the definition."""
    wanted = calls["concat"](*given)
    for name, call in calls.items():
        for got, want in zip(call(*given), wanted, strict=True):
            if np.asarray(got).tobytes() != np.asarray(want).tobytes():
                raise AssertionError(f"form {name!r} differs from the definition")


def chosen_form(cell: Cell) -> str:
    """The form that the XLA route uses in a cell, on this JAX and platform."""
    head_dim = cell.config.head_dim
    query = jax.ShapeDtypeStruct((cell.tokens, MODEL.query_heads, head_dim), cell.dtype)
    half = cell.config.layout.rotary_dim // 2
    rotation = Rotation(
        platform=jax.default_backend(),
        xs=(query,),
        rows=jax.ShapeDtypeStruct((cell.tokens, half), jnp.float32),
        is_neox_style=cell.is_neox_style,
        rotary_offset=0,
    )
    return choose_form(rotation, query)


def cells(tokens: tuple[int, ...], *, quick: bool) -> Iterator[Cell]:
    """Every case, or with `quick` full NeoX rotations of two dtypes for few tokens."""
    cases = itertools.product(tokens, DTYPES, (True, False), (False, True))
    for length, dtype, neox, partial in cases:
        cell = Cell(dtype=dtype, is_neox_style=neox, partial=partial, tokens=length)
        if not quick or (length <= 256 and dtype in DTYPES[:2] and neox > partial):
            yield cell


def _print(result: Result) -> None:
    """One table: microseconds, and the ratio to the best form of the mode."""
    print(f"\n{result.cell}   chosen: {result.chosen}")
    print(
        f"  {'':14}{'one call, min (median)':>30}{'in a loop, min (median)':>30}  cost"
    )
    ranked = sorted(FORMS, key=result.cost)
    for name in (*FLOORS, *ranked):
        call, loop = (
            _figures(times, name, result.best(mode))
            for mode, times in (("call", result.call), ("loop", result.loop))
        )
        cost = f"{result.cost(name):6.2f}" if name in FORMS else ""
        mark = "*" if name == result.chosen else " "
        print(f" {mark}{name:14}{call:>30}{loop:>30}{cost}")


def _figures(times: dict[str, Timing], name: str, best: str) -> str:
    if name not in times:
        return "-"
    timing = times[name]
    ratio = timing.minimum / times[best].minimum
    return f"{1e6 * timing.minimum:.4g} ({1e6 * timing.median:.4g}) {ratio:5.2f}x"


def _summary(results: list[Result]) -> None:
    print("\nchosen / best, minima (1 is best), and what was best:")
    for result in results:
        ratios = [
            f"{mode} {times[result.chosen].minimum / times[best].minimum:5.2f} ({best})"
            for mode, times in (("call", result.call), ("loop", result.loop))
            for best in (result.best(mode),)
        ]
        print(f"  {str(result.cell):32}{result.chosen:13}{'  '.join(ratios)}")
    worst = max(results, key=lambda result: result.cost(result.chosen))
    print(f"worst cost of a choice: {worst.cost(worst.chosen):.2f} at {worst.cell}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_forms")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args(arguments)
    plan = Plan(rounds=3, seconds=0.1) if options.quick else Plan(rounds=4, seconds=0.7)
    made: Stamp = stamp()
    results = []
    for cell in cells(tuple(options.tokens), quick=options.quick):
        results.append(run_cell(cell, plan))
        if options.json:
            print(cell, file=sys.stderr)
        else:
            _print(results[-1])
    if options.json:
        found = [result.as_json() for result in results]
        print(json.dumps({"stamp": dataclasses.asdict(made), "cells": found}))
    else:
        _summary(results)
        print(made)


if __name__ == "__main__":
    main()
