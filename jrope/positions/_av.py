"""Rows of a video with its sound: two streams in one run of tokens (Omni models).

The ids say which stream a token belongs to: the k-th video token is cell k of the grid,
the k-th audio token is k positions after the start, whatever order a processor chose.

Source: Qwen2.5-Omni's and Qwen3-Omni's `get_rope_index`.
"""

import numpy as np

from jrope.positions import _rule as rules
from jrope.positions._errors import AUDIO_KIND, TOKEN_COUNT, TRUNCATED, VIDEO_KIND
from jrope.positions._jit import helper
from jrope.positions._media import (
    grid_tokens,
    read_audio,
    read_grid,
    read_step,
    run_length,
)
from jrope.positions._table import (
    CURSOR,
    FRACTIONAL,
    SOUNDS,
    VIDEOS,
    add_point,
    add_ramp,
    add_segment,
    advance_text,
    grid_peak,
    raise_top,
    rounded,
    set_base,
)


@helper
def _count_streams(ids, body, stop, rule):
    """Tokens of each stream between two indices."""
    video, audio = np.int32(rule[rules.VIDEO]), np.int32(rule[rules.AUDIO])
    seen, heard = np.int32(0), np.int32(0)
    first = np.uint64(body)
    for k in range(stop - body):
        token = ids[first + np.uint64(k)]
        seen = np.int32(seen + np.int32(token == video))
        heard = np.int32(heard + np.int32(token == audio))
    return np.int64(seen), np.int64(heard)


@helper
def _check_streams(ids, body, rule, cells, sounds, options):
    """Counts both streams: (status, kind, end, expected, got)."""
    end = min(body + cells + sounds, ids.shape[0])
    seen, heard = _count_streams(ids, body, end, rule)
    while end < ids.shape[0] and (
        ids[end] == rule[rules.VIDEO] or ids[end] == rule[rules.AUDIO]
    ):
        seen += int(ids[end] == rule[rules.VIDEO])
        heard += int(ids[end] == rule[rules.AUDIO])
        end += 1
    if seen == cells and heard == sounds:
        return 0, VIDEO_KIND, end, 0, 0
    if end == ids.shape[0] and seen + heard == end - body < cells + sounds:
        status = 0 if options & rules.CLIP else TRUNCATED
        return status, VIDEO_KIND, end, cells + sounds, seen + heard
    if seen != cells:
        return TOKEN_COUNT, VIDEO_KIND, end, cells, seen
    return TOKEN_COUNT, AUDIO_KIND, end, sounds, heard


@helper
def _add_video_run(table, at, count, first, base, size, times):
    """Adds a run of video; text after it would follow its largest position.

    The models take the largest position of the last piece of a stream instead, however
    they cut it: the piece ends with the grid's last cell, so that is the same.
    """
    height, width = size
    step, rate = times
    fractional = table[0, FRACTIONAL] != 0
    t, h, w = grid_peak(first, count, height, width, step, rate, fractional)
    top = rounded(base + max(t, max(h, w)), fractional)
    raise_top(table, top)
    after = rounded(top + 1.0, fractional)
    row = add_segment(table, at, count, first, height, width, after)
    set_base(table, row, base, base, base, step, rate)


@helper
def _add_audio_run(table, at, count, first, base):
    """Adds a run of audio; text after it would follow its last token."""
    fractional = table[0, FRACTIONAL] != 0
    top = rounded(base + (first + count - 1), fractional)
    raise_top(table, top)
    add_ramp(table, at, count, first, base, rounded(top + 1.0, fractional))


@helper
def _add_streams(ids, at, end, rule, size, times, table):
    """Adds the runs between the two delimiters at each end."""
    base = table[0, CURSOR]
    seen, heard = np.int64(0), np.int64(0)
    while at < end:
        run = run_length(ids, at, end - at)
        if ids[at] == rule[rules.VIDEO]:
            _add_video_run(table, at, run, seen, base, size, times)
            seen += run
        else:
            _add_audio_run(table, at, run, heard, base)
            heard += run
        at += run


@helper
def _close(ids, end, rule, table):
    """In the chunked style the two closing tokens share a position: tokens passed."""
    if (
        rule[rules.AUDIO_IN_VIDEO] != rules.AV_CHUNKS
        or end + 1 >= ids.shape[0]
        or ids[end] != rule[rules.AUDIO_CLOSES]
        or ids[end + 1] != rule[rules.VISION_CLOSES]
    ):
        return 0
    position = table[0, CURSOR]
    advance_text(table, np.int64(1))
    add_point(table, end + 1, position, position + 1.0)
    return 2


@helper
def add_audio_in_video(ids, i, rule, videos, seconds, audio, table, options):
    """Adds the block whose first delimiter is token i.

    Returns:
      (status, kind, index, tokens, expected, got).
    """
    video, sound = int(table[0, VIDEOS]), int(table[0, SOUNDS])
    status, frames, height, width, want, got = read_grid(
        videos, video, rule, np.int64(VIDEO_KIND)
    )
    if status < 0:
        return status, VIDEO_KIND, video, 0, want, got
    status, step, rate, wanted, value = read_step(
        rule, np.int64(VIDEO_KIND), video, frames, seconds
    )
    if status < 0:
        return status, VIDEO_KIND, video, 0, wanted, value
    status, sounds, want, got = read_audio(audio, sound, rule)
    if status < 0:
        return status, AUDIO_KIND, sound, 0, want, got
    cells = grid_tokens(frames, height, width, ids.shape[0])
    status, kind, end, want, got = _check_streams(
        ids, i + 2, rule, cells, sounds, options
    )
    if status < 0:
        return status, kind, sound if kind == AUDIO_KIND else video, 0, want, got
    if rule[rules.AUDIO_IN_VIDEO] == rules.AV_CHUNKS:
        position = table[0, CURSOR]
        advance_text(table, np.int64(1))
        add_point(table, i + 1, position, position + 1.0)
    else:
        advance_text(table, np.int64(2))
    _add_streams(ids, i + 2, end, rule, (height, width), (step, rate), table)
    passed = _close(ids, end, rule, table)
    table[0, VIDEOS] += 1
    table[0, SOUNDS] += 1
    return 0, VIDEO_KIND, video, end + passed - i, 0, 0
