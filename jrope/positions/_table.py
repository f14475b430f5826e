"""A plan's table: what its rows and columns mean, and how kernels add a row.

A table is float64 [1 + rows, COLUMNS] (integers up to 2^53 are exact in it). Row 0 is
the header. Every other row is a segment: `COUNT` tokens from token `START` on, that
are a part of a grid of T frames x HEIGHT x WIDTH tokens, or a ramp. Tokens between two
segments, and before the first, are text: they count upwards from the `AFTER` of the
segment before them (from 0 before the first). Text therefore costs nothing.

Token g of a grid, in frame-major, then row-major order, has

    t = BASE_T + float32(float32(g // (HEIGHT * WIDTH) * STEP) * RATE)
    h = BASE_H + g // WIDTH % HEIGHT
    w = BASE_W + g % WIDTH

where t is cut to an integer unless the family has fractional positions. A row with
HEIGHT 0 is a ramp: every axis is BASE_T + g.
"""

import numpy as np

from jrope.positions._jit import helper

COLUMNS = 16
# Of a segment.
START, COUNT, FIRST, HEIGHT, WIDTH = 0, 1, 2, 3, 4
BASE_T, BASE_H, BASE_W, STEP, RATE, AFTER = 5, 6, 7, 8, 9, 10
# Of the header: number of segments, first token that the table says nothing of, what
# is added to the index of that token and all later ones, the largest position on any
# row; and which row of the positions is t, h, w and the token's index (-1: none is).
ROWS, PLANNED, SHIFT, TOP = 0, 1, 2, 3
ROW_T, ROW_H, ROW_W, ROW_INDEX, FRACTIONAL = 4, 5, 6, 7, 8
# Of the header while a table is being built: position of the next text token; images,
# videos and audios so far; whether inside a video; frames of an unfinished medium, and
# which kind it is.
CURSOR, IMAGES, VIDEOS, SOUNDS, DEPTH, FRAMES, FRAMES_OF = 9, 10, 11, 12, 13, 14, 15

BLOCK = 64


@helper
def rounded(value, fractional):
    """A position as the family's arithmetic has it: float32 where it is fractional."""
    return np.float64(np.float32(value)) if fractional else np.float64(value)


@helper
def frame_time(frame, step, rate, fractional):
    """The t of a frame, counted from the grid's own start."""
    time = np.float32(np.float32(frame) * np.float32(step))
    time = np.float32(time * np.float32(rate))
    return np.float64(time) if fractional else np.float64(np.trunc(time))


@helper
def grid_peak(first, count, height, width, step, rate, fractional):
    """The largest t, h and w among `count` tokens of a grid from token `first` on."""
    last = first + count - 1
    row, last_row = first // width, last // width
    frame, last_frame = row // height, last_row // height
    time = frame_time(last_frame, step, rate, fractional)
    top_row = height - 1 if last_frame > frame else last_row % height
    top_column = width - 1 if last_row > row else last % width
    return time, top_row, top_column


@helper
def raise_top(table, peak):
    """Notes that `peak` is among the positions."""
    table[0, TOP] = max(table[0, TOP], peak)


@helper
def advance_text(table, count):
    """Passes `count` tokens of text, which need no row."""
    if count > 0:
        fractional = table[0, FRACTIONAL] != 0
        raise_top(table, rounded(table[0, CURSOR] + (count - 1), fractional))
        table[0, CURSOR] = rounded(table[0, CURSOR] + count, fractional)


@helper
def add_segment(table, start, count, first, height, width, after):
    """Adds a row as far as there is room; the header counts it in any case.

    Returns:
      The row to write the rest to: the header's successor, unused, where none is left.
    """
    row = int(table[0, ROWS]) + 1
    table[0, ROWS] = row
    if row >= table.shape[0]:
        row = table.shape[0] - 1
    table[row, START] = start
    table[row, COUNT] = count
    table[row, FIRST] = first
    table[row, HEIGHT] = height
    table[row, WIDTH] = width
    table[row, AFTER] = after
    table[0, CURSOR] = after
    # A ramp has no row of indices: its axes are equal.
    if height > 0 and table[0, ROW_INDEX] >= 0:
        raise_top(table, np.float64(start + count - 1))
    return row


@helper
def set_base(table, row, base_t, base_h, base_w, step, rate):
    """Writes a row's own positions."""
    table[row, BASE_T] = base_t
    table[row, BASE_H] = base_h
    table[row, BASE_W] = base_w
    table[row, STEP] = step
    table[row, RATE] = rate


@helper
def add_point(table, start, position, after):
    """Adds one token with the same position on every axis."""
    one, zero = np.int64(1), np.int64(0)
    row = add_segment(table, start, one, zero, one, one, after)
    set_base(table, row, position, position, position, 0.0, 0.0)


@helper
def add_ramp(table, start, count, first, base, after):
    """Adds tokens that count upwards from `base + first` on every axis."""
    none = np.int64(0)
    row = add_segment(table, start, count, first, none, none, after)
    set_base(table, row, base, base, base, 0.0, 0.0)
