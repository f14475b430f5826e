"""Reads a model's axis map: from its rope dict, or what its code does without a key."""

from collections.abc import Mapping

from jrope._axes import AxisMap, AxisOrder, mrope_axes
from jrope._hf_rope import Config, agreed
from jrope._model_types import ModelType
from jrope._show import show

# Qwen3-Omni's and Qwen3-TTS's configs leave the first half of the word out.
_INTERLEAVED = ("mrope_interleaved", "interleaved")
_FLAGS = (*_INTERLEAVED, "mrope_interleaved_glm")
# Keys of a rope dict that only an axis map needs.
_SECTIONS = ("mrope_section", "xdrope_section")
MROPE_KEYS = frozenset({*_FLAGS, *_SECTIONS})
# Types of a rope dict that say nothing but that there is a section: the registry's name
# of the scaling, and the order that the type stands for.
SECTION_TYPES: dict[str, tuple[str, AxisOrder | None]] = {
    "mrope": ("default", None),
    "openpangu": ("default", "balanced"),
    "xdrope": ("dynamic", "chunked"),
}
# What each axis of the positions is, by how many there are: t time, h height, w width,
# p the token's index. Sources: Qwen2-VL's get_rope_index, and all that follow it;
# HunYuan-VL's get_xdrope_input_positions in vLLM.
_AXIS_NAMES = {3: ("t", "h", "w")}
_XD_AXIS_NAMES = {3: ("w", "h", "t"), 4: ("p", "w", "h", "t")}


def axis_names(config: Config, axes: int) -> tuple[str, ...] | None:
    """What the axes of a model's positions are, None where that is not known.

    Args:
      config: the text model's keys.
      axes: how many its layers have.
    """
    dicts = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    outer = [rope for rope in dicts if isinstance(rope, Mapping)]
    inner = [r for rope in outer for r in rope.values() if isinstance(r, Mapping)]
    is_xd = any(
        "xdrope" in _section_types(rope) or rope.get("xdrope_section") is not None
        for rope in (*outer, *inner)
    )
    return (_XD_AXIS_NAMES if is_xd else _AXIS_NAMES).get(axes)


def axes_from_rope(rope: Config, model: ModelType, rotary_dim: int) -> AxisMap | None:
    """The axis of each frequency, or None for one-dimensional positions.

    Raises:
      TypeError, ValueError: if a key has the wrong type, contradicts another or the
        model's code, or the section does not fit.
    """
    order = _order(rope, model)
    section = _section(rope) or model.mrope_section
    if section is None:
        _check_not_asked_for(rope)
        return None
    return mrope_axes(section, rotary_dim=rotary_dim, order=order or "chunked")


def _section(rope: Config) -> tuple[int, ...] | None:
    """The section, under either name."""
    spelled = {key: rope.get(key) for key in _SECTIONS}
    for key, section in spelled.items():
        if not isinstance(section, list | tuple | None):
            raise TypeError(f"{key} must be a list of ints, got {show(section)}")
        spelled[key] = None if section is None else tuple(section)
    return agreed(spelled, "mrope_section")


def says_order(rope: Config) -> bool:
    """Whether a rope dict says how the axes of its section lie, or has no section."""
    return _section(rope) is None or _named_order(rope) is not None


def _check_not_asked_for(rope: Config) -> None:
    """Raises if a rope dict without a section speaks of one."""
    for name in _section_types(rope):
        raise ValueError(f"rope_type {show(name)} must have the key 'mrope_section'")
    for key in _FLAGS:
        if rope.get(key):
            raise ValueError(f"{key} must come with 'mrope_section'")


def _order(rope: Config, model: ModelType) -> AxisOrder | None:
    """The order that the rope dict names, which must be the one of the model's code."""
    named = _named_order(rope)
    # SGLang's key for GLM exists to choose another order than the model's code.
    if model.mrope_order is None or named in (None, "round_robin", model.mrope_order):
        return named or model.mrope_order
    raise ValueError(
        f"the rope dict asks for {named!r} axes, but this model's code has them "
        f"{model.mrope_order!r}; give axis_of_frequency by hand if the checkpoint was "
        f"trained otherwise"
    )


def _named_order(rope: Config) -> AxisOrder | None:
    """The order that the rope dict itself names, if any."""
    for key in _FLAGS:
        if not isinstance(rope.get(key), bool | None):
            raise TypeError(f"{key} must be a bool, got {show(rope[key])}")
    interleaved = agreed({key: rope.get(key) for key in _INTERLEAVED}, _INTERLEAVED[0])
    orders = {name: SECTION_TYPES[name][1] for name in _section_types(rope)}
    by_type = agreed(orders, "the order of its axes")
    if by_type is not None:
        if interleaved is not None and interleaved is (by_type == "chunked"):
            raise ValueError(
                f"mrope_interleaved must be {not interleaved} with this rope_type, got "
                f"{interleaved}"
            )
        return by_type
    if rope.get("mrope_interleaved_glm"):
        return "round_robin"
    if interleaved is None:
        return None
    return "interleaved" if interleaved else "chunked"


def _section_types(rope: Config) -> list[str]:
    """What the rope dict's type is called, if that says that there is a section."""
    names = (rope.get("rope_type"), rope.get("type"))
    return [name for name in names if name in SECTION_TYPES]
