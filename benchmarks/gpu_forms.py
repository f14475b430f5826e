"""Every plain form of the rotation as XLA compiles it for an NVIDIA GPU, and the best.

The XLA route's choice on CUDA follows from these figures, for want of measured ones.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from benchmarks.gpu_cases import Case
from benchmarks.gpu_compile import compile_for
from benchmarks.workloads import WORKLOADS, Workload
from jrope._routes import Rotation
from jrope._routes._forms import FORMS
from jrope._routes.xla import choose_form

_LLAMA = WORKLOADS["llama3-8b"]
# Both pairings, full and partial, keys like queries and fewer of them.
FORM_WORKLOADS: tuple[Workload, ...] = (
    _LLAMA,
    dataclasses.replace(_LLAMA, name="llama3-8b, K = N", key_heads=_LLAMA.query_heads),
    *(WORKLOADS[name] for name in ("deepseek-v3-mla", "phi-2", "gpt-j-6b")),
)
FEW, MANY = 16, 4096
# Programs whose bytes differ by less are alike: some of them are rows.
_SAME_BYTES = 0.05

Found = dict[str, Any]


def form_cases() -> list[Case]:
    """What the forms are compared on."""
    return [
        Case(kernel="rope", workload=workload, tokens=tokens)
        for workload in FORM_WORKLOADS
        for tokens in (FEW, MANY)
    ]


def inspect_forms(arch: str) -> Iterator[Found]:
    """Each form for each case."""
    for case in form_cases():
        for form in FORMS:
            yield inspect_form(case, form, arch)


def inspect_form(case: Case, form: str, arch: str) -> Found:
    """One form, queries and keys in one program."""
    operands, layout = list(case.operands.values()), case.layout
    turn = functools.partial(
        FORMS[form],
        is_neox_style=layout.is_neox_style,
        rotary_offset=layout.rotary_offset,
    )

    def both(query: Any, key: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
        return turn(query, cos, sin), turn(key, cos, sin)

    program = compile_for(both, operands, arch=arch)
    moved = program.moved_bytes(case.tokens, case.tables.values())
    return {
        "form": form,
        "workload": case.workload.name,
        "tokens": case.tokens,
        "arch": arch,
        "chosen": _is_chosen(case, form, operands),
        "launches": len(program.launches),
        "accesses": program.accesses,
        "accesses_per_byte": round(
            max(kernel.accesses_per_byte for kernel in program.kernels), 2
        ),
        "bytes_over_ideal": round(moved / (case.tokens * case.ideal_bytes), 2),
    }


def _is_chosen(case: Case, form: str, operands: list[jax.ShapeDtypeStruct]) -> bool:
    rotation = Rotation(
        platform="cuda",
        xs=tuple(operands[:2]),
        rows=operands[2],
        is_neox_style=case.layout.is_neox_style,
        rotary_offset=case.layout.rotary_offset,
    )
    return choose_form(rotation, operands[0]) == form


def best(found: Iterable[Found]) -> str:
    """The best form for one case.

    For few tokens a program costs its launches. For many it costs its bytes, and what
    hinders their transfer: narrow accesses, of which a thread needs more. The first in
    the table wins a tie.
    """
    rows = list(found)
    least = min(row["bytes_over_ideal"] for row in rows)

    def cost(row: Found) -> tuple[float, ...]:
        excess = row["bytes_over_ideal"] > least + _SAME_BYTES
        rest = (row["accesses_per_byte"], row["launches"])
        few = row["tokens"] <= FEW
        return (row["launches"], *rest) if few else (excess, *rest)

    return min(rows, key=cost)["form"]
