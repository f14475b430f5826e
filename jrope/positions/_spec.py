"""What is fixed for a model: its token ids, sizes and the rule of its positions."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jrope._layout import LONGEST, check_bool, check_int
from jrope._show import show
from jrope.positions import _rule as rules
from jrope.positions._checks import (
    check_canvas,
    check_rate,
    check_seconds,
    check_token,
)
from jrope.positions._errors import PositionError
from jrope.positions._rule import NO_TOKEN

# Stand in for the pads of images, videos and audios where types, not ids, tell them.
TYPED_PADS = (-2, -3, -4)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PositionSpec:
    """How a family of models lays out positions. Frozen and hashable.

    Make one with `spec`; the fields are what a family's row in `_families.py` sets.

    Args:
      family: name of the row.
      axes: rows of the positions, A, from 1 to 4: where the family has images, each is
        one of t, h, w and index.
      image_token_id: the pad that an image's tokens are; NO_TOKEN for none.
      video_token_id: the same of videos; it may be the image's, told apart by
        video_start and video_end.
      audio_token_id: the same of audios.
      vision_start_token_id: delimiter, needed for audio in video only.
      vision_end_token_id: likewise.
      audio_start_token_id: likewise.
      audio_end_token_id: likewise.
      video_start_token_id: between it and the next an image id is a frame.
      video_end_token_id: see video_start_token_id.
      spatial_merge_size: patches per token, along rows and along columns.
      temporal_merge_size: frames of a video's grid per frame of tokens.
      extra_column: a row of tokens is one longer than the grid's.
      per_frame: whose frames are grids of their own, each beginning after the other.
      layout: where a grid begins: at the next text position ("cursor"), in time only
        ("cursor_in_time"), or at its ordinal among the images ("ordinal").
      decodes_images: grids past the prompt's images are to be generated.
      time: the t of a video's frame f: f, or the two orders of float32 products with
        `tokens_per_second` and the seconds between frames.
      tokens_per_second: positions per second.
      default_seconds: where second_per_grid_ts is not given; None: it has to be.
      image_rate: step between the frames of an image.
      audio_tokens: from feature frames to tokens.
      audio_in_video: how a video's two streams share positions.
      audio_chunk: positions in a chunk of them, for the order of their tokens.
      fractional: positions are float32, not cut to integers.
      row_t: row of the positions that holds time.
      row_h: row that holds a token's row in its grid.
      row_w: row that holds its column.
      row_index: row that holds a text token's index; -1 for none.
      hf5_differs: whether `advance="hf5"` means anything.
      canvas: ids of <image>, </image>, <slice>, </slice> and newline, where pictures
        are laid out on a canvas.

    Attributes:
      rule: the spec as the kernels read it: float64 [SIZE], read-only.
      shape_code: rows that positions must have, negative where they are fractional.

    Raises:
      TypeError, ValueError: if a size, a rate, a name or an id is none.

    >>> import dataclasses
    >>> mine = dataclasses.replace(spec("qwen2_vl"), family="mine", image_token_id=5)
    >>> mine.axes, mine.image_token_id
    (3, 5)
    """

    family: str
    axes: int = 3
    image_token_id: int = NO_TOKEN
    video_token_id: int = NO_TOKEN
    audio_token_id: int = NO_TOKEN
    vision_start_token_id: int = NO_TOKEN
    vision_end_token_id: int = NO_TOKEN
    video_start_token_id: int = NO_TOKEN
    video_end_token_id: int = NO_TOKEN
    audio_start_token_id: int = NO_TOKEN
    audio_end_token_id: int = NO_TOKEN
    spatial_merge_size: int = 2
    temporal_merge_size: int = 1
    extra_column: bool = False
    per_frame: Literal["none", "video", "all"] = "none"
    layout: Literal["cursor", "cursor_in_time", "ordinal"] = "cursor"
    decodes_images: bool = False
    time: Literal["frame", "rate_times_seconds", "frame_times_seconds"] = "frame"
    tokens_per_second: float = 1.0
    default_seconds: float | None = None
    image_rate: float = 1.0
    audio_tokens: Literal["none", "two_convolutions", "blocks_of_100"] = "none"
    audio_in_video: Literal["none", "chunks", "tokens"] = "none"
    audio_chunk: int = 50
    fractional: bool = False
    row_t: int = 0
    row_h: int = 1
    row_w: int = 2
    row_index: int = -1
    hf5_differs: bool = False
    canvas: tuple[int, int, int, int, int] | None = None
    # Made of the fields above, once: they are read at every call.
    rule: np.ndarray = dataclasses.field(init=False, repr=False, compare=False)
    shape_code: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks sizes and names where they are made."""
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got "
                    f"{show(getattr(self, name))}"
                )
        self._check_rows()
        object.__setattr__(self, "rule", self._made_rule())
        code = -self.axes if self.fractional else self.axes
        object.__setattr__(self, "shape_code", code)

    def _check_rows(self) -> None:
        """Raises if a row of the positions would be left unwritten, or written twice.

        Text, and audio, fill all rows alike: which is which means nothing there.
        """
        names = ("row_t", "row_h", "row_w", "row_index")
        given = {name: getattr(self, name) for name in names}
        rows = [row for row in given.values() if row >= 0]
        if max(rows) >= self.axes:
            raise ValueError(
                f"rows of t, h, w and index must be below axes={self.axes}, got {given}"
            )
        has_grids = {self.image_token_id, self.video_token_id} != {NO_TOKEN}
        if has_grids and sorted(rows) != list(range(self.axes)):
            raise ValueError(
                f"each of the axes={self.axes} rows must be one of t, h, w and index, "
                f"got {given}; was axes given without its rows, or a row named twice?"
            )

    def _made_rule(self) -> np.ndarray:
        made = np.zeros(rules.SIZE)
        for place, name in _PLACES.items():
            made[place] = getattr(self, name)
        for place, (name, names) in _NAMED_PLACES.items():
            made[place] = names.index(getattr(self, name))
        default = self.default_seconds
        made[rules.DEFAULT_SECONDS] = np.nan if default is None else default
        if self.audio_in_video == "none":
            made[rules.VISION_OPENS] = NO_TOKEN
        made.flags.writeable = False
        return made

    def __repr__(self) -> str:
        """The fields that are not their defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.init and getattr(self, field.name) != field.default
        ]
        return f"PositionSpec({', '.join(shown)})"

    @functools.cached_property
    def typed_rule(self) -> np.ndarray:
        """The rule for ids in which TYPED_PADS, and no delimiters, tell the media."""
        made = self.rule.copy()
        places = (rules.IMAGE, rules.VIDEO, rules.AUDIO)
        for place, pad in zip(places, TYPED_PADS, strict=True):
            if made[place] != NO_TOKEN:
                made[place] = pad
        made[[rules.VIDEO_OPENS, rules.VIDEO_CLOSES]] = NO_TOKEN
        made.flags.writeable = False
        return made

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """What positions are built in unless told otherwise."""
        return np.dtype(np.float32 if self.fractional else np.int32)


_PLACES = {
    rules.IMAGE: "image_token_id",
    rules.VIDEO: "video_token_id",
    rules.AUDIO: "audio_token_id",
    rules.VIDEO_OPENS: "video_start_token_id",
    rules.VIDEO_CLOSES: "video_end_token_id",
    rules.VISION_OPENS: "vision_start_token_id",
    rules.VISION_CLOSES: "vision_end_token_id",
    rules.AUDIO_OPENS: "audio_start_token_id",
    rules.AUDIO_CLOSES: "audio_end_token_id",
    rules.MERGE: "spatial_merge_size",
    rules.TEMPORAL_MERGE: "temporal_merge_size",
    rules.EXTRA_COLUMN: "extra_column",
    rules.DECODES_IMAGES: "decodes_images",
    rules.RATE: "tokens_per_second",
    rules.IMAGE_RATE: "image_rate",
    rules.FRACTIONAL: "fractional",
    rules.ROW_T: "row_t",
    rules.ROW_H: "row_h",
    rules.ROW_W: "row_w",
    rules.ROW_INDEX: "row_index",
}
_NAMED_PLACES = {
    rules.PER_FRAME: ("per_frame", rules.FRAME_STYLES),
    rules.LAYOUT: ("layout", rules.LAYOUTS),
    rules.TIME: ("time", rules.TIMES),
    rules.AUDIO_TOKENS: ("audio_tokens", rules.AUDIO_RULES),
    rules.AUDIO_IN_VIDEO: ("audio_in_video", rules.AV_STYLES),
}
_CHOICES = dict(_NAMED_PLACES.values())
_IDS = tuple(name for name in _PLACES.values() if name.endswith("_token_id"))
_MOST_AXES = 4  # As many as there are kinds of rows.
_SIZES = ("spatial_merge_size", "temporal_merge_size", "audio_chunk")
_FLAGS = ("extra_column", "decodes_images", "fractional", "hf5_differs")
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "axes": functools.partial(check_int, minimum=1, maximum=_MOST_AXES),
    **dict.fromkeys(_SIZES, functools.partial(check_int, minimum=1, maximum=LONGEST)),
    **dict.fromkeys(_IDS, check_token),
    **dict.fromkeys(_FLAGS, check_bool),
    **dict.fromkeys(("tokens_per_second", "image_rate"), check_rate),
    "default_seconds": check_seconds,
    "canvas": check_canvas,
    **dict.fromkeys(
        ("row_t", "row_h", "row_w"), functools.partial(check_int, minimum=0)
    ),
    "row_index": functools.partial(check_int, minimum=-1),
}


def spec(
    family: str, config: Mapping[str, Any] | object | None = None, **overrides: Any
) -> PositionSpec:
    """The positions of a family, with what a model's config says of it.

    Args:
      family: a name in `FAMILIES` or `ALIASES`, mostly a config's `model_type`.
      config: a Hugging Face config.json as a dict, or a transformers config; ids,
        sizes and rates are read from it. What it leaves out is the family's, but for
        rates (`tokens_per_second`, `position_id_per_seconds`): those are the config
        class's default, 4 and 25, which released models override.
      **overrides: fields of `PositionSpec` that differ, checked like all others.

    Raises:
      PositionError: unknown_family.
      TypeError, ValueError: an override is no field, or does not hold; the config is
        of a family with another rule.

    >>> spec("qwen2_5_vl").tokens_per_second
    2.0
    """
    from jrope.positions._families import ALIASES, FAMILIES
    from jrope.positions._from_config import as_mapping, fields_from_config

    name = ALIASES.get(family, family) if isinstance(family, str) else family
    if not isinstance(name, str) or name not in FAMILIES:
        raise PositionError(
            "unknown_family",
            expected=f"one of {', '.join(sorted({*FAMILIES, *ALIASES}))}",
            got=repr(family),
        )
    row = FAMILIES[name]
    unknown = set(overrides) - {field.name for field in dataclasses.fields(row)}
    if unknown:
        raise TypeError(
            f"overrides must be fields of PositionSpec, got {sorted(unknown)}; is one "
            f"misspelled?"
        )
    read = {}
    if config is not None:
        config = as_mapping(config)
        named = str(config.get("model_type"))
        _check_same_rule(row, FAMILIES.get(ALIASES.get(named, named)))
        read = fields_from_config(row, config)
    return dataclasses.replace(row, **{**read, **overrides})


def _check_same_rule(row: PositionSpec, other: PositionSpec | None) -> None:
    """Raises if a config is known to be of a family that lays positions out otherwise.

    Its token ids may differ: they are read from it.
    """
    if other is None or row.family == "text" or other.layout == row.layout == "ordinal":
        return
    ids = dict.fromkeys(_IDS, NO_TOKEN)
    if dataclasses.replace(row, family="", **ids) != dataclasses.replace(
        other, family="", **ids
    ):
        raise ValueError(
            f"family must be {other.family!r} for this config, by its model_type, got "
            f"{row.family!r}, whose rule differs"
        )
