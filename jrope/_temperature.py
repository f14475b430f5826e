"""Query temperature: a factor on queries that grows with their position."""

import dataclasses

from jrope._layout import check_length
from jrope.scalings import check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """A query at position s is multiplied by `1 + scale * ln(1 + (s + shift) // n)`.

    Llama 4 does so in the layers without rotary embedding, with a shift of 1; Ministral
    and Mistral in all layers, with none. `jrope.query_temperature` computes the factor.

    Source: transformers 5.24, `modeling_llama4.py` (`attn_scale`, `floor_scale`) and
    `modeling_ministral3.py` (`llama_4_scaling_beta`).

    Args:
      scale: strength of the growth.
      length: n, in positions: the factor is 1 below it.
      shift: added to the position.

    Raises:
      TypeError, ValueError: if a number is none, or not positive, or one of the two
        lengths does not fit int32.

    >>> QueryTemperature(scale=0.1, length=8192).shift
    0
    """

    scale: float
    length: int
    shift: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_number("query temperature's scale", self.scale)
        check_length("query temperature's length", self.length)
        check_length("query temperature's shift", self.shift, minimum=0)
