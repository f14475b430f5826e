"""EasyDeL's calling form: `rotary(query=, key=, positions=, frequencies=)`.

An attention takes it by its attribute `rotary`, or from `_create_rotary`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope._gather import device_positions
from jrope._operands import check_no_shared_token
from jrope._ops import rotate
from jrope._phases import phase_positions
from jrope.adapters._common import rows_of


class RotaryEmbedding(nnx.Module):
    """In place of any of EasyDeL's rotary embeddings.

    Args:
      config: what to rotate, and how.

    >>> import jax.numpy as jnp
    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> query, key = RotaryEmbedding(config)(query=jnp.ones((1, 3, 2, 8)),
    ...     key=jnp.ones((1, 3, 1, 8)), positions=jnp.arange(3)[None])
    >>> query.shape, key.shape
    ((1, 3, 2, 8), (1, 3, 1, 8))
    """

    def __init__(self, config: RopeConfig):
        """Holds no array."""
        self.config = config

    def __call__(
        self,
        positions: ArrayLike,
        query: Float[Array, "B S N H"],
        key: Float[Array, "B S K H"],
        offsets: ArrayLike | None = None,
        frequencies: object = None,
    ) -> tuple[Array, Array]:
        """Rotates queries and keys.

        Args:
          positions: int32 [B, S], or [A, B, S] for a config with several axes.
          query: [B, S, N, H].
          key: [B, S, K, H].
          offsets: int32, added to the positions but those of padding; it broadcasts to
            them.
          frequencies: taken for the call's sake and not used: EasyDeL's table is
            bfloat16, which is off by 2e-3, and the config has frequencies of its own.

        Returns:
          The rotated query and key, in their own dtypes.

        Raises:
          TypeError, ValueError: if shapes or types do not fit.
        """
        del frequencies
        places = positions if offsets is None else _moved(positions, offsets)
        indices = phase_positions(places, self.config)
        cos, sin = rows_of(indices, self.config, text_ndim=2)
        check_no_shared_token(query, cos)
        return rotate(query, key, cos, sin, layout=self.config.layout)


def _moved(positions: ArrayLike, offsets: ArrayLike) -> ArrayLike:
    """Positions moved on, on the host if both lie there; padding is not moved."""
    places = device_positions(positions)
    by = device_positions(offsets, name="offsets")
    if isinstance(positions, jax.Array) or isinstance(offsets, jax.Array):
        return jnp.where(places < 0, places, places + by)
    host = np.asarray(positions, np.int64)
    return np.where(host < 0, host, host + np.asarray(offsets, np.int64))
