"""The RoPE scalings, one dataclass a rope_type, for configs made by hand."""

from jrope._scaling import (
    SCALINGS,
    DeepseekYarn,
    Default,
    Dynamic,
    Frequencies,
    Geometry,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Scaling,
    Telechat,
    Yarn,
)

__all__ = [
    "SCALINGS",
    "DeepseekYarn",
    "Default",
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
]
