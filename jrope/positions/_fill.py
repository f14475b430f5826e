"""From a table to positions: any window of a request into any place of a buffer."""

import numpy as np

from jrope.positions._arguments import ArrayArgument, WholeArgument, row_of, whole
from jrope.positions._jit import Kernel, exact, helper, holds_floats
from jrope.positions._table import (
    AFTER,
    BASE_H,
    BASE_T,
    BASE_W,
    COUNT,
    FIRST,
    FRACTIONAL,
    HEIGHT,
    PLANNED,
    RATE,
    ROW_H,
    ROW_INDEX,
    ROW_T,
    ROW_W,
    ROWS,
    SHIFT,
    START,
    STEP,
    WIDTH,
    frame_time,
)

# Indices are unsigned: a signed sum would be tested for negative wrap-around at every
# element, which keeps LLVM from vectorising (ten times slower).


# Positions fit int32, as they are on the device.
_LARGEST = 2**31 - 1


@helper
def _level(row, at, count, value):
    """Writes one value `count` times from index `at` on."""
    first = np.uint64(at)
    for k in range(count):
        row[first + np.uint64(k)] = value


@helper
def _ramp(row, at, count, value):
    """Counts upwards from `value`."""
    first = np.uint64(at)
    for k in range(count):
        row[first + np.uint64(k)] = value + k


@helper
def _repeat(row, source, at, count):
    """Copies `count` elements from index `source` to index `at`, which lies after."""
    into, out_of = np.uint64(at), np.uint64(source)
    for k in range(count):
        row[into + np.uint64(k)] = row[out_of + np.uint64(k)]


@helper
def write_text(out, at, count, base, offset):
    """Counts upwards on every axis, from `base + offset` at column `at` on."""
    for axis in range(out.shape[0]):
        _ramp(row_of(out, axis), at, count, exact(base, out) + offset)


@helper
def _write_cells(h_row, w_row, at, cell, count, width, base_h, base_w):
    """Row and column of `count` tokens of one frame, from its token `cell` on."""
    r = cell // width
    c = cell - r * width
    stop = at + count
    while at < stop:
        run = min(width - c, stop - at)
        _level(h_row, at, run, base_h + r)
        _ramp(w_row, at, run, base_w + c)
        at += run
        r += 1
        c = 0


@helper
def _write_frame(h_row, w_row, at, height, width, base_h, base_w):
    """Row and column of a whole frame's tokens."""
    for r in range(height):
        _level(h_row, at + r * width, width, base_h + r)
    # Rows are short, and a loop for each is slow: all but one are copies, and every
    # copy is twice as long as the one before.
    _ramp(w_row, at, width, base_w)
    made, frame = width, height * width
    while made < frame:
        count = min(made, frame - made)
        _repeat(w_row, at, at + made, count)
        made += count


@helper
def _write_frames(h_row, w_row, at, g, count, height, width, base_h, base_w):
    """Rows and columns of a grid's tokens g to g + count; a frame is made once."""
    frame = height * width
    cell = g % frame
    head = min(count, frame - cell) if cell else 0
    if head:
        _write_cells(h_row, w_row, at, cell, head, width, base_h, base_w)
        at += head
    full = (count - head) // frame
    if full:
        _write_frame(h_row, w_row, at, height, width, base_h, base_w)
        made = at
        for _ in range(1, full):
            at += frame
            _repeat(h_row, made, at, frame)
            _repeat(w_row, made, at, frame)
        at += frame
    tail = count - head - full * frame
    if tail:
        _write_cells(h_row, w_row, at, 0, tail, width, base_h, base_w)


@helper
def _write_times(t_row, at, g, count, frame, base, step, rate, fractional):
    """Times of a grid's tokens g to g + count."""
    f = g // frame
    stop = at + count
    edge = at + (f + 1) * frame - g
    while at < stop:
        edge = min(edge, stop)
        time = exact(frame_time(f, step, rate, fractional), t_row)
        _level(t_row, at, edge - at, base + time)
        f += 1
        at = edge
        edge += frame


@helper
def _write_segment(table, head, s, out, at, skip, count):
    """`count` tokens of segment s, from its token `skip` on."""
    g = int(table[s, FIRST]) + skip
    height, width = int(table[s, HEIGHT]), int(table[s, WIDTH])
    if height == 0:
        write_text(out, at, count, table[s, BASE_T], g)
        return
    t_row = row_of(out, int(table[head, ROW_T]))
    h_row = row_of(out, int(table[head, ROW_H]))
    w_row = row_of(out, int(table[head, ROW_W]))
    base_h, base_w = exact(table[s, BASE_H], out), exact(table[s, BASE_W], out)
    _write_frames(h_row, w_row, at, g, count, height, width, base_h, base_w)
    base_t, fractional = exact(table[s, BASE_T], out), table[head, FRACTIONAL] != 0
    frame, step, rate = height * width, table[s, STEP], table[s, RATE]
    _write_times(t_row, at, g, count, frame, base_t, step, rate, fractional)
    index_row = int(table[head, ROW_INDEX])
    if index_row >= 0:
        index = exact(table[s, START], out) + skip
        _ramp(row_of(out, index_row), at, count, index)


@helper
def _first_after(table, head, token):
    """Index of the first segment that ends after `token`, counted from 1."""
    low, high = 1, int(table[head, ROWS]) + 1
    while low < high:
        middle = (low + high) // 2
        s = head + middle
        if table[s, START] + table[s, COUNT] <= token:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def write_window(table, head, out, start, stop, at):
    """Writes tokens start to stop of the table at row `head`, to columns from `at`."""
    planned, rows = int(table[head, PLANNED]), int(table[head, ROWS])
    edge = min(stop, planned)
    k = _first_after(table, head, start) if start < edge else 0
    x = start
    while x < edge:
        s = head + k
        begin = min(int(table[s, START]), edge) if k <= rows else edge
        if x < begin:
            base, anchor = 0.0, 0
            if k > 1:
                base = table[s - 1, AFTER]
                anchor = int(table[s - 1, START] + table[s - 1, COUNT])
            write_text(out, at, begin - x, base, x - anchor)
            at += begin - x
            x = begin
        if x < edge:
            begin = int(table[s, START])
            end = min(begin + int(table[s, COUNT]), edge)
            _write_segment(table, head, s, out, at, x - begin, end - x)
            at += end - x
            x = end
            k += 1
    if x < stop:
        write_text(out, at, stop - x, table[head, SHIFT], x)


@helper
def misfit_of(out, shape_code, start, stop, at):
    """Why a window cannot be written: 1 rows, 2 window, 3 columns, 4 dtype; 0 it can.

    5 is for positions past int32, which only decoding reaches: see `_fill_table`.
    `shape_code` is the number of rows, negative for fractional positions.
    """
    if out.shape[0] != abs(shape_code):
        return 1
    if holds_floats(out) != (shape_code < 0):
        return 4
    if start < 0 or stop < start or stop >= _LARGEST:
        return 2
    # Not `at + (stop - start)`, which can be more than an int64 holds.
    if at < 0 or at > out.shape[1] - (stop - start):
        return 3
    return 0


def _fill_table(table, out, shape_code, start, stop, at):
    """Writes a window of a plan's table if it fits; returns why it does not."""
    start, stop, at = whole(start), whole(stop), whole(at)
    misfit = misfit_of(out, whole(shape_code), start, stop, at)
    # Planned positions are in range; those of decoding go on without end.
    if misfit == 0 and stop > table[0, PLANNED]:
        misfit = 5 * int(stop - 1 + table[0, SHIFT] > _LARGEST)
    if misfit == 0:
        write_window(table, 0, out, start, stop, at)
    return misfit


def _fill_text(out, shape_code, start, stop, at):
    """Writes a window of a request that is text only; returns why it does not fit."""
    start, stop, at = whole(start), whole(stop), whole(at)
    misfit = misfit_of(out, whole(shape_code), start, stop, at)
    if misfit == 0:
        write_text(out, at, stop - start, 0.0, start)
    return misfit


_TABLE = ArrayArgument("float64", 2)
_WINDOW = (WholeArgument(),) * 4
_ROWS = {
    np.dtype(kind): ArrayArgument(kind, 2, written=True, rows=True)
    for kind in ("int32", "int64", "float32")
}
# By the dtype of the positions.
FILL_TABLE = {
    kind: Kernel(_fill_table, _TABLE, rows, *_WINDOW) for kind, rows in _ROWS.items()
}
FILL_TEXT = {kind: Kernel(_fill_text, rows, *_WINDOW) for kind, rows in _ROWS.items()}
