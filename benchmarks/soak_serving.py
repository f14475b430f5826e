"""A long run of random requests: recompiles, memory and positions, counted.

    python -m benchmarks.soak_serving [--steps 10000] [--producers 4] [--json]

The demo's scheduler serves its small random model (`tiny-qwen2-vl`, M-RoPE) with random
prompts of text, images and videos, some of which begin alike. Nobody waits for a step:
its tokens are drawn on the host, 24 steps are in flight, and every step's arrays are
filled again for the next one. When a step is done, the cos and sin that its program
looked up are compared with float64 ones of the positions that the demo's own reference
counts (`jrope.demo.reference`).

All of it runs twice: first one thread does everything, then `--producers` threads make
the requests and their plans while the main one serves. Of each run: programs compiled
after the warm-up, memory of the process after it and at the end.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import resident, stamp
from jrope import lookup
from jrope.demo import tiny
from jrope.demo.engine import Batch, CompileCounter, Engine, StepResult
from jrope.demo.model import Decoder
from jrope.demo.paged_cache import PageBook
from jrope.demo.reference import reference_positions
from jrope.demo.requests import Request
from jrope.demo.scheduler import Scheduler
from jrope.demo.sources import SOURCES
from jrope.demo.tiny import ByteTokenizer, Picture, encode_parts
from jrope.positions import PositionPlan, PositionSpec

CONTEXT, NEW_TOKENS, IN_FLIGHT = 512, 12, 24
SLOTS, CHUNK, PAGE, PAGES = 4, 40, 16, 160
WAVE = 24  # requests of one scheduler
WARM_UP = 0.1  # of all steps: arenas and allocators have grown by then
FLAT = 0.02  # what memory may grow by
_AXES = np.repeat([0, 1, 2], tiny.SPEC.mrope_section or ())
_EXPONENTS = np.arange(0, tiny.SPEC.head_dim, 2) / tiny.SPEC.head_dim

HandOver = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(kw_only=True, eq=False)
class Planned(Request):
    """A request whose plan was made where it was, on any thread.

    Attributes:
      made: the plan.
      right: positions of all its tokens, by the reference, int32 [3, tokens].
    """

    made: PositionPlan
    right: np.ndarray

    def make_plan(self, rule: PositionSpec) -> None:
        """Takes the plan that is there."""
        del rule
        self.plan = self.made


def random_request(rng: np.random.Generator, name: int) -> Planned:
    """A prompt of words and pictures with its plan, checked against the reference.

    Raises:
      AssertionError: if the plan's positions are others.
    """
    parts: list[str | Picture] = []
    if rng.random() < 0.3:  # Begins as others do, so that its pages are found.
        parts += ["All of these begin with the very same words, then they part. "]
    for _ in range(int(rng.integers(0, 4))):
        parts += ["x" * int(rng.integers(0, 40)), random_picture(rng)]
    parts += ["".join(map(chr, rng.integers(97, 123, int(rng.integers(1, 60)))))]
    ids, media = encode_parts(parts, ByteTokenizer())
    if len(ids) + NEW_TOKENS > CONTEXT:
        return random_request(rng, name)
    asked = Request(name=name, text="", prompt=ids, arrival=0, media=media)
    asked.make_plan(tiny.POSITIONS)
    whole = len(ids) + NEW_TOKENS
    right = np.asarray(reference_positions(asked, whole), np.int32).T[:, :whole]
    if not np.array_equal(asked.plan.positions(0, whole), right):
        raise AssertionError(f"a plan of other positions than the reference's: {parts}")
    return Planned(
        **{field: getattr(asked, field) for field in ("name", "text", "prompt")},
        arrival=int(rng.integers(0, 400)),
        media=media,
        made=asked.plan,
        right=right,
    )


def random_picture(rng: np.random.Generator) -> Picture:
    """One of few, so that some are shown again."""
    is_video = bool(rng.random() < 0.3)
    grid = (int(rng.integers(1, 4)) if is_video else 1, *rng.integers(1, 6, 2) * 2)
    frames, rows, columns = map(int, grid)
    kind = "video" if is_video else "image"
    return Picture(
        kind=kind, grid_thw=(frames, rows, columns), seed=int(rng.integers(8))
    )


class InFlight:
    """An engine that nobody waits for, whose arrays are filled again for every step.

    Args:
      engine: computes.
      model: the engine's, for its rotary table.
      hand_over: makes what a program gets of an array that is filled again.

    Attributes:
      scheduler: whose requests are served now.
      steps: dispatched.
      checked: tokens whose cos and sin were compared.
      wrong: steps that looked up others.
    """

    def __init__(
        self,
        engine: Engine,
        model: Decoder,
        rng: np.random.Generator,
        hand_over: HandOver = np.copy,
    ) -> None:
        """Compiles all programs."""
        self.shapes, self.context = engine.shapes, engine.context
        self.scheduler: Scheduler | None = None
        self.steps = self.checked = self.wrong = 0
        self._engine, self._rng, self._hand_over = engine, rng, hand_over
        self._rope = model.rotary["full_attention"]
        self._flying: collections.deque[tuple[Any, np.ndarray]] = collections.deque()
        self._batches = {
            shape: jax.tree.map(aligned, engine.empty_batch(shape))
            for shape in engine.shapes.values()
        }
        for name, shape in engine.shapes.items():
            engine.compile(name)
            self.run(self.empty_batch(shape))
        self.land()
        self.steps = self.checked = 0

    def empty_batch(self, shape: tuple[int, int]) -> Batch:
        """The one batch of that shape, emptied."""
        batch = self._batches[shape]
        for held, empty in zip(
            jax.tree.leaves(batch),
            jax.tree.leaves(self._engine.empty_batch(shape)),
            strict=True,
        ):
            held[...] = empty
        return batch

    def run(self, batch: Batch) -> StepResult:
        """Begins a step, and checks the one that began 24 steps before."""
        right = self._right_positions(batch)
        given = self._hand_over(batch.rope_positions)
        tokens, sample = self._engine.dispatch(batch)
        rows = look_up(self._rope.cos_sin_cache[...], given, sample)
        self._flying.append((rows, right))
        self.steps += 1
        while len(self._flying) > IN_FLIGHT:
            self._check(*self._flying.popleft())
        drawn = self._rng.integers(0, 256, len(batch.tokens)).astype(np.int32)
        return StepResult(drawn, np.zeros((len(drawn), 1), np.float32))

    def land(self) -> None:
        """Waits for all that is in flight."""
        while self._flying:
            self._check(*self._flying.popleft())

    def _right_positions(self, batch: Batch) -> np.ndarray:
        """[3, B, T] by the reference; each row's request is told by its pages."""
        right = np.zeros(batch.rope_positions.shape, np.int64)
        for row, indices in enumerate(batch.positions):
            if not (real := indices >= 0).any():
                continue
            request = self._request_of(batch.table[row])
            right[:, row, real] = request.right[:, indices[real]]
            self.checked += int(real.sum())
        return right

    def _request_of(self, table: np.ndarray) -> Planned:
        running = self.scheduler.slots if self.scheduler else []
        for request in running:
            pages = request.pages if request else []
            if isinstance(request, Planned) and pages == table[: len(pages)].tolist():
                return request
        raise AssertionError("a step of pages that no running request has")

    def _check(self, rows: tuple[jax.Array, jax.Array], right: np.ndarray) -> None:
        turning = np.moveaxis(right[_AXES], 0, -1)
        angles = turning * tiny.SPEC.theta**-_EXPONENTS
        for made, exact in zip(rows, (np.cos(angles), np.sin(angles)), strict=True):
            if not np.abs(np.asarray(made) - exact).max() < 2.0**-24:
                self.wrong += 1
                return


@jax.jit
def look_up(table: jax.Array, positions: jax.Array, sample: jax.Array) -> Any:
    """Cos and sin of a step's positions, read when its logits are there."""
    late = jnp.isnan(sample[0, 0]).astype(jnp.int32)  # 0, but XLA cannot know.
    config = tiny.SPEC.rope_configs()["full_attention"]
    return lookup(table, positions + late, layout=config.layout)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins where XLA on CPU reads an array in place: at 64 bytes."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    held = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    return held


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a run was and came to.

    Args:
      producers: threads that made requests and plans; 0: the main one did.
      steps: of the scheduler.
      requests: served to their end.
      checked: tokens whose cos and sin were compared.
      wrong: steps that looked up others.
      recompiles: programs that were compiled after the warm-up.
      resident_bytes_before: memory of the process after the first tenth.
      resident_bytes_after: at the end.
      seconds: all of it, compilation included.
    """

    producers: int
    steps: int
    requests: int
    checked: int
    wrong: int
    recompiles: int
    resident_bytes_before: int
    resident_bytes_after: int
    seconds: float

    @property
    def growth(self) -> float:
        """Of memory, as a part of what it was."""
        return self.resident_bytes_after / self.resident_bytes_before - 1

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.wrong and not self.recompiles and abs(self.growth) <= FLAT

    def as_json(self) -> dict[str, Any]:
        """A flat row."""
        row = dataclasses.asdict(self)
        return {
            **row,
            "seconds": round(self.seconds, 1),
            "growth": round(self.growth, 4),
        }


@contextlib.contextmanager
def requests_of(producers: int, seed: int) -> Iterator[Callable[[int], Planned]]:
    """Gives a function that gives the next request; its name is the argument."""
    if not producers:
        rng = np.random.default_rng(seed)
        yield functools.partial(random_request, rng)
        return
    made: queue.Queue[Planned | BaseException] = queue.Queue(2 * WAVE)
    stop = threading.Event()

    def produce(rng: np.random.Generator) -> None:
        while not stop.is_set():
            try:
                request: Planned | BaseException = random_request(rng, 0)
            except AssertionError as error:
                request = error
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    made.put(request, timeout=0.1)
                    break

    def take(name: int) -> Planned:
        request = made.get()
        if isinstance(request, BaseException):
            raise request
        request.name = name
        return request

    threads = [
        threading.Thread(target=produce, args=(np.random.default_rng((seed, k)),))
        for k in range(producers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield take
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def soak(
    *, steps: int, producers: int, seed: int = 0, hand_over: HandOver = np.copy
) -> Found:
    """Serves at least so many steps, in waves of requests."""
    begin = time.perf_counter()
    parts = SOURCES["tiny-qwen2-vl"].read(None, lambda *_: None)
    model = Decoder(parts.fetch, parts.spec, parts.spec.rope_configs())
    sizes = {"slots": SLOTS, "chunk": CHUNK, "pages": PAGES, "page_size": PAGE}
    engine = Engine(model, **sizes, context=CONTEXT)
    runner = InFlight(engine, model, np.random.default_rng(seed), hand_over)
    book = PageBook(PAGES, PAGE)
    served = before = 0
    with requests_of(producers, seed) as take, CompileCounter() as compiles:
        while runner.steps < steps:
            wave = [take(name) for name in range(WAVE)]
            runner.scheduler = Scheduler(
                runner, book, wave, new_tokens=NEW_TOKENS, positions=tiny.POSITIONS
            )
            runner.scheduler.run(lambda _: None)
            served += len(wave)
            gc.collect()
            if not before and runner.steps >= WARM_UP * steps:
                before = resident()
        runner.land()
    return Found(
        producers=producers,
        steps=runner.steps,
        requests=served,
        checked=runner.checked,
        wrong=runner.wrong,
        recompiles=compiles.count,
        resident_bytes_before=before,
        resident_bytes_after=resident(),
        seconds=time.perf_counter() - begin,
    )


def main(arguments: list[str] | None = None) -> int:
    """Soaks and prints; the exit status is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak_serving")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args(arguments)
    found = []
    for producers in (0, options.producers):
        found.append(soak(steps=options.steps, producers=producers, seed=options.seed))
        print(found[-1], file=sys.stderr, flush=True)
    if options.json:
        rows = [each.as_json() for each in found]
        print(json.dumps({"stamp": dataclasses.asdict(stamp()), "cells": rows}))
    return int(not all(each.ok for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
