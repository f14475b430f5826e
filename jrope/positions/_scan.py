"""From token ids to a table of segments: one pass that counts, checks and adds rows."""

import numpy as np

from jrope.positions import _rule as rules
from jrope.positions._arguments import ArrayArgument, WholeArgument, whole
from jrope.positions._av import add_audio_in_video
from jrope.positions._errors import (
    AUDIO_KIND,
    CAPACITY,
    IMAGE_KIND,
    SECONDS_INVALID,
    TOO_LONG,
    TOO_MANY_AUDIO_LENGTHS,
    TOO_MANY_GRIDS,
    TOO_MANY_SECONDS,
    TRUNCATED,
    VIDEO_KIND,
)
from jrope.positions._jit import helper, kernel
from jrope.positions._media import add_audio, add_grid, add_targets, read_grid
from jrope.positions._table import (
    BLOCK,
    CURSOR,
    DEPTH,
    FRACTIONAL,
    FRAMES,
    FRAMES_OF,
    IMAGES,
    PLANNED,
    ROW_H,
    ROW_INDEX,
    ROW_T,
    ROW_W,
    ROWS,
    SHIFT,
    SOUNDS,
    TOP,
    VIDEOS,
    advance_text,
    rounded,
)

# Positions are int32.
POSITION_LIMIT = 2**31 - 1

_INTEGERS, _RULE = ArrayArgument("int32", 1), ArrayArgument("float64", 1)
_GRIDS, _SECONDS = ArrayArgument("int32", 2, columns=3), ArrayArgument("float32", 1)
_TABLE = ArrayArgument("float64", 2, written=True)


@helper
def _next_of_two(ids, start, a, b):
    """Index of the first token from `start` on that is either id, or the end."""
    stop = ids.shape[0]
    while start + BLOCK <= stop:
        found = False
        first = np.uint64(start)
        for k in range(BLOCK):
            x = ids[first + np.uint64(k)]
            found = found | (x == a) | (x == b)
        if found:
            break
        start += BLOCK
    while start < stop and ids[start] != a and ids[start] != b:
        start += 1
    return start


@helper
def _next_of_five(ids, start, a, b, c, d, e):
    """The same for five ids."""
    stop = ids.shape[0]
    while start + BLOCK <= stop:
        found = False
        first = np.uint64(start)
        for k in range(BLOCK):
            x = ids[first + np.uint64(k)]
            found = found | (x == a) | (x == b) | (x == c) | (x == d) | (x == e)
        if found:
            break
        start += BLOCK
    while start < stop:
        x = ids[start]
        if x == a or x == b or x == c or x == d or x == e:
            break
        start += 1
    return start


@helper
def _next_special(ids, start, rule):
    """Index of the first token from `start` on that is more than text, or the end."""
    image, video = np.int32(rule[rules.IMAGE]), np.int32(rule[rules.VIDEO])
    audio = np.int32(rule[rules.AUDIO])
    # A family has delimiters of videos, or of videos with sound.
    opens = np.int32(max(rule[rules.VIDEO_OPENS], rule[rules.VISION_OPENS]))
    closes = np.int32(rule[rules.VIDEO_CLOSES])
    if audio == rules.NO_TOKEN and opens == rules.NO_TOKEN:
        return _next_of_two(ids, start, image, video)
    return _next_of_five(ids, start, image, video, audio, opens, closes)


@kernel(_INTEGERS, _RULE)
def count_text(ids, rule):
    """The number of tokens if all of them are text and not too many, else -1."""
    if ids.shape[0] > rules.MOST_TOKENS:
        return -1
    found = _next_special(ids, np.int64(0), rule)
    return found if found == ids.shape[0] else -1


@helper
def _start_table(table, rule):
    table[0, :] = 0
    table[0, TOP] = -1
    table[0, ROW_T] = rule[rules.ROW_T]
    table[0, ROW_H] = rule[rules.ROW_H]
    table[0, ROW_W] = rule[rules.ROW_W]
    table[0, ROW_INDEX] = rule[rules.ROW_INDEX]
    table[0, FRACTIONAL] = rule[rules.FRACTIONAL]


@helper
def _finish_table(table, tokens, rule, images):
    """Where the table ends, and what continues it."""
    if rule[rules.LAYOUT] == rules.ORDINAL:
        table[0, PLANNED], table[0, SHIFT] = tokens, 0
    elif rule[rules.DECODES_IMAGES]:
        planned = add_targets(table, tokens, images)
        table[0, PLANNED], table[0, SHIFT] = planned, table[0, CURSOR] - planned
    else:
        table[0, PLANNED] = tokens
        fractional = table[0, FRACTIONAL] != 0
        top = rounded(table[0, TOP] + 1, fractional)
        table[0, SHIFT] = rounded(top - tokens, fractional)


@helper
def _left_over(table, tokens, rule, options, images, videos, seconds, audio):
    """The error of a prompt that holds fewer media than were described."""
    image, video = int(table[0, IMAGES]), int(table[0, VIDEOS])
    frame, sound = int(table[0, FRAMES]), int(table[0, SOUNDS])
    if not table[0, TOP] < POSITION_LIMIT:
        return SECONDS_INVALID, VIDEO_KIND, max(video - 1, 0), 0, 0
    if rule[rules.DECODES_IMAGES]:
        for k in range(image, images.shape[0]):
            status, _, height, width, expected, got = read_grid(
                images, k, rule, np.int64(IMAGE_KIND)
            )
            # Of all grids, and not of each: tokens are numbered by int32.
            tokens += height * width
            if status == 0 and tokens >= POSITION_LIMIT:
                status, expected, got = CAPACITY, POSITION_LIMIT, tokens
            if status < 0:
                return status, IMAGE_KIND, k, expected, got
    if options & rules.CLIP:
        return 0, 0, 0, 0, 0
    if frame:
        if table[0, FRAMES_OF] == IMAGE_KIND:
            return TRUNCATED, IMAGE_KIND, image, int(images[image, 0]), frame
        return TRUNCATED, VIDEO_KIND, video, int(videos[video, 0]), frame
    if image < images.shape[0] and not rule[rules.DECODES_IMAGES]:
        return TOO_MANY_GRIDS, IMAGE_KIND, image, image, images.shape[0]
    if video < videos.shape[0]:
        return TOO_MANY_GRIDS, VIDEO_KIND, video, video, videos.shape[0]
    if rule[rules.TIME] != rules.BY_FRAME and video < seconds.shape[0]:
        return TOO_MANY_SECONDS, VIDEO_KIND, video, video, seconds.shape[0]
    if sound < audio.shape[0]:
        return TOO_MANY_AUDIO_LENGTHS, AUDIO_KIND, sound, sound, audio.shape[0]
    return 0, 0, 0, 0, 0


@helper
def _starts_audio_in_video(ids, i, rule, options):
    return (
        ids[i] == rule[rules.VISION_OPENS]
        and options & rules.WITHOUT_AV == 0
        and i + 1 < ids.shape[0]
        and ids[i + 1] == rule[rules.AUDIO_OPENS]
    )


@helper
def _add_item(ids, i, rule, images, videos, seconds, audio, table, options):
    """Adds what begins at the special token i.

    Returns:
      (status, kind, index, tokens, expected, got).
    """
    token = ids[i]
    is_image, is_video = token == rule[rules.IMAGE], token == rule[rules.VIDEO]
    # One id may serve both: then, as where a video's frames carry the image id, the
    # delimiters decide.
    if is_image or is_video:
        as_image = is_image and table[0, DEPTH] <= 0
        kind = np.int64(IMAGE_KIND if as_image else VIDEO_KIND)
        grids = images if as_image else videos
        return add_grid(ids, i, rule, grids, seconds, kind, table, options)
    if token == rule[rules.AUDIO]:
        return add_audio(ids, i, rule, audio, table, options)
    if _starts_audio_in_video(ids, i, rule, options):
        return add_audio_in_video(ids, i, rule, videos, seconds, audio, table, options)
    if token == rule[rules.VIDEO_OPENS]:
        table[0, DEPTH] += 1
    elif token == rule[rules.VIDEO_CLOSES]:
        table[0, DEPTH] -= 1
    advance_text(table, np.int64(1))
    return 0, 0, 0, 1, 0, 0


@helper
def _report(table, status, kind, index, expected, got, token):
    """Leaves what `from_kernel` is to be told in the header; returns the status."""
    table[0, 0], table[0, 1], table[0, 2] = kind, index, expected
    table[0, 3], table[0, 4] = got, token
    return status


@kernel(
    *(_INTEGERS, _RULE, _GRIDS, _GRIDS, _SECONDS, _INTEGERS, _TABLE, WholeArgument())
)
def scan(ids, rule, images, videos, seconds, audio, table, options):
    """Builds a plan's table.

    Args:
      ids: int32 [tokens].
      rule: float64 [SIZE], see _rule.py.
      images: int32 [n, 3], T, H, W in patches.
      videos: int32 [n, 3], the same.
      seconds: float32 [videos], seconds between two frames of the grid.
      audio: int32 [n], feature frames.
      table: float64 [1 + room, COLUMNS]; if there is too little room only the header's
        count of rows means something.
      options: sum of ADVANCE_HF5, CLIP, WITHOUT_AV.

    Returns:
      How many rows there are; or a negative status, and kind, index, expected, got and
      token of the error are the header's first entries.
    """
    options = whole(options)
    _start_table(table, rule)
    tokens, i = ids.shape[0], np.int64(0)
    if tokens > rules.MOST_TOKENS:
        return _report(table, TOO_LONG, 0, -1, rules.MOST_TOKENS, tokens, -1)
    while True:
        j = _next_special(ids, i, rule)
        advance_text(table, j - i)
        i = j
        if i == tokens:
            break
        status, kind, index, count, expected, got = _add_item(
            ids, i, rule, images, videos, seconds, audio, table, options
        )
        if status < 0:
            return _report(table, status, kind, index, expected, got, i)
        i += count
    status, kind, index, expected, got = _left_over(
        table, tokens, rule, options, images, videos, seconds, audio
    )
    if status < 0:
        return _report(table, status, kind, index, expected, got, -1)
    _finish_table(table, tokens, rule, images)
    return int(table[0, ROWS])
