"""Random scripts of a batch buffer, against one that is built token by token."""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import numpy as np
import pytest
from fuzzing import REFUSED, WAYS, cases, mostly, ways
from hypothesis import strategies as st
from positions_oracle import random_prompt
from test_positions_fuzz import model_of, planned

from jrope.positions import BatchPositions, PositionError, PositionPlan, plan, spec

pytestmark = pytest.mark.fuzz

SLOTS, TOKENS, HEADROOM, LIMIT = 4, 40, 4, 150
FAMILIES = ("text", "qwen2_5_vl", "hunyuan_vl", "qwen3_omni_moe", "isaac", "glm_image")


@dataclasses.dataclass(frozen=True)
class Known:
    """A request whose positions are known: the planned ones, then index plus shift."""

    plan: PositionPlan
    planned: tuple[tuple[float, ...], ...]
    shift: float

    def position(self, index: int) -> tuple[float, ...]:
        if index < len(self.planned):
            return self.planned[index]
        return (index + self.shift,) * self.plan.axes

    def top(self, start: int, count: int) -> float:
        """The largest position of a window, which may be too long to list."""
        inside = self.planned[start : start + count]
        last = [self.position(start + count - 1)] if count else []
        return max((max(position) for position in [*inside, *last]), default=-1)


@functools.cache
def request(family: str, seed: int) -> Known:
    if family == "text":
        tokens = 3 * seed
        made = plan(spec("text"), np.arange(tokens, dtype=np.int32))
        return Known(made, tuple((float(k),) for k in range(tokens)), 0)
    if family == "glm_image":
        return generating(seed)
    prompt = random_prompt(family, seed)
    # Text keeps its index where the largest position says nothing of it.
    shift = 0 if family == "hunyuan_vl" else prompt.delta
    made = planned(model_of(family), prompt)
    return Known(made, tuple(map(tuple, prompt.positions)), shift)


def generating(seed: int) -> Known:
    """A prompt of words that is answered with an image of rows x columns tokens."""
    words, rows, columns = 1 + seed % 5, 1 + seed % 3, 1 + seed % 4
    ids = [*range(1, words), 16384]
    made = plan(spec("glm_image"), ids, image_grid_thw=[[1, rows, columns]])
    text = [(k,) * 3 for k in range(words)]
    image = [(words, words + r, words + c) for r in range(rows) for c in range(columns)]
    after = words + max(rows, columns) - words - rows * columns
    return Known(made, tuple(text + image), after)


@dataclasses.dataclass
class Slow:
    """What the buffer must hold, and what it must refuse."""

    axes: int
    dtype: np.dtype
    slots: list[Known | None] = dataclasses.field(default_factory=lambda: [None] * 4)
    tokens: list[tuple[float, ...]] = dataclasses.field(default_factory=list)

    @property
    def buffer(self) -> np.ndarray:
        rows = np.full((TOKENS + HEADROOM, self.axes), -1, self.dtype)
        if self.tokens:
            rows[: len(self.tokens)] = self.tokens
        return rows.T

    def add(self, slot: int, known: Known) -> str | None:
        if not 0 <= slot < SLOTS or self.slots[slot] is not None:
            return "slot"
        if known.top(0, len(known.planned)) >= LIMIT:
            return "position_beyond_table"
        self.slots[slot] = known
        return None

    def remove(self, slot: int) -> str | None:
        if not 0 <= slot < SLOTS or self.slots[slot] is None:
            return "slot"
        self.slots[slot] = None
        return None

    def swap(self, first: int, second: int) -> str | None:
        if not (0 <= first < SLOTS and 0 <= second < SLOTS):
            return "slot"
        slots = self.slots
        slots[first], slots[second] = slots[second], slots[first]
        return None

    def step(self, windows: list[tuple[int, int, int]]) -> str | None:
        if any(not -(2**31) <= x < 2**31 for window in windows for x in window):
            return "input"
        for slot, computed, count in windows:
            known = self.slots[slot] if 0 <= slot < SLOTS else None
            if known is None:
                return "slot"
            if computed < 0 or count < 0:
                return "input"
            if known.top(computed, count) >= LIMIT:
                return "position_beyond_table"
        if sum(count for _, _, count in windows) > TOKENS + HEADROOM:
            return "capacity"
        self.tokens = [
            position
            for slot, computed, count in windows
            for position in map(
                self.slots[slot].position,  # type: ignore[union-attr]
                range(computed, computed + count),
            )
        ]
        return None

    def step_array(self, columns: int | None) -> str | None:
        most = TOKENS + HEADROOM
        fits = columns is None or len(self.tokens) <= columns <= most
        return None if fits else "capacity"


ways_of_steps = st.tuples(ways, st.sampled_from(["int32", "int64"]))
seeds = st.integers(0, 60)

# What is mostly refused: numbers of all kinds.
slots = st.integers(-1, SLOTS)
LATE = (LIMIT - 2, LIMIT, 2**31 - 2, 2**31 - 1, 2**31, 2**40, 2**63, -(2**31), -(2**40))
computed = st.integers(-1, 60) | st.sampled_from(LATE)
counts = st.sampled_from([0, 1, 1, 1, 2, 5, 20, 45, 2**31 - 1, 2**31])
windows = st.lists(st.tuples(slots, computed, counts), max_size=6)
any_action = st.one_of(
    st.tuples(st.just("add"), slots, seeds),
    st.tuples(st.just("remove"), slots),
    st.tuples(st.just("swap"), slots, slots),
    st.tuples(st.just("step"), windows, ways_of_steps),
    st.tuples(st.just("array"), st.none() | st.integers(-1, TOKENS + HEADROOM + 1)),
    st.tuples(st.just("copy"), st.sampled_from(["pickle", "deepcopy", "copy"])),
)

# What is mostly done: a slot is the so-manieth of those that are empty, or held, and a
# window begins near the end of what is planned.
some = st.integers(0, SLOTS - 1)
near = st.tuples(some, st.integers(-12, 20), st.sampled_from([0, 1, 1, 1, 2, 5, 20]))
add_to_empty = st.tuples(st.just("add_to_empty"), some, seeds)
likely_action = st.one_of(
    add_to_empty,
    st.tuples(st.just("remove_held"), some),
    st.tuples(st.just("swap"), some, some),
    st.tuples(st.just("step_held"), st.lists(near, min_size=1), ways_of_steps),
)
scripts = st.tuples(
    st.lists(add_to_empty, min_size=2, max_size=SLOTS),
    st.lists(mostly(likely_action, any_action, times=3), max_size=12),
).map(lambda parts: [*parts[0], *parts[1]])


def columns_of(windows: list, way: str, dtype: str) -> list[Any]:
    """Three arrays, of a dtype that holds the numbers."""
    columns = [[window[k] for window in windows] for k in range(3)]
    if way == "list":
        return columns
    if any(not -(2**31) <= x < 2**31 for column in columns for x in column):
        dtype = "uint64" if any(2**63 in column for column in columns) else "int64"
        columns = [[abs(x) for x in column] for column in columns]
    return [WAYS[way](np.asarray(column, dtype)) for column in columns]


class Script:
    """The buffer and the slow one, and the arrays that were handed out."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = model_of(family)
        self.batch = BatchPositions(
            self.model, SLOTS, TOKENS, max_position=LIMIT, headroom=HEADROOM
        )
        self.slow = Slow(self.model.axes, self.model.dtype)
        self.handed_out: list[tuple[np.ndarray, np.ndarray]] = []
        self.tokens = 0

    def run(self, action: tuple) -> None:
        name, *given = action
        getattr(self, name)(*given)
        np.testing.assert_array_equal(self.batch.buffer, self.slow.buffer, str(action))
        for ours, then in self.handed_out:
            np.testing.assert_array_equal(ours, then)

    def expect(self, code: str | None, call: Any) -> Any:
        if code is None:
            return call()
        with pytest.raises(PositionError) as caught:
            call()
        assert caught.value.code == code, caught.value
        return None

    def add(self, slot: int, seed: int) -> None:
        known = request(self.family, seed)
        self.expect(
            self.slow.add(slot, known), lambda: self.batch.add(slot, known.plan)
        )

    def remove(self, slot: int) -> None:
        self.expect(self.slow.remove(slot), lambda: self.batch.remove(slot))

    def swap(self, first: int, second: int) -> None:
        code = self.slow.swap(first, second)
        self.expect(code, lambda: self.batch.swap(first, second))

    def add_to_empty(self, which: int, seed: int) -> None:
        if empty := [s for s in range(SLOTS) if self.slow.slots[s] is None]:
            self.add(empty[which % len(empty)], seed)

    def remove_held(self, which: int) -> None:
        if held := self.held:
            self.remove(held[which % len(held)])

    def step_held(self, near: list, held_as: tuple[str, str]) -> None:
        if not (held := self.held):
            return
        windows = []
        for which, after, count in near:
            slot = held[which % len(held)]
            planned = len(self.slow.slots[slot].planned)  # type: ignore[union-attr]
            windows.append((slot, max(planned + after, 0), count))
        self.step(windows, held_as)

    @property
    def held(self) -> list[int]:
        return [slot for slot in range(SLOTS) if self.slow.slots[slot] is not None]

    def read_all(self, held_as: tuple[str, str]) -> None:
        """Every request from its start, and a few tokens past what is planned."""
        for slot in self.held:
            known = self.slow.slots[slot]
            count = min(TOKENS, len(known.planned) + 3)  # type: ignore[union-attr]
            self.run(("step", [(slot, 0, count)], held_as))
            self.run(("step_held", [(self.held.index(slot), -2, 5)], held_as))

    def step(self, windows: list, held_as: tuple[str, str]) -> None:
        way, dtype = held_as
        columns = columns_of(windows, way, dtype)
        if way != "list":
            windows = list(zip(*(map(int, x) for x in columns), strict=True))
        made = self.expect(self.slow.step(windows), lambda: self.batch.step(*columns))
        if made is not None:
            self.tokens += made.shape[1]
            assert made.shape == (self.model.axes, len(self.slow.tokens))
            assert np.shares_memory(made, self.batch.buffer) or not made.size

    def array(self, columns: int | None) -> None:
        code = self.slow.step_array(columns)
        made = self.expect(code, lambda: self.batch.step_array(columns))
        if made is not None:
            want = self.slow.buffer[:, :columns]
            want = want[0] if self.model.axes == 1 else want
            np.testing.assert_array_equal(made, want)
            self.handed_out.append((made, want))

    def copy(self, how: str) -> None:
        before = self.batch
        makers = {"deepcopy": copy.deepcopy, "copy": copy.copy}
        if how == "pickle":
            self.batch = pickle.loads(pickle.dumps(before))
        else:
            self.batch = makers[how](before)
        # What happens to the old one is nothing to the new one.
        for slot in range(SLOTS):
            before.buffer[:] = -9
            if self.slow.slots[slot] is not None:
                before.remove(slot)


@cases(st.sampled_from(FAMILIES), scripts)
def test_scripts_of_a_batch(family, script):
    running = Script(family)
    for action in script:
        running.run(action)
    stepped = running.tokens
    running.read_all(("plain", "int32"))
    return None if stepped else REFUSED


@cases(
    st.sampled_from(FAMILIES),
    st.lists(st.tuples(slots, st.integers(0, 40), ways), min_size=4, max_size=9),
)
def test_requests_that_come_and_go_keep_their_positions(family, script):
    """Every slot is read whole after each change, so that no table is left behind."""
    running = Script(family)
    for slot, seed, way in script:
        if 0 <= slot < SLOTS and running.slow.slots[slot] is not None:
            running.run(("remove", slot))
        running.run(("add", slot, seed))
        running.read_all((way, "int32"))
