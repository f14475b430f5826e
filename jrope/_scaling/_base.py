"""What a RoPE scaling is: the interface, and the series that every one starts from."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a scaling's formula starts from.

    Args:
      rope_theta: base of the geometric series of frequencies.
      rotary_dim: features rotated, R.
      head_dim: features per head, H.
      max_position_embeddings: rows of the table, P.
    """

    rope_theta: float
    rotary_dim: int
    head_dim: int
    max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frequencies:
    """What a scaling makes of a geometry.

    Args:
      inv_freq: radians per position, float64 [R/2].
      attention_factor: multiplies cos and sin.
    """

    inv_freq: np.ndarray
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(abc.ABC):
    """A RoPE scaling: a frozen dataclass whose fields are the keys of a config.json.

    A subclass's fields carry Hugging Face's names; those without a default are required
    by the config reader. The class variables are data for the reader, the errors and
    the tests.

    Attributes:
      rope_type: the value of the `rope_type` key.
      aliases: other values of that key with the same meaning.
      meaningless_keys: keys that real configs carry under this type although its
        formula has no use for them, each with the model where it was seen.
      examples: the RoPE keys of real models' config.json, by model name.
    """

    rope_type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    meaningless_keys: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @abc.abstractmethod
    def frequencies(self, geometry: Geometry) -> Frequencies:
        """Inverse frequencies and attention factor for one geometry."""


def geometric_inv_freq(rope_theta: float, dim: int) -> np.ndarray:
    """The unscaled series `theta ** (-2i / dim)`, float64 [dim/2].

    Source: Su et al. 2021, arXiv:2104.09864, section 3.3.

    >>> geometric_inv_freq(10000.0, 4).tolist()
    [1.0, 0.01]
    """
    return np.float64(rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def check_number(name: str, value: object, *, above: float = 0.0) -> None:
    """Raises unless `value` is a finite real number greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or float(value) <= above:
        raise ValueError(f"{name} must be finite and above {above:g}, got {value}")
