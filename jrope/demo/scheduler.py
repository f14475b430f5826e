"""Decides what each step computes: continuous batching over slots.

Pure host code. A turn of the loop lets arrived requests into free slots, computes one
chunk of the oldest unfinished prompt, and then one token of every answer under way.
Requests come and go between turns; the shapes that the device sees never change.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jrope.demo.engine import Batch, StepResult
from jrope.demo.faults import Fault, StepFacts
from jrope.demo.paged_cache import PageBook


class RequestError(ValueError):
    """A request could never be served."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and what became of it.

    Attributes:
      name: its number, for people.
      text: what people are shown of the prompt.
      prompt: all its token ids.
      arrival: it arrives when the server has computed this many tokens.
      computed: prompt tokens whose keys and values are in the pool.
      hit_tokens: those of them that another request had computed.
      pages: of the pool, in order.
      output: token ids of the answer.
      samples: for each of them, what `StepResult.sample` held.
      arrived, admitted, first_token, finished: moments, seconds.
    """

    name: int
    text: str
    prompt: list[int]
    arrival: int
    computed: int = 0
    hit_tokens: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)
    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed == len(self.prompt)


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What the loop has done so far; seconds are those spent in steps."""

    prefill_tokens: int = 0
    prefill_steps: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    hit_tokens: int = 0


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


def check_requests(
    requests: Sequence[Request], *, context: int, new_tokens: int
) -> None:
    """Checks that prompts and answers fit the context.

    Raises:
      RequestError: if one does not.
    """
    for request in requests:
        length = len(request.prompt)
        if not length:
            raise RequestError(f"prompt {request.name} is empty")
        if length + new_tokens > context:
            raise RequestError(
                f"prompt {request.name} must fit the context of {context} with its "
                f"{new_tokens} new tokens, got {length} tokens; shorten it or raise "
                f"--context"
            )


class Scheduler:
    """Serves requests to their end.

    Args:
      runner: computes the steps.
      book: of the runner's page pool.
      requests: in the order in which they arrive.
      new_tokens: the most that an answer may have.
      stop: ids that end an answer.
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
        fault: Fault | None = None,
    ) -> None:
        """Checks that every request fits."""
        self.totals = Totals()
        self.slots: list[Request | None] = [None] * runner.shapes["decode"][0]
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
            self.slots[slot] = request

    def _reserve(self, request: Request) -> bool:
        """Takes all pages that a request will ever need, or none."""
        known = self._book.match(request.prompt)
        missing = self._pages_needed(request) - len(known)
        if missing > self._book.available:
            self._book.release(known)
            return False
        request.pages = known + [self._book.take() for _ in range(missing)]
        request.computed = request.hit_tokens = len(known) * self._book.page_size
        self.totals.hit_tokens += request.hit_tokens
        return True

    def _prefill(self, request: Request) -> None:
        """Computes the next chunk of a prompt; the last one gives the first token."""
        shape = self._runner.shapes["prefill"]
        end = min(request.computed + shape[1], len(request.prompt))
        batch = self._runner.empty_batch(shape)
        self._fill(batch, 0, request, request.prompt[request.computed : end])
        result, seconds = self._timed(batch)
        self.totals.prefill_tokens += end - request.computed
        self.totals.prefill_steps += 1
        self.totals.prefill_seconds += seconds
        request.computed = end
        self._book.publish(request.prompt[:end], request.pages)
        if request.is_decoding:
            request.first_token = time.perf_counter()
            self._accept(request, result, 0)
        else:
            self._on_progress(request)

    def _decode(self, decoding: dict[int, Request]) -> None:
        """Computes the next token of every answer under way."""
        batch = self._runner.empty_batch(self._runner.shapes["decode"])
        for slot, request in decoding.items():
            self._fill(batch, slot, request, request.output[-1:])
        result, seconds = self._timed(batch)
        self.totals.decode_tokens += len(decoding)
        self.totals.decode_steps += 1
        self.totals.decode_seconds += seconds
        for slot, request in decoding.items():
            self._accept(request, result, slot)

    def _fill(
        self, batch: Batch, row: int, request: Request, tokens: Sequence[int]
    ) -> None:
        """Writes a request's next tokens into its row of the batch."""
        start = request.computed + max(len(request.output) - 1, 0)
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        step = StepFacts(
            chunk=start // self._runner.shapes["prefill"][1],
            prefix_hit=request.hit_tokens > 0,
            decoding=request.is_decoding,
        )
        batch.tokens[row, : len(tokens)] = tokens
        batch.positions[row, : len(tokens)] = positions
        batch.rope_positions[row, : len(tokens)] = self._fault.move(positions, step)
        batch.table[row, : len(request.pages)] = request.pages

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
            self.slots[self.slots.index(request)] = None
        self._on_progress(request)
