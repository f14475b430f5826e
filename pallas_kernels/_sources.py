"""Where a kernel's rows come from: arrays outside, a token's row inside."""

import dataclasses
import math
from typing import Any

from jaxtyping import Array, Float32, Int32

from pallas_kernels._memory import load_scalar
from pallas_kernels._rows import GivenRow, OutOfRange, Row, ShiftRow, TableRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenRows:
    """Rows that were looked up already, one a token.

    Args:
      cos: float32 [*B, T, R/2].
      sin: likewise.
    """

    cos: Float32[Array, "*B T half"]
    sin: Float32[Array, "*B T half"]

    @property
    def operands(self) -> tuple[Array, Array]:
        """As the kernel takes them, tokens flattened."""
        half = self.cos.shape[-1]
        return self.cos.reshape(-1, half), self.sin.reshape(-1, half)

    @property
    def tokens(self) -> int:
        """How many tokens have a row."""
        return math.prod(self.cos.shape[:-1])

    def row(self, refs: tuple[Any, Any], token: Any) -> Row:
        """The row of a token."""
        return GivenRow(cos=refs[0], sin=refs[1], index=token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRows:
    """Rows gathered from a table inside the kernel.

    Args:
      positions: int32 [*B, T]; negative ones are padding and read row 0.
      table: float32 [P, R], cosines in its first half.
      out_of_range: what positions of P or more read: NaN or the last row.
    """

    positions: Int32[Array, "*B T"]
    table: Float32[Array, "P R"]
    out_of_range: OutOfRange = "nan"

    @property
    def operands(self) -> tuple[Array, Array]:
        """As the kernel takes them, tokens flattened."""
        return self.positions.reshape(-1), self.table

    @property
    def tokens(self) -> int:
        """How many tokens have a row."""
        return self.positions.size

    def row(self, refs: tuple[Any, Any], token: Any) -> Row:
        """The row of a token."""
        positions, table = refs
        return TableRow(
            table=table,
            position=load_scalar(positions, token),
            out_of_range=self.out_of_range,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftRows:
    """Rows that turn by a signed number of positions, with amplitude 1.

    Args:
      shifts: int32 [S]; NaN where the magnitude is P or more.
      table: float32 [P, R].
    """

    shifts: Int32[Array, " S"]
    table: Float32[Array, "P R"]

    @property
    def operands(self) -> tuple[Array, Array]:
        """As the kernel takes them."""
        return self.shifts, self.table

    @property
    def tokens(self) -> int:
        """How many tokens have a row."""
        return self.shifts.size

    def row(self, refs: tuple[Any, Any], token: Any) -> Row:
        """The row of a token."""
        shifts, table = refs
        return ShiftRow(table=table, shift=load_scalar(shifts, token))


Rows = GivenRows | TableRows | ShiftRows


def check_tokens(rows: Rows, tokens: int) -> None:
    """Raises unless there is a row for each token."""
    if rows.tokens != tokens:
        raise ValueError(
            f"rows or positions must be one a token, {tokens}, got {rows.tokens}"
        )
