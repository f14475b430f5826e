"""Axial RoPE: the frequencies of a two-dimensional grid, as vision encoders have it."""

import dataclasses
from typing import Literal, get_args

import numpy as np

from jrope._show import show
from jrope.scalings._base import (
    Frequencies,
    Geometry,
    Scaling,
    choice,
    geometric_inv_freq,
)

AxialOrder = Literal["shared", "dealt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axial(Scaling):
    """The first half of the frequencies for one position axis, the second for another.

    Not in `SCALINGS`: no language model has it, and no config.json says which order is
    meant. `jrope.vision_config_from_hf` knows that by model type.

    Args:
      order: "shared": both axes have the series over R/2 features (Qwen2-VL and its
        kin, Llama 4). "dealt": one series over R features is dealt out in turn, so that
        the axes have no frequency in common (Pixtral).

    Source: transformers 5.24.0, `compute_axial_rope_parameters` of each model and
    `Llama4VisionRotaryEmbedding`.

    Raises:
      ValueError: if the order is unknown, or the width is no multiple of 4.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=Axial(), axis_of_frequency=(0, 0, 1, 1))
    >>> config.frequencies.inv_freq.astype(float).tolist()
    [1.0, 0.01, 1.0, 0.01]
    """

    order: AxialOrder = choice("shared")

    rope_type = "axial"

    def __post_init__(self) -> None:
        """Checks that the order is known."""
        if self.order not in get_args(AxialOrder):
            raise ValueError(
                f"order must be one of {get_args(AxialOrder)}, got {show(self.order)}"
            )

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The series of axis 0, then that of axis 1."""
        rotary_dim = geometry.rotary_dim
        if rotary_dim % 4:
            raise ValueError(
                f"rotary_dim must be a multiple of 4 for two position axes, got "
                f"{rotary_dim}"
            )
        if self.order == "shared":
            series = geometric_inv_freq(geometry.rope_theta, rotary_dim // 2)
            return Frequencies(inv_freq=np.tile(series, 2))
        series = geometry.series()
        return Frequencies(inv_freq=np.concatenate([series[0::2], series[1::2]]))
