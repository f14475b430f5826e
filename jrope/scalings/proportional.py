"""Proportional RoPE: the exponent over the whole head, a tail that does not turn."""

import dataclasses

import numpy as np

from jrope.scalings._base import (
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    geometric_inv_freq,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    """The first frequencies of the whole head's series, then zeros.

    Not to be confused with partial rotation: pairs span the whole head, (i, i + H/2),
    and the exponent is -2i / H; but only the first `partial_rotary_factor * H / 2`
    pairs turn.

    Source: Gemma 4; Hugging Face's `_compute_proportional_rope_parameters`.

    Args:
      partial_rotary_factor: the share of pairs that turn, in (0, 1].
      factor: what all frequencies are divided by.

    Raises:
      TypeError, ValueError: if the share is not in (0, 1], or the rotation is partial.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=Proportional(partial_rotary_factor=0.5))
    >>> config.frequencies.inv_freq.astype(float).round(5).tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    rope_type = "proportional"
    rotates_whole_head = True
    examples = {
        "Gemma-4 (global layers)": {
            "head_dim": 512,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
            },
        },
    }

    def __post_init__(self) -> None:
        """Checks the share and the factor."""
        check_number("partial_rotary_factor", self.partial_rotary_factor)
        check_number("proportional scaling's factor", self.factor)
        if self.partial_rotary_factor > 1:
            raise ValueError(
                f"partial_rotary_factor must be at most 1, got "
                f"{self.partial_rotary_factor}"
            )

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The series, cut off."""
        head_dim = geometry.head_dim
        if geometry.rotary_dim != head_dim:
            raise ValueError(
                f"rotary_dim must be head_dim = {head_dim} under proportional scaling, "
                f"whose pairs span the whole head, got {geometry.rotary_dim}"
            )
        turning = int(self.partial_rotary_factor * head_dim // 2)
        inv_freq = geometric_inv_freq(geometry.rope_theta, head_dim) / self.factor
        inv_freq[turning:] = np.longdouble(0)
        return Frequencies(inv_freq=inv_freq)
