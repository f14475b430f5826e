"""One step of a running batch: every request's window, side by side, in one call."""

import numpy as np

from jrope.positions._arguments import ArrayArgument, row_of
from jrope.positions._errors import CAPACITY, INPUT, POSITION_BEYOND_TABLE, SLOT
from jrope.positions._fill import write_text, write_window
from jrope.positions._jit import Kernel, helper

PADDING = -1
# Rows of the state: first token past a request's table (EMPTY: no request), and where
# its table begins in the arena.
PLANNED_ROW, HEAD_ROW = 0, 1
EMPTY = 2**31 - 1
# What else a batch hands over: columns that the step before wrote, rows of the table of
# cos and sin, columns that may be used; and what it is told of an error.
WRITTEN, LIMIT, ROOM, ENTRY, EXPECTED, GOT = range(6)


@helper
def _all_decode_in_order(slots, computed, scheduled, planned, shift, limit):
    """Whether slots 0, 1, 2, ... each decode one token in range: nothing to gather."""
    count = slots.shape[0]
    if count > planned.shape[0]:
        return False
    odd = 0
    for b in range(count):
        x = computed[b]
        odd |= int(slots[b] != b) | int(scheduled[b] != 1)
        odd |= int(x < planned[b]) | int(x + shift[b] >= limit)
    return odd == 0


@helper
def _write_decode_in_order(computed, shift, out):
    for axis in range(out.shape[0]):
        row = row_of(out, axis)
        for b in range(computed.shape[0]):
            row[b] = computed[b] + shift[b]


@helper
def _all_decode(slots, computed, scheduled, planned, shift, limit):
    """Whether every request decodes one token in range: the common step, vectorised."""
    odd = 0
    count = slots.shape[0]
    for b in range(count):
        odd |= int(slots[b] < 0) | int(slots[b] >= planned.shape[0])
    if odd:
        return False
    for b in range(count):
        s = np.uint32(slots[b])
        x = computed[b]
        odd |= int(scheduled[b] != 1) | int(x < planned[s]) | int(x + shift[s] >= limit)
    return odd == 0


@helper
def _write_decode(slots, computed, shift, out):
    count = slots.shape[0]
    first = row_of(out, 0)
    for b in range(count):
        first[b] = computed[b] + shift[np.uint32(slots[b])]
    for axis in range(1, out.shape[0]):
        row = row_of(out, axis)
        for b in range(count):
            row[b] = first[b]


@helper
def _check(slots, computed, scheduled, planned, shift, limit, columns):
    """Tokens of the step, or (status, entry, expected, got)."""
    total = np.int64(0)
    for b in range(slots.shape[0]):
        s, c, n = int(slots[b]), int(computed[b]), int(scheduled[b])
        if s < 0 or s >= planned.shape[0]:
            return SLOT, b, planned.shape[0] - 1.0, np.float64(s)
        if planned[s] == EMPTY:
            return SLOT, b, 1.0, 0.0
        if c < 0 or n < 0:
            return INPUT, b, 0.0, np.float64(min(c, n))
        last = c + n - 1
        if n > 0 and last >= planned[s] and last + shift[s] >= limit:
            return POSITION_BEYOND_TABLE, b, limit - 1.0, np.float64(last + shift[s])
        total += n
    if total > columns:
        return CAPACITY, -1, np.float64(columns), np.float64(total)
    return total, 0, 0.0, 0.0


@helper
def _write_mixed(slots, computed, scheduled, state, shift, arena, out):
    at = np.int64(0)
    for b in range(slots.shape[0]):
        s, c, n = int(slots[b]), int(computed[b]), int(scheduled[b])
        if c >= state[PLANNED_ROW, s]:
            if n == 1:
                for axis in range(out.shape[0]):
                    row_of(out, axis)[at] = c + shift[s]
            else:
                write_text(out, at, n, shift[s], c)
        else:
            write_window(arena, int(state[HEAD_ROW, s]), out, c, c + n, at)
        at += n


@helper
def _write_padding(out, start, stop):
    for axis in range(out.shape[0]):
        row = row_of(out, axis)
        for k in range(start, stop):
            row[np.uint64(k)] = PADDING


def _step_batch(state, shift, arena, out, numbers, slots, computed, scheduled):
    """Writes a step's positions, or nothing if anything is wrong.

    Columns that the step before wrote get padding where this one writes none.

    Args:
      state: int32 [2, slots], see PLANNED_ROW, HEAD_ROW.
      shift: [slots], what decoding adds to a token's index.
      arena: float64 [rows, COLUMNS], the tables of all plans.
      out: [A, capacity].
      numbers: float64 [6], see WRITTEN and those after it.
      slots: int32 [requests].
      computed: int32 [requests], tokens of each that came before.
      scheduled: int32 [requests], tokens of each in this step.

    Returns:
      Tokens of the step, or a negative status.
    """
    count, before = slots.shape[0], int(numbers[WRITTEN])
    limit, columns = int(numbers[LIMIT]), int(numbers[ROOM])
    if computed.shape[0] != count or scheduled.shape[0] != count:
        wrong = computed.shape[0] if computed.shape[0] != count else scheduled.shape[0]
        numbers[ENTRY], numbers[EXPECTED], numbers[GOT] = -1, count, wrong
        return INPUT
    planned = state[PLANNED_ROW]
    fits = count <= columns
    if fits and _all_decode_in_order(slots, computed, scheduled, planned, shift, limit):
        _write_decode_in_order(computed, shift, out)
        total = count
    elif fits and _all_decode(slots, computed, scheduled, planned, shift, limit):
        _write_decode(slots, computed, shift, out)
        total = count
    else:
        total, entry, expected, got = _check(
            slots, computed, scheduled, planned, shift, limit, columns
        )
        if total < 0:
            numbers[ENTRY], numbers[EXPECTED], numbers[GOT] = entry, expected, got
            return total
        _write_mixed(slots, computed, scheduled, state, shift, arena, out)
    _write_padding(out, total, before)
    numbers[WRITTEN] = total
    return total


def _kernel(shift: str, out: str) -> Kernel:
    integers, table = ArrayArgument("int32", 1), ArrayArgument("float64", 2)
    return Kernel(
        _step_batch,
        *(ArrayArgument("int32", 2), ArrayArgument(shift, 1), table),
        ArrayArgument(out, 2, written=True, rows=True),
        ArrayArgument("float64", 1, written=True),
        *(integers, integers, integers),
    )


# By whether positions are fractional.
STEP_BATCH = {False: _kernel("int32", "int32"), True: _kernel("float64", "float32")}
