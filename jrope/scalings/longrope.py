"""LongRoPE: one list of divisors for short requests, another for long ones."""

import dataclasses
import math
from typing import Literal, Self

import numpy as np

from jrope._layout import MAX_HEAD_DIM, check_length
from jrope._show import show
from jrope.scalings._base import (
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    check_optional_amplitude,
    check_optional_number,
    choice,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(Scaling):
    """Frequency i divided by `short_factor[i]`, or by `long_factor[i]`.

    Which list is a matter of the request: its declared total length decides, once for
    its life, since cached keys were turned by the choice. A request of exactly the
    original length is short, and rows of the short table past it are NaN. `for_length`
    chooses; to serve both at once, stack the two tables (`jrope.stack_tables`).

    The attention factor is `attention_factor` where given, else
    `sqrt(1 + ln(factor) / ln(original length))`.

    Source: Ding et al. 2024, arXiv:2402.13753; Hugging Face's
    `_compute_longrope_parameters`.

    Args:
      short_factor: divisors [R/2] up to the original length.
      long_factor: divisors [R/2] past it.
      original_max_position_embeddings: context length of pre-training, in positions.
      factor: how many times longer the context becomes; None for the ratio of the
        config's max_position_embeddings to the original length.
      attention_factor: the final amplitude of cos and sin.
      short_mscale: in its place, the amplitude of the short list.
      long_mscale: likewise of the long list.
      chosen: the list in use; the user's choice, or `for_length`'s.

    Raises:
      TypeError, ValueError: if a list is no tuple of numbers, or has the wrong length.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=64,
    ...     scaling=LongRope(short_factor=(1.0, 1.0), long_factor=(1.0, 4.0),
    ...         original_max_position_embeddings=16))
    >>> long = config.for_length(17).frequencies.inv_freq
    >>> config.longest_request, long.astype(float).tolist()
    (16, [1.0, 0.0025])
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    chosen: Literal["short", "long"] = choice("short")

    rope_type = "longrope"
    aliases = ("su",)
    examples = {
        "a Phi-3 of eight features": {
            "head_dim": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.02, 1.05, 1.3],
                "long_factor": [1.08, 2.62, 15.1, 64.7],
            },
        },
    }

    def __post_init__(self) -> None:
        """Checks the lists and numbers."""
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if not isinstance(divisors, tuple):
                raise TypeError(
                    f"{name} must be a tuple of numbers, got {type(divisors).__name__}"
                )
            if len(divisors) > MAX_HEAD_DIM // 2:
                raise ValueError(
                    f"{name} must have at most {MAX_HEAD_DIM // 2} entries, one a "
                    f"pair of a head's features, got {len(divisors)}"
                )
            for i, divisor in enumerate(divisors):
                check_number(f"{name}[{i}]", divisor)
        name = "original_max_position_embeddings"
        check_length(name, self.original_max_position_embeddings, minimum=2)
        check_optional_number("factor", self.factor)
        for name in ("attention_factor", "short_mscale", "long_mscale"):
            check_optional_amplitude(name, getattr(self, name))
        if self.chosen not in ("short", "long"):
            raise ValueError(
                f"chosen must be 'short' or 'long', got {show(self.chosen)}"
            )

    def pinned(self, max_position_embeddings: int) -> Self:
        """The lengths' ratio as the factor, where the config does not name it."""
        if self.factor is not None:
            return self
        ratio = max_position_embeddings / self.original_max_position_embeddings
        return dataclasses.replace(self, factor=ratio)

    def for_length(self, total_length: int) -> Self:
        """The long list for a request longer than the original context."""
        long = total_length > self.original_max_position_embeddings
        return dataclasses.replace(self, chosen="long" if long else "short")

    def longest_request(self, max_position_embeddings: int) -> int:
        """The original length under the short list."""
        if self.chosen == "long":
            return max_position_embeddings
        return min(self.original_max_position_embeddings, max_position_embeddings)

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The series divided by the chosen list."""
        divisors = self.long_factor if self.chosen == "long" else self.short_factor
        half = geometry.rotary_dim // 2
        if len(divisors) != half:
            raise ValueError(
                f"{self.chosen}_factor must have rotary_dim // 2 = {half} entries, got "
                f"{len(divisors)}; is partial_rotary_factor missing?"
            )
        return Frequencies(
            inv_freq=geometry.series() / np.asarray(divisors, np.longdouble),
            attention_factor=self._amplitude(geometry),
        )

    def _amplitude(self, geometry: Geometry) -> float:
        own = self.long_mscale if self.chosen == "long" else self.short_mscale
        if own is not None:
            return own
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.factor or geometry.max_position_embeddings / original
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(original))
