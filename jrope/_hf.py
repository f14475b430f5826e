"""Reads a Hugging Face config.json: the only file that knows its top-level keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrope._config import RopeConfig
from jrope._layout import check_int
from jrope._scaling import SCALINGS, Scaling, check_number

# Model types whose attention code turns pairs (2i, 2i + 1). A config.json does not say;
# source: the rotary functions of transformers 5.24, by model.
GPTJ_STYLE_MODEL_TYPES = frozenset(
    {
        "codegen",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "glm",
        "glm4",
        "gptj",
    }
)

# Keys of a rope dict that the reader itself uses; all others belong to the scaling.
_READER_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_Config = Mapping[str, Any]


def config_from_hf(
    hf_config: object,
    *,
    layer_type: str | None = None,
    max_position_embeddings: int | None = None,
) -> RopeConfig | None:
    """The RoPE of a model, from its config.json.

    Reads both spellings: `rope_theta` + `rope_scaling` (transformers 4) and
    `rope_parameters` (5), flat or with an entry a layer type. Every key of the rope
    dict is used or refused by name.

    Args:
      hf_config: the parsed config.json as a mapping, or a transformers config object.
      layer_type: which layers, such as "sliding_attention", for models whose layers
        differ; refused for models whose layers do not.
      max_position_embeddings: rows of the table, in place of the config's own.

    Returns:
      The config, or None for layers without rotary embedding.

    Raises:
      ValueError, TypeError: if a key is missing, unknown, contradicted by another, or
        holds a wrong value. The message names the key.

    >>> config = config_from_hf({"hidden_size": 64, "num_attention_heads": 4,
    ...     "max_position_embeddings": 128, "rope_theta": 10000.0})
    >>> config.head_dim, config.is_neox_style
    (16, True)
    """
    config = _as_mapping(hf_config)
    rope = _rope_dict(config, layer_type)
    if rope is None:
        return None
    head_dim = _head_dim(config)
    return RopeConfig(
        head_dim=head_dim,
        rope_theta=_theta(config, rope, layer_type),
        max_position_embeddings=(
            _required(config, "max_position_embeddings")
            if max_position_embeddings is None
            else max_position_embeddings
        ),
        scaling=_scaling(config, rope),
        rotary_dim=_rotary_dim(config, rope, head_dim),
        is_neox_style=config.get("model_type") not in GPTJ_STYLE_MODEL_TYPES,
    )


def _as_mapping(hf_config: object) -> _Config:
    if isinstance(hf_config, Mapping):
        return hf_config
    to_dict = getattr(hf_config, "to_dict", None)
    if to_dict is None:
        raise TypeError(
            f"hf_config must be a mapping (a parsed config.json) or a transformers "
            f"config object, got {type(hf_config).__name__}"
        )
    return to_dict()


def _required(config: _Config, key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"config.json must have {key!r}, got keys {sorted(config)}")
    return value


def _agreed(found: Mapping[str, Any], what: str) -> Any:
    """The one value among spellings of the same thing; None where none is given."""
    given = {key: value for key, value in found.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise ValueError(f"config.json gives {what} twice, and differently: {given}")
    return values[0] if values else None


def _rope_dict(config: _Config, layer_type: str | None) -> _Config | None:
    """The rope dict of these layers ({} for plain RoPE), None where they have none."""
    rope = _agreed(
        {key: config.get(key) for key in ("rope_parameters", "rope_scaling")},
        "the RoPE parameters",
    )
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping):
        raise TypeError(f"the rope parameters must be a mapping, got {rope!r}")
    nested = bool(rope) and all(
        value is None or isinstance(value, Mapping) for value in rope.values()
    )
    if nested:
        if layer_type not in rope:
            raise ValueError(
                f"layer_type must be one of {sorted(rope)}, since this model's layers "
                f"differ, got {layer_type!r}"
            )
        return rope[layer_type]
    if config.get("rope_local_base_freq") is None:
        if layer_type is not None:
            raise ValueError(
                f"layer_type must be None, since this model's layers do not differ, "
                f"got {layer_type!r}"
            )
        return rope
    # Gemma 3's spelling before transformers 5: sliding layers have a base of their own
    # and are never scaled.
    if layer_type == "sliding_attention":
        return {"rope_theta": config["rope_local_base_freq"]}
    if layer_type == "full_attention":
        return rope
    raise ValueError(
        f"layer_type must be 'sliding_attention' or 'full_attention', since this model "
        f"has rope_local_base_freq, got {layer_type!r}"
    )


def _theta(config: _Config, rope: _Config, layer_type: str | None) -> float:
    found = {"rope_theta in the rope dict": rope.get("rope_theta")}
    if layer_type is None:
        found["rope_theta"] = config.get("rope_theta")
    elif found["rope_theta in the rope dict"] is None:
        found["rope_theta"] = config.get("rope_theta")
    theta = _agreed(found, "rope_theta")
    if theta is None:
        raise ValueError(
            "config.json must have 'rope_theta', at its top level or in the rope dict"
        )
    check_number("rope_theta", theta)
    return float(theta)


def _head_dim(config: _Config) -> int:
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _required(config, "hidden_size")
        heads = _required(config, "num_attention_heads")
        check_int("hidden_size", hidden, minimum=1)
        check_int("num_attention_heads", heads, minimum=1)
        if hidden % heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads where head_dim "
                f"is absent, got {hidden} and {heads}"
            )
        return hidden // heads
    check_int("head_dim", head_dim, minimum=2)
    return head_dim


def _rotary_dim(config: _Config, rope: _Config, head_dim: int) -> int:
    key = "partial_rotary_factor"
    share = _agreed({key: config.get(key), f"{key} (rope)": rope.get(key)}, key)
    if share is None:
        return head_dim
    check_number(key, share)
    if share > 1:
        raise ValueError(f"{key} must be at most 1, got {share}")
    return int(head_dim * share)


def _scaling(config: _Config, rope: _Config) -> Scaling:
    spelled = {key: rope.get(key) for key in ("rope_type", "type")}
    rope_type = _agreed(spelled, "the rope type") or "default"
    by_name = {
        name: scaling
        for scaling in SCALINGS.values()
        for name in (scaling.rope_type, *scaling.aliases)
    }
    if rope_type not in by_name:
        raise ValueError(
            f"rope_type must be one of {sorted(by_name)}, got {rope_type!r}"
        )
    scaling = by_name[rope_type]
    fields = {field.name: field for field in dataclasses.fields(scaling)}
    unknown = set(rope) - set(fields) - _READER_KEYS - set(scaling.meaningless_keys)
    if unknown:
        raise ValueError(
            f"rope_type {rope_type!r} has the keys {sorted(fields)}, got unknown "
            f"{sorted(unknown)}; is a key misspelled, or the rope_type wrong?"
        )
    values = {
        name: rope[name] if rope.get(name) is not None else config.get(name)
        for name in fields
    }
    values = {name: value for name, value in values.items() if value is not None}
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"rope_type {rope_type!r} must have the key {name!r}")
    return scaling(**values)
