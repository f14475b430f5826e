"""Rows of a table by position: checks, out-of-range policies and one gather."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from jrope._layout import LONGEST
from jrope._no_gradient import no_gradient

OutOfRange = Literal["nan", "clip"]

_NARROW = tuple(map(np.dtype, ("int32", "int16", "int8", "uint16", "uint8")))


def check_out_of_range(out_of_range: str) -> None:
    """Raises unless the policy is one of the two."""
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(
            f"out_of_range must be one of {get_args(OutOfRange)}, got {out_of_range!r}"
        )


def check_array(name: str, value: object) -> None:
    """Raises unless `value` is a jax.Array (tracers included)."""
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a jax.Array, got {type(value).__name__}; move it to the "
            f"device once, outside jit, with jnp.asarray"
        )


def check_table(table: Array) -> None:
    """Raises unless the table's array is float32 and not stacked."""
    check_array("the cos/sin table", table)
    if table.dtype != jnp.float32:
        raise TypeError(
            f"the cos/sin table must be float32, got {table.dtype}; was the whole "
            f"model cast to {table.dtype}? Leave the table out of the cast, or "
            f"rebuild it (jrope.nnx.fill_tables, jrope.linen.rope_variables)"
        )
    if table.ndim != 2:
        raise ValueError(
            f"the cos/sin table must be [P, R], got shape {table.shape}; was it "
            f"stacked by vmap?"
        )
    if not table.shape[0]:
        raise ValueError(
            f"the cos/sin table must have a row for position 0, got shape {table.shape}"
        )


def device_positions(
    positions: ArrayLike,
    *,
    rows: int = LONGEST + 1,
    out_of_range: OutOfRange = "nan",
    name: str = "positions",
) -> Array:
    """Positions as int32, or an error; nothing is wrapped around or truncated.

    Those that lie on the host are checked there, against the table's end as well.
    """
    if isinstance(positions, jax.Array):
        if positions.dtype in _NARROW:
            return positions.astype(jnp.int32)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(_not_integers(name, positions.dtype))
        raise TypeError(
            f"{name} on the device must be int32, got {positions.dtype}; check "
            f"their range on the host and cast them with {name}.astype(jnp.int32)"
        )
    host = np.asarray(positions)
    # NumPy's type of an empty list, which is one of integers as well.
    if not host.size and not hasattr(positions, "dtype"):
        host = host.astype(np.int32)
    if host.dtype.kind not in "iu":
        raise TypeError(_not_integers(name, host.dtype))
    if host.size:
        low, high = int(host.min()), int(host.max())
        _check_range(name, low, high, rows if out_of_range == "nan" else None)
    return jnp.asarray(host.astype(np.int32))


def _not_integers(name: str, dtype: np.dtype) -> str:
    hint = (
        "; lookup alone takes fractions, as float32; are query and positions swapped?"
    )
    return f"{name} must be integers, got {dtype}" + hint * (name == "positions")


def _check_range(name: str, low: int, high: int, rows: int | None) -> None:
    if high > LONGEST:
        raise ValueError(
            f"{name} must fit int32, got {high}; was a padding id cast to an "
            f"unsigned type?"
        )
    if low < -LONGEST - 1:
        raise ValueError(f"{name} must fit int32, got {low}")
    if rows is not None and high >= rows:
        raise ValueError(
            f"{name} must be below the table's {rows} rows, got {high}; does the "
            f"context exceed max_position_embeddings? Pad with negative positions"
        )


def saturated_sum(first: Array, count: Array) -> Array:
    """`first + count` in int32, which stops at the largest one and does not wrap."""
    room = jnp.int32(LONGEST) - jnp.maximum(first, jnp.int32(0))
    return first + jnp.minimum(count, room)


def gather_rows(table: Array, indices: Array, out_of_range: OutOfRange) -> Array:
    """Rows [*B, T, R] of non-negative indices: one gather of static shape.

    The NaN policy costs nothing measurable over the clipping one. Neither lets an index
    wrap around. The table has no gradient, and asking for it is an error.
    """
    sharding = _rows_sharding(indices)
    table = no_gradient(table)
    if out_of_range == "clip":
        return table.at[indices].get(
            mode="clip", wrap_negative_indices=False, out_sharding=sharding
        )
    return table.at[indices].get(
        mode="fill",
        fill_value=jnp.nan,
        wrap_negative_indices=False,
        out_sharding=sharding,
    )


def _rows_sharding(indices: Array) -> NamedSharding | None:
    """How rows lie on a mesh with explicit axes: as the positions do. Else None."""
    sharding = jax.typeof(indices).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
