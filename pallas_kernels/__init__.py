"""Pallas kernels for NVIDIA GPUs: jax only, with no knowledge of jrope.

Names are imported when they are first used, so that a jax too old for Mosaic GPU can
import the package and ask `jax_too_old()`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pallas_kernels._support import OLDEST_JAX, jax_too_old

if TYPE_CHECKING:
    from pallas_kernels._interpreted import interpreted
    from pallas_kernels._sharded import sharded
    from pallas_kernels._traffic import Access, traffic
    from pallas_kernels.rope import rope

_HOMES = {
    "Access": "pallas_kernels._traffic",
    "interpreted": "pallas_kernels._interpreted",
    "rope": "pallas_kernels.rope",
    "sharded": "pallas_kernels._sharded",
    "traffic": "pallas_kernels._traffic",
}

__all__ = [
    "OLDEST_JAX",
    "Access",
    "interpreted",
    "jax_too_old",
    "rope",
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
