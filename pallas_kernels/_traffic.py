"""What a kernel reads and writes, noted while it is traced.

The machine code shows how many bytes the threads of a block ask for. Some ask for the
same ones: every head of a token turns by the same row, which the first level cache then
serves. The notes tell the two apart, and the machine code must agree with their sum.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """One load or store, of one token.

    Args:
      what: "heads", "cos", "sin", "weight" or "scalar".
      store: or load.
      start: the first column. Loads of other things than heads that agree in this, in
        what they load and how much, are of the same bytes.
      distinct: bytes of global memory.
      asked: bytes that all threads ask for together.
      width: bytes in one thread's widest access.
    """

    what: str
    store: bool
    start: int
    distinct: int
    asked: int
    width: int


_NOTES: contextvars.ContextVar[list[Access] | None] = contextvars.ContextVar(
    "pallas_kernels_traffic", default=None
)


@contextlib.contextmanager
def traffic() -> Iterator[list[Access]]:
    """Collects the accesses of every kernel that is traced inside."""
    notes: list[Access] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def distinct_bytes(accesses: list[Access]) -> int:
    """Bytes that move between the chip and its memory: each once."""
    once = {access for access in accesses if access.what != "heads"}
    heads = [access for access in accesses if access.what == "heads"]
    return sum(access.distinct for access in (*once, *heads))


def note(access: Access) -> None:
    """Adds to the list of the innermost `traffic()`, if there is one."""
    notes = _NOTES.get()
    if notes is not None:
        notes.append(access)
