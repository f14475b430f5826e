"""What a model is: its sizes and rotations, read from a GGUF file's metadata."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jrope import RopeConfig

LayerType = Literal["full_attention", "sliding_attention"]

_GEMMA_LOCAL_THETA = 1e4  # not in the file; Gemma 3 report, arXiv:2503.19786, section 2
_GEMMA_PERIOD = 6  # every sixth layer attends to everything; same section


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and constants of a model, read from a GGUF file's metadata."""

    architecture: Literal["llama", "gemma3"]
    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    norm_eps: float
    context: int
    theta: float
    window: int | None

    @property
    def is_gemma(self) -> bool:
        """Whether the four differences of Gemma 3 apply."""
        return self.architecture == "gemma3"

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
            # GGUF stores the query and key rows of Llama permuted to GPT-J's pairs.
            is_neox_style=self.is_gemma,
        )
        if not self.is_gemma:
            return {"full_attention": full}
        local = dataclasses.replace(full, rope_theta=_GEMMA_LOCAL_THETA)
        return {"full_attention": full, "sliding_attention": local}


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
