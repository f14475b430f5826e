"""Reads a Hugging Face config.json: the only file that knows its keys.

The way of a config: its text model's keys, then the rope dict of one layer type, then
the widths, the base and the scaling, each from one of several spellings that must
agree.
"""

from collections.abc import Mapping
from typing import Any

from jrope._config import DualChunk, Fope, RopeConfig
from jrope._hf_mrope import MROPE_KEYS, SECTION_TYPES, axes_from_rope, says_order
from jrope._hf_rope import (
    Config,
    agreed,
    as_mapping,
    is_null,
    optional,
    required,
    rope_dict,
    text_config,
)
from jrope._layout import MAX_HEAD_DIM, check_int, check_length
from jrope._model_types import MODEL_TYPES, NOT_ATTENTION, ModelType
from jrope._show import show
from jrope.scalings import SCALINGS, Scaling, check_number, config_keys

# Keys of a rope dict that the reader itself uses; all others belong to the scaling.
_READER_KEYS = frozenset(
    {
        "fope_init_factor",  # Of training alone.
        "fope_sep_head",
        "llama_4_scaling_beta",
        "num_inv_freq",
        "num_key_value_heads",
        "num_kv_heads",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "type",
        "use_fope",
    }
    | MROPE_KEYS
)
_FOPE_KEYS = (
    "fope_init_factor",
    "fope_sep_head",
    "num_inv_freq",
    "num_key_value_heads",
    "num_kv_heads",
)
_WIDTH_KEYS = ("rotary_dim", "rope_dim")
_SHARE_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_HEADS_KEYS = ("num_attention_heads", "n_head")
_HIDDEN_KEYS = ("hidden_size", "n_embd")


def config_from_hf(
    hf_config: object,
    *,
    layer_type: str | None = None,
    max_position_embeddings: int | None = None,
    is_neox_style: bool | None = None,
) -> RopeConfig | None:
    """The RoPE of a model, from its config.json.

    Reads the spellings of transformers 4 (`rope_theta` + `rope_scaling`) and 5
    (`rope_parameters`, flat or with an entry a layer type) and the older aliases. Every
    key of the rope dict is used, known to mean nothing, or refused by name. What a
    config.json leaves to the model's code comes from a table by `model_type`.

    Args:
      hf_config: the parsed config.json as a mapping, its path, or a transformers config
        object; of a multimodal model, its text model is read.
      layer_type: which layers, such as "sliding_attention", for models whose layers
        differ.
      max_position_embeddings: rows of the table, in place of the config's own length.
        Nothing else follows from it.
      is_neox_style: the pairing, in place of the model type's; required for model types
        that jrope does not know.

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
    config, model = read(hf_config, is_neox_style)
    if layer_type in NOT_ATTENTION:
        return None
    rope = rope_dict(config, model, layer_type)
    if rope is None:
        return None
    scaling = _scaling(config, rope, model)
    length = _length(config, model, max_position_embeddings)
    head_dim = _head_dim(config, model)
    rotary_dim = _rotary_dim(config, rope, model, scaling, head_dim)
    interleave = config.get("rope_interleave")
    if not isinstance(interleave, bool | None):
        raise TypeError(f"rope_interleave must be a bool, got {show(interleave)}")
    pairing = model.is_neox_style if interleave is None else not interleave
    return RopeConfig(
        head_dim=head_dim,
        rope_theta=rope["rope_theta"],
        max_position_embeddings=(
            length if max_position_embeddings is None else max_position_embeddings
        ),
        scaling=scaling.pinned(length),
        rotary_dim=rotary_dim,
        rotary_offset=head_dim - rotary_dim if model.trailing else 0,
        is_neox_style=pairing if is_neox_style is None else is_neox_style,
        axis_of_frequency=axes_from_rope(rope, model, rotary_dim),
        dual_chunk=_dual_chunk(config),
        fope=_fope(rope),
    )


def _length(config: Config, model: ModelType, rows: int | None) -> int:
    """The model's context length: the config's, its type's, or else the caller's."""
    length = optional(config, _LENGTH_KEYS)
    if length is None:
        length = model.max_position_embeddings
    if length is None:
        length = rows
    if length is None:
        length = required(config, _LENGTH_KEYS)
    check_length("max_position_embeddings", length)
    return length


def read(
    hf_config: object, is_neox_style: bool | None
) -> tuple[dict[str, Any], ModelType]:
    """The text model's keys and its row of the table."""
    outer = as_mapping(hf_config)
    config = text_config(outer)
    name = config.get("model_type")
    if name is None:
        name = _name_of_nested(outer.get("model_type"))
    if not isinstance(name, str | None):
        raise TypeError(f"model_type must be a string, got {show(name)}")
    model = MODEL_TYPES.get(name) if name is not None else None
    if model is None:
        _check_whole_head(name, config)
        if name is not None:
            _check_unknown(name, config, is_neox_style)
        model = ModelType()
    return {**model.defaults, **config}, model


def _name_of_nested(outer: object) -> object:
    """The type of a text model that is nested in another and does not say its own."""
    return next(
        (name for name in (f"{outer}_text", outer) if name in MODEL_TYPES), outer
    )


def _head_dim(config: Config, model: ModelType) -> int:
    keys = model.head_dim_keys
    if keys:
        for key in keys:
            check_int(key, required(config, (key,)), minimum=1, maximum=MAX_HEAD_DIM)
        return sum(config[key] for key in keys)
    head_dim = optional(config, ("head_dim", "attention_head_dim"))
    if head_dim is not None:
        check_int("head_dim", head_dim, minimum=2, maximum=MAX_HEAD_DIM)
        return head_dim
    if model.head_dim is not None:
        return model.head_dim
    hidden, heads = required(config, _HIDDEN_KEYS), required(config, _HEADS_KEYS)
    check_int("hidden_size", hidden, minimum=1)
    check_int("num_attention_heads", heads, minimum=1)
    if hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads where head_dim is "
            f"absent, got {show(hidden)} and {show(heads)}"
        )
    check_int("head_dim", hidden // heads, minimum=2, maximum=MAX_HEAD_DIM)
    return hidden // heads


def _rotary_dim(
    config: Config,
    rope: Config,
    model: ModelType,
    scaling: Scaling,
    head_dim: int,
) -> int:
    """R, from a width or a share, or the model type's default."""
    if scaling.rotates_whole_head:
        return head_dim
    spelled = {key: config.get(key) for key in _SHARE_KEYS}
    spelled["the rope dict"] = rope.get("partial_rotary_factor")
    share = agreed(spelled, "partial_rotary_factor")
    width = optional(config, (*_WIDTH_KEYS, *_rope_part(model)))
    if width is not None:
        check_int("rotary_dim", width, minimum=1)
    if share is None:
        if width is None and is_null(config, "rotary_dim"):
            return head_dim  # GPT-J says so.
        if width is None:
            width = model.rotary_dim
        return int(head_dim * model.partial_rotary_factor) if width is None else width
    check_number("partial_rotary_factor", share)
    if share > 1:
        raise ValueError(f"partial_rotary_factor must be at most 1, got {show(share)}")
    if width is not None and width != int(head_dim * share):
        raise ValueError(
            f"config.json gives the rotated width twice, and differently: "
            f"{show(width)} features, and partial_rotary_factor = {share} of "
            f"head_dim = {head_dim}"
        )
    return int(head_dim * share)


def _rope_part(model: ModelType) -> tuple[str, ...]:
    """The key of the rotated part of a head that has another part besides."""
    return ("qk_rope_head_dim",) if model.trailing else ()


def _scaling(config: Config, rope: Config, model: ModelType) -> Scaling:
    scaling = SCALINGS[_rope_type(rope, model)]
    keys = config_keys(scaling)
    unknown = set(rope) - set(keys) - _READER_KEYS - set(scaling.meaningless_keys)
    if unknown:
        raise ValueError(
            f"rope_type {scaling.rope_type!r} has the keys {sorted(keys)} of its own, "
            f"got unknown {show(sorted(map(str, unknown)))}; is a key misspelled, or "
            f"the rope_type wrong?"
        )
    values = {key: rope[key] for key in keys if rope.get(key) is not None}
    original = "original_max_position_embeddings"
    if original in keys and config.get(original) is not None:
        outer = {original: config[original]}
        if not model.outer_length_wins:
            agreed({"the rope dict": values.get(original), **outer}, original)
        values |= outer
    for key, is_required in keys.items():
        if is_required and key not in values:
            raise ValueError(
                f"rope_type {scaling.rope_type!r} must have the key {key!r}"
            )
    return scaling(
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values.items()
        }
    )


def _rope_type(rope: Config, model: ModelType) -> str:
    """The registry's name of the rope dict's type."""
    names = {
        alias: scaling.rope_type
        for scaling in SCALINGS.values()
        for alias in (scaling.rope_type, *scaling.aliases)
    }
    names |= {name: scaling for name, (scaling, _) in SECTION_TYPES.items()}
    spelled = {}
    for key in ("rope_type", "type"):
        name = rope.get(key)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{key} must be a string, got {show(name)}")
        if name is not None and name not in names:
            raise ValueError(f"{key} must be one of {sorted(names)}, got {show(name)}")
        spelled[key] = None if name is None else names[name]
    found = agreed(spelled, "rope_type") or "default"
    return model.rope_types.get(found, found)


def _check_whole_head(name: str | None, config: Config) -> None:
    """Raises if a config of no known type names a part of the head."""
    if config.get("qk_rope_head_dim") is not None:
        raise ValueError(
            f"qk_rope_head_dim names a part of the head that rotates, but jrope does "
            f"not know how model_type {show(name)} uses it; "
            + (
                "was model_type left out?"
                if name is None
                else "is it another type's new name? Then give that as model_type"
            )
        )


def _check_unknown(name: str, config: Config, is_neox_style: bool | None) -> None:
    """Raises unless a model type that is not in the table leaves nothing to guess."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    told = any(key in config for key in (*_SHARE_KEYS, *_WIDTH_KEYS))
    missing = []
    if is_neox_style is None:
        missing.append("the pairing (give is_neox_style)")
    if not told and "partial_rotary_factor" not in rope:
        missing.append("how much of a head rotates (add 'partial_rotary_factor')")
    if isinstance(rope, Mapping) and not says_order(rope):
        missing.append("in what order its axes lie (add 'mrope_interleaved')")
    if missing:
        raise ValueError(
            f"model_type {show(name)} is not one that jrope knows, and its config does "
            f"not say {' nor '.join(missing)}; for a vision encoder use "
            f"jrope.vision_config_from_hf"
        )


def _dual_chunk(config: Config) -> DualChunk | None:
    """Qwen2.5-1M's sizes; its other keys concern sparse attention, not positions."""
    sizes = config.get("dual_chunk_attention_config")
    if sizes is None:
        return None
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"dual_chunk_attention_config must be a mapping, got {show(sizes)}"
        )
    return DualChunk(
        chunk_size=required(sizes, ("chunk_size",)),
        local_size=required(sizes, ("local_size",)),
    )


def _fope(rope: Config) -> Fope | None:
    """FoPE's sizes; its keys stand in a rope dict of the default type."""
    given = [key for key in _FOPE_KEYS if rope.get(key) is not None]
    used = rope.get("use_fope")
    if not isinstance(used, bool | None):
        raise TypeError(f"use_fope must be a bool, got {show(used)}")
    if not used:
        if given:
            raise ValueError(f"{given[0]} must come with use_fope = true")
        return None
    separate = rope.get("fope_sep_head")
    return Fope(
        num_inv_freq=rope.get("num_inv_freq"),
        separate_heads=True if separate is None else separate,
    )
