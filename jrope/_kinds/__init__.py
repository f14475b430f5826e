"""Table kinds: how rows are kept, and how a position's row is made of them.

Each is a frozen pytree around one float32 array, so that it is passed to a jitted
function as an argument. A kind gives rows; which axis or layer uses them it does not
know.
"""

from typing import Literal

from jaxtyping import Array

from jrope._config import RopeConfig
from jrope._gather import check_array
from jrope._kinds._base import Table
from jrope._kinds.dual_chunk import ChunkForm, DualChunkTable
from jrope._kinds.flat import FlatTable
from jrope._kinds.fope import FopeTable
from jrope._kinds.stacked import StackedTable, stack_tables
from jrope._kinds.two_level import TwoLevelTable

TableName = Literal["flat", "two_level"]


# What `table=` of the Flax layers may name.
TABLE_KINDS: dict[TableName, type[FlatTable] | type[TwoLevelTable]] = {
    "flat": FlatTable,
    "two_level": TwoLevelTable,
}


def wrap_table(config: RopeConfig, array: Array, kind: TableName) -> Table:
    """The table of a layer around the array that it holds.

    Raises:
      ValueError: if the array is not of this config and kind.
    """
    shape = (TABLE_KINDS[kind].array_rows(config), config.layout.rotary_dim)
    if array.shape != shape:
        raise ValueError(
            f"the cos/sin table of this config and table={kind!r} must have shape "
            f"{shape}, got {array.shape}; was it built for another config or kind, or "
            f"stacked by vmap?"
        )
    return TABLE_KINDS[kind].wrap(config, array)


def as_table(table: Array | Table) -> Table:
    """A bare array is a flat table."""
    if isinstance(table, Table):
        return table
    check_array("the cos/sin table", table)
    return FlatTable(cos_sin_cache=table)


def _check_single(kind: Table) -> None:
    """Raises for several tables in one, where nothing says which one a token reads."""
    if isinstance(kind, StackedTable):
        raise ValueError(
            "the table must be a single one here, got a StackedTable: only "
            "jrope.lookup and jrope.apply_rope take the row_offset that chooses; give "
            "the one of its tables that is meant, which begins at one of table.starts"
        )


def check_adds_up(kind: Table) -> None:
    """Raises unless keys can be moved by the table's rows."""
    _check_single(kind)
    if not kind.adds_up:
        raise ValueError(
            f"keys are moved by a table whose turns add up, flat or two-level, "
            f"got {type(kind).__name__}, whose turns do not; keep keys as they were "
            f"before rotation and turn them by their new positions"
        )


def check_for_all_heads(kind: Table) -> None:
    """Raises unless a position has one row, by which all heads turn."""
    _check_single(kind)
    if isinstance(kind, FopeTable):
        raise ValueError(
            "the table must have one row a position for all heads, got a FopeTable, "
            "which has one for each key head; jrope.lookup and jrope.rotate take it, "
            "with heads by table.group"
        )


__all__ = [
    "TABLE_KINDS",
    "ChunkForm",
    "DualChunkTable",
    "FlatTable",
    "FopeTable",
    "StackedTable",
    "Table",
    "TableName",
    "TwoLevelTable",
    "as_table",
    "check_adds_up",
    "check_for_all_heads",
    "stack_tables",
    "wrap_table",
]
