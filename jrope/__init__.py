"""jrope: rotary position embeddings for JAX.

Names of the host half are imported at once and need only numpy; names of the device
half import jax when they are first used, so that a host process never loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jrope._config import RopeConfig
from jrope._hf import config_from_hf
from jrope._layout import RotaryLayout
from jrope._scaling import SCALINGS, Default, Linear, Llama3, Scaling
from jrope._tables import compute_cos_sin_cache
from jrope._version import __version__

if TYPE_CHECKING:
    from jrope._ops import apply_rope, rotate
    from jrope._rotate import lookup, rotate_one

_DEVICE_HALF = {
    "apply_rope": "jrope._ops",
    "lookup": "jrope._rotate",
    "rotate": "jrope._ops",
    "rotate_one": "jrope._rotate",
}

__all__ = [
    "SCALINGS",
    "Default",
    "Linear",
    "Llama3",
    "RopeConfig",
    "RotaryLayout",
    "Scaling",
    "__version__",
    "apply_rope",
    "compute_cos_sin_cache",
    "config_from_hf",
    "lookup",
    "rotate",
    "rotate_one",
]


def __getattr__(name: str) -> Any:
    """Imports the device half at the first use of one of its names."""
    if name not in _DEVICE_HALF:
        raise AttributeError(f"module 'jrope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_DEVICE_HALF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Every public name, those not yet imported included."""
    return sorted(set(globals()) | set(__all__))
