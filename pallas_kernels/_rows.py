"""The row of cosines and sines by which a token's pairs turn."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels._heads import Box
from pallas_kernels._memory import load

OutOfRange = Literal["nan", "clip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenRow:
    """Row `index` of cos and sin, [rows, R/2] each."""

    cos: Any
    sin: Any
    index: Any

    def fetch(self, box: Box) -> tuple[Array, Array]:
        """The cosines and sines of a box's pairs."""
        return (
            _row(self.cos, self.index, box, what="cos"),
            _row(self.sin, self.index, box, what="sin"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """Row `position` of a table [P, R], cosines in its first half.

    Args:
      table: float32 [P, R].
      position: int32; negative ones read row 0.
      out_of_range: what a position of P or more reads.
    """

    table: Any
    position: Array
    out_of_range: OutOfRange

    def fetch(self, box: Box) -> tuple[Array, Array]:
        """The cosines and sines of a box's pairs."""
        rows, width = self.table.shape
        index = jnp.clip(self.position, jnp.int32(0), jnp.int32(rows - 1))
        cos = _row(self.table, index, box, what="cos")
        sin = _row(self.table, index, box, what="sin", start=width // 2)
        if self.out_of_range == "clip":
            return cos, sin
        # Added, not selected: a scalar is selected once, not for every feature.
        nan = jnp.where(self.position < rows, jnp.float32(0), jnp.float32(jnp.nan))
        return cos + nan, sin + nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftRow:
    """The rotation by a signed number of positions, with amplitude 1.

    Args:
      table: float32 [P, R].
      shift: int32; NaN where its magnitude is P or more.
    """

    table: Any
    shift: Array

    def fetch(self, box: Box) -> tuple[Array, Array]:
        """The cosines and sines of a box's pairs."""
        # -2^31 has no positive counterpart.
        distance = jnp.abs(jnp.maximum(self.shift, jnp.int32(-(2**31) + 1)))
        row = TableRow(table=self.table, position=distance, out_of_range="nan")
        cos, sin = row.fetch(box)
        amplitude = lax.sqrt(cos * cos + sin * sin)
        direction = jnp.where(self.shift < 0, jnp.float32(-1), jnp.float32(1))
        return cos / amplitude, direction * (sin / amplitude)


Row = GivenRow | TableRow | ShiftRow


def _row(ref: Any, index: Any, box: Box, *, what: str, start: int = 0) -> Array:
    assert box.pair is not None
    return load(
        ref.at[index, pl.ds(start + box.pair, box.spread.columns)],
        box.spread,
        axes=(0, 2) if box.spread.paired else (0,),
        what=what,
        start=box.pair,
    )
