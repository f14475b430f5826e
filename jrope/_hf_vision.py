"""Reads a vision encoder's two-dimensional RoPE from a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrope._axes import chunked_axes
from jrope._config import RopeConfig
from jrope._hf_rope import Config, agreed, as_mapping, required
from jrope._layout import MAX_HEAD_DIM, check_int
from jrope._show import show
from jrope.scalings import Axial, check_number
from jrope.scalings.axial import AxialOrder

_UNUSED_KEYS = ("rope_scaling", "partial_rotary_factor")
# Rows of the table where no image size bounds the grid; vLLM's Qwen2.5-VL has as many.
_GRID = 8192
_SUFFIXES = ("_vision_encoder", "_vision_model", "_vision")
_OF_LANGUAGE_MODELS = ("vocab_size", "num_key_value_heads", "max_position_embeddings")
_HEADS_KEYS = ("num_heads", "num_attention_heads", "attention_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionType:
    """What a vision encoder's config leaves to its code.

    Args:
      order: which frequencies each axis has.
      is_neox_style: the pairing.
      width_key: the encoder's width; Qwen2-VL calls something else hidden_size.
      is_one_based: whether a grid counts from 1, position 0 being the class token's.
      image_size: pixels a side, where the config is published without.
    """

    order: AxialOrder = "shared"
    is_neox_style: bool = True
    width_key: str = "hidden_size"
    is_one_based: bool = False
    image_size: int | None = None


# By model type without "_vision" and the like. Source: transformers 5.24.0.
VISION_TYPES: Mapping[str, VisionType] = {
    "qwen2_vl": VisionType(width_key="embed_dim"),
    **dict.fromkeys(
        (
            *("exaone4_5", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"),
            *("qwen2_5_omni", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"),
        ),
        VisionType(),
    ),
    "pixtral": VisionType(order="dealt", image_size=1024),
    "llama4": VisionType(is_neox_style=False, is_one_based=True, image_size=448),
}


def vision_config_from_hf(
    hf_config: object, *, max_position_embeddings: int | None = None
) -> RopeConfig:
    """The two-dimensional RoPE of a model's vision encoder, from its config.json.

    Its positions are [2, *B, T], built by `jrope.positions.vision_positions`: rows
    first and columns second (Llama 4: columns first).

    Args:
      hf_config: the parsed config.json of the whole model or of its vision encoder, its
        path, or a transformers config object.
      max_position_embeddings: rows of the table, one more than the largest coordinate;
        by default those of the encoder's own image size, or 8192 where it takes any.

    Raises:
      ValueError, TypeError: if the encoder is not one that jrope knows, or a key is
        missing or wrong.

    >>> vision = {"model_type": "qwen2_vl", "embed_dim": 32, "num_heads": 4}
    >>> vision_config_from_hf(vision).axis_of_frequency
    (0, 0, 1, 1)
    """
    config, kind = _read(as_mapping(hf_config))
    head_dim = _head_dim(config, kind)
    if max_position_embeddings is None:
        max_position_embeddings = _grid(config, kind)
    half = head_dim // 2
    return RopeConfig(
        head_dim=head_dim,
        rope_theta=_theta(config),
        max_position_embeddings=max_position_embeddings,
        scaling=Axial(order=kind.order),
        is_neox_style=kind.is_neox_style,
        axis_of_frequency=chunked_axes((half - half // 2, half // 2)),
    )


def _read(config: Config) -> tuple[Config, VisionType]:
    """The encoder's keys, wherever they are nested, and its row of the table."""
    outer = config.get("model_type")
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return _read({"model_type": outer, **thinker})
    inner = config.get("vision_config", config)
    if not isinstance(inner, Mapping):
        raise TypeError(f"vision_config must be a mapping, got {show(inner)}")
    if inner is config and any(key in config for key in _OF_LANGUAGE_MODELS):
        raise ValueError(
            f"the config must have 'vision_config' or be a vision encoder's, got one "
            f"of a language model, with keys {sorted(config)}"
        )
    own = inner.get("model_type")
    kind = VISION_TYPES.get(_stem(outer if own is None else own))
    if kind is None:
        raise ValueError(
            f"model_type of a vision encoder must be one of {sorted(VISION_TYPES)}, "
            f"got {show(own)} in a config of {show(outer)}"
        )
    return inner, kind


def _stem(name: Any) -> str:
    text = name if isinstance(name, str) else ""
    for suffix in _SUFFIXES:
        text = text.removesuffix(suffix)
    return text.removesuffix("_thinker")


def _head_dim(config: Config, kind: VisionType) -> int:
    head_dim = config.get("head_dim")
    if head_dim is not None:
        check_int("head_dim", head_dim, minimum=4, maximum=MAX_HEAD_DIM)
        return head_dim
    width, heads = required(config, (kind.width_key,)), required(config, _HEADS_KEYS)
    check_int(kind.width_key, width, minimum=1)
    check_int("num_heads", heads, minimum=1)
    if width % heads:
        raise ValueError(
            f"{kind.width_key} must be a multiple of the vision encoder's heads where "
            f"head_dim is absent, got {show(width)} and {show(heads)}"
        )
    check_int("head_dim", width // heads, minimum=4, maximum=MAX_HEAD_DIM)
    return width // heads


def _theta(config: Config) -> float:
    """The base: 10000 in every encoder that does not say."""
    rope = config.get("rope_parameters")
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters must be a mapping, got {show(rope)}")
    unused = [key for key in _UNUSED_KEYS if config.get(key) is not None]
    unused += sorted(set(rope) - {"rope_theta", "rope_type", "type"})
    if unused:
        raise ValueError(
            f"a vision encoder's rotation has a base alone, got {show(unused)}; is its "
            f"rope dict a language model's?"
        )
    # Llama 4's rope dict is of the default type.
    for name in (rope.get("rope_type"), rope.get("type")):
        if name not in (None, "axial", "default"):
            raise ValueError(
                f"rope_type of a vision encoder must be 'axial' or 'default', got "
                f"{show(name)}"
            )
    given = {"the top level": config.get("rope_theta")}
    given["rope_parameters"] = rope.get("rope_theta")
    theta = agreed(given, "rope_theta")
    theta = 10000.0 if theta is None else theta
    check_number("rope_theta", theta)
    return float(theta)


def _grid(config: Config, kind: VisionType) -> int:
    """One more than the largest coordinate of a patch."""
    if kind.image_size is None:
        return _GRID
    image = config.get("image_size", kind.image_size)
    sides = tuple(image) if isinstance(image, list | tuple) and image else (image,)
    patch = required(config, ("patch_size",))
    for side in (*sides, patch):
        check_int("image_size and patch_size", side, minimum=1)
    return max(sides) // patch + (1 if kind.is_one_based else 0)
