"""Every kernel on an NVIDIA GPU, beside XLA and a measured copy.

    python -m benchmarks.bench_gpu [--dry] [--out benchmarks/results]

At most 8 minutes on an H200. Needs Python 3.12, jax 0.11.2 or newer with CUDA, numpy,
flax and numba. Values are checked first, on fresh random operands: a kernel that is
wrong is not timed. `--dry` does all of it on a CPU, in the interpreter, for few tokens.
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

if "--dry" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.gpu_cases import KERNELS, Case  # noqa: E402
from benchmarks.timing import stamp  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192, 65_536)
_DRY_TOKENS = (1, 4)
_WORKLOAD, _PARTIAL = WORKLOADS["llama3-8b"], WORKLOADS["phi-2"]
_ROUNDS, _SECONDS = 9, 0.4
# Several times the 50 MB of the second level cache, so that no call finds its operands.
_ROTATED_BYTES = 400_000_000
_SECONDS_IN_ALL = 480.0

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One kernel for one number of tokens.

    Args:
      kernel: its name.
      implementation: "pallas" or "xla".
      tokens: T.
      microseconds: the median of one call.
      gigabytes_per_second: of the bytes that must move.
      of_copy: the same over the measured copy's.
      launches: of the compiled program.
    """

    kernel: str
    implementation: str
    tokens: int
    microseconds: float
    gigabytes_per_second: float
    of_copy: float
    launches: int


def random_operands(case: Case, rng: np.random.Generator) -> Arrays:
    """Fresh operands; positions within the table, slots distinct, one of them -1."""
    slots = rng.permutation(case.cache_tokens)[: case.tokens].astype(np.int32)
    if case.tokens > 1:
        slots[-1] = -1
    whole = {
        "positions": rng.integers(0, case.rows, case.tokens, np.int32),
        "shifts": rng.integers(1 - case.rows, case.rows, case.tokens, np.int32),
        "slots": slots,
    }
    return {
        name: jnp.asarray(whole[name])
        if name in whole
        else jnp.asarray(rng.standard_normal(x.shape, np.float32)).astype(x.dtype)
        for name, x in case.operands.items()
    }


def check(case: Case, rng: np.random.Generator) -> None:
    """Raises unless the kernel agrees with the definition on fresh operands.

    What the kernel must rewrite is random, and fresh results come in memory that holds
    something else: a feature that is not written shows.
    """
    operands = random_operands(case, rng)
    poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in operands.values()]
    jax.block_until_ready(poison)
    del poison
    calls = (compiled(case, name, donate=False)[0] for name in ("pallas", "xla"))
    got, want = (jax.tree.leaves(call(*operands.values())) for call in calls)
    for one, other in zip(got, want, strict=True):
        _assert_close(case, np.asarray(one), np.asarray(other))


def _assert_close(case: Case, got: np.ndarray, want: np.ndarray) -> None:
    """Both round a float32 result once: two neighbours of the dtype at the most."""
    wide, other = got.astype(np.float64), want.astype(np.float64)
    eps = {1: 2.0**-3, 2: 2.0**-7}.get(got.dtype.itemsize, 2.0**-20)
    bound = eps * np.maximum(np.abs(other), 2.0**-6) + 1e-5
    wrong = ~(np.abs(wide - other) <= bound)
    if wrong.any():
        raise AssertionError(
            f"{case.kernel} at T = {case.tokens} differs from its definition in "
            f"{wrong.sum()} of {wrong.size} elements, by up to "
            f"{np.abs(wide - other).max():.3g}"
        )


def compiled(case: Case, implementation: str, *, donate: bool) -> tuple[Any, int]:
    """The program and how many launches it has."""
    run = functools.partial(case.run, implementation=implementation)
    jitted = jax.jit(run, donate_argnums=case.donate if donate else ())
    program = jitted.lower(*case.operands.values()).compile()
    text = str(program.as_text())
    entry = text[text.index("\nENTRY") :].splitlines()[1:]
    kinds = ("fusion(", "custom-call(", "copy(", " while(", " scatter(")
    return program, sum(any(kind in line for kind in kinds) for line in entry)


def time_case(
    case: Case, implementation: str, copy: float, rng: np.random.Generator
) -> Result:
    """Medians over calls whose operands are not in the cache."""
    program, launches = compiled(case, implementation, donate=True)
    size = max(1, case.tokens * case.ideal_bytes)
    sets = max(2, min(16, _ROTATED_BYTES // size))
    first = list(random_operands(case, rng).values())
    given = [[jnp.copy(x) for x in first] for _ in range(sets)]
    order = list(case.operands)
    places = [order.index(name) for name in case.kind.rewritten]
    results = len(jax.tree.leaves(jax.eval_shape(
        functools.partial(case.run, implementation="xla"), *case.operands.values()
    )))  # fmt: skip
    outs = _rewritten_results(case, results)

    def call(i: int) -> Any:
        out = jax.tree.leaves(program(*given[i % sets]))
        for place, result in zip(places, outs, strict=True):
            given[i % sets][place] = out[result]
        return out

    seconds = _median(call)
    rate = size / seconds
    return Result(
        kernel=case.kernel,
        implementation=implementation,
        tokens=case.tokens,
        microseconds=1e6 * seconds,
        gigabytes_per_second=rate / 1e9,
        of_copy=rate / copy,
        launches=launches,
    )


def _rewritten_results(case: Case, results: int) -> list[int]:
    """Which results take the place of what was donated."""
    count = len(case.kind.rewritten)
    first = 1 if case.kernel.startswith("rope_append_kv") else 0
    assert first + count <= results
    return list(range(first, first + count))


def _median(call: Callable[[int], Any]) -> float:
    """Seconds of one call: rounds of as many as fill a fraction of a second."""
    for i in range(2):
        jax.block_until_ready(call(i))
    start = time.perf_counter()
    jax.block_until_ready(call(2))
    one = time.perf_counter() - start
    repeats = max(1, min(200, int(_SECONDS / _ROUNDS / max(one, 1e-7))))
    samples = []
    for _ in range(_ROUNDS):
        start, out = time.perf_counter(), None
        for i in range(repeats):
            out = call(i)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / repeats)
    return statistics.median(samples)


def copy_rate(size: int) -> float:
    """Bytes per second, read and written, of a copy far larger than the cache."""
    operands = [jnp.zeros(size // 4, jnp.float32) + i for i in range(2)]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)

    def call(i: int) -> Any:
        operands[i % 2] = step(operands[i % 2])
        return operands[i % 2]

    return 2 * size / _median(call)


def plan(tokens: tuple[int, ...], *, dry: bool) -> Iterator[Case]:
    """The cases, all kernels for few tokens first."""
    sizes = {"rows": 64, "cache_tokens": 64} if dry else {"cache_tokens": 131_072}
    for count in tokens:
        for kernel in KERNELS:
            workload = _PARTIAL if kernel == "rope_in_place" else _WORKLOAD
            yield Case(kernel=kernel, workload=workload, tokens=count, **sizes)


def run(*, dry: bool) -> tuple[float, list[Result]]:
    """Checks everything, then times as much as there is time for."""
    rng = np.random.default_rng()
    tokens = _DRY_TOKENS if dry else TOKENS
    start = time.perf_counter()
    for case in plan((1, 4) if dry else (1, 33, 256), dry=dry):
        check(case, rng)
    print(f"all kernels are right ({time.perf_counter() - start:.0f} s)", flush=True)
    copy = copy_rate(2**20 if dry else 2**31)
    print(f"copy: {copy / 1e12:.2f} TB/s", flush=True)
    results: list[Result] = []
    for case in plan(tokens, dry=dry):
        if time.perf_counter() - start > _SECONDS_IN_ALL:
            print(f"out of time before {case.kernel} at T = {case.tokens}", flush=True)
            break
        for name in ("pallas", "xla"):
            results.append(time_case(case, name, copy, rng))
    return copy, results


def _interpreted() -> None:
    """The kernels on this CPU."""
    from jrope._routes import BY_NAME
    from jrope._routes.pallas import PallasRoute
    from jrope.fused._kernels import PLATFORMS, Kernels

    BY_NAME["cpu"] = (PallasRoute(interpret=True),)
    PLATFORMS["cpu"] = Kernels(interpret=True)


def _write(
    folder: pathlib.Path, copy: float, results: list[Result]
) -> tuple[pathlib.Path, pathlib.Path]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(result) for result in results]
    table, whole = folder / "gpu.csv", folder / "gpu.json"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Result)])
        writer.writeheader()
        writer.writerows(rows)
    made = {"stamp": dataclasses.asdict(stamp()), "copy": copy, "results": rows}
    whole.write_text(json.dumps(made, indent=1) + "\n")
    return table, whole


def _print(results: list[Result]) -> None:
    """Microseconds of both, their ratio, and the kernel's share of the copy."""
    print(f"{'kernel':22}{'T':>7}{'pallas us':>11}{'xla us':>9}{'x':>7}{'of copy':>9}")
    both = zip(results[::2], results[1::2], strict=True)
    for own, xla in both:
        ratio = xla.microseconds / own.microseconds
        print(
            f"{own.kernel:22}{own.tokens:7}{own.microseconds:11.1f}"
            f"{xla.microseconds:9.1f}{ratio:7.2f}{own.of_copy:9.2f}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu")
    parser.add_argument("--dry", action="store_true", help="on a CPU, interpreted")
    parser.add_argument("--out", type=pathlib.Path, help="folder for CSV and JSON")
    options = parser.parse_args(arguments)
    if options.dry:
        _interpreted()
    elif jax.default_backend() != "gpu":
        sys.exit("bench_gpu needs an NVIDIA GPU; --dry checks it without one")
    copy, results = run(dry=options.dry)
    if options.out is not None:
        for path in _write(options.out, copy, results):
            print(f"written: {path}")
    _print(results)


if __name__ == "__main__":
    main()
