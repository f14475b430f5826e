"""MaxText's calling form: a module that rotates one tensor at a time.

`attention.rotary_embedding = jrope.adapters.maxtext.RotaryEmbedding(config)`, or an
`Attention` whose `init_rotary_embedding` returns it. MaxText's Llama 3.1 checkpoints
keep Meta's order of channels: give `config_from_hf` then `is_neox_style=False`.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope._phases import phase_positions
from jrope.adapters._common import rows_of, turn


class RotaryEmbedding(nnx.Module):
    """In place of any of MaxText's rotary embeddings of text.

    Args:
      config: what to rotate, and how.
      cast_as_fprop_dtype: whether the result is cast to `fprop_dtype`.
      fprop_dtype: the dtype of the result then.

    Raises:
      ValueError: at a call, if there are no positions, or shapes do not fit.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> out = RotaryEmbedding(config)(jnp.ones((1, 3, 2, 8)), jnp.arange(3)[None])
    >>> out.shape, str(out.dtype)
    ((1, 3, 2, 8), 'bfloat16')
    """

    def __init__(
        self,
        config: RopeConfig,
        *,
        cast_as_fprop_dtype: bool = True,
        fprop_dtype: DTypeLike = jnp.bfloat16,
    ):
        """Holds no array."""
        self.config = config
        self.cast_as_fprop_dtype = cast_as_fprop_dtype
        self.fprop_dtype = jnp.dtype(fprop_dtype)

    def __call__(
        self, inputs: Float[Array, "B S N H"], position: ArrayLike | None = None
    ) -> Array:
        """Rotates queries or keys.

        Args:
          inputs: [B, S, N, H].
          position: int32 [B, S], or [B, S, A] for a config with several axes.

        Raises:
          ValueError: if there are no positions, or shapes do not fit.
        """
        if position is None:
            raise ValueError(
                "position must be given; jnp.arange(S)[None] where every row starts at "
                "0"
            )
        indices = phase_positions(position, self.config)
        if indices.ndim == 3:  # Axes come last in MaxText, first in jrope.
            one = indices.shape[-1] == 1
            indices = indices[..., 0] if one else jnp.moveaxis(indices, -1, 0)
        rows = rows_of(indices, self.config, text_ndim=2)
        turned = turn(inputs, rows, self.config)
        return turned.astype(self.fprop_dtype) if self.cast_as_fprop_dtype else turned
