"""The plain table: one row a position."""

import dataclasses
from typing import ClassVar, Self

import numpy as np
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, gather_rows
from jrope._kinds._base import no_offset, pytree
from jrope._tables import check_flat, compute_cos_sin_cache


@pytree("cos_sin_cache")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FlatTable:
    """One row a position: what a bare array [P, R] stands for.

    Args:
      cos_sin_cache: float32 [P, R], cos then sin.
      longest_request: where rows of NaN begin, less than P if the config is of short
        requests only; None stands for P.
    """

    cos_sin_cache: Float32[Array, "P R"]
    longest_request: int | None = None

    has_waves: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    @staticmethod
    def compute(config: RopeConfig) -> np.ndarray:
        """The array, on the host."""
        return compute_cos_sin_cache(config)

    @staticmethod
    def array_rows(config: RopeConfig) -> int:
        """Rows of the array.

        Raises:
          ValueError: if the config cannot be tabulated so.
        """
        check_flat(config)
        return config.max_position_embeddings

    @classmethod
    def wrap(cls, config: RopeConfig, array: Array) -> Self:
        """The table around its array."""
        return cls(cos_sin_cache=array, longest_request=config.longest_request)

    @property
    def max_position_embeddings(self) -> int:
        """P, or the longest request."""
        return self.longest_request or self.cos_sin_cache.shape[0]

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """One gather."""
        no_offset(row_offset)
        return gather_rows(self.cos_sin_cache, indices, out_of_range)
