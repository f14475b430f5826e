"""The registry of RoPE scalings: a frozen dataclass a rope_type."""

from jrope._scaling._base import (
    TWO_PI,
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    config_keys,
)
from jrope._scaling.default import Default
from jrope._scaling.dynamic import Dynamic
from jrope._scaling.linear import Linear
from jrope._scaling.llama3 import Llama3
from jrope._scaling.longrope import LongRope
from jrope._scaling.ntk import Ntk
from jrope._scaling.proportional import Proportional
from jrope._scaling.yarn import DeepseekYarn, Telechat, Yarn

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
