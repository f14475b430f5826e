"""google/tunix's calling form of its Llama and Qwen models.

Each model file holds the name of its own: `tunix.models.qwen3.model.apply_rope =
jrope.adapters.tunix.apply_rope`. tunix's Llama leaves out the base and the scaling of
Llama 3.1 and later; `functools.partial(apply_rope, rope_theta=..., rope_scaling=...)`
puts them in. Its Gemma models call as `jrope.adapters.gemma` does.
"""

from collections.abc import Mapping
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jrope.adapters._common import config_of, rows_of, turn


def apply_rope(
    inputs: Float[Array, "B L N H"],
    positions: ArrayLike,
    head_dim: int,
    rope_theta: float | int = 1_000_000,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
) -> Array:
    """Rotates queries or keys.

    Args:
      inputs: [B, L, N, H].
      positions: int32 [B, L].
      head_dim: H.
      rope_theta: base of the geometric series.
      rope_scaling: the rope dict of config.json.

    Returns:
      The rotated inputs, in their dtype.

    Raises:
      TypeError, ValueError: if shapes do not fit or a key is unknown.

    >>> import jax.numpy as jnp
    >>> apply_rope(jnp.ones((1, 3, 2, 8)), jnp.arange(3)[None], 8).shape
    (1, 3, 2, 8)
    """
    config = config_of(head_dim, rope_theta, rope_scaling)
    return turn(inputs, rows_of(positions, config, text_ndim=2), config)
