"""Linear scaling: positions divided by a factor."""

import dataclasses

from jrope.scalings._base import Frequencies, Geometry, Scaling, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Positions interpolated by `factor`, as frequencies divided by it.

    Source: Chen et al. 2023, arXiv:2306.15595; Hugging Face's
    `_compute_linear_scaling_rope_parameters`.

    Args:
      factor: how many times longer the context becomes.

    Raises:
      TypeError, ValueError: if the factor is no positive number.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=Linear(factor=4.0))
    >>> config.frequencies.inv_freq.astype(float).tolist()
    [0.25, 0.0025]
    """

    factor: float

    rope_type = "linear"
    examples = {
        "Gemma-3-4B (global layers)": {
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    }

    def __post_init__(self) -> None:
        """Checks the factor."""
        check_number("linear scaling's factor", self.factor)

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The unscaled series divided by `factor`."""
        return Frequencies(inv_freq=geometry.series() / self.factor)
