"""Rows of images, videos and audios: each checked against its description first."""

import numpy as np

from jrope.positions import _rule as rules
from jrope.positions._errors import (
    AUDIO_KIND,
    GRID_NONPOSITIVE,
    GRID_NOT_DIVISIBLE,
    IMAGE_KIND,
    SECONDS_INVALID,
    TOKEN_COUNT,
    TOO_FEW_AUDIO_LENGTHS,
    TOO_FEW_GRIDS,
    TOO_FEW_SECONDS,
    TRUNCATED,
    VIDEO_KIND,
)
from jrope.positions._jit import helper
from jrope.positions._table import (
    BLOCK,
    CURSOR,
    FRAMES,
    FRAMES_OF,
    IMAGES,
    SOUNDS,
    VIDEOS,
    add_segment,
    advance_text,
    frame_time,
    grid_peak,
    raise_top,
    rounded,
    set_base,
)

# A float32 time at or past this would not fit into an int32 position.
_TIME_LIMIT = 2.0**31 - 2.0**24
# Tokens from which on it pays to look where in memory they begin.
_LONG_RUN = 1024


@helper
def run_length(ids, start, limit):
    """How many tokens from `start` on equal the first, `limit` at most."""
    pad = ids[start]
    stop = min(ids.shape[0], start + limit)
    if _is_run(ids, start, stop, pad):
        return stop - start
    i = start
    while i + BLOCK <= stop and _is_run(ids, i, i + BLOCK, pad):
        i += BLOCK
    while i < stop and ids[i] == pad:
        i += 1
    return i - start


@helper
def _is_run(ids, start, stop, pad):
    """Whether all tokens are `pad`, looked at in one sweep."""
    count = stop - start
    if count < _LONG_RUN:
        return _difference(ids, start, count, pad) == 0
    # Up to the border of a cache line: loads across borders are half as fast.
    head = -(ids.ctypes.data // 4 + start) % 16
    other = _difference(ids, start, head, pad)
    return other | _difference(ids, start + head, count - head, pad) == 0


@helper
def _difference(ids, start, count, pad):
    """Zero where `count` tokens equal `pad`."""
    other = np.int32(0)
    first = np.uint64(start)
    for k in range(count):
        # Without the cast it would be summed up in int64, half as many at a time.
        other = np.int32(other | (ids[first + np.uint64(k)] ^ pad))
    return other


@helper
def read_grid(grids, k, rule, kind):
    """A grid in tokens: (status, frames, height, width, expected, got)."""
    if k >= grids.shape[0]:
        return TOO_FEW_GRIDS, 0, 0, 0, k + 1, grids.shape[0]
    merge = int(rule[rules.MERGE])
    frames, height, width = int(grids[k, 0]), int(grids[k, 1]), int(grids[k, 2])
    smallest = min(frames, min(height, width))
    if smallest < 1:
        return GRID_NONPOSITIVE, 0, 0, 0, 1, smallest
    # One division each: they are the slowest thing here.
    rows, columns = height // merge, width // merge
    if rows * merge != height or columns * merge != width:
        wrong = height if rows * merge != height else width
        return GRID_NOT_DIVISIBLE, 0, 0, 0, merge, wrong
    if kind == VIDEO_KIND:
        frames //= int(rule[rules.TEMPORAL_MERGE])
        if frames < 1:
            return GRID_NONPOSITIVE, 0, 0, 0, 1, frames
    return 0, frames, rows, columns + int(rule[rules.EXTRA_COLUMN]), 0, 0


@helper
def grid_tokens(frames, height, width, limit):
    """Tokens of a grid; `limit + 1` for all that are more, which cannot overflow."""
    if height > limit or width > limit or frames > limit or height * width > limit:
        return limit + 1
    return min(frames * height * width, limit + 1)


@helper
def read_step(rule, kind, k, frames, seconds):
    """Step and rate of a grid's time: (status, step, rate, expected, got)."""
    style = int(rule[rules.TIME])
    if kind == IMAGE_KIND or style == rules.BY_FRAME:
        rate = rule[rules.IMAGE_RATE] if kind == IMAGE_KIND else 1.0
        return 0, 1.0, rate, 0.0, 0.0
    value = np.float32(rule[rules.DEFAULT_SECONDS])
    if k < seconds.shape[0]:
        value = seconds[k]
        if not (value >= 0.0 and value < np.inf):
            return SECONDS_INVALID, 0.0, 0.0, 0.0, np.float64(value)
    elif seconds.shape[0] > 0 or np.isnan(value):
        return TOO_FEW_SECONDS, 0.0, 0.0, k + 1.0, np.float64(seconds.shape[0])
    step, rate = np.float64(value), rule[rules.RATE]
    if style == rules.RATE_FIRST:
        step, rate = np.float64(np.float32(rate) * value), 1.0
    if not frame_time(frames - 1, step, rate, rule[rules.RATE] > 0) < _TIME_LIMIT:
        return SECONDS_INVALID, 0.0, 0.0, 0.0, np.float64(value)
    return 0, step, rate, 0.0, 0.0


@helper
def _bases(table, rule, k):
    """Where grid k begins on the axes t, h and w."""
    cursor, layout = table[0, CURSOR], rule[rules.LAYOUT]
    if layout == rules.FROM_CURSOR:
        return cursor, cursor, cursor
    if layout == rules.CURSOR_IN_TIME:
        return cursor, 0.0, 0.0
    return np.float64(k), 0.0, 0.0


@helper
def _after_grid(table, rule, options, tops, end, height, width, is_last):
    """Where text goes on after a grid."""
    top_t, top_h, top_w = tops
    layout, fractional = rule[rules.LAYOUT], rule[rules.FRACTIONAL] != 0
    if layout == rules.ORDINAL:
        return np.float64(end)
    if layout == rules.CURSOR_IN_TIME and is_last:
        return top_t + 1.0
    if options & rules.ADVANCE_HF5:
        return table[0, CURSOR] + max(height, width)
    return rounded(max(top_t, max(top_h, top_w)) + 1.0, fractional)


@helper
def _place_grid(table, rule, options, k, start, count, shape, times, is_last):
    """Adds the row of `count` tokens of a grid, from its first token on."""
    frames, height, width = shape
    step, rate = times
    fractional = rule[rules.FRACTIONAL] != 0
    base_t, base_h, base_w = _bases(table, rule, k)
    if count == frames * height * width:
        top_t = frame_time(frames - 1, step, rate, fractional)
        top_h, top_w = height - 1, width - 1
    else:
        top_t, top_h, top_w = grid_peak(
            np.int64(0), count, height, width, step, rate, fractional
        )
    tops = (
        rounded(base_t + top_t, fractional),
        rounded(base_h + top_h, fractional),
        rounded(base_w + top_w, fractional),
    )
    raise_top(table, max(tops[0], max(tops[1], tops[2])))
    after = _after_grid(
        table, rule, options, tops, start + count, height, width, is_last
    )
    row = add_segment(table, start, count, np.int64(0), height, width, after)
    set_base(table, row, base_t, base_h, base_w, step, rate)


@helper
def check_run(ids, i, run, expected, more, options):
    """Whether a run of equal tokens is one medium: (status, got).

    Args:
      ids: int32 [tokens].
      i: where the run begins.
      run: its length, `expected` at most.
      expected: tokens of the medium.
      more: whether another medium may touch it.
      options: of the call.
    """
    if run < expected:
        if i + run < ids.shape[0]:
            return TOKEN_COUNT, run
        return (0, run) if options & rules.CLIP else (TRUNCATED, run)
    if not more and i + run < ids.shape[0] and ids[i + run] == ids[i]:
        return TOKEN_COUNT, run_length(ids, i, ids.shape[0])
    return 0, run


@helper
def _lead_of(ids, i, count, rule):
    """Tokens of an image's run before its grid: 1 in XD-RoPE's longer form, else 0."""
    if rule[rules.LAYOUT] != rules.ORDINAL:
        return 0
    return 1 if run_length(ids, i, count + 3) > count else 0


@helper
def _unfinished(table, kind):
    """Frames so far of a medium of the other kind, which this one interrupts."""
    return int(table[0, FRAMES]) if table[0, FRAMES_OF] != kind else 0


@helper
def add_grid(ids, i, rule, grids, seconds, kind, table, options):
    """Adds the image, the video, or the frame of either that begins at token i.

    Returns:
      (status, kind, index, tokens, expected, got).
    """
    counter = IMAGES if kind == IMAGE_KIND else VIDEOS
    k = int(table[0, counter])
    if rule[rules.DECODES_IMAGES]:
        # An image without its end delimiter is still being generated: it is text.
        run = run_length(ids, i, ids.shape[0])
        if i + run == ids.shape[0]:
            advance_text(table, run)
            return 0, kind, k, run, 0, 0
    status, frames, height, width, expected, got = read_grid(grids, k, rule, kind)
    if status < 0:
        return status, kind, k, 0, expected, got
    if _unfinished(table, kind):
        return TOKEN_COUNT, kind, k, 0, 0, _unfinished(table, kind)
    status, step, rate, wanted, value = read_step(rule, kind, k, frames, seconds)
    if status < 0:
        return status, kind, k, 0, wanted, value
    style = rule[rules.PER_FRAME]
    per_frame = style == rules.ALL_FRAMES or (
        style == rules.VIDEO_FRAMES and kind == VIDEO_KIND
    )
    shape = (1 if per_frame else frames, height, width)
    left = frames - int(table[0, FRAMES]) - 1 if per_frame else 0
    more = left > 0 or k + 1 < grids.shape[0]
    status, run, got = _add_run(
        ids, i, rule, k, shape, (step, rate), more, table, options
    )
    if status < 0:
        return status, kind, k, 0, run, got
    table[0, FRAMES_OF] = kind
    table[0, FRAMES] = frames - left if left else 0
    table[0, counter] += int(left == 0)
    return 0, kind, k, run, 0, 0


@helper
def _add_run(ids, i, rule, k, shape, times, more, table, options):
    """Checks one run of pads and adds its grid: (status, tokens, got).

    With an error status the second entry is the number of tokens that had to come.
    """
    frames, height, width = shape
    count = grid_tokens(frames, height, width, ids.shape[0])
    lead = _lead_of(ids, i, count, rule)
    whole = count + 2 * lead
    run = run_length(ids, i, whole)
    status, got = check_run(ids, i, run, whole, more, options)
    if status < 0:
        return status, whole, got
    advance_text(table, lead)
    inside = min(run - lead, count)
    if inside > 0:
        _place_grid(table, rule, options, k, i + lead, inside, shape, times, not more)
    advance_text(table, run - lead - inside)
    return 0, run, 0


@helper
def audio_tokens(length, rule):
    """Tokens of an audio with so many feature frames.

    Source: Qwen2.5-Omni's and Qwen3-Omni's `_get_feat_extract_output_lengths`, with
    Python's floor division, which these compiled divisions are as well.
    """
    if rule[rules.AUDIO_TOKENS] == rules.TWO_CONVOLUTIONS:
        return ((length - 1) // 2 - 1) // 2 + 1
    rest, blocks = length % 100, length // 100
    features = (rest - 1) // 2 + 1
    return ((features - 1) // 2 + 1 - 1) // 2 + 1 + blocks * 13


@helper
def read_audio(audio, k, rule):
    """Tokens of audio k: (status, tokens, expected, got)."""
    if k >= audio.shape[0]:
        return TOO_FEW_AUDIO_LENGTHS, 0, k + 1, audio.shape[0]
    count = audio_tokens(int(audio[k]), rule) if audio[k] > 0 else 0
    if count < 1:
        return TOKEN_COUNT, 0, 1, count
    return 0, count, 0, 0


@helper
def add_audio(ids, i, rule, audio, table, options):
    """Passes an audio of its own, which counts as text does.

    Returns:
      (status, kind, index, tokens, expected, got).
    """
    k = int(table[0, SOUNDS])
    status, count, expected, got = read_audio(audio, k, rule)
    if status < 0:
        return status, AUDIO_KIND, k, 0, expected, got
    run = run_length(ids, i, count)
    status, got = check_run(ids, i, run, count, k + 1 < audio.shape[0], options)
    if status < 0:
        return status, AUDIO_KIND, k, 0, count, got
    advance_text(table, run)
    table[0, SOUNDS] += 1
    return 0, AUDIO_KIND, k, run, 0, 0


@helper
def add_targets(table, tokens, images):
    """Adds the images still to be generated, from the last grid to the first.

    Source: GLM-Image's `get_rope_index`, its decode table.

    Returns:
      Index of the first token after them.
    """
    for k in range(images.shape[0] - 1, int(table[0, IMAGES]) - 1, -1):
        height, width = int(images[k, 1]), int(images[k, 2])
        cursor = table[0, CURSOR]
        after = cursor + max(height, width)
        row = add_segment(
            table, tokens, height * width, np.int64(0), height, width, after
        )
        set_base(table, row, cursor, cursor, cursor, 1.0, 1.0)
        raise_top(table, after - 1.0)
        tokens += height * width
    return tokens
