"""jrope: rotary position embeddings for JAX.

A config becomes a table, once a model. A step reads the rows of its positions, once.
Every layer turns its queries and keys by them:

>>> import jax.numpy as jnp
>>> import jrope
>>> config = jrope.RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=512)
>>> table = jnp.asarray(jrope.compute_cos_sin_cache(config))
>>> cos, sin = jrope.lookup(table, jnp.arange(16), layout=config.layout)
>>> query, key = jnp.ones((16, 8, 64)), jnp.ones((16, 2, 64))  # [T, heads, H]
>>> query, key = jrope.rotate(query, key, cos, sin, layout=config.layout)

Names, in the order of that life:

- what a model's rotation is: RopeConfig, RotaryLayout, config_from_hf, layers_from_hf,
  vision_config_from_hf, mrope_axes, SCALINGS
- its table: compute_cos_sin_cache, TwoLevelTable, StackedTable, DualChunkTable,
  FopeTable
- turning heads: lookup, rotate, apply_rope, rerope, and rotate_one, the definition
- beside it: permute_pairing for weights, query_temperature for Llama 4 and Ministral

Modules, each imported by its name:

- jrope.nnx, jrope.linen: layers that hold the table
- jrope.positions: positions of prompts with images, videos and audio, on the host
- jrope.positions_jax: positions from indptr, masks and segment ids, in the graph
- jrope.fused: the rotation with its neighbours (packed qkv, norms, paged caches)
- jrope.vllm, jrope.flashinfer: the functions of these two
- jrope.adapters: MaxText, gemma, EasyDeL and others, a module each
- jrope.scalings: every rope_type, a dataclass each
- jrope.context_parallel: a sequence that is split over devices
- jrope.routes, jrope.hpu, jrope.buckets: platforms that JAX does not know
- jrope.explain: what a config.json means

Letters in shapes: B batch, T tokens, N query heads, K key heads, H features per head,
R features rotated, P rows of the table, A axes of positions. A star is any number of
axes: [*B, T]. Positions are absolute, from 0; frequencies are radians per position.

Names of the host half are imported at once and need only numpy; names of the device
half import jax when they are first used, so that a host process never loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jrope._axes import mrope_axes
from jrope._config import DualChunk, Fope, RopeConfig
from jrope._hf import config_from_hf
from jrope._hf_layers import layers_from_hf, query_temperatures_from_hf
from jrope._hf_vision import vision_config_from_hf
from jrope._layout import RotaryLayout
from jrope._pairing import permute_pairing
from jrope._tables import compute_cos_sin_cache
from jrope._temperature import QueryTemperature
from jrope._version import __version__
from jrope.scalings import SCALINGS

if TYPE_CHECKING:
    from jrope import fused
    from jrope._kinds import (
        DualChunkTable,
        FopeTable,
        StackedTable,
        TwoLevelTable,
        stack_tables,
    )
    from jrope._ops import apply_rope, rerope, rotate
    from jrope._query_temperature import query_temperature
    from jrope._rotate import lookup, rotate_one

_DEVICE_HALF = {
    "DualChunkTable": "jrope._kinds",
    "FopeTable": "jrope._kinds",
    "StackedTable": "jrope._kinds",
    "TwoLevelTable": "jrope._kinds",
    "apply_rope": "jrope._ops",
    "lookup": "jrope._rotate",
    "query_temperature": "jrope._query_temperature",
    "rerope": "jrope._ops",
    "rotate": "jrope._ops",
    "rotate_one": "jrope._rotate",
    "stack_tables": "jrope._kinds",
}

__all__ = [
    "SCALINGS",
    "DualChunk",
    "DualChunkTable",
    "Fope",
    "FopeTable",
    "QueryTemperature",
    "RopeConfig",
    "RotaryLayout",
    "StackedTable",
    "TwoLevelTable",
    "__version__",
    "apply_rope",
    "compute_cos_sin_cache",
    "config_from_hf",
    "fused",
    "layers_from_hf",
    "lookup",
    "mrope_axes",
    "permute_pairing",
    "query_temperature",
    "query_temperatures_from_hf",
    "rerope",
    "rotate",
    "rotate_one",
    "stack_tables",
    "vision_config_from_hf",
]


def __getattr__(name: str) -> Any:
    """Imports the device half at the first use of one of its names."""
    if name == "fused":
        return importlib.import_module("jrope.fused")
    if name not in _DEVICE_HALF:
        raise AttributeError(f"module 'jrope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_DEVICE_HALF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Every public name, those not yet imported included."""
    return sorted(set(globals()) | set(__all__))
