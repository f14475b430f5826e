"""Head shapes and rotations of real models, shared by benchmarks and tests."""

import dataclasses

from jrope import RopeConfig, mrope_axes
from jrope.scalings import Llama3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One rotary layer of one model.

    Args:
      name: of the model, and of the layer type where it has several.
      query_heads: N.
      key_heads: K.
      config: the rotation, with the head dimension H.
      source: the config.json or paper that the figures are from.
    """

    name: str
    query_heads: int
    key_heads: int
    config: RopeConfig
    source: str

    def __post_init__(self) -> None:
        """Checks that queries come in whole groups per key head."""
        if self.query_heads % self.key_heads:
            raise ValueError(
                f"query_heads must be a multiple of key_heads, got {self.query_heads} "
                f"and {self.key_heads}"
            )


_ALL = (
    Workload(
        name="llama3-8b",
        query_heads=32,
        key_heads=8,
        config=RopeConfig(
            head_dim=128, rope_theta=500_000.0, max_position_embeddings=8192
        ),
        source="meta-llama/Meta-Llama-3-8B config.json",
    ),
    Workload(
        name="llama3.1-8b",
        query_heads=32,
        key_heads=8,
        config=RopeConfig(
            head_dim=128,
            rope_theta=500_000.0,
            max_position_embeddings=131_072,
            scaling=Llama3(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        source="meta-llama/Llama-3.1-8B config.json",
    ),
    Workload(
        name="qwen3-0.6b",
        query_heads=16,
        key_heads=8,
        config=RopeConfig(
            head_dim=128, rope_theta=1_000_000.0, max_position_embeddings=40_960
        ),
        source="Qwen/Qwen3-0.6B config.json",
    ),
    Workload(
        name="qwen3-8b",
        query_heads=32,
        key_heads=8,
        config=RopeConfig(
            head_dim=128, rope_theta=1_000_000.0, max_position_embeddings=40_960
        ),
        source="Qwen/Qwen3-8B config.json",
    ),
    Workload(
        name="gemma3-270m-local",
        query_heads=4,
        key_heads=1,
        config=RopeConfig(
            head_dim=256, rope_theta=10_000.0, max_position_embeddings=32_768
        ),
        source="google/gemma-3-270m config.json (rope_local_base_freq)",
    ),
    Workload(
        name="gemma3-270m-global",
        query_heads=4,
        key_heads=1,
        config=RopeConfig(
            head_dim=256, rope_theta=1_000_000.0, max_position_embeddings=32_768
        ),
        source="google/gemma-3-270m config.json (rope_theta)",
    ),
    Workload(
        name="gemma3-4b-local",
        query_heads=8,
        key_heads=4,
        config=RopeConfig(
            head_dim=256, rope_theta=10_000.0, max_position_embeddings=131_072
        ),
        source="google/gemma-3-4b-pt config.json (rope_local_base_freq)",
    ),
    Workload(
        name="deepseek-v3-mla",
        query_heads=128,
        key_heads=1,
        config=RopeConfig(
            head_dim=64,
            rope_theta=10_000.0,
            max_position_embeddings=4096,
            is_neox_style=False,
        ),
        source="deepseek-ai/DeepSeek-V3 config.json (qk_rope_head_dim; without YaRN)",
    ),
    Workload(
        name="phi-2",
        query_heads=32,
        key_heads=32,
        config=RopeConfig(
            head_dim=80,
            rotary_dim=32,
            rope_theta=10_000.0,
            max_position_embeddings=2048,
        ),
        source="microsoft/phi-2 config.json (partial_rotary_factor 0.4)",
    ),
    Workload(
        name="gpt-j-6b",
        query_heads=16,
        key_heads=16,
        config=RopeConfig(
            head_dim=256,
            rotary_dim=64,
            rope_theta=10_000.0,
            max_position_embeddings=2048,
            is_neox_style=False,
        ),
        source="EleutherAI/gpt-j-6b config.json",
    ),
    Workload(
        name="qwen2-vl-7b",
        query_heads=28,
        key_heads=4,
        config=RopeConfig(
            head_dim=128,
            rope_theta=1_000_000.0,
            max_position_embeddings=32_768,
            axis_of_frequency=mrope_axes((16, 24, 24), rotary_dim=128),
        ),
        source="Qwen/Qwen2-VL-7B-Instruct config.json (mrope_section 16, 24, 24)",
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
