"""Llama 3.1's scaling: long wavelengths interpolated, short ones kept."""

import dataclasses

import numpy as np

from jrope._layout import check_length
from jrope.scalings._base import (
    TWO_PI,
    Frequencies,
    Geometry,
    Scaling,
    check_number,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Scaling by wavelength, in three bands.

    A frequency that turns more than `high_freq_factor` times within the original
    context is kept, one that turns fewer than `low_freq_factor` times is divided by
    `factor`, and between the two bands they are blended linearly in the number of
    turns.

    Source: Llama 3.1's reference code; Hugging Face's
    `_compute_llama3_parameters`.

    Args:
      factor: how many times longer the context becomes.
      low_freq_factor: turns below which a frequency is divided by `factor`.
      high_freq_factor: turns above which a frequency is kept.
      original_max_position_embeddings: context length of pre-training, in positions.

    Raises:
      TypeError, ValueError: if a number is none, or the bands are swapped.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=128, rope_theta=5e5,
    ...     max_position_embeddings=131072,
    ...     scaling=Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    ...         original_max_position_embeddings=8192))
    >>> plain = RopeConfig(head_dim=128, rope_theta=5e5, max_position_embeddings=131072)
    >>> slower = plain.frequencies.inv_freq / config.frequencies.inv_freq
    >>> slower[[0, 30, 63]].astype(float).round(3).tolist()
    [1.0, 1.553, 8.0]
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    rope_type = "llama3"
    examples = {
        "Llama-3.1-8B": {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        "Llama-3.2-1B": {
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    }

    def __post_init__(self) -> None:
        """Checks that the bands are in order."""
        check_number("llama3 scaling's factor", self.factor)
        check_number("low_freq_factor", self.low_freq_factor)
        check_number("high_freq_factor", self.high_freq_factor)
        check_length(
            "original_max_position_embeddings", self.original_max_position_embeddings
        )
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be at least low_freq_factor, got "
                f"{self.high_freq_factor} < {self.low_freq_factor}; are they swapped?"
            )

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The three bands, blended by turns within the original context."""
        kept = geometry.series()
        turns = self.original_max_position_embeddings * kept / TWO_PI
        band = self.high_freq_factor - self.low_freq_factor
        if band:
            share = np.clip((turns - self.low_freq_factor) / band, 0.0, 1.0)
        else:
            share = np.where(turns >= self.high_freq_factor, 1.0, 0.0)
        return Frequencies(inv_freq=(1 - share) * kept / self.factor + share * kept)
