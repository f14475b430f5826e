"""Reads the fields of a spec from a Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from jrope._show import show
from jrope.positions._checks import check_rate
from jrope.positions._spec import PositionSpec

# Where a field stands in a config: in the top level or in the named part of it, under
# the first of these keys that is there.
_KEYS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "image_token_id": (None, ("image_token_id", "image_token_index", "im_patch_id")),
    "video_token_id": (None, ("video_token_id", "video_token_index")),
    "audio_token_id": (None, ("audio_token_id", "audio_token_index")),
    "vision_start_token_id": (None, ("vision_start_token_id",)),
    "vision_end_token_id": (None, ("vision_end_token_id",)),
    "video_start_token_id": (None, ("video_start_token_id",)),
    "video_end_token_id": (None, ("video_end_token_id",)),
    "audio_start_token_id": (None, ("audio_start_token_id",)),
    "audio_end_token_id": (None, ("audio_end_token_id",)),
    "spatial_merge_size": ("vision_config", ("spatial_merge_size",)),
    "temporal_merge_size": ("vision_config", ("temporal_merge_size",)),
}
_CANVAS = (
    "image_start_id",
    "image_end_id",
    "slice_start_id",
    "slice_end_id",
    "newline_id",
)
# What the config classes of transformers 5.24.0 take where a file leaves it out; the
# released files name other values.
_ABSENT_RATE = {"rate_times_seconds": 4.0, "frame_times_seconds": 25.0}


def as_mapping(config: object) -> Mapping[str, Any]:
    """A config as its keys.

    Raises:
      TypeError: it is neither a dict nor a transformers config.
    """
    made: Any = config
    if not isinstance(config, Mapping) and hasattr(config, "to_dict"):
        made = made.to_dict()
    if not isinstance(made, Mapping):
        raise TypeError(
            f"config must be a dict (a parsed config.json) or a transformers config, "
            f"got {type(config).__name__}"
        )
    return made


def fields_from_config(row: PositionSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `row` that a config names; a key that is null names nothing.

    Args:
      row: the family's own row.
      config: config.json as a dict; an Omni model's thinker_config is found in it.

    Raises:
      TypeError: a part of the config is no mapping, a rate no number.
      ValueError: a rate is none; the number of sections fits no form of the family;
        some of a canvas' markers are missing.
    """
    config = _part(config, "thinker_config") or config
    found: dict[str, Any] = {
        name: value for name in _KEYS if (value := _find(config, name)) is not None
    }
    if row.time != "frame":
        found |= _rate(row, config)
    if row.layout == "ordinal":
        found |= _axes(config)
    if row.canvas is not None:
        found |= _canvas(config)
        # Not the encoder's own: it merges on.
        found.pop("spatial_merge_size", None)
        if config.get("downsample_mode") == "4x":
            found["spatial_merge_size"] = 2
    return found


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of a config, empty where it is left out."""
    part = config.get(key)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise TypeError(f"{key} must be a mapping, got {show(part)}")
    return part


def _find(config: Mapping[str, Any], name: str) -> Any:
    part, keys = _KEYS[name]
    place = _part(config, part) if part else config
    return next((place[key] for key in keys if place.get(key) is not None), None)


def _rate(row: PositionSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Positions per second, and the chunk of audio in video that follows from it."""
    absent = _ABSENT_RATE[row.time]
    if row.time == "rate_times_seconds":
        vision = _part(config, "vision_config")
        return {"tokens_per_second": _number(vision, "tokens_per_second", absent)}
    rate = _number(config, "position_id_per_seconds", absent)
    chunk = int(rate * _number(config, "seconds_per_chunk", 2.0))
    return {"tokens_per_second": rate, "image_rate": rate, "audio_chunk": chunk}


def _number(place: Mapping[str, Any], key: str, absent: float) -> float:
    value = place.get(key)
    if value is None:
        return absent
    check_rate(key, value)
    return float(value)


def _axes(config: Mapping[str, Any]) -> dict[str, Any]:
    """XD-RoPE has as many axes as sections: (index, w, h, t), or the last three."""
    text = _part(config, "text_config") or config
    scaling = _part(text, "rope_scaling") or _part(text, "rope_parameters")
    section = scaling.get("xdrope_section") or scaling.get("mrope_section")
    if section is None:
        return {}
    if not isinstance(section, list | tuple):
        raise TypeError(f"xdrope_section must be a list, got {show(section)}")
    if len(section) not in (3, 4):
        raise ValueError(
            f"xdrope_section must have 3 or 4 entries, got {len(section)}: "
            f"{show(section)}"
        )
    if len(section) == 4:
        return {"axes": 4, "row_t": 3, "row_h": 2, "row_w": 1, "row_index": 0}
    return {"axes": 3, "row_t": 2, "row_h": 1, "row_w": 0, "row_index": -1}


def _canvas(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of a canvas' markers: all of them, or none."""
    missing = [key for key in _CANVAS if config.get(key) is None]
    if not missing:
        return {"canvas": tuple(config[key] for key in _CANVAS)}
    if len(missing) < len(_CANVAS):
        raise ValueError(
            f"a config must name all markers of a canvas or none, got one without "
            f"{', '.join(missing)}"
        )
    return {}
