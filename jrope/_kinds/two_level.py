"""Two small tables whose angles add up, for very long contexts."""

import dataclasses
from typing import ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, gather_rows
from jrope._kinds._base import add_angles, no_offset, pytree
from jrope._tables import (
    FINE_ROWS,
    check_two_level,
    coarse_row_count,
    compute_two_level_cache,
)


@pytree("cos_sin_cache")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TwoLevelTable:
    """Two small tables whose angles add up: a million positions in about a megabyte.

    Position s is `1024 * (s // 1024)` and `s % 1024`; the rotation is the product of
    the two. Each of cos and sin is off by at most 1.25 * 2^-23, times the attention
    factor's next power of two, at any position up to 2^24; a flat table's by 2^-25.

    Args:
      cos_sin_cache: float32 [ceil(P / 1024) + 1024, R], one row more where that is P:
        the coarse rows, then the fine ones, which alone carry the attention factor.
      max_position_embeddings: P, or the longest request.
      only_short_requests: whether longer ones read NaN under "clip" as well, as they do
        of a flat table.

    >>> from jrope import lookup
    >>> config = RopeConfig(head_dim=64, rope_theta=1e6, max_position_embeddings=2**20)
    >>> table = TwoLevelTable.from_config(config)
    >>> cos, sin = lookup(table, jnp.array([999_999]), layout=config.layout)
    >>> table.cos_sin_cache.shape, cos.shape
    ((2048, 64), (1, 32))
    """

    cos_sin_cache: Float32[Array, "rows R"]
    max_position_embeddings: int
    only_short_requests: bool = False

    has_waves: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    @staticmethod
    def compute(config: RopeConfig) -> np.ndarray:
        """The array, on the host."""
        return compute_two_level_cache(config)

    @staticmethod
    def array_rows(config: RopeConfig) -> int:
        """Rows of the array.

        Raises:
          ValueError: if the config cannot be tabulated so.
        """
        check_two_level(config)
        return coarse_row_count(config) + FINE_ROWS

    @classmethod
    def wrap(cls, config: RopeConfig, array: Array) -> Self:
        """The table around its array."""
        return cls(
            cos_sin_cache=array,
            max_position_embeddings=config.longest_request,
            only_short_requests=(
                config.longest_request < config.max_position_embeddings
            ),
        )

    @classmethod
    def from_config(cls, config: RopeConfig) -> Self:
        """The table of a config, on the default device."""
        return cls.wrap(config, jnp.asarray(cls.compute(config)))

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """Two gathers and a complex product."""
        no_offset(row_offset)
        table, last = self.cos_sin_cache, jnp.int32(self.max_position_embeddings - 1)
        past = indices > last
        indices = jnp.minimum(indices, last)
        coarse_rows = jnp.int32(table.shape[0] - FINE_ROWS)
        coarse, fine = indices // jnp.int32(FINE_ROWS), indices % jnp.int32(FINE_ROWS)
        if self.only_short_requests:
            out_of_range = "nan"
        if out_of_range == "nan":
            coarse = jnp.where(past, jnp.int32(table.shape[0]), coarse)
        return add_angles(
            gather_rows(table, coarse, out_of_range),
            gather_rows(table, coarse_rows + fine, out_of_range),
        )
