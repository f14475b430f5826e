"""What every kernel would be on an NVIDIA GPU, compiled on a machine without one.

    python -m benchmarks.gpu_inspect [--json] [--arch sm_90a] [--workload llama3-8b]

Launches, registers, spills and bytes of each kernel, beside what XLA makes of the same
operation's definition, and of each plain form of the rotation.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

# Read when jax is imported and when XLA starts: a plugin without a driver must not be
# asked for a GPU, and LLVM's stack traces cost ten seconds a kernel.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

import jax  # noqa: E402

from benchmarks.gpu_cases import Case, cases  # noqa: E402
from benchmarks.gpu_compile import (  # noqa: E402
    TARGETS,
    Program,
    compile_for,
    missing,
)
from benchmarks.workloads import WORKLOADS  # noqa: E402
from jrope._routes import Rotation  # noqa: E402
from jrope._routes._forms import FORMS  # noqa: E402
from jrope._routes.xla import choose_form  # noqa: E402
from pallas_kernels import distinct_bytes, traffic  # noqa: E402

_THREADS = 128
_FORM_WORKLOADS = ("llama3-8b", "phi-2", "gpt-j-6b")


def inspect(case: Case, arch: str) -> dict[str, Any]:
    """One kernel on one workload, and XLA's program for the same."""
    return {**inspect_kernel(case, arch), **inspect_definition(case, arch)}


def inspect_kernel(case: Case, arch: str) -> dict[str, Any]:
    """One kernel on one workload."""
    operands = list(case.operands.values())
    ideal = case.ideal_bytes
    with traffic() as accesses:
        own = _compiled(case, "pallas", arch)
    (kernel,) = own.kernels
    return {
        "name": case.kernel,
        "workload": case.workload.name,
        "arch": arch,
        "launches": len(own.launches),
        "registers": kernel.registers,
        "spills": kernel.spilled,
        "local": kernel.local,
        "instructions": kernel.instructions,
        "accesses": kernel.accesses,
        "widest_heads": sorted({a.width for a in accesses if a.what == "heads"}),
        "asked_bytes": kernel.asked_bytes(_THREADS),
        "noted_bytes": sum(access.asked for access in accesses),
        "bytes": distinct_bytes(accesses),
        "ideal_bytes": ideal,
        "bytes_over_ideal": round(distinct_bytes(accesses) / ideal, 3),
        "alias_bytes": own.alias_bytes,
        "expected_alias_bytes": case.alias_bytes,
        "operands": [f"{x.dtype}{list(x.shape)}" for x in operands],
    }


def inspect_definition(case: Case, arch: str) -> dict[str, Any]:
    """What XLA makes of the same operation."""
    theirs = _compiled(case, "xla", arch)
    return {
        "xla_launches": len(theirs.launches),
        "xla_accesses": _all_accesses(theirs),
        "xla_bytes_over_ideal": _over(theirs, case.tokens, case.ideal_bytes),
    }


def _compiled(case: Case, implementation: str, arch: str) -> Program:
    run = functools.partial(case.run, implementation=implementation)
    operands = list(case.operands.values())
    return compile_for(run, operands, arch=arch, donate=case.donate)


def inspect_forms(arch: str) -> Iterator[dict[str, Any]]:
    """Each plain form on a few workloads, with fresh results and in place."""
    for name in _FORM_WORKLOADS:
        case = Case(kernel="rope", workload=WORKLOADS[name])
        layout, operands = case.layout, list(case.operands.values())
        options = {
            "is_neox_style": layout.is_neox_style,
            "rotary_offset": layout.rotary_offset,
        }
        rotation = Rotation(
            platform="cuda",
            xs=tuple(operands[:2]),
            rows=operands[2],
            **options,
        )
        for form, turn in FORMS.items():

            def both(query, key, cos, sin, turn=turn, options=options):
                return tuple(turn(x, cos, sin, **options) for x in (query, key))

            program = compile_for(both, operands, arch=arch)
            yield {
                "form": form,
                "workload": name,
                "arch": arch,
                "chosen": choose_form(rotation, operands[0]) == form,
                "launches": len(program.launches),
                "accesses": _all_accesses(program),
                "bytes_over_ideal": _over(program, case.tokens, case.ideal_bytes),
            }


def _over(program: Program, tokens: int, ideal: int) -> float:
    return round(program.moved_bytes(tokens) / (tokens * ideal), 2)


def _all_accesses(program: Program) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kernel in program.kernels:
        for access, count in kernel.accesses.items():
            counts[access] = counts.get(access, 0) + count
    return counts


def _print_kernel(found: dict[str, Any]) -> None:
    print(
        f"{found['name']:20}{found['workload']:20}{found['launches']:9}"
        f"{found['registers']:10}{found['spills']:7}{found['bytes']:10}"
        f"{found['bytes_over_ideal']:8}{found['xla_launches']:14}"
        f"{found['xla_bytes_over_ideal']:8}  {_written(found['accesses'])}",
        flush=True,
    )


def _print_form(found: dict[str, Any]) -> None:
    mark = "*" if found["chosen"] else " "
    print(
        f"{mark}{found['form']:19}{found['workload']:20}{found['launches']:9}"
        f"{found['bytes_over_ideal']:8}  {_written(found['accesses'])}",
        flush=True,
    )


def _written(accesses: dict[str, int]) -> str:
    return " ".join(f"{access}x{count}" for access, count in accesses.items())


def main(arguments: list[str] | None = None) -> None:
    """Runs the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_inspect")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--arch", choices=sorted(TARGETS), default="sm_90a")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), nargs="+")
    parser.add_argument("--kernel", nargs="+", help="only these")
    parser.add_argument("--no-forms", action="store_true", help="leave the forms out")
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
                kernels.append(inspect(case, options.arch))
                _print_kernel(kernels[-1])
        if not options.no_forms:
            print(
                f"\n{'form (* chosen)':20}{'workload':20}{'launches':>9}{'/ideal':>8}"
            )
            for found in inspect_forms(options.arch):
                forms.append(found)
                _print_form(found)
    if options.json:
        print(json.dumps({"kernels": kernels, "forms": forms}))


if __name__ == "__main__":
    main()
