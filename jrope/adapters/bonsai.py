"""jax-ml/bonsai's calling form: `sin, cos` once per step, sine first."""

from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._layout import RotaryLayout
from jrope._operands import check_no_shared_token
from jrope._ops import rotate
from jrope.adapters._common import rows_of

Row = Float32[Array, "B T half"]


class RoPE(nnx.Module):
    """`RoPE(...)(positions) -> (sin, cos)` of bonsai's models, from a config.

    Args:
      config: what to rotate, and how.

    >>> import jax.numpy as jnp
    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> sin, cos = RoPE(config)(jnp.arange(3)[None])
    >>> sin.shape
    (1, 3, 4)
    """

    def __init__(self, config: RopeConfig):
        """Holds no array."""
        self.config = config

    def __call__(self, positions: ArrayLike) -> tuple[Row, Row]:
        """Sine, then cosine, float32 [B, T, R/2], of positions int32 [B, T]."""
        cos, sin = rows_of(positions, self.config, text_ndim=2)
        return sin, cos


def apply_rope(x: Float[Array, "B T N H"], sin: Row, cos: Row) -> Array:
    """Rotates queries or keys; pairs are (i, i + H/2), as in bonsai.

    Args:
      x: [B, T, N, H].
      sin: float32 [B, T, H/2].
      cos: likewise.

    Raises:
      TypeError, ValueError: if shapes or types do not fit.

    >>> import jax.numpy as jnp
    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> sin, cos = RoPE(config)(jnp.arange(3)[None])
    >>> apply_rope(jnp.ones((1, 3, 2, 8)), sin, cos).shape
    (1, 3, 2, 8)
    """
    check_no_shared_token(x, cos)
    head_dim = x.shape[-1]
    layout = RotaryLayout(head_dim=head_dim, rotary_dim=head_dim)
    turned, _ = rotate(x, None, cos, sin, layout=layout)
    return turned
