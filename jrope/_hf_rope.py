"""Which rope dict the layers of one type have, of all the ways to write it."""

import json
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from jrope._model_types import (
    GLOBAL_AND_LOCAL_BASE,
    LOCAL_BASE,
    LayerRule,
    ModelType,
)
from jrope._show import show
from jrope.scalings import check_number

Config = Mapping[str, Any]

# Where a multimodal config keeps its text model's.
_TEXT_CONFIGS = ("thinker_config", "text_config", "llm_config", "language_config")
# Levels of a config; real ones have six at most.
_DEEPEST = 64
THETA_KEYS = ("rope_theta", "rotary_emb_base")
_ROPE_NAMES = ("rope_parameters", "rope_scaling")


def as_mapping(hf_config: object) -> Config:
    if isinstance(hf_config, str | os.PathLike):
        hf_config = _load(Path(hf_config))
    if isinstance(hf_config, Mapping):
        _check_depth(hf_config)
        return hf_config
    to_dict = getattr(hf_config, "to_dict", None)
    if to_dict is None:
        raise TypeError(
            f"hf_config must be a mapping (a parsed config.json), a path, or a "
            f"transformers config object, got {type(hf_config).__name__}"
        )
    made = to_dict()
    if not isinstance(made, Mapping):
        raise TypeError(f"to_dict() of hf_config must give a mapping, got {show(made)}")
    _check_depth(made)
    return made


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text, whose last twin of a key would win in silence."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(
                f"a key must stand once in an object, got {show(key)} as "
                f"{show(made[key])} and {show(value)}"
            )
        made[key] = value
    return made


def _check_depth(config: Config) -> None:
    """Raises if a config is nested deeper than any, or within itself."""
    level: list[Any] = [config]
    for _ in range(_DEEPEST):
        inner = {
            id(value): value
            for outer in level
            for value in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(value, Mapping | list | tuple)
        }
        level = [*inner.values()]
        if not level:
            return
    raise ValueError(
        f"hf_config must not nest deeper than {_DEEPEST} levels, got more; is it "
        f"another file's, or does it hold itself?"
    )


def text_config(config: Config) -> Config:
    """The keys of the text model, which a multimodal config nests."""
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            _check_outer(config, inner, key)
            return text_config(inner)
    return config


def _check_outer(config: Config, inner: Config, name: str) -> None:
    """Raises if a rope key beside the text model's config is not in it as well."""
    for key in (*_ROPE_NAMES, *THETA_KEYS):
        outer = config.get(key)
        if outer is not None and inner.get(key) != outer:
            raise ValueError(
                f"{key} must stand in {name}, which is what is read, got {show(outer)} "
                f"beside it"
            )


def agreed(found: Mapping[str, Any], what: str) -> Any:
    """The one value among spellings of the same thing; None where none is given."""
    given = {key: value for key, value in found.items() if value is not None}
    values = list(given.values())
    for name, value in given.items():
        if not isinstance(value, str | Real | list | tuple | Mapping):
            raise TypeError(f"{what} must be a plain value, got {show(value)} ({name})")
    # NaN differs from itself; what it is for refuses it by name.
    if any(value != values[0] and value == value for value in values):
        raise ValueError(
            f"config.json gives {what} twice, and differently: {show(given)}"
        )
    return values[0] if values else None


def optional(config: Config, keys: tuple[str, ...]) -> Any:
    """The value of a key or of its aliases, None where it is absent."""
    return agreed({key: config.get(key) for key in keys}, keys[0])


def required(config: Config, keys: tuple[str, ...]) -> Any:
    """The value of a key or of its aliases."""
    value = optional(config, keys)
    if value is None:
        raise ValueError(
            f"config.json must have {keys[0]!r}, got keys "
            f"{show(sorted(map(str, config)))}"
        )
    return value


def _has_rope(config: Config, model: ModelType) -> bool:
    """Whether the model has rotary embedding, as far as one switch says."""
    if model.rope_switch is None:
        return model.has_rope
    key, value = model.rope_switch
    return config.get(key, model.switch_default) == value


def layer_types_of(config: Config) -> list[str] | None:
    """The types of all layers, where the config names them."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple) or not all(
        isinstance(kind, str) for kind in types
    ):
        raise TypeError(f"layer_types must be a list of strings, got {show(types)}")
    return list(types)


def is_null(config: Config, key: str | None) -> bool:
    """Whether a key is there and null, which is not the same as absent."""
    return key is not None and key in config and config[key] is None


def rope_dict(
    config: Config, model: ModelType, layer_type: str | None
) -> dict[str, Any] | None:
    """The rope dict of these layers, its base filled in; None where they have none."""
    if not _has_rope(config, model):
        return None
    outer = _outer_rope(config)
    rules = layer_rules(config, model)
    name = model.layer_aliases.get(layer_type or "", layer_type)
    if is_nested(config):
        entry = _nested(outer, layer_type, name)
        if entry is None:
            return None
        return _with_theta(config, model, rules.get(name or "", LayerRule()), entry)
    rule = _rule(config, rules, layer_type, name)
    if not rule.has_rope and not is_null(config, rule.rope_if_null):
        return None
    kept = outer if rule.scaled else {"rope_theta": outer.get("rope_theta")}
    return _with_theta(config, model, rule, kept)


def _outer_rope(config: Config) -> Config:
    """The rope dict as it stands in the config, under either name."""
    for key in _ROPE_NAMES:
        outer = config.get(key)
        if outer is not None and not isinstance(outer, Mapping):
            raise TypeError(f"{key} must be a mapping, got {show(outer)}")
    outer = agreed(
        {key: config.get(key) or None for key in _ROPE_NAMES}, "rope_parameters"
    )
    return {} if outer is None else outer


def is_nested(config: Config) -> bool:
    """Whether the rope dict has an entry a layer type."""
    entries = list(_outer_rope(config).values())
    return any(isinstance(entry, Mapping) for entry in entries) and all(
        entry is None or isinstance(entry, Mapping) for entry in entries
    )


def layer_rules(config: Config, model: ModelType) -> Mapping[str, LayerRule]:
    """The model type's rules, or those that its keys speak of."""
    if model.layer_rules:
        return model.layer_rules
    if config.get("rope_local_base_freq") is not None:
        return LOCAL_BASE
    if config.get("global_rope_theta") is not None:
        return GLOBAL_AND_LOCAL_BASE
    return {}


def _nested(outer: Config, layer_type: str | None, name: str | None) -> Any:
    for key in (layer_type, name):
        if key is not None and key in outer:
            return outer[key]
    raise ValueError(
        f"layer_type must be one of {show(sorted(map(str, outer)))}, since this "
        f"model's layers differ, got {show(layer_type)}; layers_from_hf reads them all"
    )


def _rule(
    config: Config,
    rules: Mapping[str, LayerRule],
    layer_type: str | None,
    name: str | None,
) -> LayerRule:
    """The rule of a layer type where the rope dict is flat."""
    rotating = [rule for rule in rules.values() if rule.has_rope]
    if layer_type is None and all(rule == rotating[0] for rule in rotating):
        return rotating[0] if rotating else LayerRule()
    if name is not None and name in rules:
        return rules[name]
    # What a model whose layers are all alike calls them.
    alike = layer_types_of(config) or ["full_attention"]
    if not rules and layer_type in alike:
        return LayerRule()
    if rules:
        raise ValueError(
            f"layer_type must be one of {sorted(rules)}, since this model's layers "
            f"differ, got {show(layer_type)}; layers_from_hf reads them all"
        )
    raise ValueError(
        f"layer_type must be None, since this model's layers do not differ, got "
        f"{show(layer_type)}"
    )


def _with_theta(
    config: Config, model: ModelType, rule: LayerRule, rope: Config
) -> dict[str, Any]:
    """The rope dict with its base, and what the model's code fixes, filled in."""
    outer = optional(config, THETA_KEYS)
    given = {"the rope dict": rope.get("rope_theta")}
    given |= {key: config.get(key) for key in rule.theta_keys}
    if not model.layer_rules and not rule.theta_keys and not is_nested(config):
        given["the top level"] = outer
    defaults = (rule.theta, outer) if rule.theta_keys else (outer, rule.theta)
    by_type = model.rope_theta if config.get("model_type") is not None else None
    candidates = (agreed(given, "rope_theta"), *defaults, by_type)
    theta = next((value for value in candidates if value is not None), None)
    if theta is None:
        raise ValueError(
            "config.json must have 'rope_theta', at its top level or in the rope dict"
        )
    check_number("rope_theta", theta)
    return {**rope, **rule.overrides, "rope_theta": float(theta)}
