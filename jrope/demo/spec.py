"""What a model is: its sizes and rotations, as a GGUF file's metadata has them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jrope import RopeConfig, mrope_axes

LayerType = Literal["full_attention", "sliding_attention"]
# The names that GGUF files have for Llama, Gemma 3, Qwen2-VL and Qwen3-VL.
Architecture = Literal["llama", "gemma3", "qwen2vl", "qwen3vl"]

_GEMMA_LOCAL_THETA = 1e4  # not in the file; Gemma 3 report, arXiv:2503.19786, section 2
_GEMMA_PERIOD = 6  # every sixth layer attends to everything; same section


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and constants of a model.

    Attributes:
      mrope_section: frequencies of time, height and width, for M-RoPE: chunked in
        Qwen2-VL, interleaved in Qwen3-VL. None for one-dimensional positions.
      deepstack_layers: after how many of the first layers a picture's further features
        are added (Qwen3-VL).
    """

    architecture: Architecture
    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    norm_eps: float
    context: int
    theta: float
    window: int | None
    mrope_section: tuple[int, int, int] | None = None
    deepstack_layers: int = 0

    @property
    def is_gemma(self) -> bool:
        """Whether the four differences of Gemma 3 apply."""
        return self.architecture == "gemma3"

    @property
    def is_neox_style(self) -> bool:
        """Whether features i and i + H/2 turn together.

        GGUF stores the query and key rows of Llama permuted to GPT-J's pairs.
        """
        return self.architecture != "llama"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether query, key and value have a bias."""
        return self.architecture == "qwen2vl"

    @property
    def has_query_key_norm(self) -> bool:
        """Whether each head's query and key are normalised before they turn."""
        return self.architecture in ("gemma3", "qwen3vl")

    @property
    def takes_media(self) -> bool:
        """Whether images and videos may be in a prompt; positions then have axes."""
        return self.mrope_section is not None

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The types that occur."""
        return tuple(self.rope_configs())

    def layer_type(self, layer: int) -> LayerType:
        """How far layer `layer` looks back."""
        if self.is_gemma and (layer + 1) % _GEMMA_PERIOD:
            return "sliding_attention"
        return "full_attention"

    def rope_configs(self) -> dict[LayerType, RopeConfig]:
        """The rotation of each layer type: one config, so one table, a type."""
        full = RopeConfig(
            head_dim=self.head_dim,
            rope_theta=self.theta,
            max_position_embeddings=self.context,
            is_neox_style=self.is_neox_style,
            axis_of_frequency=self._axis_of_frequency(),
        )
        if not self.is_gemma:
            return {"full_attention": full}
        local = dataclasses.replace(full, rope_theta=_GEMMA_LOCAL_THETA)
        return {"full_attention": full, "sliding_attention": local}

    def _axis_of_frequency(self) -> tuple[int, ...] | None:
        if self.mrope_section is None:
            return None
        return mrope_axes(
            self.mrope_section,
            rotary_dim=self.head_dim,
            order="interleaved" if self.architecture == "qwen3vl" else "chunked",
        )


def read_spec(metadata: Mapping[str, Any]) -> ModelSpec:
    """Reads a model's sizes.

    Raises:
      ValueError: if the architecture is not one of the two.
    """
    architecture = metadata["general.architecture"]
    if architecture not in ("llama", "gemma3"):
        raise ValueError(
            f"general.architecture must be 'llama' or 'gemma3', got {architecture!r}"
        )

    def get(key: str) -> Any:
        return metadata[f"{architecture}.{key}"]

    width, heads = get("embedding_length"), get("attention.head_count")
    is_gemma = architecture == "gemma3"
    return ModelSpec(
        architecture=architecture,
        layers=get("block_count"),
        width=width,
        heads=heads,
        key_heads=get("attention.head_count_kv"),
        head_dim=get("attention.key_length") if is_gemma else width // heads,
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        context=get("context_length"),
        theta=get("rope.freq_base"),
        window=get("attention.sliding_window") if is_gemma else None,
    )
