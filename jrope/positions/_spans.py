"""Media by their offsets, painted as the ids that the scan reads."""

from collections.abc import Sequence

import numpy as np

from jrope.positions._errors import PositionError
from jrope.positions._inputs import as_grids, check_kinds
from jrope.positions._media import audio_tokens
from jrope.positions._spec import TYPED_PADS, PositionSpec

VIDEO_WITH_SOUND = 4


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
            order = interleave(spec, videos, seconds, audio, video, sound)
            _paint_both(spec, ids, offset, stop, length, order)
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


def _paint_both(
    spec: PositionSpec,
    ids: np.ndarray,
    offset: int,
    stop: int,
    length: int,
    order: np.ndarray,
) -> None:
    """Paints a video with its sound and the delimiters that the scan looks for."""
    if length != len(order) + 2 or offset == 0:
        raise PositionError(
            "token_count",
            kind="video",
            token=offset,
            expected=f"{len(order) + 2} tokens after a video's start delimiter",
            got=length,
        )
    ids[offset - 1] = spec.vision_start_token_id
    ids[offset] = spec.audio_start_token_id
    inside = ids[offset + 1 : offset + 1 + len(order)]
    inside[:] = order[: len(inside)]
    ids[offset + length - 1 : stop] = spec.audio_end_token_id
    ids[offset + length : offset + length + 1] = spec.vision_end_token_id


def interleave(
    spec: PositionSpec,
    videos: np.ndarray,
    seconds: np.ndarray,
    audio: np.ndarray,
    video: int,
    sound: int,
) -> np.ndarray:
    """The pads of a video and its sound in the order of the family's processor.

    Qwen3-Omni merges by time, video first. Qwen2.5-Omni lays chunk after chunk, the
    video's before the audio's; a stream is cut before a token whose time reaches the
    next multiple of a chunk, once a token.

    Raises:
      PositionError: too_few_grids, too_few_seconds, too_few_audio_lengths.
    """
    have = (len(videos), len(seconds), len(audio))
    codes = ("too_few_grids", "too_few_seconds", "too_few_audio_lengths")
    for code, index, count in zip(codes, (video, video, sound), have, strict=True):
        if index >= count:
            raise PositionError(code, index=index, expected=index + 1, got=count)
    frames, height, width = videos[video].tolist()
    merge = spec.spatial_merge_size
    cells = (height // merge) * (width // merge)
    rate = np.float32(spec.tokens_per_second)
    times = np.arange(frames, dtype=np.float32) * seconds[video] * rate
    video_times = np.repeat(times, cells)
    sounds = max(audio_tokens(int(audio[sound]), spec.rule), 0)
    audio_times = np.arange(sounds, dtype=np.float32)
    if spec.audio_in_video == "chunks":
        video_times = _chunks(np.trunc(video_times), spec.audio_chunk)
        audio_times = _chunks(audio_times, spec.audio_chunk)
    stream = np.repeat([0, 1], [len(video_times), len(audio_times)])
    order = np.lexsort((stream, np.concatenate([video_times, audio_times])))
    pads = np.array([TYPED_PADS[1], TYPED_PADS[2]], np.int32)
    return pads[stream[order]]


def _chunks(times: np.ndarray, chunk: int) -> np.ndarray:
    """The number of cuts up to each token."""
    made = np.zeros(len(times), np.int64)
    cuts = 0
    for k, time in enumerate(times.tolist()):
        cuts += time >= (cuts + 1) * chunk
        made[k] = cuts
    return made
