"""What a model's config.json leaves to its code: one table, by model_type.

Source of every row: the configuration and modeling files of transformers 5.24.0
(pairing from the rotary function, widths and bases from the defaults), but where a row
says otherwise.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrope._axes import AxisOrder

# Layers without queries and keys (Qwen3-Next, LFM2, Granite 4, ...).
NOT_ATTENTION = frozenset({"conv", "linear_attention", "mamba", "recurrent"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRule:
    """How the layers of one type read a flat rope dict.

    Args:
      theta_keys: top-level keys for the base, first found first; then `rope_theta`.
      theta: the base where no key gives one.
      scaled: whether the rope dict's scaling applies.
      overrides: rope keys that the model's code fixes.
      has_rope: whether these layers have rotary embedding at all.
      rope_if_null: a top-level key that gives them one after all where it is null.
    """

    theta_keys: tuple[str, ...] = ()
    theta: float | None = None
    scaled: bool = True
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_rope: bool = True
    rope_if_null: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """Which layers are "full_attention" where no `layer_types` says so.

    Layer i is when `(i + phase) % period == 0`; the others are "sliding_attention".

    Args:
      key: the top-level key of the period.
      period: the period where that key is absent.
      phase: see above.
    """

    key: str
    period: int
    phase: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """The defaults of one model_type.

    Args:
      is_neox_style: the pairing; a config's `rope_interleave` wins.
      partial_rotary_factor: the share of the head that turns.
      rotary_dim: the width that turns, where the code fixes a number of features.
      rope_theta: the base.
      head_dim: the head's width; None for hidden_size / num_attention_heads.
      max_position_embeddings: the context length, in positions.
      head_dim_keys: keys whose values add up to the head's width.
      trailing: whether the last features turn, not the first.
      rope_types: names of rope types that the model's code understands otherwise.
      layer_rules: by layer type, for models whose layers differ.
      layer_aliases: layer types that follow the rule of another name.
      layer_pattern: which layers are of which type, where no `layer_types` says so.
      no_rope_interval: every so many layers one has no rotary embedding.
      outer_length_wins: whether the top level's original length beats the rope dict's.
      rope_switch: (key, value): rotary embedding only where the top-level key has the
        value; a key that is absent has `switch_default`.
      switch_default: see above.
      has_rope: whether the model has rotary embedding at all.
      mrope_section: frequencies per position axis where the rope dict has none; None
        for one-dimensional positions.
      mrope_order: how the code lays the axes out, whatever the rope dict says.
      defaults: top-level keys of a config that has none of them.
    """

    is_neox_style: bool = True
    partial_rotary_factor: float = 1.0
    rotary_dim: int | None = None
    rope_theta: float = 10000.0
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    head_dim_keys: tuple[str, ...] = ()
    trailing: bool = False
    rope_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_rules: Mapping[str, LayerRule] = dataclasses.field(default_factory=dict)
    layer_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_pattern: LayerPattern | None = None
    no_rope_interval: int | None = None
    outer_length_wins: bool = False
    rope_switch: tuple[str, Any] | None = None
    switch_default: Any = None
    has_rope: bool = True
    mrope_section: tuple[int, ...] | None = None
    mrope_order: AxisOrder | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# Sliding layers with a base of their own, never scaled: Gemma 3.
LOCAL_BASE = {
    "sliding_attention": LayerRule(
        theta_keys=("rope_local_base_freq",), theta=10000.0, scaled=False
    ),
    "full_attention": LayerRule(theta=1000000.0),
}
# Two bases by name: ModernBERT.
GLOBAL_AND_LOCAL_BASE = {
    "sliding_attention": LayerRule(theta_keys=("local_rope_theta",), theta=10000.0),
    "full_attention": LayerRule(theta_keys=("global_rope_theta",), theta=160000.0),
}
# Rotary embedding in the sliding layers alone: Cohere 2, EXAONE 4.
SLIDING_ONLY = {
    "sliding_attention": LayerRule(),
    "full_attention": LayerRule(has_rope=False),
}
_HYBRID_SLIDING_ONLY = {
    "sliding_attention": LayerRule(),
    # EXAONE-4.0-1.2B has no sliding window, and every layer rotates.
    "full_attention": LayerRule(has_rope=False, rope_if_null="sliding_window"),
}

_DEEPSEEK = ModelType(
    is_neox_style=False,
    head_dim_keys=("qk_rope_head_dim",),
    rope_types={"yarn": "deepseek_yarn"},
)
_GEMMA3 = ModelType(
    layer_rules=LOCAL_BASE,
    layer_pattern=LayerPattern(key="sliding_window_pattern", period=6),
)
_GLM = ModelType(is_neox_style=False, partial_rotary_factor=0.5)
_GLM4V = dataclasses.replace(_GLM, mrope_section=(8, 12, 12), mrope_order="chunked")
_GPTJ = ModelType(is_neox_style=False, rotary_dim=64)
_HALF = ModelType(partial_rotary_factor=0.5)
_QUARTER = ModelType(partial_rotary_factor=0.25)
_QWEN35 = dataclasses.replace(
    _QUARTER, mrope_section=(11, 11, 10), mrope_order="interleaved"
)
_PHI3 = ModelType(outer_length_wins=True)


def _plain(rope_theta: float, *model_types: str) -> dict[str, ModelType]:
    """Rows of models that turn the whole head in NeoX pairs."""
    return dict.fromkeys(model_types, ModelType(rope_theta=rope_theta))


def _chunked(rope_theta: float, *model_types: str) -> dict[str, ModelType]:
    """Rows of the Qwen2-VL kind."""
    model = ModelType(
        rope_theta=rope_theta, mrope_section=(16, 24, 24), mrope_order="chunked"
    )
    return dict.fromkeys(model_types, model)


def _interleaved(rope_theta: float, *model_types: str) -> dict[str, ModelType]:
    """Rows of the Qwen3-VL kind."""
    model = ModelType(
        rope_theta=rope_theta, mrope_section=(24, 20, 20), mrope_order="interleaved"
    )
    return dict.fromkeys(model_types, model)


_ROWS: dict[str, ModelType] = {
    **_plain(
        10000.0,
        *("afmoe", "arcee", "aria_text", "chameleon", "dbrx", "deepseek_ocr2_text"),
        *("diffllama", "doge", "dots1", "eurobert", "falcon_h1"),
        *("gemma", "gemma2", "granite", "granitemoe"),
        *("granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax"),
        *("idefics", "jais2", "jetmoe", "llama", "ministral"),
        *("mistral", "moshi", "nanochat", "olmo", "olmo2"),
        *("olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
        *("starcoder2", "vaultgemma"),
    ),
    **_plain(150000.0, "gpt_oss"),
    **_plain(500000.0, "bitnet", "csm", "flex_olmo", "mllama_text_model"),
    **_chunked(500000.0, "paddleocr_vl_text"),
    **_interleaved(500000.0, "qwen3_vl_text", "qwen3_vl_moe_text"),
    **_plain(1000000.0, "emu3_text_model", "lfm2", "lfm2_moe", "minimax", "mixtral"),
    **_chunked(1000000.0, "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl"),
    **_chunked(1000000.0, "qwen2_5_vl_text", "qwen2_5_omni_text"),
    **_interleaved(1000000.0, "qwen3_omni_moe_talker_text", "qwen3_omni_moe_text"),
    **_interleaved(100000000.0, "cosmos3_edge_text"),
    # Not in transformers; vLLM 0.33 (keye.py, keye_vl1_5.py), Qwen3 inside.
    **_chunked(1000000.0, "Keye", "KeyeVL1_5"),
    **_plain(1000000.0, "ministral3", "phimoe", "solar_open"),
    # Not in transformers; pairing from its published modeling file.
    **_plain(1000000.0, "internlm2"),
    **_plain(5000000.0, "minimax_m2"),
    **_plain(12000000.0, "apertus"),
    "bamba": _HALF,
    "blt": ModelType(is_neox_style=False, rope_theta=500000.0),
    "codegen": _GPTJ,
    "cohere": ModelType(is_neox_style=False, rope_theta=500000.0),
    "cohere2": ModelType(
        is_neox_style=False,
        layer_rules=SLIDING_ONLY,
        layer_pattern=LayerPattern(key="sliding_window_pattern", period=4),
    ),
    # Pairing as its published reference has it; transformers' class is contested.
    "cohere_compass_text": ModelType(
        is_neox_style=False, mrope_section=(24, 20, 20), mrope_order="interleaved"
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": ModelType(
        is_neox_style=False,
        trailing=True,
        rotary_dim=64,
        layer_rules={
            "main": LayerRule(scaled=False),
            # The reference leaves YaRN's amplitude out.
            "compress": LayerRule(
                theta_keys=("compress_rope_theta",),
                theta=160000.0,
                overrides={"attention_factor": 1.0},
            ),
        },
        layer_aliases={
            "sliding_attention": "main",
            "compressed_sparse_attention": "compress",
            "heavily_compressed_attention": "compress",
        },
    ),
    "ernie4_5": ModelType(is_neox_style=False, rope_theta=500000.0),
    "ernie4_5_moe": ModelType(is_neox_style=False, rope_theta=500000.0),
    # Baidu publishes it flat, transformers nests it.
    **dict.fromkeys(
        ("ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        ModelType(
            is_neox_style=False,
            rope_theta=500000.0,
            mrope_section=(22, 22, 20),
            mrope_order="ernie",
        ),
    ),
    "esm": ModelType(
        rope_switch=("position_embedding_type", "rotary"), switch_default="absolute"
    ),
    "exaone4": ModelType(
        layer_rules=_HYBRID_SLIDING_ONLY,
        layer_pattern=LayerPattern(key="sliding_window_pattern", period=4),
    ),
    "falcon": ModelType(rope_switch=("alibi", False), switch_default=False),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": dataclasses.replace(
        _GEMMA3, layer_pattern=LayerPattern(key="sliding_window_pattern", period=5)
    ),
    "gemma4_text": ModelType(),
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": _HALF,
    "glm4v_moe_text": dataclasses.replace(_GLM4V, is_neox_style=True),
    "glm4v_text": _GLM4V,
    "glm_image_text": dataclasses.replace(_GLM4V, is_neox_style=True),
    "glm_ocr_text": _GLM4V,
    "gpt_neox": _QUARTER,
    "gpt_neox_japanese": ModelType(),
    "gptj": _GPTJ,
    "granitemoehybrid": ModelType(rope_switch=("position_embedding_type", "rope")),
    # transformers 5 gives a pair's two features different axes, which is no rotation;
    # here as in Tencent's own code and vLLM.
    "hunyuan_vl": ModelType(),
    "hunyuan_vl_text": ModelType(),
    "hy_v4_vl_text": ModelType(
        is_neox_style=False,
        head_dim_keys=("qk_rope_head_dim",),
        mrope_section=(12, 10, 10),
        mrope_order="interleaved",
    ),
    "helium": ModelType(is_neox_style=False, rope_theta=100000.0),
    "llama4_text": ModelType(
        is_neox_style=False, rope_theta=500000.0, no_rope_interval=4
    ),
    "jamba": ModelType(has_rope=False),
    # DeepSeek-V3's code under a name of its own.
    "kimi_k2": dataclasses.replace(_DEEPSEEK, rope_theta=50000.0),
    "longcat_flash": dataclasses.replace(_DEEPSEEK, rope_theta=10000000.0),
    "minicpm3": ModelType(head_dim_keys=("qk_rope_head_dim",)),
    "mistral4": ModelType(
        is_neox_style=False,
        trailing=True,
        head_dim_keys=("qk_nope_head_dim", "qk_rope_head_dim"),
        defaults={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 1048576,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "max_position_embeddings": 1048576,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "modernbert": ModelType(
        layer_rules=GLOBAL_AND_LOCAL_BASE,
        layer_pattern=LayerPattern(key="global_attn_every_n_layers", period=3, phase=0),
    ),
    "moonshine": ModelType(is_neox_style=False, partial_rotary_factor=0.9),
    "nemotron": _HALF,
    "olmo3": ModelType(
        rope_theta=500000.0,
        layer_rules={
            "sliding_attention": LayerRule(scaled=False),
            "full_attention": LayerRule(),
        },
        layer_pattern=LayerPattern(key="sliding_window_pattern", period=4),
    ),
    # Not in transformers; its rope dict is of the type "openpangu".
    "openpangu_vl": ModelType(),
    "persimmon": _HALF,
    "phi": _HALF,
    "phi3": _PHI3,
    "phi4_multimodal": _PHI3,
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_next": _QUARTER,
    "qwen4_exp_text": _QWEN35,
    "recurrent_gemma": _HALF,
    "smollm3": ModelType(rope_theta=2000000.0, no_rope_interval=4),
    "stablelm": _QUARTER,
    "zamba2": ModelType(rope_switch=("use_mem_rope", True), switch_default=False),
}

# Widths of heads that are not hidden_size / num_attention_heads.
_HEAD_DIMS = {
    64: ("gpt_oss",),
    128: (
        *("cosmos3_edge_text", "Keye", "KeyeVL1_5"),
        *("afmoe", "ernie4_5", "glm", "glm4", "helium", "llama4_text", "minimax_m2"),
        *("ministral3", "paddleocr_vl_text", "qwen3", "qwen3_vl_text", "seed_oss"),
        "solar_open",
    ),
    256: (
        *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"),
        "vaultgemma",
    ),
    512: ("deepseek_v4",),
}

# Context lengths of configs that are published without one.
_LENGTHS = {
    2048: ("falcon", "gpt_neox", "llama", "olmo", "olmo2", "phi"),
    4096: ("deepseek_v3", "nemotron", "phi3", "stablelm", "starcoder2"),
    8192: ("cohere", "cohere2", "gemma", "gemma2", "modernbert"),
    32768: ("gemma3n_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    131072: (
        *("gemma3_text", "gemma4_text", "glm", "glm4", "gpt_oss", "llama4_text"),
        *("mistral", "mixtral"),
    ),
    1048576: ("deepseek_v4",),
}


def _with_sizes(name: str, model: ModelType) -> ModelType:
    found = {}
    for field, sizes in (
        ("head_dim", _HEAD_DIMS),
        ("max_position_embeddings", _LENGTHS),
    ):
        for size, names in sizes.items():
            if name in names:
                found[field] = size
    return dataclasses.replace(model, **found)


MODEL_TYPES = {name: _with_sizes(name, model) for name, model in _ROWS.items()}
