"""google-deepmind/gemma's calling form: `gm.math.apply_rope`, for every Gemma.

`gemma.gm.math._positional_embeddings.apply_rope = jrope.adapters.gemma.apply_rope` puts
it into every attention, which looks the name up when it is called.
"""

import functools

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope.adapters._common import rows_of, turn
from jrope.scalings import Proportional


def apply_rope(
    inputs: Float[Array, "B L N H"],
    positions: ArrayLike,
    *,
    base_frequency: float | int,
    scale_factor: float | int = 1.0,
    rope_proportion: float | int = 1.0,
) -> Array:
    """Rotates queries or keys.

    Args:
      inputs: [B, L, N, H].
      positions: int32 [B, L].
      base_frequency: base of the geometric series, its exponent over H.
      scale_factor: what positions are divided by, at least 1.
      rope_proportion: the share of pairs that turn; pairs are (i, i + H/2).

    Returns:
      The rotated inputs, in their dtype.

    Raises:
      TypeError, ValueError: if shapes or values do not fit.

    >>> import jax.numpy as jnp
    >>> apply_rope(jnp.ones((1, 3, 2, 8)), jnp.arange(3)[None],
    ...     base_frequency=10_000).shape
    (1, 3, 2, 8)
    """
    if scale_factor < 1:
        raise ValueError(f"scale_factor must be at least 1, got {scale_factor}")
    config = _config(
        inputs.shape[-1], float(base_frequency), float(scale_factor), rope_proportion
    )
    return turn(inputs, rows_of(positions, config, text_ndim=2), config)


@functools.lru_cache(maxsize=256)
def _config(head_dim: int, theta: float, factor: float, share: float) -> RopeConfig:
    return RopeConfig(
        head_dim=head_dim,
        rope_theta=theta,
        max_position_embeddings=2**31 - 1,
        scaling=Proportional(partial_rotary_factor=share, factor=factor),
    )
