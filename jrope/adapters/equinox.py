"""equinox's calling form: `x [T, D] -> x [T, D]`, a head at a time under vmap."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope.adapters._common import rows_of, turn


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RotaryPositionalEmbedding:
    """In place of `equinox.nn.RotaryPositionalEmbedding`, with positions.

    A pytree without leaves, so neither gradients nor optimizers see anything of it.
    Within `process_heads`: `jax.vmap(rope, in_axes=1, out_axes=1)(query_heads)`.

    Args:
      config: what to rotate, and how.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> RotaryPositionalEmbedding(config)(jnp.ones((3, 8))).shape
    (3, 8)
    """

    config: RopeConfig

    def __call__(
        self,
        x: Float[Array, "T D"],
        *,
        key: Array | None = None,
        positions: ArrayLike | None = None,
    ) -> Array:
        """Rotates one head.

        Args:
          x: [T, D].
          key: ignored, as all of equinox's layers take one.
          positions: int32 [T], or [A, T] for a config with several axes; None for 0 to
            T - 1, as equinox has it.
        """
        del key
        if positions is None:
            positions = jnp.arange(x.shape[0], dtype=jnp.int32)
        rows = rows_of(positions, self.config, text_ndim=1)
        return turn(x[:, None], rows, self.config)[:, 0]
