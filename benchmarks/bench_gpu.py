"""Every kernel on an NVIDIA GPU, beside XLA and a measured copy.

    python -m benchmarks.bench_gpu [--dry] [--out benchmarks/results]

At most 8 minutes on an H200. Needs Python 3.12, jax 0.11.2 or newer with CUDA, numpy,
flax, numba and jaxtyping. Values are checked first, on fresh random operands: a kernel
that is wrong is not timed, and the exit status says so. Then the numbers of tokens that
decide most come first, and what was timed is written after each of them. `--dry` does
all of it on a CPU, in the interpreter, for few tokens.
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

if "--dry" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.gpu_cases import KERNELS, Case, cases  # noqa: E402
from benchmarks.gpu_compile import launches_of  # noqa: E402
from benchmarks.gpu_timing import (  # noqa: E402
    Effort,
    call_seconds,
    copy_rate,
    device_seconds,
)
from benchmarks.timing import stamp  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

_START = time.perf_counter()
_SECONDS_IN_ALL = 440.0  # Less what starting takes, and the last case.

# The limit by memory and the default of the plain rotation first, then decoding.
TOKENS = (8192, 256, 1, 65_536, 64, 4096, 8, 1024)
_DRY_TOKENS = (4, 1)
# Kernels of fewer tokens take less than a launch: they are profiled as well.
_PROFILED_TOKENS = 256
_WORKLOAD, _PARTIAL = WORKLOADS["llama3-8b"], WORKLOADS["phi-2"]
# Sets of a single token that fill the second level cache would be too many.
_MOST_SETS = 2048
_DRY_EFFORT = Effort(rounds=2, seconds=0.02, profiled=1, rotated=0)
# Where threads hold copies of each other's features, or heads come in several groups.
_ODD_HEADS = ("gemma3-270m-local", "deepseek-v3-mla", "qwen2-vl-7b")
_ODD_KERNELS = ("qkv_rope_packed", "rope_append_kv_norm", "rerope_cache")

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One kernel for one number of tokens.

    Args:
      kernel: its name.
      implementation: "pallas" or "xla".
      tokens: T.
      microseconds: the median of one call, of many in flight.
      device_microseconds: of what ran on the GPU; None where it was not profiled.
      gigabytes_per_second: of the bytes that must move, by the shorter time.
      of_copy: the same over the measured copy's.
      launches: of the compiled program.
      sets: of operands, in turn.
    """

    kernel: str
    implementation: str
    tokens: int
    microseconds: float
    device_microseconds: float | None
    gigabytes_per_second: float
    of_copy: float
    launches: int
    sets: int


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


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
    # On the device: a host makes the millions of a cache too slowly.
    key = jax.random.key(int(rng.integers(2**31)))
    return {
        name: jnp.asarray(whole[name])
        if name in whole
        else _normal(jax.random.fold_in(key, i), shape=x.shape, dtype=x.dtype)
        for i, (name, x) in enumerate(case.operands.items())
    }


def check(case: Case, rng: np.random.Generator) -> str | None:
    """How the kernel differs from the definition on fresh operands, or None.

    What the kernel must rewrite is random, and fresh results come in memory that holds
    NaN: a feature that is not written shows.
    """
    operands = random_operands(case, rng)
    calls = [compiled(case, name, donate=False)[0] for name in ("pallas", "xla")]
    want = jax.block_until_ready(jax.tree.leaves(calls[1](*operands.values())))
    poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in want for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    got = jax.tree.leaves(calls[0](*operands.values()))
    pairs = zip(got, want, strict=True)
    found = (_difference(np.asarray(one), np.asarray(other)) for one, other in pairs)
    difference = next((each for each in found if each is not None), None)
    where = f"{case.kernel} on {case.workload.name} at T = {case.tokens}"
    return None if difference is None else f"{where} differs {difference}"


def _difference(got: np.ndarray, want: np.ndarray) -> str | None:
    """Both round a float32 result once: two neighbours of the dtype at the most."""
    wide, other = got.astype(np.float64), want.astype(np.float64)
    eps = {1: 2.0**-3, 2: 2.0**-7}.get(got.dtype.itemsize, 2.0**-20)
    bound = eps * np.maximum(np.abs(other), 2.0**-6) + 1e-5
    wrong = ~(np.abs(wide - other) <= bound)
    if not wrong.any():
        return None
    largest = np.abs(wide - other)[wrong].max()
    return f"in {wrong.sum()} of {wrong.size} elements, by up to {largest:.3g}"


def compiled(case: Case, implementation: str, *, donate: bool) -> tuple[Any, int]:
    """The program and how many launches it has."""
    run = functools.partial(case.run, implementation=implementation)
    jitted = jax.jit(run, donate_argnums=case.donate if donate else ())
    program = jitted.lower(*case.operands.values()).compile()
    return program, len(launches_of(str(program.as_text())))


def rotating(
    case: Case, program: Any, operands: Arrays, sets: int
) -> Callable[[int], Any]:
    """Calls over so many sets of what belongs to tokens; tables and caches are one."""
    held = dict(operands)
    given = [
        {name: jnp.copy(x) for name, x in operands.items() if name not in case.tables}
        for _ in range(sets)
    ]
    rewritten = case.kind.rewritten
    # Results in whose place operands are; queries are fresh where a cache is written.
    first = 1 if case.kernel.startswith("rope_append_kv") else 0

    def call(i: int) -> Any:
        own = given[i % sets]
        out = jax.tree.leaves(program(*(held | own).values()))
        for name, result in zip(rewritten, out[first:], strict=False):
            (held if name in case.tables else own)[name] = result
        return out

    return call


def time_case(
    case: Case,
    implementation: str,
    copy: float,
    rng: np.random.Generator,
    effort: Effort,
) -> Result:
    """Medians over calls whose operands are not in the cache."""
    program, launches = compiled(case, implementation, donate=True)
    size = case.tokens * case.ideal_bytes
    sets = max(2, min(_MOST_SETS, -(-effort.rotated // size)))
    call = rotating(case, program, random_operands(case, rng), sets)
    seconds = call_seconds(call, effort)
    few = case.tokens <= _PROFILED_TOKENS
    device = device_seconds(call, effort) if few else None
    rate = size / min(seconds, device or seconds)
    return Result(
        kernel=case.kernel,
        implementation=implementation,
        tokens=case.tokens,
        microseconds=1e6 * seconds,
        device_microseconds=None if device is None else 1e6 * device,
        gigabytes_per_second=rate / 1e9,
        of_copy=rate / copy,
        launches=launches,
        sets=sets,
    )


def checks(*, dry: bool) -> Iterator[Case]:
    """Every kernel at several lengths, in both pairings, and odd heads."""
    for count in (1, 4) if dry else (1, 33, 256):
        for kernel in KERNELS:
            yield _case(kernel, count, dry=dry)
    odd = [
        case
        for case in cases(tokens=33)
        if case.workload.name in ("phi-2", "gpt-j-6b")
        or (case.workload.name in _ODD_HEADS and case.kernel in _ODD_KERNELS)
    ]
    # The interpreter takes half a second for each, and the tests have them.
    yield from () if dry else odd


def _case(kernel: str, tokens: int, *, dry: bool) -> Case:
    sizes = {"rows": 64, "cache_tokens": 64} if dry else {"cache_tokens": 131_072}
    workload = _PARTIAL if kernel == "rope_in_place" else _WORKLOAD
    return Case(kernel=kernel, workload=workload, tokens=tokens, **sizes)


@dataclasses.dataclass(kw_only=True)
class Record:
    """What was found, as far as it went.

    Args:
      copy: bytes per second of the measured copy.
      wrong: how kernels differ from their definitions.
      left_out: kernels and numbers of tokens for which there was no time.
      results: of the others.
    """

    copy: float = 0.0
    wrong: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    results: list[Result] = dataclasses.field(default_factory=list)


def run(record: Record, write: Callable[[], None], *, dry: bool) -> None:
    """Checks everything, then times as much as there is time for."""
    rng, effort = np.random.default_rng(), _DRY_EFFORT if dry else Effort()
    bad = set()
    for case in checks(dry=dry):
        difference = check(case, rng)
        if difference is not None:
            print(f"WRONG: {difference}", flush=True)
            record.wrong.append(difference)
            bad.add(case.kernel)
    right = "all kernels are right" if not bad else f"wrong: {', '.join(sorted(bad))}"
    print(f"{right} ({time.perf_counter() - _START:.0f} s)", flush=True)
    record.copy = copy_rate(2**20 if dry else 2**31, effort)
    print(f"copy: {record.copy / 1e12:.2f} TB/s", flush=True)
    for tokens in _DRY_TOKENS if dry else TOKENS:
        for kernel in KERNELS:
            if kernel in bad:
                continue
            if time.perf_counter() - _START > _SECONDS_IN_ALL:
                record.left_out.append(f"{kernel} at T = {tokens}")
                continue
            for name in ("pallas", "xla"):
                case = _case(kernel, tokens, dry=dry)
                result = time_case(case, name, record.copy, rng, effort)
                record.results.append(result)
        write()


def _interpreted() -> None:
    """The kernels on this CPU."""
    from jrope._routes import BY_NAME
    from jrope._routes.pallas import PallasRoute
    from jrope.fused._kernels import PLATFORMS, Kernels

    BY_NAME["cpu"] = (PallasRoute(interpret=True),)
    PLATFORMS["cpu"] = Kernels(interpret=True)


def _write(folder: pathlib.Path, record: Record) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = {"stamp": dataclasses.asdict(stamp()), **dataclasses.asdict(record)}
    (folder / "gpu.json").write_text(json.dumps(made, indent=1) + "\n")
    with (folder / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Result)])
        writer.writeheader()
        writer.writerows(made["results"])


def _print(record: Record) -> None:
    """Both times, how many times faster the kernel is, and its share of the copy."""
    print(
        f"{'kernel':22}{'T':>7}{'pallas us':>11}{'xla us':>9}{'x':>7}"
        f"{'device us':>11}{'xla us':>9}{'x':>7}{'of copy':>9}{'launches':>12}"
    )
    pairs = list(zip(record.results[::2], record.results[1::2], strict=True))
    order = list(KERNELS)
    for own, xla in sorted(
        pairs, key=lambda p: (order.index(p[0].kernel), p[0].tokens)
    ):
        device = f"{'-':>11}{'-':>9}{'-':>7}"
        if own.device_microseconds and xla.device_microseconds:
            times = own.device_microseconds, xla.device_microseconds
            device = f"{times[0]:11.1f}{times[1]:9.1f}{times[1] / times[0]:7.2f}"
        print(
            f"{own.kernel:22}{own.tokens:7}{own.microseconds:11.1f}"
            f"{xla.microseconds:9.1f}{xla.microseconds / own.microseconds:7.2f}{device}"
            f"{own.of_copy:9.2f}{f'{own.launches}, {xla.launches}':>12}"
        )
    for line in (*record.wrong, *(f"no time for {each}" for each in record.left_out)):
        print(line)


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
    record = Record()

    def write() -> None:
        if options.out is not None:
            _write(options.out, record)

    run(record, write, dry=options.dry)
    _print(record)
    if record.wrong:
        sys.exit("kernels differ from their definitions: see above")


if __name__ == "__main__":
    main()
