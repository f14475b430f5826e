"""What a kernel reads and writes, noted while it is traced.

The machine code shows how many bytes the threads of a block ask for. Some ask for the
same ones: every head of a token turns by the same row, which the first level cache then
serves. The notes tell the two apart, and the machine code must agree with their sum.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """One load or store, of one token.

    Args:
      what: "heads", "cos", "sin", "weight", "amax", "scalar", or "padding"
        for what padded tokens do instead.
      store: or load.
      start: the first column. Rows that agree in this, in
        what they load and how much, are of the same bytes.
      shape: of what is accessed.
      itemsize: bytes of each of its elements.
      asked: bytes that all threads ask for together.
      width: bytes in one access of a thread.
    """

    what: str
    store: bool
    start: int
    shape: tuple[int, ...]
    itemsize: int
    asked: int
    width: int

    @property
    def distinct(self) -> int:
        """Bytes of global memory."""
        return math.prod(self.shape) * self.itemsize


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
    """Bytes that move between the chip and its memory for a token: each once.

    Weights are the same for all tokens and stay on the chip.
    """
    once = {
        (access.what, access.start, access.distinct): access.distinct
        for access in accesses
        if access.what in ("cos", "sin")
    }
    each = [a.distinct for a in accesses if a.what in ("heads", "amax", "scalar")]
    return sum(once.values()) + sum(each)


def note(access: Access) -> None:
    """Adds to the list of the innermost `traffic()`, if there is one."""
    notes = _NOTES.get()
    if notes is not None:
        notes.append(access)


@contextlib.contextmanager
def of_padding() -> Iterator[None]:
    """Marks the accesses inside: in place of others, for tokens that are padding."""
    with traffic() as notes:
        yield
    for access in notes:
        note(dataclasses.replace(access, what="padding"))
