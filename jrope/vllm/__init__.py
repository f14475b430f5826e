"""vLLM's calling forms: its names, arguments and results, over jrope.

The position builders need numpy and numba; `get_rope` and the two operations import jax
when they are first used, so that a host process never loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jrope.vllm._positions import (
    get_input_positions,
    get_input_positions_tensor,
    get_next_input_positions,
    get_next_input_positions_tensor,
)

if TYPE_CHECKING:
    from jrope.vllm._rope import (
        ServingRotaryEmbedding,
        batched_rotary_embedding,
        get_rope,
        rotary_embedding,
    )

_DEVICE_HALF = (
    "ServingRotaryEmbedding",
    "batched_rotary_embedding",
    "get_rope",
    "rotary_embedding",
)

__all__ = [
    "ServingRotaryEmbedding",
    "batched_rotary_embedding",
    "get_input_positions",
    "get_input_positions_tensor",
    "get_next_input_positions",
    "get_next_input_positions_tensor",
    "get_rope",
    "rotary_embedding",
]


def __getattr__(name: str) -> Any:
    """Imports the device half at the first use of one of its names."""
    if name not in _DEVICE_HALF:
        raise AttributeError(f"module 'jrope.vllm' has no attribute {name!r}")
    value = getattr(importlib.import_module("jrope.vllm._rope"), name)
    globals()[name] = value
    return value
