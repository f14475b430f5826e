"""How a fused operation is told by what its tokens turn."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jrope._fractional import is_fractional
from jrope._gather import (
    OutOfRange,
    check_array,
    check_out_of_range,
    check_table,
    device_positions,
)
from jrope._kinds import FlatTable, Table, as_table, check_for_all_heads
from jrope._layout import RotaryLayout, check_layout
from jrope._rotate import lookup

Rows = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSource:
    """Where the rows come from: the last two operands of an operation.

    Args:
      layout: which features turn, and in which pairs.
      gathered: whether the operands are positions and a flat table, whose rows the
        operation itself gathers, or cos and sin.
      out_of_range: what positions past the table read.
    """

    layout: RotaryLayout
    gathered: bool
    out_of_range: OutOfRange = "nan"

    def rows(self, first: Array, second: Array) -> Rows:
        """Cosines and sines, [*B, T, R/2] each."""
        if not self.gathered:
            return first, second
        plain = dataclasses.replace(self.layout, axis_of_frequency=None)
        return lookup(second, first, layout=plain, out_of_range=self.out_of_range)

    def kernel_rows(self, first: Array, second: Array) -> Any:
        """The same, for a kernel."""
        from pallas_kernels import GivenRows, TableRows

        if not self.gathered:
            return GivenRows(cos=first, sin=second)
        return TableRows(positions=first, table=second, out_of_range=self.out_of_range)

    @property
    def place(self) -> Any:
        """The layout, as kernels take it."""
        from pallas_kernels import Place

        return Place(
            head_dim=self.layout.head_dim,
            rotary_dim=self.layout.rotary_dim,
            rotary_offset=self.layout.rotary_offset,
            is_neox_style=self.layout.is_neox_style,
        )

    def axes(self, tokens: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Names of the two operands' axes, for `Axes`."""
        return (tokens, ("p", "r")) if self.gathered else ((*tokens, "r"),) * 2

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of those that must be whole."""
        return ("p", "r") if self.gathered else ("r",)


def row_source(
    positions: ArrayLike | None,
    table: Array | Table | Rows,
    *,
    layout: RotaryLayout,
    tokens: tuple[int, ...],
    out_of_range: OutOfRange,
    is_shared: bool = True,
) -> tuple[RowSource, Rows]:
    """Checks positions and table, or rows, and gives them as operands.

    Rows of multimodal positions, of float positions and of every kind of table but the
    flat one are looked up here, once: no kernel knows any of them.

    Args:
      positions: int32 [*B, T] or [A, *B, T]; None where rows are given.
      table: what `lookup` takes, or the rows (cos, sin) that it gave.
      layout: for `lookup`.
      tokens: the axes [*B, T] of the heads.
      out_of_range: for `lookup`.
      is_shared: whether axes of length 1 are one for all, or must be the tokens' own.
    """
    check_layout(layout)
    check_out_of_range(out_of_range)
    if positions is None:
        return _given(table, layout, tokens, is_shared)
    if isinstance(table, tuple):
        raise TypeError(
            "positions must be None where the rows (cos, sin) are given: they are of "
            "positions already"
        )
    kind = as_table(table)
    check_for_all_heads(kind)
    check_table(kind.cos_sin_cache)
    is_flat = type(kind) is FlatTable and kind.cos_sin_cache.shape[1] == (
        layout.rotary_dim
    )
    if not is_flat or layout.position_axes is not None or is_fractional(positions):
        rows = lookup(kind, positions, layout=layout, out_of_range=out_of_range)
        return _given(rows, layout, tokens, is_shared)
    indices = device_positions(
        positions, rows=kind.max_position_embeddings, out_of_range=out_of_range
    )
    source = RowSource(layout=layout, gathered=True, out_of_range=out_of_range)
    places = _over(tokens, indices, 0, "positions", is_shared)
    return source, (places, kind.cos_sin_cache)


def _given(
    rows: Any, layout: RotaryLayout, tokens: tuple[int, ...], is_shared: bool
) -> tuple[RowSource, Rows]:
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise TypeError(
            f"without positions the table must be the rows (cos, sin) of jrope.lookup, "
            f"got {type(rows).__name__}"
        )
    half = layout.rotary_dim // 2
    for name, row in zip(("cos", "sin"), rows, strict=True):
        check_array(name, row)
        if row.dtype != jnp.float32 or row.shape[-1:] != (half,):
            raise ValueError(
                f"{name} must be float32 [*B, T, R/2] with R/2 = {half}, got "
                f"{row.dtype} {row.shape}"
            )
    cos, sin = (_over(tokens, row, 1, "rows", is_shared) for row in rows)
    return RowSource(layout=layout, gathered=False), (cos, sin)


def _over(
    tokens: tuple[int, ...], x: Array, rest: int, name: str, is_shared: bool
) -> Array:
    """One for every token, where an axis of length 1 was shared."""
    own = x.shape[: x.ndim - rest]
    fits = len(own) == len(tokens) and all(
        length == wanted or (is_shared and length == 1)
        for length, wanted in zip(own, tokens, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must have the axes of the tokens, {tokens}"
            f"{' (1 is shared)' * is_shared}, got {own}"
        )
    return jnp.broadcast_to(x, (*tokens, *x.shape[x.ndim - rest :]))


def tokens_in(shape: tuple[int, ...]) -> int:
    """How many tokens axes [*B, T] hold."""
    return math.prod(shape)
