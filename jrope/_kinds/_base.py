"""What a table kind is: a frozen pytree around an array that gives rows."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jrope._gather import OutOfRange
from jrope._products import complex_product, rounds_products


@runtime_checkable
class Table(Protocol):
    """What `lookup` asks of a table.

    Attributes:
      has_waves: whether each feature of a row is a wave along the positions, so that
        there are rows between rows.
      adds_up: whether turning by the rows of two positions is turning by the row of
        their sum, so that keys can be moved.
    """

    has_waves: ClassVar[bool]
    adds_up: ClassVar[bool]

    @property
    def cos_sin_cache(self) -> Array:
        """The array that rows are read from, float32 [rows, R]."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """One more than the largest position that has a row, of any table inside."""
        ...

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """Rows [*B, T, R], cos then sin, of non-negative positions [*B, T]."""
        ...


def pytree(*data: str) -> Any:
    """Registers a frozen dataclass whose named fields are arrays, the others static."""

    def register(cls: type) -> type:
        names = [field.name for field in dataclasses.fields(cls)]
        meta = [name for name in names if name not in data]
        return jax.tree_util.register_dataclass(
            cls, data_fields=list(data), meta_fields=meta
        )

    return register


def no_offset(row_offset: object) -> None:
    if row_offset is not None:
        raise ValueError(
            "row_offset must be None for a single table; jrope.stack_tables makes one "
            "of several"
        )


@jax.jit
def add_angles(one: Array, other: Array) -> Array:
    """Rows of the sum of two angles; jitted, so that eager calls have the same bits."""
    one, other = lax.optimization_barrier((one, other))
    half = one.shape[-1] // 2
    a, b = one[..., :half], one[..., half:]
    c, d = other[..., :half], other[..., half:]
    rounded = rounds_products(2 * half, one.dtype)
    return jnp.concatenate(complex_product(a, b, c, d, rounded=rounded), axis=-1)
