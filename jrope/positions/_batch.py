"""The positions of a running batch, in one buffer that is made once."""

import functools
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions._errors import INPUT, SLOT, PositionError, from_kernel
from jrope.positions._inputs import as_size, as_vector, check_spec
from jrope.positions._plan import PositionPlan
from jrope.positions._scan import POSITION_LIMIT
from jrope.positions._spec import PositionSpec
from jrope.positions._step import (
    EMPTY,
    ENTRY,
    EXPECTED,
    GOT,
    HEAD_ROW,
    LIMIT,
    PADDING,
    PLANNED_ROW,
    ROOM,
    STEP_BATCH,
    WRITTEN,
)
from jrope.positions._table import COLUMNS

_ALIGNMENT = 64


class BatchPositions:
    """Positions of all running requests, step after step.

    Every request sits in a slot with its plan. `step` takes the slots that run, how
    many tokens of each are computed already and how many are to be computed now:
    prefill, a chunk of it, a chunk that reaches past the prompt's end, a prefix hit, a
    resumed request, drafts to verify and decoding are all the same window. Columns past
    the step hold padding, -1. Not for several threads at a time.

    Args:
      spec: of the model; `spec("text")` for plain RoPE, with one axis.
      max_requests: slots.
      max_tokens: of one step, drafts not counted.
      max_position: rows of the table of cos and sin; no position reaches it.
      headroom: columns more, for draft tokens.

    Raises:
      TypeError, ValueError: a size is none, or more than any engine has.

    >>> from jrope.positions import BatchPositions, plan, spec
    >>> batch = BatchPositions(spec("text"), 4, max_tokens=8, max_position=100)
    >>> batch.add(0, plan(spec("text"), [5, 6, 7]))
    >>> batch.add(1, plan(spec("text"), [5, 6]))
    >>> batch.step([0, 1], computed=[0, 9], scheduled=[3, 1])
    array([[0, 1, 2, 9]], dtype=int32)
    """

    def __init__(
        self,
        spec: PositionSpec,
        max_requests: int,
        max_tokens: int,
        max_position: int,
        headroom: int = 0,
    ) -> None:
        """Makes the buffer, all of it padding."""
        check_spec(spec)
        max_requests = as_size("max_requests", max_requests, least=1)
        self.spec = spec
        self.max_position = as_size(
            "max_position", max_position, least=1, most=POSITION_LIMIT
        )
        self.capacity = as_size("max_tokens", max_tokens, least=1) + as_size(
            "headroom", headroom, least=0
        )
        self.buffer = _aligned((spec.axes, self.capacity), spec.dtype)
        self.buffer[:] = PADDING
        self._plans: list[PositionPlan | None] = [None] * max_requests
        self._state = np.zeros((2, max_requests), np.int32)
        self._state[PLANNED_ROW] = EMPTY
        self._shift = np.zeros(
            max_requests, np.float64 if spec.fractional else np.int32
        )
        self._arena = np.zeros((max(2 * max_requests, 16), COLUMNS))
        self._arena_rows = 0
        self._numbers = np.zeros(6)
        self._numbers[[LIMIT, ROOM]] = self.max_position, self.capacity
        self._bind()

    def add(self, slot: int, plan: PositionPlan) -> None:
        """Puts a request into an empty slot.

        Raises:
          PositionError: slot (taken, or none such), out_shape (a plan of another kind
            of family), position_beyond_table.
        """
        self._check_slot(slot, empty=True)
        if not isinstance(plan, PositionPlan):
            raise TypeError(
                f"plan must be a PositionPlan, as jrope.positions.plan makes it, got "
                f"{type(plan).__name__}"
            )
        if plan.spec.shape_code != self.spec.shape_code:
            raise PositionError(
                "out_shape",
                index=slot,
                expected=f"a plan of {self.spec.family}",
                got=plan.spec.family,
                hint="was the batch made for another model's spec?",
            )
        if plan.max_position >= self.max_position:
            raise PositionError(
                "position_beyond_table",
                index=slot,
                expected=f"at most {self.max_position - 1}",
                got=plan.max_position,
            )
        self._place(slot, plan)
        self._plans[slot] = plan

    def remove(self, slot: int) -> None:
        """Empties a slot.

        Raises:
          PositionError: slot.
        """
        self._check_slot(slot, empty=False)
        self._plans[slot] = None
        self._state[PLANNED_ROW, slot] = EMPTY

    def swap(self, first: int, second: int) -> None:
        """Exchanges two slots, of which either may be empty.

        Raises:
          PositionError: slot.
        """
        for slot in (first, second):
            self._check_slot(slot)
        there, back = [first, second], [second, first]
        self._plans[first], self._plans[second] = (
            self._plans[second],
            self._plans[first],
        )
        self._state[:, there] = self._state[:, back]
        self._shift[there] = self._shift[back]

    def step(
        self, slots: ArrayLike, computed: ArrayLike, scheduled: ArrayLike
    ) -> np.ndarray:
        """Fills the buffer for one step.

        Args:
          slots: int [requests], in the order of the step's tokens.
          computed: int [requests], tokens of each that are computed already.
          scheduled: int [requests], tokens of each to compute now; 0 is allowed.

        Returns:
          A view of the buffer, [A, tokens]: gone with the next step.

        Raises:
          PositionError: slot, input, capacity, position_beyond_table; the buffer still
            holds the step before.
        """
        try:
            tokens = self._run(slots, computed, scheduled)
        except TypeError:
            names = ("slots", "computed", "scheduled")
            given = (slots, computed, scheduled)
            STEP_BATCH[self.spec.fractional].prepare()
            self._bind()
            tokens = self._run(*map(as_vector, names, given))
        if tokens < 0:
            entry, expected, got = self._numbers[[ENTRY, EXPECTED, GOT]].tolist()
            if tokens == SLOT:
                self._refuse_slot(int(entry), slots)
            if tokens == INPUT:
                _refuse_counts(int(entry), slots, computed, scheduled)
            raise from_kernel(tokens, 0, entry, expected, got, -1)
        return self.buffer[:, :tokens]

    def step_array(self, columns: int | None = None) -> np.ndarray:
        """The step's positions for a jitted function: always [A, columns].

        A copy: refilling the buffer while steps are in flight cannot change it. With
        one axis the shape is [columns].

        Args:
          columns: of the program that will take them, where it takes fewer than the
            buffer has, such as one token a request while decoding; None for all.

        Raises:
          PositionError: capacity, if the step has more tokens, or the buffer fewer
            columns.
        """
        if columns is None:
            columns = self.capacity
        elif not hasattr(type(columns), "__index__"):
            raise TypeError(f"columns must be an int, got {columns!r}")
        tokens = int(self._numbers[WRITTEN])
        if not tokens <= columns <= self.capacity:
            raise PositionError(
                "capacity",
                expected=(
                    f"at least {tokens} columns, the step's tokens, and at most "
                    f"{self.capacity}, the buffer's"
                ),
                got=columns,
            )
        held = self.buffer[:, :columns]
        return (held[0] if self.spec.axes == 1 else held).copy()

    def __getstate__(self) -> dict[str, Any]:
        """All but the compiled kernel, which belongs to its process."""
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A batch of its own: what `pickle` and `copy` make shares nothing."""
        vars(self).update(state)
        self._plans = list(self._plans)
        for name in ("_state", "_shift", "_arena", "_numbers"):
            setattr(self, name, getattr(self, name).copy())
        held = self.buffer
        self.buffer = _aligned(held.shape, held.dtype)
        self.buffer[:] = held
        self._bind()

    def _bind(self) -> None:
        """Makes `_run`, the kernel with all that is the same at every step."""
        self._run = functools.partial(
            STEP_BATCH[self.spec.fractional].run,
            self._state,
            self._shift,
            self._arena,
            self.buffer,
            self._numbers,
        )

    def _place(self, slot: int, plan: PositionPlan) -> None:
        """Writes what the kernel needs of a plan; its table goes into the arena."""
        table = plan.table
        if table is None:
            self._state[:, slot] = 0
            self._shift[slot] = 0
            return
        if self._arena_rows + len(table) > len(self._arena):
            self._renew_arena(len(table))
        head = self._arena_rows
        self._arena[head : head + len(table)] = table
        self._arena_rows += len(table)
        self._state[:, slot] = plan.num_planned, head
        self._shift[slot] = plan.decode_shift

    def _renew_arena(self, more: int) -> None:
        """Copies all requests' tables to a new arena, twice as large as needed."""
        live = [
            (slot, plan.table)
            for slot, plan in enumerate(self._plans)
            if plan is not None and plan.table is not None
        ]
        rows = sum(len(table) for _, table in live) + more
        self._arena = np.zeros((max(2 * rows, len(self._arena)), COLUMNS))
        self._arena_rows = 0
        for slot, table in live:
            head = self._arena_rows
            self._arena[head : head + len(table)] = table
            self._arena_rows += len(table)
            self._state[HEAD_ROW, slot] = head
        self._bind()

    def _refuse_slot(self, entry: int, slots: ArrayLike) -> NoReturn:
        """Raises for an entry of a step whose slot is empty, or no slot."""
        slot = int(np.asarray(slots)[entry])
        if not 0 <= slot < len(self._plans):
            expected = f"a slot of 0 to {len(self._plans) - 1}"
            raise PositionError("slot", index=entry, expected=expected, got=slot)
        raise PositionError(
            "slot",
            index=entry,
            expected="the slot of a request",
            got=f"slot {slot}, which is empty",
            hint="was its request removed, or never added?",
        )

    def _check_slot(self, slot: int, *, empty: bool | None = None) -> None:
        if isinstance(slot, bool) or not hasattr(type(slot), "__index__"):
            raise TypeError(f"a slot must be an int, got {slot!r}")
        if not 0 <= slot < len(self._plans):
            expected = f"a slot of 0 to {len(self._plans) - 1}"
            raise PositionError("slot", expected=expected, got=slot)
        if empty is not None and (self._plans[slot] is None) != empty:
            held = self._plans[slot]
            raise PositionError(
                "slot",
                expected=f"slot {slot} to {'be empty' if empty else 'hold a request'}",
                got="an empty slot" if held is None else f"{held!r} in it",
                hint=(
                    "remove the request that it holds first"
                    if empty
                    else "was its request removed before, or never added?"
                ),
            )


def _refuse_counts(
    entry: int, slots: ArrayLike, computed: ArrayLike, scheduled: ArrayLike
) -> NoReturn:
    """Raises for counts of a step that are negative, or not one for each slot."""
    requests = len(np.asarray(slots))
    name, counts = next(
        (name, counts)
        for name, given in (("computed", computed), ("scheduled", scheduled))
        for counts in [np.asarray(given)]
        if (len(counts) != requests if entry < 0 else counts[entry] < 0)
    )
    if entry < 0:
        expected = f"as many entries of {name} as of slots, {requests}"
        raise PositionError("input", expected=expected, got=len(counts))
    raise PositionError(
        "input",
        index=entry,
        expected=f"{name} of at least 0",
        got=int(counts[entry]),
        hint="a number of tokens is not negative",
    )


def _aligned(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes, as devices like to read them."""
    size = shape[0] * shape[1] * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
