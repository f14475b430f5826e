"""What a route is: a way to run the rotation, asked whether it takes a case."""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """One bind of the primitive, as a route sees it: types, never values.

    Args:
      platform: as the PJRT client reports it, such as "cpu" or "cuda".
      xs: shape and dtype of each operand [*B, T, N, H].
      rows: shape and dtype of cos and of sin, [*B, T, R/2]; shared axes have length 1.
      is_neox_style: the pairing.
      rotary_offset: index of the first rotated feature.
      is_multi_platform: whether the program is one for several platforms, as
        `jax.export` makes them.
      is_symbolic: whether it has dimension variables, in these shapes or in others.

    >>> one = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)
    >>> rows = jax.ShapeDtypeStruct((1, 8, 32), jnp.float32)
    >>> rotation = Rotation(platform="hpu", xs=(one, one), rows=rows,
    ...     is_neox_style=True, rotary_offset=0)
    >>> rotation.tokens, str(rotation.dtype)
    (16, 'bfloat16')
    """

    platform: str
    xs: tuple[jax.ShapeDtypeStruct, ...]
    rows: jax.ShapeDtypeStruct
    is_neox_style: bool
    rotary_offset: int
    is_multi_platform: bool = False
    is_symbolic: bool = False

    @property
    def tokens(self) -> int:
        """Tokens rotated: the product of [*B, T]."""
        return math.prod(self.xs[0].shape[:-2])

    @property
    def dtype(self) -> jnp.dtype:
        """The operands' dtype: that of the first, which is the query."""
        return self.xs[0].dtype


class Route(Protocol):
    """A way to run the rotation on some platform.

    >>> from jrope.routes import COMPOSITE
    >>> COMPOSITE.name, callable(COMPOSITE.declines), callable(COMPOSITE.run)
    ('composite', True, True)
    """

    @property
    def name(self) -> str:
        """What a user writes as `implementation=`."""
        ...

    def declines(self, rotation: Rotation) -> str | None:
        """Why this route does not take the case, or None where it does."""
        ...

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """Traces the rotation of every operand; equal to `rotate_one` of each."""
        ...
