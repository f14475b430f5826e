"""What every kernel would be on an NVIDIA GPU, compiled on a machine without one.

    python -m benchmarks.gpu_inspect [--json] [--arch sm_90a] [--workload llama3-8b]

Launches, registers, spills and bytes of each kernel, beside what XLA makes of the same
operation's definition, and of each plain form of the rotation.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
from typing import Any

# Read when jax is imported and when XLA starts: a plugin without a driver must not be
# asked for a GPU, and LLVM's stack traces cost ten seconds a kernel.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

import jax  # noqa: E402

from benchmarks.gpu_cases import Case, cases  # noqa: E402
from benchmarks.gpu_compile import TARGETS, Program, compile_for, missing  # noqa: E402
from benchmarks.gpu_forms import inspect_forms  # noqa: E402
from benchmarks.gpu_machine_code import THREADS  # noqa: E402
from benchmarks.gpu_widths import NARROW, narrow  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402
from pallas_kernels import Access, distinct_bytes, traffic  # noqa: E402


def inspect_kernel(case: Case, arch: str) -> dict[str, Any]:
    """One kernel on one workload."""
    return {**_kernel(case.first_alike, arch), "workload": case.workload.name}


def inspect_definition(case: Case, arch: str) -> dict[str, Any]:
    """What XLA makes of the same operation."""
    return _definition(case.first_alike, arch)


@functools.cache
def _kernel(case: Case, arch: str) -> dict[str, Any]:
    ideal = case.ideal_bytes
    with traffic() as accesses:
        program = _compiled(case, "pallas", arch)
    (kernel,) = program.kernels
    narrower = [dataclasses.asdict(each) for each in narrow(accesses)]
    return {
        "name": case.kernel,
        "workload": case.workload.name,
        "arch": arch,
        "launches": len(program.launches),
        "registers": kernel.registers,
        "spills": kernel.spilled,
        "local": kernel.local,
        "instructions": kernel.instructions,
        "accesses": kernel.accesses,
        "widths": _written(kernel.widths),
        "noted_widths": _written(_widths(accesses)),
        "narrow_heads": narrower,
        "bytes": distinct_bytes(accesses),
        "ideal_bytes": ideal,
        "bytes_over_ideal": round(distinct_bytes(accesses) / ideal, 3),
        "alias_bytes": program.alias_bytes,
        "expected_alias_bytes": case.alias_bytes,
        "operands": [f"{x.dtype}{list(x.shape)}" for x in case.operands.values()],
    }


@functools.cache
def _definition(case: Case, arch: str) -> dict[str, Any]:
    program = _compiled(case, "xla", arch)
    moved = program.moved_bytes(case.tokens, case.tables.values())
    return {
        "xla_launches": len(program.launches),
        "xla_accesses": program.accesses,
        "xla_bytes_over_ideal": round(moved / (case.tokens * case.ideal_bytes), 2),
    }


def _compiled(case: Case, implementation: str, arch: str) -> Program:
    run = functools.partial(case.run, implementation=implementation)
    operands = list(case.operands.values())
    return compile_for(run, operands, arch=arch, donate=case.donate)


def _widths(accesses: list[Access]) -> dict[tuple[bool, int], int]:
    """What the notes say of `MachineCode.widths`."""
    counts: collections.Counter[tuple[bool, int]] = collections.Counter()
    for access in accesses:
        one = access.asked // (THREADS * access.width)
        counts[access.store, access.width] += one
    return dict(counts)


def _written(widths: dict[tuple[bool, int], int]) -> dict[str, int]:
    """With keys that JSON has, such as "store 16"."""
    return {
        f"{'store' if store else 'load'} {width}": count
        for (store, width), count in sorted(widths.items())
    }


def _print_kernel(found: dict[str, Any]) -> None:
    print(
        f"{found['name']:20}{found['workload']:20}{found['launches']:9}"
        f"{found['registers']:10}{found['spills']:7}{found['bytes']:10}"
        f"{found['bytes_over_ideal']:8}{found.get('xla_launches', '-'):>14}"
        f"{found.get('xla_bytes_over_ideal', '-'):>8}  {_line(found['accesses'])}",
        flush=True,
    )


def _print_narrow(kernels: list[dict[str, Any]]) -> None:
    """What is read or written by less than 128 bits a thread, where, and why."""
    print("\nheads x features x bits, by accesses of so many bits for less than 128")
    for row in NARROW:
        held = dataclasses.asdict(row)
        where = {each["workload"] for each in kernels if held in each["narrow_heads"]}
        if where:
            print(
                f"{row.heads:2} x {row.features:3} x {row.bits:2} {row.access:4}  "
                f"{row.reason} ({', '.join(sorted(where))})"
            )


def _print_form(found: dict[str, Any]) -> None:
    mark = "*" if found["chosen"] else " "
    print(
        f"{mark}{found['form']:19}{found['workload']:20}{found['tokens']:7}"
        f"{found['launches']:9}{found['bytes_over_ideal']:8}"
        f"{found['accesses_per_byte']:8}  {_line(found['accesses'])}",
        flush=True,
    )


def _line(accesses: dict[str, int]) -> str:
    return " ".join(f"{access}x{count}" for access, count in accesses.items())


def main(arguments: list[str] | None = None) -> None:
    """Runs the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_inspect")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--arch", choices=sorted(TARGETS), default="sm_90a")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), nargs="+")
    parser.add_argument("--kernel", nargs="+", help="only these")
    parser.add_argument(
        "--kernels-only", action="store_true", help="not XLA's programs"
    )
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        sys.exit(f"gpu_inspect needs the CUDA plugin: {reason}")
    rows = sys.stderr if options.json else sys.stdout
    kernels, forms = [], []
    with contextlib.redirect_stdout(rows):
        print(f"jax {jax.__version__}, compiled for {options.arch}; bytes per token")
        print(
            f"{'kernel':20}{'workload':20}{'launches':>9}{'registers':>10}"
            f"{'spills':>7}{'bytes':>10}{'/ideal':>8}{'XLA launches':>14}"
            f"{'/ideal':>8}  accesses"
        )
        for case in cases():
            wanted = case.workload.name in (options.workload or WORKLOADS)
            if wanted and case.kernel in (options.kernel or [case.kernel]):
                kernels.append(inspect_kernel(case, options.arch))
                if not options.kernels_only:
                    kernels[-1] |= inspect_definition(case, options.arch)
                _print_kernel(kernels[-1])
        _print_narrow(kernels)
        if not options.kernels_only:
            print(
                f"\n{'form (* chosen)':20}{'workload':20}{'tokens':>7}{'launches':>9}"
                f"{'/ideal':>8}{'per B':>8}  accesses; per byte that is stored"
            )
            for found in inspect_forms(options.arch):
                forms.append(found)
                _print_form(found)
    if options.json:
        print(json.dumps({"kernels": kernels, "forms": forms}))


if __name__ == "__main__":
    main()
