"""No scaling: the geometric series of the RoPE paper."""

import dataclasses

from jrope.scalings._base import Frequencies, Geometry, Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Default(Scaling):
    """Unscaled frequencies, `theta ** (-2i / R)`.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.3.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=64)
    >>> config.frequencies.inv_freq.astype(float).tolist()
    [1.0, 0.01]
    """

    rope_type = "default"
    examples = {
        "Llama-3-8B": {
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_scaling": None,
        },
        "SmolLM2-135M": {
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
        },
    }

    def trained_length(self, max_position_embeddings: int) -> int:
        """The config's own length."""
        return max_position_embeddings

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The unscaled series."""
        return Frequencies(inv_freq=geometry.series())
