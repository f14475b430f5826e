"""jrope's rotation beside those of other projects, all its own forms, and the floors.

    python -m benchmarks.bench_rope [--quick] [--json] [--hlo FOLDER]

Every candidate is timed as one call, and in a loop of advancing positions inside one
program, which is how a server runs it. Each is checked first against the formula in
float64, in both programs. Candidates whose compiled programs are the same are timed as
one: their difference would be noise.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.rope_cases import (
    FLOORS,
    ROWS,
    TOKENS,
    Cell,
    Step,
    copy,
    exact_turn,
    loop_of,
    multiply,
    operands,
)
from benchmarks.rope_peers import PEERS, Peer
from benchmarks.timing import Plan, Timing, measure, stamp
from benchmarks.workloads import WORKLOADS
from jrope import apply_rope, compute_cos_sin_cache, lookup
from jrope._routes._forms import FORMS, Form

OURS = "jrope"
# What is asked of ours: its median over that of the best form, and over a copy's at
# many tokens by is_neox_style, where some form reaches that.
BEST_GOAL = 1.05
COPY_GOALS = {True: 1.2, False: 1.5}
MODES = ("call", "loop")
DTYPES = ("float32", "bfloat16")
# Frequencies without scaling, which is what all peers have.
_CONFIG = dataclasses.replace(
    WORKLOADS["llama3-8b"].config, max_position_embeddings=ROWS
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to rotate queries and keys.

    Args:
      step: the whole of a step.
      state: what it keeps between steps.
      error: the largest one to accept, over |a| + |b| of a pair; None for floors.
    """

    step: Step
    state: Any
    error: float | None


def candidates(cell: Cell) -> dict[str, Candidate]:
    """Ours, our forms by "form: ", floors, and the peers that have the pairing."""
    config = dataclasses.replace(_CONFIG, is_neox_style=cell.is_neox_style)
    table = jnp.asarray(compute_cos_sin_cache(config))
    # Half an ulp of the result; the products are in float32.
    error = 2.0**-8 if cell.dtype == "bfloat16" else 2.0**-21

    def ours(
        query: Array, key: Array, state: Array, positions: Array
    ) -> tuple[Array, Array]:
        return apply_rope(positions, query, key, state, layout=config.layout)

    def by_form(
        form: Form, query: Array, key: Array, state: Array, positions: Array
    ) -> tuple[Array, Array]:
        cos, sin = lookup(state, positions, layout=config.layout)
        turn = functools.partial(form, is_neox_style=cell.is_neox_style)
        return turn(query, cos, sin), turn(key, cos, sin)

    found = {OURS: Candidate(step=ours, state=table, error=error)}
    for name, form in FORMS.items():
        step = functools.partial(by_form, form)
        found[f"form: {name}"] = Candidate(step=step, state=table, error=error)
    for name, floor in zip(FLOORS, (copy, multiply), strict=True):
        found[name] = Candidate(step=floor, state=table, error=None)
    for name, peer in PEERS.items():
        if cell.is_neox_style in peer.pairings:
            found[name] = _peer(peer, cell)
    return found


def _peer(peer: Peer, cell: Cell) -> Candidate:
    theta = _CONFIG.rope_theta
    kept = peer.keep(ROWS, _CONFIG.head_dim, theta)

    def step(
        query: Array, key: Array, state: tuple[Array, ...], positions: Array
    ) -> tuple[Array, Array]:
        turn = functools.partial(
            peer.turn,
            kept=state,
            positions=positions,
            theta=theta,
            is_neox_style=cell.is_neox_style,
        )
        return turn(query), turn(key)

    state = tuple(jnp.asarray(each) for each in kept)
    return Candidate(step=step, state=state, error=peer.error(cell.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What is timed in one cell.

    Args:
      calls: distinct programs with their operands, by the first candidate of each.
      texts: their HLO, likewise.
      names: of every candidate, whose program it has.
    """

    calls: dict[str, Callable[..., tuple[Array, Array]]]
    texts: dict[str, str]
    names: dict[str, str]


def programs(cell: Cell, mode: str) -> Programs:
    """Compiles and checks all candidates."""
    query, key, positions = operands(cell)
    made = Programs(calls={}, texts={}, names={})
    twins: dict[str, str] = {}
    for name, candidate in candidates(cell).items():
        if mode == "loop" and name == FLOORS[0]:
            continue  # removed by the compiler
        step = loop_of(candidate.step) if mode == "loop" else candidate.step
        more = (1,) if mode == "loop" else ()
        given = (query, key, candidate.state, positions)
        program = jax.jit(step).lower(*given, *more).compile()
        text = program.as_text() or ""
        made.names[name] = twins.setdefault(canonical(text), name)
        if made.names[name] == name:
            made.texts[name] = text
            made.calls[name] = functools.partial(program, *given)
            check(name, made.calls[name](*more), candidate, cell)
    return made


def canonical(text: str) -> str:
    """A program's text without the names and places of what made it."""
    seen: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+",
        lambda name: seen.setdefault(name[0], f"%{len(seen)}"),
        without_places(text),
    )


def without_places(text: str) -> str:
    """A program's text without its heading and the places in files."""
    start = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    return re.sub(r", metadata=\{[^}]*\}", "", text[start.start() if start else 0 :])


def heart(text: str) -> list[str]:
    """The lines of a program that say what runs: its loop's body, or its entry."""
    body = re.search(r"body=(%[\w.\-]+)", text)
    lines = without_places(text).splitlines()
    name = body[1] if body else "ENTRY"
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
    found = lines[start : lines.index("}", start)]
    return [line.strip() for line in found if re.search("fusion|concat|copy", line)]


def check(
    name: str, got: tuple[Array, Array], candidate: Candidate, cell: Cell
) -> None:
    """Raises unless a candidate's result of one step is the rotation, at 64 tokens."""
    if candidate.error is None:
        return
    query, key, positions = operands(cell)
    some = np.unique(np.linspace(0, cell.tokens - 1, 64).astype(int))
    half = _CONFIG.head_dim // 2
    inv_freq = _CONFIG.rope_theta ** -(np.arange(half) / half)
    for x, out in zip((query, key), got, strict=True):
        if out.shape != x.shape or out.dtype != x.dtype:
            raise AssertionError(f"{name!r} gives {out.dtype} {out.shape} at {cell}")
        want, size = exact_turn(
            np.asarray(x)[some].astype(np.float64),
            np.asarray(positions)[some],
            inv_freq,
            is_neox_style=cell.is_neox_style,
        )
        error = np.abs(np.asarray(out)[some].astype(np.float64) - want) / size
        if not error.max() <= candidate.error:
            raise AssertionError(
                f"{name!r} is off by {error.max():.2g} of a pair's size at {cell}, "
                f"more than {candidate.error:.2g}: it is another rotation"
            )


def run_cell(cell: Cell, mode: str, *, quick: bool) -> dict[str, Any]:
    """Checks and times all candidates in one cell, in one mode."""
    made = programs(cell, mode)
    steps = cell.steps if mode == "loop" else 1
    more = (steps,) if mode == "loop" else ()
    calls = {name: functools.partial(call, *more) for name, call in made.calls.items()}
    is_long = cell.tokens > 256
    # Who is far from ours needs no further rounds: a third of the time is theirs else.
    first = measure(calls, plan=_SCREEN if is_long else _SHORT_SCREEN, work=steps)
    near = {
        name: calls[name]
        for name in calls
        if first[name].median < 1.6 * first[OURS].median
    }
    plan = _QUICK if quick else _LONG if is_long else _SHORT
    close = measure(near, plan=plan, work=steps)
    row = result(cell, mode, made.names, first, close)
    if row["misses"]:
        best = made.names[row["best_form"]]
        row["hlo"] = {name: heart(made.texts[name]) for name in (OURS, best)}
    return row


# Rounds of everybody, then of those that are near. Programs are warm after the check.
_SHORT_SCREEN = Plan(rounds=5, seconds=0.2, warm_up=1)
_SHORT = Plan(rounds=60, seconds=1.5, sample_seconds=1e-3, warm_up=1)
_SCREEN = Plan(rounds=1, seconds=0, warm_up=0)
_LONG = Plan(rounds=7, seconds=2.0, warm_up=0)
_QUICK = Plan(rounds=3, seconds=0.1, warm_up=1)


def result(
    cell: Cell,
    mode: str,
    names: dict[str, str],
    first: dict[str, Timing],
    close: dict[str, Timing],
) -> dict[str, Any]:
    """Ratios of medians; those of candidates far from ours are of the first rounds."""

    def over(name: str) -> float:
        """How many times as long as ours it takes."""
        times = close if names[name] in close else first
        return times[names[name]].median / times[OURS].median

    forms = {name: over(name) for name in names if name.startswith("form: ")}
    peers = {name: over(name) for name in names if name in PEERS}
    best = min({**forms, **peers}, key={**forms, **peers}.__getitem__)
    floor = FLOORS[0] if mode == "call" else FLOORS[1]
    times = {**first, **close}
    goals = misses(
        over_best=1 / min(1.0, *forms.values(), *peers.values()),
        over_copy=1 / over(floor) if cell.tokens > 256 and mode == "call" else None,
        best_over_copy=over(best) / over(floor),
        peers=peers,
        is_neox_style=cell.is_neox_style,
    )
    return {
        "jax": jax.__version__,
        "tokens": cell.tokens,
        "dtype": cell.dtype,
        "pairing": cell.pairing,
        "mode": mode,
        "over_best_form": _round(1 / min(1.0, *forms.values(), *peers.values())),
        "best_form": best,
        "same_program": sorted(name for name in forms if names[name] == OURS),
        "over_copy": _round(1 / over(floor)),
        "copy_is": floor,
        "best_over_copy": _round(over(best) / over(floor)),
        "misses": goals,
        "peers": {name: _round(ratio) for name, ratio in peers.items()},
        "forms": {name[6:]: _round(ratio) for name, ratio in forms.items()},
        "median_us": {
            name: times[names[name]].as_json()["median_us"] for name in names
        },
        "min_us": {name: times[names[name]].as_json()["min_us"] for name in names},
    }


def misses(
    *,
    over_best: float,
    over_copy: float | None,
    best_over_copy: float,
    peers: dict[str, float],
    is_neox_style: bool,
) -> list[str]:
    """The goals that a cell misses, in words.

    Args:
      over_best: ours over the best form of all, peers' included.
      over_copy: ours over a copy, at many tokens in one call; None elsewhere.
      best_over_copy: the best form over a copy, which bounds what can be asked.
      peers: how many times as long as ours each takes.
      is_neox_style: the pairing.
    """
    found = []
    if over_best > BEST_GOAL:
        found.append(f"over_best_form > {BEST_GOAL}")
    goal = COPY_GOALS[is_neox_style]
    if over_copy is not None and over_copy > goal >= best_over_copy:
        found.append(f"over_copy > {goal}")
    return found + [f"faster: {name}" for name, ratio in peers.items() if ratio < 1]


def _round(ratio: float) -> float:
    return float(f"{ratio:.3g}")


def cells(*, quick: bool, tokens: tuple[int, ...]) -> Iterator[Cell]:
    """Every case; with `quick` those of few tokens."""
    for length, dtype, neox in itertools.product(tokens, DTYPES, (True, False)):
        if not quick or length <= 256:
            yield Cell(dtype=dtype, is_neox_style=neox, partial=False, tokens=length)


def _print(row: dict[str, Any]) -> None:
    where = [str(row[key]) for key in ("tokens", "dtype", "pairing", "mode")]
    print(
        f"\nT={' '.join(where)}: {row['median_us'][OURS]:.4g} us; over best form "
        f"{row['over_best_form']} ({row['best_form']}), over {row['copy_is']} "
        f"{row['over_copy']}; misses: {', '.join(row['misses']) or 'none'}"
    )
    for kind in ("peers", "forms"):
        ratios = sorted(row[kind].items(), key=lambda pair: pair[1])
        print(f"  {kind}: " + ", ".join(f"{name} {ratio}x" for name, ratio in ratios))


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_rope")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument(
        "--hlo", type=pathlib.Path, help="write the compiled programs there instead"
    )
    options = parser.parse_args(arguments)
    made = stamp()
    rows = []
    for cell in cells(quick=options.quick, tokens=tuple(options.tokens)):
        for mode in MODES:
            if options.hlo:
                write_programs(cell, mode, options.hlo)
                continue
            rows.append(run_cell(cell, mode, quick=options.quick))
            if options.json:
                print(f"{cell} {mode}", file=sys.stderr)
            else:
                _print(rows[-1])
    if options.json:
        sources = {name: peer.source for name, peer in PEERS.items()}
        whole = {"stamp": dataclasses.asdict(made), "sources": sources, "cells": rows}
        print(json.dumps(whole))


def write_programs(cell: Cell, mode: str, folder: pathlib.Path) -> None:
    """The HLO of every distinct program of a cell, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs(cell, mode).texts.items():
        safe = re.sub(r"\W+", "-", f"{cell} {mode} {name}")
        (folder / f"{safe}.txt").write_text(without_places(text))


if __name__ == "__main__":
    main()
