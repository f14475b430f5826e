"""The factor of a query temperature at given positions: see `QueryTemperature`."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jrope._gather import device_positions
from jrope._temperature import QueryTemperature


def query_temperature(
    positions: ArrayLike, temperature: QueryTemperature
) -> Float32[Array, "..."]:
    """What queries at these positions are multiplied by, before the dot product.

    Args:
      positions: int32 [*B, T]; other integers as `lookup` takes them.
      temperature: from `query_temperatures_from_hf`.

    Returns:
      float32 [*B, T]; `query * factor[..., None, None]`.

    >>> query_temperature(jnp.array([0, 8191, 8192]), QueryTemperature(scale=0.1,
    ...     length=8192)).round(4).tolist()
    [1.0, 1.0, 1.0692999362945557]
    """
    return _temperature(device_positions(positions), temperature)


@functools.partial(jax.jit, static_argnums=1)
def _temperature(positions: Array, temperature: QueryTemperature) -> Array:
    """In two divisions, since a position plus the shift can exceed int32."""
    length = jnp.int32(temperature.length)
    inside = positions % length + jnp.int32(temperature.shift)
    steps = positions // length + inside // length
    growth = jnp.log1p(jnp.maximum(steps, jnp.int32(0)).astype(jnp.float32))
    return jnp.float32(1) + jnp.float32(temperature.scale) * growth
