"""Several tables in one array, chosen token by token."""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, gather_rows
from jrope._kinds._base import pytree
from jrope._tables import (
    compute_cos_sin_cache,
)


@pytree("cos_sin_cache")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StackedTable:
    """Several flat tables in one array; a token's `row_offset` says which is its own.

    For LongRoPE's two lists chosen per request, the bases of dynamic NTK per length,
    and the scalings of several LoRA adapters, in one compiled program.

    Args:
      cos_sin_cache: float32 [sum of all P, R].
      starts: where each table begins, the values that `row_offset` may take.

    >>> from jrope import lookup
    >>> short, long = (RopeConfig(head_dim=2, rope_theta=theta,
    ...     max_position_embeddings=4) for theta in (1e4, 1e6))
    >>> table = stack_tables([short, long])
    >>> offset = jnp.full(2, table.starts[1], jnp.int32)
    >>> cos, _ = lookup(table, jnp.arange(2), layout=short.layout, row_offset=offset)
    >>> table.starts, cos.shape
    ((0, 4), (2, 1))
    """

    cos_sin_cache: Float32[Array, "rows R"]
    starts: tuple[int, ...]

    has_waves: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each table."""
        ends = (*self.starts[1:], self.cos_sin_cache.shape[0])
        return tuple(end - start for start, end in zip(self.starts, ends, strict=True))

    @property
    def max_position_embeddings(self) -> int:
        """P of the longest table."""
        return max(self.lengths)

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """One gather; an offset that begins no table gives NaN."""
        if row_offset is None:
            raise ValueError(
                f"row_offset must say which of the stacked tables each token reads, "
                f"one of {self.starts}, got None"
            )
        axes = zip(row_offset.shape[::-1], indices.shape[::-1], strict=False)
        if row_offset.ndim > indices.ndim or any(
            own not in (1, whole) for own, whole in axes
        ):
            raise ValueError(
                f"row_offset must broadcast to positions, which are {indices.shape}, "
                f"got shape {row_offset.shape}"
            )
        length = jnp.zeros_like(row_offset)
        for start, rows in zip(self.starts, self.lengths, strict=True):
            length = jnp.where(row_offset == start, jnp.int32(rows), length)
        past = indices >= length
        if out_of_range == "clip":
            indices = jnp.where(past, length - jnp.int32(1), indices)
            past = jnp.broadcast_to(length == 0, indices.shape)
        nowhere = jnp.int32(self.cos_sin_cache.shape[0])
        indices = jnp.where(past, nowhere, indices + row_offset)
        return gather_rows(self.cos_sin_cache, indices, "nan")


def stack_tables(configs: Iterable[RopeConfig]) -> StackedTable:
    """One table of several configs, for `lookup(..., row_offset=...)`.

    Args:
      configs: of equal layout.

    Returns:
      The table; its `starts[i]` is the `row_offset` of `configs[i]`.

    Raises:
      TypeError: if one is no RopeConfig.
      ValueError: if there is no config, or layouts differ.

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=4)
    >>> stack_tables([config, dataclasses.replace(config, rope_theta=1e6)]).starts
    (0, 4)
    """
    configs = tuple(configs)
    for config in configs:
        if not isinstance(config, RopeConfig):
            raise TypeError(
                f"configs must be RopeConfigs, got {type(config).__name__} in it"
            )
    if not configs or any(config.layout != configs[0].layout for config in configs):
        raise ValueError(
            f"stacked tables must have equal layouts, got "
            f"{[config.layout for config in configs]}"
        )
    arrays = [compute_cos_sin_cache(config) for config in configs]
    starts = np.cumsum([0, *(len(array) for array in arrays)])[:-1]
    return StackedTable(
        cos_sin_cache=jnp.asarray(np.concatenate(arrays)),
        starts=tuple(int(start) for start in starts),
    )
