"""The calling form of Habana's HpuRotaryEmbedding, for Gaudi users who come to JAX.

Habana's layer slices its cache by the length of the longest sequence, which with a
context (prefix cache, chunked prefill) is known only from the positions' values, so it
compiles anew at every length. Here rows are read by position from the whole table, as
was proposed for it (HabanaAI/vllm-fork issue 166): no length is a shape.

No Gaudi plugin for JAX is public and none was run: see the page on platforms.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._gather import check_array
from jrope._kinds._base import pytree
from jrope._operands import check_no_shared_token
from jrope.nnx import RotaryEmbedding
from jrope.scalings import Default, Scaling

_UNSCALED = Default()


@pytree("rows")
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows of one step for every distinct config of a model; a pytree.

    Args:
      configs: one a table.
      rows: cos and sin [*B, T, R/2] of each config.

    Raises:
      ValueError: from `of`, if a config was not prepared.

    >>> import jax.numpy as jnp
    >>> layers = [HpuRotaryEmbedding(8, 8, 64, base) for base in (1e4, 1e6, 1e4)]
    >>> rows = prepare(layers, jnp.arange(4))
    >>> len(rows.configs), rows.of(layers[0].rope.config)[0].shape
    (2, (4, 4))
    """

    configs: tuple[RopeConfig, ...]
    rows: tuple[tuple[Float32[Array, "..."], Float32[Array, "..."]], ...]

    def of(self, config: RopeConfig) -> tuple[Array, Array]:
        """The rows of one config.

        Raises:
          ValueError: if they were not prepared.
        """
        if config not in self.configs:
            raise ValueError(
                f"rows must be prepared for every layer's config, got "
                f"{len(self.configs)} and not {config}; was a layer left out of "
                f"prepare?"
            )
        return self.rows[self.configs.index(config)]


class HpuRotaryEmbedding(nnx.Module):
    """Rotary embedding with Habana's arguments, over jrope's table and routes.

    Positions past the table read its last row: check them on the host. For tables of
    other kinds, multimodal positions and anything new use `jrope.nnx.RotaryEmbedding`.

    Args:
      head_size: H.
      rotary_dim: R, the leading features that turn.
      max_position_embeddings: P.
      base: the base of the frequencies.
      is_neox_style: pairs are (i, i + R/2), Habana's BLOCKWISE; False is PAIRWISE.
      scaling: of the frequencies, from `jrope.scalings`.
      implementation: the name of a route (docs/pages/platforms.md), or None.

    >>> import jax.numpy as jnp
    >>> rope = HpuRotaryEmbedding(8, 8, max_position_embeddings=64)
    >>> query, key = rope(jnp.arange(4), jnp.ones((4, 16)), jnp.ones((4, 8)))
    >>> query.shape, key.shape
    ((4, 16), (4, 8))
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000.0,
        is_neox_style: bool = True,
        *,
        scaling: Scaling = _UNSCALED,
        implementation: str | None = None,
    ):
        """Builds the table."""
        config = RopeConfig(
            head_dim=head_size,
            rotary_dim=rotary_dim,
            rope_theta=base,
            max_position_embeddings=max_position_embeddings,
            is_neox_style=is_neox_style,
            scaling=scaling,
        )
        self.rope = RotaryEmbedding(
            config, implementation=implementation, out_of_range="clip"
        )

    def __call__(
        self,
        positions: ArrayLike,
        query: Float[Array, "*T NH"],
        key: Float[Array, "*T KH"],
    ) -> tuple[Array, Array]:
        """Rotates one layer's heads; with several layers use `prepare` and `rotate`.

        Args:
          positions: int32 [T] or [B, T], absolute: the context counts.
          query: [T, N * H], of B * T tokens if positions are [B, T]; or [B, T, N * H].
          key: likewise.

        Returns:
          The rotated query and key, in their own shapes; Habana's layer adds an axis
          to 2-D ones.

        Raises:
          TypeError, ValueError: as `jrope.lookup` and `jrope.rotate` do.
        """
        return self.rotate(prepare([self], positions), query, key)

    def rotate(
        self, rows: StepRows, query: Float[Array, "*T NH"], key: Float[Array, "*T KH"]
    ) -> tuple[Array, Array]:
        """Rotates one layer's heads by the rows that `prepare` looked up."""
        for name, heads in (("query", query), ("key", key)):
            check_array(name, heads)
        if not query.ndim == key.ndim or query.ndim not in (2, 3):
            raise ValueError(
                f"query and key must both be [T, N * H] or [B, T, N * H], got shapes "
                f"{query.shape} and {key.shape}; are the heads not flattened?"
            )
        cos, sin = (_as_tokens_of(query, row) for row in rows.of(self.rope.config))
        check_no_shared_token(query, cos)
        return self.rope.rotate(query, key, cos, sin)


def prepare(layers: Iterable[HpuRotaryEmbedding], positions: ArrayLike) -> StepRows:
    """Looks this step's rows up, once for each distinct base, for all layers.

    Rows are values of the step and are kept nowhere, so none can be of another step.

    Args:
      layers: every rotary layer of the model; those with equal configs share rows.
      positions: int32 [T] or [B, T].

    Raises:
      TypeError, ValueError: if positions have other axes, or as `jrope.lookup` does.

    >>> import jax.numpy as jnp
    >>> layers = [HpuRotaryEmbedding(8, 8, 64) for _ in range(2)]
    >>> rows = prepare(layers, jnp.arange(4))
    >>> query, key = layers[1].rotate(rows, jnp.ones((4, 16)), jnp.ones((4, 8)))
    >>> query.shape
    (4, 16)
    """
    if np.ndim(positions) not in (1, 2):
        raise ValueError(
            f"positions must be [T] or [B, T], got shape {np.shape(positions)}; "
            f"multimodal ones take jrope.nnx.RotaryEmbedding"
        )
    ropes = {layer.rope.config: layer.rope for layer in layers}
    return StepRows(
        configs=tuple(ropes),
        rows=tuple(rope.rows(positions) for rope in ropes.values()),
    )


def _as_tokens_of(query: Array, row: Array) -> Array:
    """A row array with as many token axes as `query` has."""
    if row.ndim == query.ndim:
        return row
    return row[None] if query.ndim == 3 else row.reshape(-1, row.shape[-1])
