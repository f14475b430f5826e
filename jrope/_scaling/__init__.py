"""The registry of RoPE scalings: one file and one frozen dataclass a rope_type."""

from jrope._scaling._base import Frequencies, Geometry, Scaling, check_number
from jrope._scaling.default import Default
from jrope._scaling.linear import Linear
from jrope._scaling.llama3 import Llama3

# The config reader, its errors and the tests follow from this table: see README.md.
SCALINGS: dict[str, type[Scaling]] = {
    scaling.rope_type: scaling for scaling in (Default, Linear, Llama3)
}

__all__ = [
    "SCALINGS",
    "Default",
    "Frequencies",
    "Geometry",
    "Linear",
    "Llama3",
    "Scaling",
    "check_number",
]
