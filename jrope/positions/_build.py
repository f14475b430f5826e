"""From a prompt to its plan: by token ids, token types, or offsets of its media."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions import _rule as rules
from jrope.positions._canvas import canvas_table
from jrope.positions._errors import PositionError, from_kernel
from jrope.positions._inputs import (
    NO_GRIDS,
    NO_LENGTHS,
    NO_SECONDS,
    as_grids,
    as_seconds,
    as_size,
    as_vector,
    check_spec,
    types_as_ids,
)
from jrope.positions._plan import PositionPlan
from jrope.positions._rule import MOST_TOKENS
from jrope.positions._scan import count_text, scan
from jrope.positions._spans import paint_spans
from jrope.positions._spec import PositionSpec
from jrope.positions._table import COLUMNS

UseAudio = Literal["auto"] | bool
Advance = Literal["max", "hf5"]
Truncate = Literal["error", "clip"]

# Rows set aside for every audio, which may be part of a video; more are found out.
_ROWS_FOR_AUDIO = 24
# Images that are given room without a look at the tokens.
_FEW = 1000


def plan(
    spec: PositionSpec,
    input_ids: ArrayLike,
    *,
    image_grid_thw: ArrayLike | None = None,
    video_grid_thw: ArrayLike | None = None,
    second_per_grid_ts: ArrayLike | None = None,
    audio_lengths: ArrayLike | None = None,
    token_types: ArrayLike | None = None,
    use_audio_in_video: UseAudio = "auto",
    advance: Advance = "max",
    truncate: Truncate = "error",
) -> PositionPlan:
    """Plans the positions of one prompt, without padding.

    Every medium is counted and checked first: its grid against its tokens, all grids
    against all media. Numpy arrays of int32 (seconds: float32) are taken as they are;
    everything else is converted, and lists cost many times the plan itself.

    Args:
      spec: of the model.
      input_ids: int [N].
      image_grid_thw: int [images, 3], T, H, W in patches, in the order of the prompt.
        For a canvas family target sizes, int [images, 2].
      video_grid_thw: the same of the videos.
      second_per_grid_ts: float [videos], seconds between two frames of a video's grid.
        Without meaning, and ignored, where time is text.
      audio_lengths: int [audios], feature frames.
      token_types: int [N], 0 text, 1 image, 2 video, 3 audio, in place of the pad ids.
      use_audio_in_video: "auto" and True: a video whose first delimiter is followed by
        an audio's holds both streams. False: none does.
      advance: "max": text goes on past the largest position of a grid, as in training.
        "hf5": past the larger side, as transformers 5.3 and later do, which lets text
        run into a long video's positions.
      truncate: "clip" plans a prompt that ends inside a medium as far as it goes.

    Raises:
      PositionError: the prompt and the descriptions of its media do not fit.

    >>> from jrope.positions import plan, spec
    >>> ids = [7, 151652] + 4 * [151655] + [151653]
    >>> plan(spec("qwen2_vl"), ids, image_grid_thw=[[1, 4, 4]]).positions()
    array([[0, 1, 2, 2, 2, 2, 4],
           [0, 1, 2, 2, 3, 3, 4],
           [0, 1, 2, 3, 2, 3, 4]], dtype=int32)
    """
    options = 0
    if advance != "max" or truncate != "error" or use_audio_in_video != "auto":
        options = _options(spec, use_audio_in_video, advance, truncate)
    ids: Any = input_ids
    try:
        canvas = spec.canvas
    except AttributeError:
        check_spec(spec)
        raise
    if token_types is not None or canvas is not None:
        ids = as_vector("input_ids", ids)
    if canvas is not None:
        table = canvas_table(spec, ids, image_grid_thw, video_grid_thw, token_types)
        return PositionPlan(spec, len(ids), table)
    rule = spec.rule
    if token_types is not None:
        ids, rule = types_as_ids(spec, ids, token_types), spec.typed_rule
    if image_grid_thw is video_grid_thw is second_per_grid_ts is audio_lengths is None:
        try:
            tokens = count_text.run(ids, rule)
        except TypeError:
            ids = as_vector("input_ids", ids)
            count_text.prepare()
            tokens = count_text.run(ids, rule)
        if tokens >= 0:
            return PositionPlan(spec, tokens, None)
    return _scan(
        spec,
        rule,
        ids,
        NO_GRIDS if image_grid_thw is None else image_grid_thw,
        NO_GRIDS if video_grid_thw is None else video_grid_thw,
        NO_SECONDS if second_per_grid_ts is None else second_per_grid_ts,
        NO_LENGTHS if audio_lengths is None else audio_lengths,
        options,
    )


def plan_from_spans(
    spec: PositionSpec,
    num_tokens: int,
    spans: Sequence[tuple[int, int, int]] | np.ndarray,
    *,
    image_grid_thw: ArrayLike | None = None,
    video_grid_thw: ArrayLike | None = None,
    second_per_grid_ts: ArrayLike | None = None,
    audio_lengths: ArrayLike | None = None,
    advance: Advance = "max",
    truncate: Truncate = "error",
) -> PositionPlan:
    """Plans a prompt whose media are known by their offsets; no ids are needed.

    Args:
      spec: of the model; not a canvas family, whose markers matter.
      num_tokens: N.
      spans: int [n, 3]: kind, offset, length of every run of one medium's tokens, in
        the order of the prompt. Kinds: 1 image, 2 video (where text parts the frames, a
        span for each), 3 audio, 4 video with its sound, from the audio's start to its
        end delimiter; the order of the two streams is the processor's.
      image_grid_thw: as in `plan`, like all that follow.
      video_grid_thw: T, H, W of every video.
      second_per_grid_ts: seconds between two frames of a grid.
      audio_lengths: feature frames.
      advance: where text goes on after a grid.
      truncate: whether the prompt may end inside a medium.

    Raises:
      PositionError: as in `plan`; input, if a span lies outside the prompt.
      TypeError, ValueError: num_tokens is no number of tokens.

    >>> from jrope.positions import spec
    >>> made = plan_from_spans(spec("qwen2_vl"), 7, [(1, 2, 4)],
    ...     image_grid_thw=[[1, 4, 4]])
    >>> made.positions()[1].tolist()
    [0, 1, 2, 2, 3, 3, 4]
    """
    check_spec(spec)
    if spec.canvas is not None:
        raise PositionError(
            "input", expected="token ids", got="spans", hint="markers matter here"
        )
    grids = as_grids("video_grid_thw", video_grid_thw)
    seconds, lengths = as_seconds(second_per_grid_ts), _lengths(audio_lengths)
    num_tokens = as_size("num_tokens", num_tokens, least=0)
    ids = paint_spans(spec, num_tokens, spans, grids, seconds, lengths)
    return _scan(
        spec,
        spec.typed_rule,
        ids,
        as_grids("image_grid_thw", image_grid_thw),
        grids,
        seconds,
        lengths,
        _options(spec, "auto", advance, truncate),
    )


def _lengths(values: ArrayLike | None) -> np.ndarray:
    return NO_LENGTHS if values is None else as_vector("audio_lengths", values)


def _options(
    spec: PositionSpec, use_audio: UseAudio, advance: Advance, truncate: Truncate
) -> int:
    """The flags of a call.

    Raises:
      ValueError: a word that is none of the choices.
    """
    choices = (
        ("advance", advance, ("max", "hf5")),
        ("truncate", truncate, ("error", "clip")),
        ("use_audio_in_video", use_audio, ("auto", True, False)),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    options = rules.ADVANCE_HF5 if advance == "hf5" and spec.hf5_differs else 0
    options += rules.CLIP if truncate == "clip" else 0
    return options + (0 if use_audio else rules.WITHOUT_AV)


def _scan(
    spec: PositionSpec,
    rule: np.ndarray,
    ids: Any,
    images: Any,
    videos: Any,
    seconds: Any,
    audio: Any,
    options: int,
) -> PositionPlan:
    """Scans with as much room as the media probably need, then as they do."""
    try:
        room = _room(spec, ids, images, videos, audio)
        table = np.empty((room + 1, COLUMNS))
        rows = scan.run(ids, rule, images, videos, seconds, audio, table, options)
    except (TypeError, ValueError, IndexError):
        # Not arrays as kernels take them: they are made so, or refused by name.
        ids = as_vector("input_ids", ids)
        images = as_grids("image_grid_thw", images)
        videos = as_grids("video_grid_thw", videos)
        seconds, audio = as_seconds(seconds), _lengths(audio)
        scan.prepare()
        room = _room(spec, ids, images, videos, audio)
        table = np.empty((room + 1, COLUMNS))
        rows = scan.run(ids, rule, images, videos, seconds, audio, table, options)
    if rows > room:
        table = np.empty((rows + 1, COLUMNS))
        rows = scan.run(ids, rule, images, videos, seconds, audio, table, options)
    if rows < 0:
        raise from_kernel(rows, *table[0, :5].tolist())
    return PositionPlan(spec, len(ids), table)


def _room(spec: PositionSpec, ids: Any, images: Any, videos: Any, audio: Any) -> int:
    """Rows that the media probably need; no more than there are tokens."""
    room = len(images)
    if videos is NO_GRIDS and audio is NO_LENGTHS and room < _FEW:
        return room
    if videos is not NO_GRIDS:
        room += len(videos) if spec.per_frame == "none" else _frames(videos, len(ids))
    if audio is not NO_LENGTHS:
        room += _ROWS_FOR_AUDIO * len(audio)
    return max(0, min(room, len(ids), MOST_TOKENS))


def _frames(videos: Any, most: int) -> int:
    """Frames of all videos, or as many as there can be."""
    return min(int(np.asarray(videos)[..., 0].sum()), most) + len(videos)
