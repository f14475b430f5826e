"""What one block of threads does for one token: fetch, turn, put."""

import dataclasses
from collections.abc import Callable, Iterator

from jaxtyping import Array

from pallas_kernels._heads import Box, Heads, Place, pair_boxes, pass_boxes
from pallas_kernels._rows import Row
from pallas_kernels._threads import powers_of_two

# Bytes that a thread fetches before it uses any: 32 registers of the 255 there are.
# More would hide no more latency, and with many heads spill.
_IN_FLIGHT = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Heads to be turned.

    Args:
      source: where they are read.
      target: where they are written.
      heads: how many.
      place: the rotation within each.
      copy_rest: whether to write the features that pass as well. Where source and
        target are the same array they are there already.
    """

    source: Heads
    target: Heads
    heads: int
    place: Place
    copy_rest: bool

    def boxes(self) -> Iterator[Box]:
        """All features to be read and written."""
        size = self.source.ref.dtype.itemsize
        for head, heads in powers_of_two(self.heads):
            yield from pair_boxes(self.place, head, heads, size)
            if self.copy_rest:
                yield from pass_boxes(self.place, head, heads, size)


def turn(turns: list[Turn], row: Callable[[], Row]) -> None:
    """Turns the heads of one token.

    Heads are fetched before `row` is called, whose load may depend on that of a
    position: the two latencies overlap.
    """
    jobs = [(each, box) for each in turns for box in each.boxes()]
    fetched_rows: dict[tuple, tuple[Array, Array]] = {}
    found: Row | None = None
    for wave in _waves(jobs):
        values = [box.fetch(each.source) for each, box in wave]
        found = row() if found is None else found
        for (each, box), value in zip(wave, values, strict=True):
            if box.pair is not None:
                # Boxes that lie alike on the threads share their row.
                key = (box.layout, box.pair)
                if key not in fetched_rows:
                    fetched_rows[key] = found.fetch(box)
                cos, sin = map(box.over_heads, fetched_rows[key])
                first, second = box.split(value)
                turned = turn_pairs(first, second, cos, sin)
                dtype = each.target.ref.dtype
                value = [x.astype(dtype) for x in box.join(list(turned))]
            box.put(each.target, value)


def turn_pairs(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """One rotation of every pair, in float32."""
    return a * cos - b * sin, b * cos + a * sin


def _waves(jobs: list[tuple[Turn, Box]]) -> Iterator[list[tuple[Turn, Box]]]:
    """Cuts the work so that a thread has no more than `_IN_FLIGHT` bytes fetched."""
    wave: list[tuple[Turn, Box]] = []
    held = 0
    for each, box in jobs:
        size = len(box.starts) * box.spread.held * each.source.ref.dtype.itemsize
        if wave and held + size > _IN_FLIGHT:
            yield wave
            wave, held = [], 0
        wave.append((each, box))
        held += size
    if wave:
        yield wave
