"""sglang-jax's calling form: `get_rope`, and `rotary_emb(positions, query, key)`.

An attention takes it by its attribute: `attention.rotary_emb = get_rope(...)`, or every
model at once where its module imports the name `get_rope`.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope._ops import rotate
from jrope._phases import phase_positions
from jrope.adapters._common import config_of, rows_of


class RotaryEmbedding(nnx.Module):
    """What `get_rope` returns; of a `RopeConfig` directly for any other model.

    Args:
      config: what to rotate, and how.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> query, key = RotaryEmbedding(config)(jnp.arange(3), jnp.ones((4, 16)),
    ...     jnp.ones((4, 8)))
    >>> query.shape, key.shape
    ((4, 16), (4, 8))
    """

    def __init__(self, config: RopeConfig):
        """Holds no array."""
        self.config = config

    def __call__(
        self,
        positions: ArrayLike,
        query: Float[Array, "Tpad ..."],
        key: Float[Array, "Tpad ..."],
    ) -> tuple[Array, Array]:
        """Rotates the tokens that have positions; padding after them stays.

        Args:
          positions: int32 [T], or [3, T] with M-RoPE.
          query: [Tpad, N, H] or [Tpad, N * H], Tpad at least T.
          key: likewise.

        Returns:
          The rotated query and key.
        """
        indices = phase_positions(positions, self.config)
        cos, sin = rows_of(indices, self.config, text_ndim=1)
        tokens = indices.shape[-1]
        turned = rotate(
            query[:tokens], key[:tokens], cos, sin, layout=self.config.layout
        )
        if tokens == query.shape[0]:
            return turned
        return (
            jnp.concatenate([turned[0], query[tokens:]]),
            jnp.concatenate([turned[1], key[tokens:]]),
        )


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float | int,
    is_neox_style: bool = True,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    partial_rotary_factor: float | int = 1.0,
    dual_chunk_attention_config: Mapping[str, Any] | None = None,
) -> RotaryEmbedding:
    """The rotary embedding of a model, from sglang-jax's arguments.

    Args:
      head_size: features per head.
      rotary_dim: leading features rotated, before `partial_rotary_factor`.
      max_position: taken for the call's sake: rows are computed, to any position.
      base: `rope_theta`.
      is_neox_style: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.
      rope_scaling: the rope dict of config.json. Every key is used or refused by name.
      dtype: taken for the call's sake: rows are float32, heads keep their own type.
      partial_rotary_factor: multiplies `rotary_dim`.
      dual_chunk_attention_config: must be None.

    Raises:
      ValueError: if a key is unknown, or the scaling depends on the model's length.

    >>> rotary_emb = get_rope(8, 8, 4096, 10_000)
    >>> query, key = rotary_emb(jnp.arange(3), jnp.ones((3, 16)), jnp.ones((3, 8)))
    >>> query.shape, key.shape
    ((3, 16), (3, 8))
    """
    del max_position, dtype
    if dual_chunk_attention_config is not None:
        raise ValueError(
            "dual_chunk_attention_config must be None; use jrope.DualChunkTable"
        )
    width = int(rotary_dim * partial_rotary_factor)
    config = config_of(
        head_size, base, rope_scaling, is_neox_style=is_neox_style, rotary_dim=width
    )
    return RotaryEmbedding(config)
