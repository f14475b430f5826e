"""Hugging Face's convention: cos and sin of full width, made once, then applied.

For modules ported from transformers: `cos, sin = self.rotary_emb(x, position_ids)` in
the model, `apply_rotary_pos_emb(q, k, cos, sin)` in each attention.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._layout import RotaryLayout
from jrope._operands import check_no_shared_token
from jrope._ops import rotate
from jrope.adapters._common import rows_of

Wide = Float32[Array, "B S R"]


class RotaryEmbedding(nnx.Module):
    """`rotary_emb(x, position_ids)` of transformers' models.

    Args:
      config: what to rotate, and how.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> cos, sin = RotaryEmbedding(config)(None, jnp.arange(3)[None])
    >>> cos.shape
    (1, 3, 8)
    """

    def __init__(self, config: RopeConfig):
        """Holds no array."""
        self.config = config

    def __call__(self, x: object, position_ids: ArrayLike) -> tuple[Wide, Wide]:
        """Cos and sin of full width, times the attention factor.

        Args:
          x: taken for the call's sake; transformers casts to its dtype, here rows stay
            float32 and the rotation casts its result.
          position_ids: int32 [B, S], or [A, B, S] for a config with several axes, which
            is finished here.

        Returns:
          cos and sin, float32 [B, S, R]: each entry twice, R/2 apart for NeoX pairs,
          side by side for GPT-J pairs.
        """
        del x
        cos, sin = rows_of(position_ids, self.config, text_ndim=2)
        if self.config.is_neox_style:
            return jnp.concatenate([cos, cos], -1), jnp.concatenate([sin, sin], -1)
        return jnp.repeat(cos, 2, axis=-1), jnp.repeat(sin, 2, axis=-1)


def apply_rotary_pos_emb(
    q: Float[Array, "B ..."],
    k: Float[Array, "B ..."],
    cos: Wide,
    sin: Wide,
    position_ids: object = None,
    unsqueeze_dim: int = 1,
    *,
    is_neox_style: bool = True,
) -> tuple[Array, Array]:
    """Rotates queries and keys by cos and sin of full width.

    Args:
      q: [B, N, S, H], or [B, S, N, H] with `unsqueeze_dim=2`.
      k: likewise with K heads.
      cos: float32 [B, S, R] from `RotaryEmbedding`; R below H rotates leading features.
      sin: likewise.
      position_ids: ignored, as in transformers.
      unsqueeze_dim: the axis of heads, 1 or 2.
      is_neox_style: how `cos` and `sin` repeat, and which features are pairs.

    Returns:
      The rotated queries and keys, in their own dtypes.

    Raises:
      TypeError, ValueError: if shapes or types do not fit.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> cos, sin = RotaryEmbedding(config)(None, jnp.arange(3)[None])
    >>> q, k = apply_rotary_pos_emb(jnp.ones((1, 2, 3, 8)), jnp.ones((1, 1, 3, 8)),
    ...     cos, sin)
    >>> q.shape, k.shape
    ((1, 2, 3, 8), (1, 1, 3, 8))
    """
    del position_ids
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    rotary_dim = cos.shape[-1]
    layout = RotaryLayout(
        head_dim=q.shape[-1], rotary_dim=rotary_dim, is_neox_style=is_neox_style
    )
    once = slice(rotary_dim // 2) if is_neox_style else slice(None, None, 2)
    rows = cos[..., once], sin[..., once]
    swapped = unsqueeze_dim == 1
    query, key = (jnp.swapaxes(x, 1, 2) if swapped else x for x in (q, k))
    check_no_shared_token(query, cos)
    turned = rotate(query, key, *rows, layout=layout)
    if not swapped:
        return turned
    return jnp.swapaxes(turned[0], 1, 2), jnp.swapaxes(turned[1], 1, 2)
