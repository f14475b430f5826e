"""The registry of RoPE scalings, a frozen dataclass a rope_type: see README.md.

The config reader makes them; for configs made by hand, they are here.
"""

from jrope.scalings._base import (
    TWO_PI,
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    config_keys,
)
from jrope.scalings.axial import Axial
from jrope.scalings.default import Default
from jrope.scalings.dynamic import Dynamic
from jrope.scalings.linear import Linear
from jrope.scalings.llama3 import Llama3
from jrope.scalings.longrope import LongRope
from jrope.scalings.ntk import Ntk
from jrope.scalings.proportional import Proportional
from jrope.scalings.yarn import DeepseekYarn, Telechat, Yarn

# The config reader, its errors and the tests follow from this table: see README.md.
SCALINGS: dict[str, type[Scaling]] = {
    scaling.rope_type: scaling
    for scaling in (
        Default,
        Linear,
        Ntk,
        Dynamic,
        Yarn,
        DeepseekYarn,
        Telechat,
        Llama3,
        LongRope,
        Proportional,
    )
}

__all__ = [
    "SCALINGS",
    "TWO_PI",
    "Axial",
    "Default",
    "DeepseekYarn",
    "Dynamic",
    "Frequencies",
    "Geometry",
    "Linear",
    "Llama3",
    "LongRope",
    "Ntk",
    "Proportional",
    "Scaling",
    "Telechat",
    "Yarn",
    "check_number",
    "config_keys",
]
