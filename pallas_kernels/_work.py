"""What one block of threads does for one token: fetch, norm, turn, put."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels._finish import Narrow, Norm, Values, narrowed, normed
from pallas_kernels._heads import Box, Cut, Heads, Place
from pallas_kernels._rows import Row
from pallas_kernels._threads import THREADS, powers_of_two
from pallas_kernels._traffic import of_padding

# Bytes that a thread fetches before it uses any: 32 registers of the 255 there are.
# More would hide no more latency, and with many heads spill.
_IN_FLIGHT = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Heads of one token, and what is done to them.

    Args:
      source: where they are read.
      target: where they are written.
      heads: how many.
      place: the rotation within each.
      turns: whether they turn at all.
      in_place: source and target are the same array: what does not change stays.
      norm: a norm of each head.
      dequantise: gives what a head that is read is multiplied by, if anything.
      narrow: write them in 8 bits.
      when: write only if this holds.
      unless: write what was read if this holds.
    """

    source: Heads
    target: Heads
    heads: int
    place: Place
    turns: bool = True
    in_place: bool = False
    norm: Norm | None = None
    dequantise: Any = None
    narrow: Narrow | None = None
    when: Array | None = None
    unless: Array | None = None

    @property
    def whole_heads(self) -> bool:
        """Whether all features of a head are needed together."""
        by_amax = self.narrow is not None and self.narrow.scale is None
        return self.norm is not None or by_amax

    def groups(self) -> Iterator[list[Box]]:
        """The boxes of as many heads as one fetch should bring."""
        size = self.source.ref.dtype.itemsize
        stays = self.in_place and not self.whole_heads
        if self.in_place and not rewritable(
            self.place, self.heads, size, whole_heads=self.whole_heads
        ):
            raise ValueError(
                f"{self.heads} heads must have as many pairs as a block has warps, or "
                f"one warp reads what another has written, got rotary_dim = "
                f"{self.place.rotary_dim}; do not turn them in place"
            )

        def boxes(cut: Cut) -> list[Box]:
            if not self.turns:
                return cut.whole()
            return cut.pairs() + ([] if stays else cut.rest())

        return _cuts(self.place, self.heads, size, boxes, whole=self.whole_heads)


def rewritable(place: Place, heads: int, itemsize: int, *, whole_heads: bool) -> bool:
    """Whether heads can be turned in place: no two warps hold the same features.

    Args:
      place: the rotation within each.
      heads: how many.
      itemsize: bytes of a feature.
      whole_heads: whether the features that pass are rewritten too: with a norm, or a
        scale for each head.
    """

    def boxes(cut: Cut) -> list[Box]:
        return cut.pairs() + (cut.rest() if whole_heads else [])

    cuts = _cuts(place, heads, itemsize, boxes, whole=whole_heads)
    return all(box.spread.warp_copies == 1 for cut in cuts for box in cut)


def _cuts(
    place: Place,
    heads: int,
    itemsize: int,
    boxes_of: Callable[[Cut], list[Box]],
    *,
    whole: bool,
) -> Iterator[list[Box]]:
    most = max(1, _IN_FLIGHT * THREADS // (itemsize * place.head_dim))
    most = 1 << most.bit_length() - 1
    for start, count in powers_of_two(heads):
        for head in range(start, start + count, min(count, most)):
            cut = Cut(place=place, head=head, heads=min(count, most), itemsize=itemsize)
            boxes = boxes_of(cut)
            if whole:
                # All boxes of a head on the same lanes, so that sums meet.
                lanes = min(box.spread.column_lanes for box in boxes)
                boxes = boxes_of(dataclasses.replace(cut, column_lanes=lanes))
            yield boxes


def work(jobs: list[Job], row: Callable[[], Row]) -> None:
    """Does the jobs of one token.

    Heads are fetched before `row` is called, whose load may depend on that of a
    position: the two latencies overlap.
    """
    rows = _Rows(row)
    for wave in _waves([(job, boxes) for job in jobs for boxes in job.groups()]):
        fetched = [[box.fetch(job.source) for box in boxes] for job, boxes in wave]
        for (job, boxes), values in zip(wave, fetched, strict=True):
            results = _computed(job, boxes, values, rows)
            _put(job, boxes, results)


class _Rows:
    """The token's row, fetched once for all boxes that lie alike on the threads."""

    def __init__(self, row: Callable[[], Row]) -> None:
        self._row, self._found = row, None
        self._fetched: dict[Any, tuple[Array, Array]] = {}

    def of(self, box: Box) -> tuple[Array, Array]:
        """Cosines and sines for every feature of a box."""
        if self._found is None:
            self._found = self._row()
        key = (box.layout, box.pair, box.spread.columns)
        if key not in self._fetched:
            self._fetched[key] = self._found.fetch(box)
        cos, sin = self._fetched[key]
        return box.over_heads(cos), box.over_heads(sin)


def _computed(job: Job, boxes: list[Box], fetched: Values, rows: _Rows) -> Values:
    """What is written of some heads, in the target's dtype."""
    if not job.turns and job.narrow is None and job.dequantise is None:
        return fetched
    values = [[x.astype(jnp.float32) for x in each] for each in fetched]
    if job.dequantise is not None:
        factors = job.dequantise(boxes[0])
        values = [
            [x * box.of_heads(factors) for x in each]
            for each, box in zip(values, boxes, strict=True)
        ]
    norm, width = job.norm, job.place.head_dim
    if norm is not None and norm.first:
        values = _rounded(normed(values, boxes, norm, width), job)
    values = [
        _turned(box, each, rows) if box.pair is not None else each
        for box, each in zip(boxes, values, strict=True)
    ]
    if norm is not None and not norm.first:
        values = normed(_rounded(values, job), boxes, norm, width)
    if job.narrow is not None:
        values = narrowed(values, boxes, job.narrow)
    dtype = job.target.ref.dtype
    exact = job.norm is None and job.narrow is None and job.dequantise is None
    return [
        # What passes is written as it was read.
        read if exact and box.pair is None else [x.astype(dtype) for x in each]
        for box, each, read in zip(boxes, values, fetched, strict=True)
    ]


def _turned(box: Box, values: list[Array], rows: _Rows) -> list[Array]:
    first, second = box.split(values)
    cos, sin = rows.of(box)
    return box.join(
        [first * cos - second * sin, second * cos + first * sin],
    )


def _rounded(values: Values, job: Job) -> Values:
    """As separate layers leave them."""
    assert job.norm is not None
    if not job.norm.rounded:
        return values
    dtype = job.source.ref.dtype
    return [[x.astype(dtype).astype(jnp.float32) for x in each] for each in values]


def _put(job: Job, boxes: list[Box], results: Values) -> None:
    def put() -> None:
        for box, each in zip(boxes, results, strict=True):
            box.put(job.target, each)

    def copy() -> None:
        # Read again, not held in registers until here.
        with of_padding():
            for box in boxes:
                box.put(job.target, box.fetch(job.source))

    if job.when is not None:
        pl.when(job.when)(put)
    elif job.unless is not None:
        pl.when(jnp.logical_not(job.unless))(put)
        pl.when(job.unless)(copy)
    else:
        put()


def _waves(
    groups: list[tuple[Job, list[Box]]],
) -> Iterator[list[tuple[Job, list[Box]]]]:
    """Cuts the work so that a thread has no more than `_IN_FLIGHT` bytes fetched."""
    wave: list[tuple[Job, list[Box]]] = []
    held = 0
    for job, boxes in groups:
        size = sum(len(box.starts) * box.spread.held for box in boxes)
        size *= job.source.ref.dtype.itemsize
        if wave and held + size > _IN_FLIGHT:
            yield wave
            wave, held = [], 0
        wave.append((job, boxes))
        held += size
    if wave:
        yield wave
