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
    "stack_tables",
    "wrap_table",
]
