"""The rows of dual chunk attention."""

import dataclasses
from typing import ClassVar, Literal, Self

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, gather_rows
from jrope._kinds._base import no_offset, pytree
from jrope._tables import (
    compute_dual_chunk_cache,
)

ChunkForm = Literal[
    "key",
    "query",
    "query_succ",
    "query_inter",
    "query_succ_critical",
    "query_inter_critical",
]
_CHUNK_TABLES = {
    "key": 0,
    "query": 0,
    "query_succ": 1,
    "query_inter": 1,
    "query_succ_critical": 2,
    "query_inter_critical": 3,
}


@pytree("cos_sin_cache")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DualChunkTable:
    """The rows of dual chunk attention: one form for keys, five for queries.

    With c = chunk_size - local_size, a token at position s is turned as if at

    - `key`, `query`: s % c;
    - `query_succ`: min(s % c + c, chunk_size), for keys of the chunk before;
    - `query_inter`: min(2c - 1, chunk_size), for keys of all earlier chunks;
    - `query_succ_critical`: s % c + c;
    - `query_inter_critical`: s % c + chunk_size.

    Look each form up by itself: `lookup(table.form("query_succ"), positions, ...)`.

    Source: An et al. 2024, arXiv:2402.17463; vLLM's `DualChunkRotaryEmbedding`
    (Qwen2.5-1M).

    Args:
      cos_sin_cache: float32 [4c, R].
      max_position_embeddings: P.
      selected: the form that rows are of.

    >>> from jrope import DualChunk, lookup
    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=64,
    ...     dual_chunk=DualChunk(chunk_size=8, local_size=2))
    >>> table = DualChunkTable.from_config(config)
    >>> cos, _ = lookup(table, jnp.array([7]), layout=config.layout)
    >>> far, _ = lookup(table.form("query_succ"), jnp.array([7]), layout=config.layout)
    >>> cos.round(4).tolist(), far.round(4).tolist()
    ([[0.5403000116348267]], [[0.7538999915122986]])
    """

    cos_sin_cache: Float32[Array, "rows R"]
    max_position_embeddings: int
    selected: ChunkForm = "key"

    has_waves: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: RopeConfig) -> Self:
        """The table of a config with `dual_chunk`.

        Raises:
          ValueError: if the config has none.
        """
        return cls(
            cos_sin_cache=jnp.asarray(compute_dual_chunk_cache(config)),
            max_position_embeddings=config.max_position_embeddings,
        )

    def form(self, selected: ChunkForm) -> Self:
        """The same table, giving rows of another form.

        Raises:
          ValueError: if there is no such form.
        """
        if selected not in _CHUNK_TABLES:
            raise ValueError(
                f"the form must be one of {sorted(_CHUNK_TABLES)}, got {selected!r}"
            )
        return dataclasses.replace(self, selected=selected)

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """One gather, within the form's quarter of the array."""
        no_offset(row_offset)
        quarter = self.cos_sin_cache.shape[0] // 4
        past = indices >= self.max_position_embeddings
        inside = indices % jnp.int32(quarter)
        if self.selected == "query_inter":
            inside = jnp.full_like(inside, quarter - 1)
        indices = inside + jnp.int32(quarter * _CHUNK_TABLES[self.selected])
        if out_of_range == "nan":
            indices = jnp.where(past, jnp.int32(4 * quarter), indices)
        return gather_rows(self.cos_sin_cache, indices, out_of_range)
