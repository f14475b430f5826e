"""Media by their offsets, painted as the ids that the scan reads."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jrope.positions._errors import AUDIO_KIND, VIDEO_KIND, PositionError, from_kernel
from jrope.positions._inputs import as_grids, check_kinds
from jrope.positions._media import read_audio, read_grid, read_step
from jrope.positions._spec import TYPED_PADS, PositionSpec

VIDEO_WITH_SOUND = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Both:
    """A video and its sound, checked: sizes in tokens, and the video's clock."""

    frames: int
    cells: int
    step: float
    rate: float
    sounds: int

    @property
    def tokens(self) -> int:
        """Of both streams."""
        return self.frames * self.cells + self.sounds


def paint_spans(
    spec: PositionSpec,
    num_tokens: int,
    spans: Sequence[tuple[int, int, int]] | np.ndarray,
    videos: np.ndarray,
    seconds: np.ndarray,
    audio: np.ndarray,
) -> np.ndarray:
    """Ids of a prompt whose text is unknown: int32 [num_tokens].

    Raises:
      PositionError: input, if spans leave the prompt, overlap, or are of no kind.
    """
    rows = as_grids("spans", spans)
    ids = np.full(num_tokens, -1, np.int32)
    _check_spans(spec, rows, num_tokens)
    video = sound = 0
    for kind, offset, length in rows.tolist():
        stop = min(offset + length, num_tokens)
        if kind == VIDEO_WITH_SOUND:
            both = _read_both(spec, videos, seconds, audio, video, sound)
            _paint_both(spec, ids, offset, stop, length, both)
        else:
            ids[offset:stop] = TYPED_PADS[kind - 1]
        video += kind in (2, VIDEO_WITH_SOUND)
        sound += kind in (3, VIDEO_WITH_SOUND)
    return ids


def _check_spans(spec: PositionSpec, rows: np.ndarray, num_tokens: int) -> None:
    both = rows[:, 0] == VIDEO_WITH_SOUND
    check_kinds(spec, rows[~both, 0])
    stops = rows[:, 1].astype(np.int64) + rows[:, 2]
    starts = np.append(rows[:, 1], num_tokens)
    inside = (rows[:, 1:] >= 0).all() and (stops[:-1] <= starts[1:-1]).all()
    if not inside or (rows[:, 1] > num_tokens).any() or (rows[:, 0] == 0).any():
        raise PositionError(
            "input",
            expected=f"(kind, offset, length) in order within {num_tokens} tokens",
            got=rows.tolist(),
        )
    if both.any() and spec.audio_in_video == "none":
        raise PositionError(
            "input", expected=f"kinds 1 to 3 for {spec.family}", got=VIDEO_WITH_SOUND
        )


def _read_both(
    spec: PositionSpec,
    videos: np.ndarray,
    seconds: np.ndarray,
    audio: np.ndarray,
    video: int,
    sound: int,
) -> _Both:
    """What the descriptions say, by the rules of the scan and before its work.

    Raises:
      PositionError: as the scan would: too few of something, or one that is wrong.
    """
    rule = spec.rule
    status, frames, height, width, expected, got = read_grid(
        videos, video, rule, VIDEO_KIND
    )
    _refuse(status, VIDEO_KIND, video, expected, got)
    # Of seconds past any model's, which it then refuses.
    with np.errstate(over="ignore", invalid="ignore"):
        status, step, rate, expected, got = read_step(
            rule, VIDEO_KIND, video, frames, seconds
        )
    _refuse(status, VIDEO_KIND, video, expected, got)
    status, sounds, expected, got = read_audio(audio, sound, rule)
    _refuse(status, AUDIO_KIND, sound, expected, got)
    return _Both(
        frames=frames, cells=height * width, step=step, rate=rate, sounds=sounds
    )


def _refuse(status: int, kind: int, index: int, expected: float, got: float) -> None:
    if status < 0:
        raise from_kernel(status, kind, index, expected, got, -1)


def _paint_both(
    spec: PositionSpec,
    ids: np.ndarray,
    offset: int,
    stop: int,
    length: int,
    both: _Both,
) -> None:
    """Paints a video with its sound and the delimiters that the scan looks for."""
    if length != both.tokens + 2 or offset == 0:
        raise PositionError(
            "token_count",
            kind="video",
            token=offset,
            expected=f"{both.tokens + 2} tokens after a video's start delimiter",
            got=length,
        )
    ids[offset - 1] = spec.vision_start_token_id
    ids[offset : offset + 1] = spec.audio_start_token_id
    end = min(offset + 1 + both.tokens, stop)
    if end > offset + 1:
        ids[offset + 1 : end] = _interleaved(spec, both, end - offset - 1)
    ids[offset + length - 1 : stop] = spec.audio_end_token_id
    ids[offset + length : offset + length + 1] = spec.vision_end_token_id


def _interleaved(spec: PositionSpec, both: _Both, count: int) -> np.ndarray:
    """The first `count` pads of both streams in the order of the family's processor.

    Qwen3-Omni merges by time, video first. Qwen2.5-Omni lays chunk after chunk, the
    video's before the audio's; a stream is cut before a token whose time reaches the
    next multiple of a chunk, once a token.

    Of each stream no more than `count` tokens are looked at: a prompt may hold little
    of what its descriptions say.
    """
    cell = np.arange(min(both.frames * both.cells, count))
    frame = (cell // both.cells).astype(np.float32)
    seen = frame * np.float32(both.step) * np.float32(both.rate)
    heard = np.arange(min(both.sounds, count))
    if spec.audio_in_video == "chunks":
        seen = _chunks(seen.astype(np.int64), spec.audio_chunk)
        heard = _chunks(heard, spec.audio_chunk)
    stream = np.repeat([0, 1], [len(seen), len(heard)])
    order = np.lexsort((stream, np.concatenate([seen, heard])))[:count]
    pads = np.array([TYPED_PADS[1], TYPED_PADS[2]], np.int32)
    return pads[stream[order]]


def _chunks(times: np.ndarray, chunk: int) -> np.ndarray:
    """The number of cuts up to each token: those its time asks for, one a token."""
    token = np.arange(len(times))
    behind = np.minimum.accumulate(times // chunk - token)
    return token + np.minimum(behind, 1)
