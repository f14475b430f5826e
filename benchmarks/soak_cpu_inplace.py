"""Random calls of the route cpu_inplace against the definition, counted.

    python -m benchmarks.soak_cpu_inplace [--calls 1000000] [--seed 0] [--json]

A call is one of the compiled handler. Programs differ at random in all that a rotation
has: dtypes, pairing, head size, rotated features, offset, heads, batch axes, shared
rows, direction; operands hold infinities, NaN, both zeros and subnormal numbers, too.
Each program makes its calls in a loop on the device, one step after the other with
operands and rows of its own, from several threads at once; half of the programs use the
operands again after the call. Then it is called once with donated operands.

Every element is compared with `jrope.rotate_one`, compiled by XLA for all steps at
once. Bits that differ are counted; where they do, the error must be within the bound of
one rotation (docs/pages/precision.md). At the end one program makes 1,000,000 calls
more, with the memory of the process before and after.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from benchmarks.timing import resident, stamp
from jrope import rotate_one
from jrope._primitive import bind_rope

ROUTE = "cpu_inplace"
DTYPES = ("float32", "bfloat16", "float16", "float64")
THREADS, RUNS, STEPS = 2, 4, 1000
STEADY_CALLS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What one program turns.

    Args:
      dtypes: of the operands, one to three.
      heads: of each.
      leading: batch axes and tokens.
      row_leading: likewise, with 1 where rows are shared.
      width: features of a head.
      half: rotated pairs.
      offset: index of the first rotated feature.
      is_neox_style: the pairing.
      is_back: turned by the negated sine, as the transpose does.
      is_kept: the operands are used again after the call.
    """

    dtypes: tuple[str, ...]
    heads: tuple[int, ...]
    leading: tuple[int, ...]
    row_leading: tuple[int, ...]
    width: int
    half: int
    offset: int
    is_neox_style: bool
    is_back: bool
    is_kept: bool

    @property
    def style(self) -> dict[str, Any]:
        """What says which features turn."""
        return {"is_neox_style": self.is_neox_style, "rotary_offset": self.offset}


def draw(rng: np.random.Generator) -> Case:
    """A case at random; small ones, as in a step that decodes."""
    count = int(rng.choice([1, 2, 2, 3]))
    kinds = rng.choice(DTYPES, count if rng.random() < 0.3 else 1)
    leading = tuple(map(int, rng.integers(1, 5, rng.choice([1, 1, 2, 3]))))
    width = int(rng.choice([2, 7, 16, 64, 80, 96, 128]))
    whole = rng.random() < 0.5
    half = width // 2 if whole else int(rng.integers(1, width // 2 + 1))
    return Case(
        dtypes=tuple(str(kinds[i % len(kinds)]) for i in range(count)),
        heads=tuple(map(int, rng.integers(1, 6, count))),
        leading=leading,
        row_leading=tuple(1 if rng.random() < 0.2 else size for size in leading),
        width=width,
        half=half,
        offset=int(rng.integers(0, width - 2 * half + 1)),
        is_neox_style=bool(rng.random() < 0.5),
        is_back=bool(rng.random() < 0.3),
        is_kept=bool(rng.random() < 0.5),
    )


ODD = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, 6e-8, 6e4, 3e38])


def operands(case: Case, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Operands and rows for all steps of a run; one value in a thousand is odd."""
    xs = []
    for dtype, heads in zip(case.dtypes, case.heads, strict=True):
        x = rng.standard_normal((STEPS, *case.leading, heads, case.width))
        places = rng.integers(0, x.size, max(1, x.size // 1000))
        x.flat[places] = rng.choice(ODD, len(places))
        with np.errstate(over="ignore"):
            xs.append(x.astype(jnp.dtype(dtype)))
    angles = rng.uniform(0, 50, (STEPS, *case.row_leading, case.half))
    return xs, [(1.25 * f(angles)).astype(np.float32) for f in (np.cos, np.sin)]


def program(case: Case) -> Any:
    """The steps in a loop on the device, and the operands where they are kept."""

    def step(_, given):
        xs, (cos, sin) = given
        sin = -sin if case.is_back else sin
        turned = bind_rope(xs, cos, sin, **case.style, implementation=ROUTE)
        return None, (turned, xs if case.is_kept else None)

    return lambda xs, rows: lax.scan(step, None, (xs, rows))[1]


def definition(case: Case) -> Any:
    """All steps at once, in plain JAX."""

    def run(xs, rows):
        cos, sin = rows
        sin = -sin if case.is_back else sin
        return [rotate_one(x, cos, sin, **case.style) for x in xs]

    return run


def differing(got: Any, want: Any) -> np.ndarray:
    """Where bits differ; any NaN is as good as another."""
    got, want = np.asarray(got), np.asarray(want)
    bits = np.dtype(f"uint{8 * got.dtype.itemsize}")
    both_nan = np.isnan(got) & np.isnan(want)
    return (got.view(bits) != want.view(bits)) & ~both_nan


def over_bound(case: Case, x: Any, rows: Any, got: Any) -> np.ndarray:
    """How far each element is past the bound of one rotation; at most 0 is within."""
    cos, sin = (np.asarray(row, np.float64)[..., None, :] for row in rows)
    sin = -sin if case.is_back else sin
    dtype, x = x.dtype, np.asarray(x).astype(np.float64)
    pair = np.arange(case.half)
    first = case.offset + (pair if case.is_neox_style else 2 * pair)
    second = first + (case.half if case.is_neox_style else 1)
    exact, size = x.copy(), np.zeros_like(x)
    a, b = x[..., first], x[..., second]
    exact[..., first], exact[..., second] = a * cos - b * sin, b * cos + a * sin
    size[..., first] = np.abs(a * cos) + np.abs(b * sin)
    size[..., second] = np.abs(b * cos) + np.abs(a * sin)
    info = ml_dtypes.finfo(dtype)
    arithmetic = 2.0**-23 * size
    least = np.maximum(np.abs(exact) + arithmetic, float(info.tiny))
    half_ulp = 0.5 * float(info.eps) * 2.0 ** np.floor(np.log2(least))
    return np.abs(np.asarray(got).astype(np.float64) - exact) - arithmetic - half_ulp


@dataclasses.dataclass
class Counts:
    """What was called and found.

    Args:
      programs: that were compiled.
      calls: of the handler.
      elements: compared.
      differing: whose bits are not the definition's.
      over_bound: of those, past the bound of one rotation.
      changed_operands: elements of kept operands that are not what they were.
    """

    programs: int = 0
    calls: int = 0
    elements: int = 0
    differing: int = 0
    over_bound: int = 0
    changed_operands: int = 0

    def compare(self, case: Case, xs: Any, rows: Any, outs: Any, wants: Any) -> None:
        """Counts one result's elements."""
        for x, out, want in zip(xs, outs, wants, strict=True):
            places = differing(out, want)
            self.elements += places.size
            self.differing += int(places.sum())
            if places.any():
                with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                    past = over_bound(case, x, rows, out)[places]
                self.over_bound += int((~(past <= 0)).sum())


def soak(case: Case, counts: Counts, seed: int) -> None:
    """Compiles a program, calls it from several threads and counts what it gave."""
    xs, rows = operands(case, np.random.default_rng((seed, RUNS)))
    run, define = (
        jax.jit(make(case)).lower(xs, rows).compile() for make in (program, definition)
    )

    def one(number: int) -> Any:
        xs, rows = operands(case, np.random.default_rng((seed, number)))
        # XLA's own copies: it may read NumPy's memory where that lies well.
        with jax.enable_x64(True):
            given = jax.device_put((xs, rows), may_alias=False)
            return xs, rows, run(*given), define(*given)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for xs, rows, (outs, kept), wants in pool.map(one, range(RUNS)):
            counts.compare(case, xs, rows, outs, wants)
            for x, again in zip(xs, kept or xs, strict=True):
                counts.changed_operands += int(differing(again, x).sum())
            counts.calls += STEPS * len(set(case.dtypes))
    alone = functools.partial(bind_rope, **case.style, implementation=ROUTE)
    sin = -rows[1] if case.is_back else rows[1]
    given = jax.device_put((xs, rows[0], sin), may_alias=False)
    outs = jax.jit(alone, donate_argnums=0)(*given)
    wants = define(xs, rows)
    counts.compare(case, xs, rows, outs, wants)
    counts.calls += len(set(case.dtypes))
    counts.programs += 1


def steady(calls: int) -> dict[str, int]:
    """Memory before and after calls of one program, all that it needs being there."""
    rows = jnp.ones((2, 1, 32))

    def turn(_, x):
        return bind_rope(
            [x], *rows, is_neox_style=True, rotary_offset=0, implementation=ROUTE
        )[0]

    run = jax.jit(lambda x: lax.fori_loop(0, 100, turn, x), donate_argnums=0)
    x = jnp.zeros((1, 4, 64))
    found = {}
    for name, count in (("before", max(1, calls // 1000)), ("after", calls // 100)):
        for _ in range(count):
            x = run(x)
        jax.block_until_ready(x)
        found[f"resident_bytes_{name}"] = resident()
    return {"calls": calls, **found}


def main(arguments: list[str] | None = None) -> int:
    """Soaks and prints; the exit status is 1 where an element was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--steady", type=int, default=STEADY_CALLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args(arguments)
    start, counts = time.perf_counter(), Counts()
    with jax.enable_x64(True):
        while counts.calls < options.calls:
            seed = options.seed * 1_000_000 + counts.programs
            soak(draw(np.random.default_rng(seed)), counts, seed)
            jax.clear_caches()
            if counts.programs % 25 == 0:
                print(f"{counts.calls} calls", file=sys.stderr, flush=True)
    result = {
        **dataclasses.asdict(counts),
        "steady": steady(options.steady),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if options.json:
        print(json.dumps({**result, "stamp": dataclasses.asdict(stamp())}))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    return int(bool(counts.over_bound or counts.changed_operands))


if __name__ == "__main__":
    raise SystemExit(main())
