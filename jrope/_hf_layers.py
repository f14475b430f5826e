"""Reads a Hugging Face config.json layer by layer: which have RoPE, and which one."""

from typing import Any

from jrope._config import RopeConfig
from jrope._hf import config_from_hf, read
from jrope._hf_rope import (
    Config,
    as_mapping,
    is_nested,
    layer_rules,
    layer_types_of,
    required,
    rope_dict,
    text_config,
)
from jrope._layout import check_int
from jrope._model_types import NOT_ATTENTION, ModelType
from jrope._show import show
from jrope._temperature import QueryTemperature

_LAYERS_KEYS = ("num_hidden_layers", "n_layer")
# Beyond any model: a number that is wrong rather than large.
_MAX_LAYERS = 65536


def layers_from_hf(
    hf_config: object,
    *,
    max_position_embeddings: int | None = None,
    is_neox_style: bool | None = None,
) -> list[RopeConfig | None]:
    """The RoPE of every layer of a model; None where a layer has none.

    Layers that share their RoPE share one config: `dict.fromkeys(...)` of the list has
    those that the model needs a table for, in the order of its layers (a set's order
    differs from process to process). docs/pages/layers.md has such a model.

    Args:
      hf_config: as `config_from_hf` takes it.
      max_position_embeddings: likewise.
      is_neox_style: likewise.

    Raises:
      ValueError, TypeError: as `config_from_hf`, and if the layers are not named.

    >>> gemma = {"model_type": "gemma3_text", "num_hidden_layers": 6,
    ...     "max_position_embeddings": 1024}
    >>> [int(config.rope_theta) for config in layers_from_hf(gemma)]
    [10000, 10000, 10000, 10000, 10000, 1000000]
    """
    config, model = read(hf_config, is_neox_style)
    by_type: dict[str | None, RopeConfig | None] = {}
    layers = []
    for layer_type, has_rope in _layers(config, model):
        if layer_type not in by_type:
            by_type[layer_type] = config_from_hf(
                hf_config,
                layer_type=layer_type,
                max_position_embeddings=max_position_embeddings,
                is_neox_style=is_neox_style,
            )
        layers.append(by_type[layer_type] if has_rope else None)
    return layers


def counts_layers(hf_config: object) -> bool:
    """Whether a config says how many layers its model has."""
    config = text_config(as_mapping(hf_config))
    return any(config.get(key) is not None for key in _LAYERS_KEYS)


def query_temperatures_from_hf(hf_config: object) -> list[QueryTemperature | None]:
    """The query temperature of every layer of a model; None where a layer has none.

    Llama 4's layers without rotary embedding have one, unless
    `attn_temperature_tuning` is false, and all layers where the rope dict has a
    `llama_4_scaling_beta`.

    Args:
      hf_config: as `config_from_hf` takes it.

    Raises:
      ValueError, TypeError: if a key is missing or holds a wrong value.

    >>> llama4 = {"model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 128,
    ...     "max_position_embeddings": 8192}
    >>> query_temperatures_from_hf(llama4)[2:]
    [None, QueryTemperature(scale=0.1, length=8192, shift=1)]
    """
    config, model = read(hf_config, True)
    found: list[QueryTemperature | None] = []
    for layer_type, has_rope in _layers(config, model):
        rope = rope_dict(config, model, layer_type) or {}
        beta = rope.get("llama_4_scaling_beta")
        if beta is not None:
            length = rope.get("original_max_position_embeddings")
            if length is None:
                raise ValueError(
                    "llama_4_scaling_beta must come with "
                    "'original_max_position_embeddings'"
                )
            found.append(QueryTemperature(scale=beta, length=length))
        elif not has_rope and _tunes_temperature(config):
            found.append(
                QueryTemperature(
                    scale=_value(config, "attn_scale", 0.1),
                    length=_value(config, "floor_scale", 8192),
                    shift=1,
                )
            )
        else:
            found.append(None)
    return found


def _tunes_temperature(config: Config) -> bool:
    default = config.get("model_type") == "llama4_text"
    tunes = config.get("attn_temperature_tuning")
    if not isinstance(tunes, int | None):  # Some Llama 4 configs say 4 for true.
        raise TypeError(f"attn_temperature_tuning must be a bool, got {show(tunes)}")
    return default if tunes is None else bool(tunes)


def _layers(config: Config, model: ModelType) -> list[tuple[str | None, bool]]:
    """Of each layer: the type that its RoPE goes by, and whether it has one."""
    count = required(config, _LAYERS_KEYS)
    check_int("num_hidden_layers", count, minimum=1, maximum=_MAX_LAYERS)
    flags = _flags(config)
    if flags is None and model.no_rope_interval is not None:
        interval = _value(config, "no_rope_layer_interval", model.no_rope_interval)
        check_int("no_rope_layer_interval", interval, minimum=1)
        flags = [(i + 1) % interval != 0 for i in range(count)]
    types = _layer_types(config, model, count)
    for name, values in (("no_rope_layers", flags), ("layer_types", types)):
        if values is not None and len(values) != count:
            raise ValueError(
                f"{name} must have num_hidden_layers = {count} entries, got "
                f"{len(values)}"
            )
    differ = bool(layer_rules(config, model)) or is_nested(config)
    return [
        (
            types[i] if types is not None and differ else None,
            (flags is None or flags[i]) and (types is None or _attends(types[i])),
        )
        for i in range(count)
    ]


def _flags(config: Config) -> list[bool] | None:
    """`no_rope_layers`, where 1 means that rotary embedding is on."""
    flags = config.get("no_rope_layers")
    if flags is None:
        return None
    if not isinstance(flags, list | tuple) or not all(
        isinstance(flag, int) and flag in (0, 1) for flag in flags
    ):
        raise TypeError(f"no_rope_layers must be a list of 0 and 1, got {show(flags)}")
    return [bool(flag) for flag in flags] or None


def _attends(layer_type: str) -> bool:
    """Whether layers of a type have queries and keys to rotate."""
    return layer_type not in NOT_ATTENTION


def _value(config: Config, key: str, default: Any) -> Any:
    """A value, or its default where it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def _layer_types(config: Config, model: ModelType, count: int) -> list[str] | None:
    types = layer_types_of(config)
    if types is not None:
        return types
    pattern = model.layer_pattern
    if pattern is None:
        if layer_rules(config, model) or is_nested(config):
            raise ValueError(
                "config.json must have 'layer_types', since this model's layers differ"
            )
        return None
    period = _value(config, pattern.key, pattern.period)
    check_int(pattern.key, period, minimum=1)
    return [
        "sliding_attention" if (i + pattern.phase) % period else "full_attention"
        for i in range(count)
    ]
