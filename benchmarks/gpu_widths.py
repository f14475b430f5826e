"""Heads that are read or written by less than 128 bits a thread, and why.

Every other access of a kernel to heads is of 128 bits, over all named workloads: the
tests hold this list to what the kernels ask for, and docs/pages/gpu.md to this list.
"""

import dataclasses
import math
from collections.abc import Iterable

from pallas_kernels import Access

# A block has 128 threads. Fewer of them with wider accesses would ask for no fewer
# bytes, and leave the rest of the block idle.
FEW = "fewer than 128 x 16 bytes: every thread takes a part"
# Wider stores would need a shuffle between threads.
NARROWED = "read 16 bytes a thread in 16 bits, which are 8 bytes in 8 bits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    """Some neighbouring features of some heads.

    Args:
      heads: how many at once.
      features: of each head.
      bits: of a feature.
      access: bits of a thread's access.
      reason: why not 128.
    """

    heads: int
    features: int
    bits: int
    access: int
    reason: str


def _row(heads: int, features: int, bits: int, access: int, reason: str) -> Narrow:
    return Narrow(
        heads=heads, features=features, bits=bits, access=access, reason=reason
    )


NARROW = (
    _row(32, 64, 8, 64, NARROWED),
    _row(32, 32, 8, 64, FEW),
    _row(32, 16, 16, 64, FEW),
    _row(32, 16, 8, 32, FEW),
    _row(16, 256, 8, 64, NARROWED),
    _row(16, 128, 8, 64, NARROWED),
    _row(16, 64, 8, 64, FEW),
    _row(8, 128, 8, 64, FEW),
    _row(8, 64, 16, 64, FEW),
    _row(8, 64, 8, 32, FEW),
    _row(4, 256, 8, 64, FEW),
    _row(4, 128, 16, 64, FEW),
    _row(4, 128, 8, 32, FEW),
    _row(4, 64, 16, 32, FEW),
    _row(4, 64, 8, 16, FEW),
    _row(1, 256, 16, 32, FEW),
    _row(1, 256, 8, 16, FEW),
    _row(1, 128, 16, 16, FEW),
    _row(1, 128, 8, 8, FEW),
    _row(1, 64, 16, 32, FEW),
    _row(1, 64, 8, 16, FEW),
)


def narrow(accesses: Iterable[Access]) -> list[Narrow]:
    """Those among a kernel's accesses to heads, the list's reason with each.

    Raises:
      LookupError: if one is not on the list.
    """
    found = {
        (a.shape[0], math.prod(a.shape[1:]), 8 * a.itemsize, 8 * a.width)
        for a in accesses
        if a.what in ("heads", "padding") and a.shape and 8 * a.width < 128
    }
    known = {(n.heads, n.features, n.bits, n.access): n for n in NARROW}
    if unlisted := found - set(known):
        raise LookupError(
            f"accesses to heads must be of 128 bits or on the list of "
            f"benchmarks/gpu_widths.py, got (heads, features, bits of each, bits of an "
            f"access) {sorted(unlisted)}"
        )
    return [known[key] for key in sorted(found, reverse=True)]
