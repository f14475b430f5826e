"""Dynamic NTK scaling: a base that follows the length, or one that `alpha` fixes."""

import dataclasses
from typing import Literal, Self, cast, get_args

import numpy as np

from jrope._layout import check_length
from jrope._show import show
from jrope.scalings._base import (
    Frequencies,
    Geometry,
    Scaling,
    check_optional_number,
    choice,
)

BaseRule = Literal["by_length", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(Scaling):
    """A base enlarged with the length of the sequence, or by a fixed `alpha`.

    By `factor`, for a sequence of length s past the trained length L, the base is
    multiplied by `(factor * s / L - (factor - 1)) ** (R / (R - 2))`. There are two
    rules for s, and they give different models:

    - `base_rule="by_length"` is Hugging Face's: s is the sequence's own length, and up
      to L nothing is scaled. `for_length` gives a request the scaling of its declared
      total length, so that its cached keys stay valid for its life.
    - `base_rule="constant"` is that of serving engines: `s = factor * L` for every
      request, short ones included.

    By `alpha` (HunYuan) the base is multiplied by `alpha ** (R / (R - 2))`, always.

    Source: Hugging Face's `_compute_dynamic_ntk_parameters`; vLLM's
    `DynamicNTKScalingRotaryEmbedding` and `DynamicNTKAlphaRotaryEmbedding`.

    Args:
      factor: how many times longer the context may become.
      alpha: a fixed enlargement, which wins over `factor`.
      max_trained_positions: the trained length L, in positions; by default the config's
        max_position_embeddings.
      base_rule: the user's choice of rule for `factor`.
      sequence_length: the length s of the by-length rule, in positions; None for any
        length up to L.

    Raises:
      TypeError, ValueError: if a number is none, or there is nothing to enlarge by.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=Dynamic(factor=2.0, max_trained_positions=32))
    >>> long = config.for_length(64).frequencies.inv_freq
    >>> config.longest_request, long.astype(float).round(5).tolist()
    (32, [1.0, 0.00333])
    """

    factor: float | None = None
    alpha: float | None = None
    max_trained_positions: int | None = None
    base_rule: BaseRule = choice("by_length")
    sequence_length: int | None = choice(None)

    rope_type = "dynamic"
    meaningless_keys = {
        "beta_fast": "HunYuan-Dense-V1",
        "beta_slow": "HunYuan-Dense-V1",
        "mscale": "HunYuan-Dense-V1",
        "mscale_all_dim": "HunYuan-Dense-V1",
    }
    examples = {
        "InternLM2-7B": {
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        "HunYuan-Dense-V1": {
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "dynamic",
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    }

    def __post_init__(self) -> None:
        """Checks that there is something to enlarge the base by."""
        check_optional_number("dynamic scaling's factor", self.factor)
        check_optional_number("alpha", self.alpha)
        for name in ("max_trained_positions", "sequence_length"):
            if getattr(self, name) is not None:
                check_length(name, getattr(self, name))
        if self.base_rule not in get_args(BaseRule):
            raise ValueError(
                f"base_rule must be one of {get_args(BaseRule)}, got "
                f"{show(self.base_rule)}"
            )
        if self.factor is None and self.alpha is None:
            raise ValueError(
                "rope_type 'dynamic' must have the key 'factor' or 'alpha'"
            )
        if self.factor is not None and self.factor < 1:
            raise ValueError(
                f"dynamic scaling's factor must be at least 1, got {self.factor}"
            )

    def pinned(self, max_position_embeddings: int) -> Self:
        """The trained length, where the config does not name it."""
        if self.max_trained_positions is not None or self.alpha is not None:
            return self
        return dataclasses.replace(self, max_trained_positions=max_position_embeddings)

    def for_length(self, total_length: int) -> Self:
        """The by-length rule at a request's declared total length."""
        if self.alpha is not None or self.base_rule == "constant":
            return self
        return dataclasses.replace(self, sequence_length=total_length)

    def longest_request(self, max_position_embeddings: int) -> int:
        """By length, the length in use; otherwise any."""
        if self.alpha is not None or self.base_rule == "constant":
            return max_position_embeddings
        trained = self.trained_length(max_position_embeddings)
        longest = max(self.sequence_length or trained, trained)
        return min(longest, max_position_embeddings)

    def trained_length(self, max_position_embeddings: int) -> int:
        """L, the config's own length unless it names another."""
        return self.max_trained_positions or max_position_embeddings

    def warnings(self, max_position_embeddings: int) -> list[str]:
        """That there are two rules."""
        del max_position_embeddings
        if self.alpha is not None:
            return []
        return [
            f"Hugging Face lets the base follow a sequence's length, serving engines "
            f"keep it constant: base_rule={show(self.base_rule)} is chosen"
        ]

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The series of the enlarged base."""
        dim = geometry.rotary_dim
        if dim <= 2:
            raise ValueError(
                f"rotary_dim must be above 2 under dynamic scaling, whose exponent is "
                f"R / (R - 2), got {dim}"
            )
        trained = self.trained_length(geometry.max_position_embeddings)
        power = self._enlargement(trained) ** (np.longdouble(dim) / (dim - 2))
        return Frequencies(inv_freq=geometry.series(theta_factor=power))

    def _enlargement(self, trained: int) -> np.longdouble:
        """What the base is multiplied by, before the exponent."""
        if self.alpha is not None:
            return np.longdouble(self.alpha)
        factor = np.longdouble(cast(float, self.factor))
        length = max(self.sequence_length or trained, trained)
        longer = (
            factor if self.base_rule == "constant" else np.longdouble(length) / trained
        )
        return factor * longer - (factor - 1)
