"""Fixed NTK scaling: a larger base, the same for every length."""

import dataclasses

import numpy as np

from jrope.scalings._base import (
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    check_optional_number,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ntk(Scaling):
    """A base `factor` times larger, plain or "mixed".

    Without `mixed_b` the series over the base `theta * factor` is divided by
    `factor ** (2 / R)`; with it, frequency i of the plain series is divided by
    `exp(a * (i + 1) ** mixed_b)`, where `a = ln(factor) / (R / 2) ** mixed_b`. Either
    way the lowest frequency is divided by `factor`.

    Source: vLLM's `NTKScalingRotaryEmbedding`, after Su Jianlin's
    kexue.fm/archives/9706.

    Args:
      factor: how many times longer the context becomes.
      mixed_b: exponent of the mixed rule.

    Raises:
      TypeError, ValueError: if a number is none, or not positive.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=Ntk(factor=4.0))
    >>> config.frequencies.inv_freq.astype(float).round(5).tolist()
    [0.5, 0.0025]
    """

    factor: float
    mixed_b: float | None = None

    rope_type = "ntk"
    examples = {
        "a Llama-2 derivative": {
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "ntk", "factor": 4.0},
        },
        "a Llama-2 derivative, mixed": {
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.625},
        },
    }

    def __post_init__(self) -> None:
        """Checks both numbers."""
        check_number("ntk scaling's factor", self.factor)
        check_optional_number("mixed_b", self.mixed_b)

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The series of the larger base, or the mixed one."""
        half = geometry.rotary_dim // 2
        if self.mixed_b is None:
            enlarged = geometry.series(theta_factor=self.factor)
            return Frequencies(
                inv_freq=enlarged / np.longdouble(self.factor) ** (1 / half)
            )
        steps = np.arange(1, half + 1, dtype=np.longdouble)
        growth = np.log(np.longdouble(self.factor)) * (steps / half) ** self.mixed_b
        return Frequencies(inv_freq=geometry.series() / np.exp(growth))
