"""How a box of features lies on the 128 threads of a block."""

import dataclasses
from typing import Any

from pallas_kernels._mosaic import TiledLayout, plgpu

THREADS = 128
_WARPS, _LANES = 4, 32
ACCESS_BYTES = 16  # The widest access to global memory.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A box [rows, columns], or [rows, columns, 2], on a warpgroup.

    Each thread holds runs of `vector` neighbouring columns of a row. Where the box has
    fewer runs than threads, lanes hold copies of each other's; they load and store at
    the same time, so a box may be rewritten in place. Warps do not keep step, and hold
    copies only where a box has fewer runs than warps.

    Args:
      rows: heads, a power of two.
      columns: features of a head, or pairs of them; a power of two.
      vector: columns in a run.
      row_lanes: lanes side by side over rows.
      column_lanes: lanes side by side over columns.
      row_warps: likewise warps.
      column_warps: likewise.
      paired: whether there is a last axis of two features.
    """

    rows: int
    columns: int
    vector: int
    row_lanes: int
    column_lanes: int
    row_warps: int
    column_warps: int
    paired: bool

    @property
    def elements(self) -> int:
        """Features in the box."""
        return self.rows * self.columns * (2 if self.paired else 1)

    @property
    def held(self) -> int:
        """Features in one thread."""
        return self.elements * self.copies // THREADS

    @property
    def held_columns(self) -> int:
        """Columns of which one thread holds features."""
        return self.columns // (self.column_lanes * self.column_warps)

    @property
    def held_rows(self) -> int:
        """Rows of which one thread holds features."""
        return self.rows // (self.row_lanes * self.row_warps)

    @property
    def warp_copies(self) -> int:
        """How many warps hold the same features."""
        return _WARPS // (self.row_warps * self.column_warps)

    @property
    def copies(self) -> int:
        """How many threads hold the same features."""
        return self.warp_copies * _LANES // (self.row_lanes * self.column_lanes)

    @property
    def layout(self) -> Any:
        """The layout for `plgpu.load`."""
        across = self.column_lanes * self.vector
        tiles = (
            (self.row_warps * self.row_lanes, self.column_warps * across),
            (self.row_lanes, across),
            (1, self.vector),
        )
        if self.paired:
            tiles = tuple((*tile, 2) for tile in tiles)
        rank = len(tiles[0])
        lane_copies = _LANES // (self.row_lanes * self.column_lanes)
        return _tiled(
            tiles,
            (-3 * rank, *_copied(self.warp_copies), 1 - 3 * rank),
            (-2 * rank, *_copied(lane_copies), 1 - 2 * rank),
        )


def spread(
    rows: int,
    columns: int,
    *,
    alignment: int,
    itemsize: int,
    paired: bool = False,
    column_lanes: int | None = None,
) -> Spread:
    """Spreads a box over all threads, in runs as wide as they then can be.

    Args:
      rows: a power of two.
      columns: a power of two.
      alignment: every run must start at a multiple of so many columns.
      itemsize: bytes of a column.
      paired: whether a column is a pair, whose two features lie side by side.
      column_lanes: lanes over the columns, where several boxes must agree on which
        thread holds which head; by default as many as there are runs.
    """
    vector = min(ACCESS_BYTES // itemsize, alignment, columns)
    vector = min(vector, max(1, rows * columns // THREADS))
    if column_lanes is None:
        runs = columns // vector
        # Warps first: see `Spread` on copies.
        lanes = max(1, min(_LANES, rows * runs // _WARPS))
        column_lanes = min(lanes, runs)
        row_lanes = min(lanes // column_lanes, rows)
    else:
        vector = min(vector, max(1, columns // column_lanes))
        runs = columns // vector
        row_lanes = min(_LANES // column_lanes, max(1, rows // _WARPS))
    # Warps over rows first: a sum over columns then stays within a warp.
    row_warps = min(_WARPS, rows // row_lanes)
    column_warps = min(_WARPS // row_warps, runs // column_lanes)
    return Spread(
        rows=rows,
        columns=columns,
        vector=vector,
        row_lanes=row_lanes,
        column_lanes=column_lanes,
        row_warps=row_warps,
        column_warps=column_warps,
        paired=paired,
    )


def powers_of_two(count: int) -> list[tuple[int, int]]:
    """Cuts `count` into powers of two, the largest first: (start, length) of each.

    >>> powers_of_two(28)
    [(0, 16), (16, 8), (24, 4)]
    """
    parts, start = [], 0
    for bit in reversed(range(count.bit_length())):
        if count >> bit & 1:
            parts.append((start, 1 << bit))
            start += 1 << bit
    return parts


def _copied(times: int) -> tuple[Any, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()


def _tiled(tiles: tuple, warp_dims: tuple, lane_dims: tuple) -> Any:
    """A tiled layout in its canonical form, which Mosaic demands."""
    layout = TiledLayout(
        plgpu.Tiling(tiles), warp_dims, lane_dims, -1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )
