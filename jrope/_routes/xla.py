"""The XLA route: plain JAX, for every platform and every case."""

import dataclasses

from jaxtyping import Array

from jrope._rotate import rotate_one
from jrope._routes._route import Rotation


@dataclasses.dataclass(frozen=True)
class XlaRoute:
    """Runs the rotation as plain JAX."""

    name: str = "xla"

    def declines(self, rotation: Rotation) -> str | None:
        """Never declines."""
        del rotation
        return None

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """The definition, for each operand."""
        return tuple(
            rotate_one(
                x,
                cos,
                sin,
                is_neox_style=rotation.is_neox_style,
                rotary_offset=rotation.rotary_offset,
            )
            for x in xs
        )


XLA = XlaRoute()
