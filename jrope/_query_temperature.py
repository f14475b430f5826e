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
    """Quotients and rests by themselves: a position plus the shift can exceed int32."""
    length = jnp.int32(temperature.length)
    shift, rest = divmod(temperature.shift, temperature.length)
    carry = positions % length >= length - jnp.int32(rest)
    ahead = jnp.int32(shift) + carry.astype(jnp.int32)
    quotient = positions // length
    # Their sum can exceed int32 as well, and then only uint32 holds it.
    steps = quotient.astype(jnp.uint32) + ahead.astype(jnp.uint32)
    is_padding = (quotient < 0) & (jnp.minimum(quotient, jnp.int32(0)) + ahead < 0)
    steps = jnp.where(is_padding, jnp.uint32(0), steps)
    growth = jnp.log1p(steps.astype(jnp.float32))
    return jnp.float32(1) + jnp.float32(temperature.scale) * growth
