"""Decides what each step computes: continuous batching over slots.

Pure host code. A turn of the loop lets arrived requests into free slots, computes one
chunk of the oldest unfinished prompt, and then one token of every answer under way.
Requests come and go between turns; the shapes that the device sees never change.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jrope.demo.engine import Batch, StepResult
from jrope.demo.faults import Fault, StepFacts
from jrope.demo.media import grid_starts
from jrope.demo.paged_cache import PageBook
from jrope.demo.requests import Request, RequestError, check_requests
from jrope.positions import BatchPositions, PositionSpec, spec

_ONE_AXIS = spec("text")

# A row of a batch: whose it is, and the tokens to compute.
Row = tuple[Request, Sequence[int]]


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What the loop has done so far.

    Attributes:
      prefill_tokens, prefill_steps, prefill_seconds: seconds are those in steps.
      decode_tokens, decode_steps, decode_seconds: likewise.
      hit_tokens: found in pages that another request had computed.
      media_cuts: how often a chunk or a hit ended inside an image or a video.
    """

    prefill_tokens: int = 0
    prefill_steps: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    hit_tokens: int = 0
    media_cuts: int = 0


class Runner(Protocol):
    """What the scheduler needs of an engine."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The batch shapes of "prefill" and "decode"."""
        ...

    @property
    def context(self) -> int:
        """Tokens that a sequence may have."""
        ...

    def empty_batch(self, shape: tuple[int, int]) -> Batch:
        """A batch in which nothing is a token."""
        ...

    def run(self, batch: Batch) -> StepResult:
        """Runs one step."""
        ...


class Scheduler:
    """Serves requests to their end.

    Args:
      runner: computes the steps.
      book: of the runner's page pool.
      requests: in the order in which they arrive.
      new_tokens: the most that an answer may have.
      stop: ids that end an answer.
      positions: the rule of rotary positions.
      fault: moves the positions that the rotary layers are told.

    Raises:
      RequestError: if a request could never be served.
    """

    def __init__(
        self,
        runner: Runner,
        book: PageBook,
        requests: Sequence[Request],
        *,
        new_tokens: int,
        stop: frozenset[int] = frozenset(),
        positions: PositionSpec = _ONE_AXIS,
        fault: Fault | None = None,
    ) -> None:
        """Checks that every request fits."""
        self.totals = Totals()
        slots, chunk = runner.shapes["decode"][0], runner.shapes["prefill"][1]
        self.slots: list[Request | None] = [None] * slots
        self._positions = BatchPositions(
            positions, slots, max_tokens=max(slots, chunk), max_position=runner.context
        )
        self._runner, self._book = runner, book
        self._coming = collections.deque(sorted(requests, key=lambda r: r.arrival))
        self._waiting: collections.deque[Request] = collections.deque()
        self._new_tokens, self._stop = new_tokens, stop
        self._fault = fault or Fault()
        self._on_progress: Callable[[Request], None] = lambda request: None
        check_requests(requests, context=runner.context, new_tokens=new_tokens)
        for request in requests:
            if (needed := self._pages_needed(request)) > book.pages:
                raise RequestError(
                    f"prompt {request.name} needs {needed} pages, the pool has "
                    f"{book.pages}"
                )

    def run(self, on_progress: Callable[[Request], None]) -> None:
        """Turns the loop until nothing is left to do.

        Args:
          on_progress: called with a request when a part of its prompt has been read or
            it has a new token.
        """
        self._on_progress = on_progress
        while self._coming or self._waiting or any(self.slots):
            self.turn()

    def turn(self) -> None:
        """Lets requests in, computes one chunk of a prompt and one token an answer."""
        self._receive()
        self._admit()
        prefilling = [r for r in self.slots if r and not r.is_decoding]
        if prefilling:
            self._prefill(min(prefilling, key=lambda r: r.admitted))
        decoding = {i: r for i, r in enumerate(self.slots) if r and r.is_decoding}
        if decoding:
            self._decode(decoding)

    def _pages_needed(self, request: Request) -> int:
        return -(-(len(request.prompt) + self._new_tokens) // self._book.page_size)

    def _receive(self) -> None:
        """Moves requests whose time has come into the queue; never idles."""
        done = self.totals.prefill_tokens + self.totals.decode_tokens
        is_idle = not self._waiting and not any(self.slots)
        while self._coming and (self._coming[0].arrival <= done or is_idle):
            request = self._coming.popleft()
            request.arrived = time.perf_counter()
            self._waiting.append(request)
            is_idle = False

    def _admit(self) -> None:
        """Gives free slots to waiting requests, first come first served."""
        for slot, occupant in enumerate(self.slots):
            if occupant or not self._waiting:
                continue
            if not self._reserve(self._waiting[0]):
                return
            request = self._waiting.popleft()
            request.admitted = time.perf_counter()
            request.make_plan(self._positions.spec)
            self._positions.add(slot, request.plan)
            self.slots[slot] = request

    def _reserve(self, request: Request) -> bool:
        """Takes all pages that a request will ever need, or none."""
        known = self._book.match(request.cache_keys)
        missing = self._pages_needed(request) - len(known)
        if missing > self._book.available:
            self._book.release(known)
            return False
        request.pages = known + [self._book.take() for _ in range(missing)]
        request.computed = request.hit_tokens = len(known) * self._book.page_size
        self.totals.hit_tokens += request.hit_tokens
        self._count_cut(request)
        return True

    def _prefill(self, request: Request) -> None:
        """Computes the next chunk of a prompt; the last one gives the first token."""
        chunk = self._runner.shapes["prefill"][1]
        end = min(request.computed + chunk, len(request.prompt))
        new = request.prompt[request.computed : end]
        batch = self._make_batch("prefill", {0: (request, new)})
        result, seconds = self._timed(batch)
        self.totals.prefill_tokens += end - request.computed
        self.totals.prefill_steps += 1
        self.totals.prefill_seconds += seconds
        request.computed = end
        self._count_cut(request)
        self._book.publish(request.cache_keys[:end], request.pages)
        if request.is_decoding:
            request.first_token = time.perf_counter()
            self._accept(request, result, 0)
        else:
            self._on_progress(request)

    def _decode(self, decoding: dict[int, Request]) -> None:
        """Computes the next token of every answer under way."""
        rows = {slot: (r, r.output[-1:]) for slot, r in decoding.items()}
        batch = self._make_batch("decode", rows)
        result, seconds = self._timed(batch)
        self.totals.decode_tokens += len(decoding)
        self.totals.decode_steps += 1
        self.totals.decode_seconds += seconds
        for slot, request in decoding.items():
            self._accept(request, result, slot)

    def _make_batch(self, name: str, rows: Mapping[int, Row]) -> Batch:
        """A batch of that shape, and the rotary positions of all its rows at once."""
        batch = self._runner.empty_batch(self._runner.shapes[name])
        asked = [
            (self.slots.index(request), request.pending, len(new))
            for request, new in rows.values()
        ]
        slots, computed, scheduled = np.asarray(asked, np.int32).T.copy()
        found = self._positions.step(slots, computed, scheduled)
        windows = np.split(found, np.cumsum(scheduled)[:-1], axis=1)
        for (row, (request, new)), window in zip(rows.items(), windows, strict=True):
            self._fill(batch, row, request, new, window)
        return batch

    def _fill(
        self,
        batch: Batch,
        row: int,
        request: Request,
        new: Sequence[int],
        rope_positions: np.ndarray,
    ) -> None:
        """Writes a request's next tokens and their positions [A, T] into its row."""
        start, stop = request.pending, request.pending + len(new)
        step = StepFacts(
            chunk=start // self._runner.shapes["prefill"][1],
            prefix_hit=request.hit_tokens > 0,
            decoding=request.is_decoding,
            delta=int(request.plan.delta),
            grid_starts=grid_starts(request.plan, request.media, start, stop),
        )
        columns = slice(0, len(new))
        batch.tokens[row, columns] = new
        batch.positions[row, columns] = np.arange(start, stop, dtype=np.int32)
        batch.rope_positions[..., row, columns] = self._fault.move(rope_positions, step)
        batch.table[row, : len(request.pages)] = request.pages
        if batch.media is not None:
            batch.media.write(row, request.media, start, stop)

    def _count_cut(self, request: Request) -> None:
        cut = request.computed
        self.totals.media_cuts += any(m.start < cut < m.stop for m in request.media)

    def _timed(self, batch: Batch) -> tuple[StepResult, float]:
        start = time.perf_counter()
        return self._runner.run(batch), time.perf_counter() - start

    def _accept(self, request: Request, result: StepResult, row: int) -> None:
        """Adds a token to an answer; the last one frees the slot and the pages."""
        request.output.append(int(result.tokens[row]))
        request.samples.append(result.sample[row])
        if request.output[-1] in self._stop or len(request.output) == self._new_tokens:
            request.finished = time.perf_counter()
            self._book.release(request.pages)
            slot = self.slots.index(request)
            self._positions.remove(slot)
            self.slots[slot] = None
        self._on_progress(request)
