"""Pallas kernels for NVIDIA GPUs: jax only, with no knowledge of jrope.

Modules have an underscore, so that importing one never hides the function of its name.
Names are imported when they are first used, so that a jax too old for Mosaic GPU can
import the package and ask `jax_too_old()`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pallas_kernels._support import OLDEST_JAX, jax_too_old, no_fp8

if TYPE_CHECKING:
    from pallas_kernels._finish import Norm
    from pallas_kernels._heads import Place
    from pallas_kernels._interpreted import interpreted
    from pallas_kernels._qk_norm_rope import qk_norm_rope
    from pallas_kernels._qkv_rope import qkv_rope
    from pallas_kernels._rerope_cache import rerope_cache
    from pallas_kernels._rope import rope
    from pallas_kernels._rope_append_kv import rope_append_kv
    from pallas_kernels._sharded import sharded
    from pallas_kernels._sources import GivenRows, ShiftRows, TableRows
    from pallas_kernels._traffic import Access, distinct_bytes, traffic
    from pallas_kernels._work import rewritable

_HOMES = {
    "Access": "pallas_kernels._traffic",
    "GivenRows": "pallas_kernels._sources",
    "Norm": "pallas_kernels._finish",
    "Place": "pallas_kernels._heads",
    "ShiftRows": "pallas_kernels._sources",
    "TableRows": "pallas_kernels._sources",
    "distinct_bytes": "pallas_kernels._traffic",
    "interpreted": "pallas_kernels._interpreted",
    "qk_norm_rope": "pallas_kernels._qk_norm_rope",
    "qkv_rope": "pallas_kernels._qkv_rope",
    "rerope_cache": "pallas_kernels._rerope_cache",
    "rewritable": "pallas_kernels._work",
    "rope": "pallas_kernels._rope",
    "rope_append_kv": "pallas_kernels._rope_append_kv",
    "sharded": "pallas_kernels._sharded",
    "traffic": "pallas_kernels._traffic",
}

__all__ = [
    "OLDEST_JAX",
    "Access",
    "GivenRows",
    "Norm",
    "Place",
    "ShiftRows",
    "TableRows",
    "distinct_bytes",
    "interpreted",
    "jax_too_old",
    "no_fp8",
    "qk_norm_rope",
    "qkv_rope",
    "rerope_cache",
    "rewritable",
    "rope",
    "rope_append_kv",
    "sharded",
    "traffic",
]


def __getattr__(name: str) -> Any:
    """Imports a name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
