"""Rows without a table: angles of any int32 position, computed in the program.

For calling forms that have no argument for a table (FlashInfer's, gemma's). A table
built inside the program would be a constant of it, or be built at every call. A float32
product of position and frequency is off by 2e-3 at position 32k and by 6e-2 at a
million. So the product is of integers, in turns: a frequency is 64 bits of a fraction
of a turn, and the part of the product past the point, the phase, is what is left when
whole turns overflow. What is a constant of the program are R/2 frequencies.

Each of cos and sin is off by less than 2^-23, times the attention factor's next power
of two, at any position below 2^31 (tests/test_phases.py): as a two-level table's, four
times a flat one's. It costs some 20 operations for each frequency and token, where a
table costs a row read: with several layers, make the rows once per step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32, UInt32

from jrope._config import RopeConfig
from jrope._gather import device_positions
from jrope._tables import check_flat
from jrope.scalings import TWO_PI

_QUARTER_BITS = 30
_RADIANS = np.float32(TWO_PI / np.longdouble(2) ** 32)


def phase_rows(
    positions: ArrayLike, config: RopeConfig
) -> tuple[Float32[Array, "*B T half"], Float32[Array, "*B T half"]]:
    """This step's rows, computed instead of looked up.

    There is no last row: every position has one, but those past a longest request that
    is less than the config's length, whose rows are NaN as a flat table's are. A
    negative position is padding and gets position 0's row.

    Args:
      positions: int32 [*B, T], or [A, *B, T] where the config has an axis map.
      config: what to rotate by.

    Returns:
      cos and sin, float32 [*B, T, R/2] each, times the attention factor.

    Raises:
      TypeError, ValueError: if the positions are not integers or do not fit the axis
        map, or on the host lie past the longest request, or the config asks for float32
        angles or another kind of table than a flat one.

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=8)
    >>> cos, sin = phase_rows(jnp.array([0, 1]), config)
    >>> cos.round(4).tolist(), sin.round(4).tolist()
    ([[1.0], [0.5403000116348267]], [[0.0], [0.8414999842643738]])
    """
    if config.angle_dtype != "float64":
        raise ValueError(
            f"computed rows must have angle_dtype='float64', got "
            f"{config.angle_dtype!r}; float32 angles come from a table"
        )
    check_flat(config)
    indices = phase_positions(positions, config)
    axes = config.layout.position_axes
    if axes is not None and (indices.ndim < 2 or indices.shape[0] != axes):
        raise ValueError(
            f"positions must be [A, *B, T] with A = {axes}, since the model has "
            f"multimodal positions, got shape {indices.shape}"
        )
    return _rows(indices, config)


def phase_positions(positions: ArrayLike, config: RopeConfig) -> Int32[Array, "..."]:
    """Positions as `phase_rows` takes them; those on the host are checked there.

    Raises:
      TypeError, ValueError: if they are not integers, or on the host one does not fit
        int32 or lies past the longest request.
    """
    indices, longest = device_positions(positions), _short_requests(config)
    if longest is not None and not isinstance(positions, jax.Array):
        furthest = int(np.asarray(positions, np.int64).max(initial=-1))
        if furthest >= longest:
            raise ValueError(
                f"positions must be below {longest}, the longest request that this "
                f"config is for, got {furthest}; the config of longer ones is "
                f"config.for_length(total_length)"
            )
    return indices


def _short_requests(config: RopeConfig) -> int | None:
    """The longest request, where it is less than the config's length."""
    longest = config.longest_request
    return longest if longest < config.max_position_embeddings else None


@functools.partial(jax.jit, static_argnums=1)
def _rows(indices: Int32[Array, "..."], config: RopeConfig) -> tuple[Array, Array]:
    """Jitted, so that eager calls have the same bits.

    Barrier and concatenation keep XLA from computing the waves again for every head:
    XLA:CPU drops the one before it fuses, and older ones never fuse the other.
    """
    places = jnp.maximum(indices, jnp.int32(0)).astype(jnp.uint32)
    if config.layout.axis_of_frequency is None:
        places = places[..., None]
    else:
        places = jnp.moveaxis(places[config.layout.axes_array()], 0, -1)
    cos, sin = _waves(_phase(places, _words(config)))
    longest = _short_requests(config)
    if longest is not None:
        past = places >= jnp.uint32(longest)
        cos, sin = (jnp.where(past, jnp.float32(jnp.nan), wave) for wave in (cos, sin))
    amplitude = jnp.float32(config.frequencies.attention_factor)
    rows = jnp.concatenate([cos * amplitude, sin * amplitude], axis=-1)
    rows, half = lax.optimization_barrier(rows), cos.shape[-1]
    return rows[..., :half], rows[..., half:]


@functools.lru_cache(maxsize=256)
def _words(config: RopeConfig) -> np.ndarray:
    """Each frequency's fraction of a turn per position, as uint32 [2, R/2].

    The first word counts 2^-32 of a turn, the second 2^-64.
    """
    turns = config.frequencies.inv_freq / TWO_PI
    parts = [int(np.rint(part * np.longdouble(2) ** 64)) for part in turns % 1]
    words = [(part >> 32 & 0xFFFFFFFF, part & 0xFFFFFFFF) for part in parts]
    return np.array(words, np.uint32).T


def _phase(places: UInt32[Array, "..."], words: np.ndarray) -> UInt32[Array, "..."]:
    """Position times frequency, in 2^-32 of a turn; whole turns overflow."""
    high, low = (
        jnp.expand_dims(jnp.asarray(word), tuple(range(places.ndim - 1)))
        for word in words
    )
    return places * high + _high_product(places, low)


def _high_product(a: UInt32[Array, "..."], b: UInt32[Array, "..."]) -> Array:
    """The upper 32 bits of a product of two uint32, at most 3 units too low.

    From products of their halves, without the carries: a unit is 1.5e-9 radians.
    """
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    return a_high * b_high + (a_high * b_low >> half) + (a_low * b_high >> half)


def _waves(phase: UInt32[Array, "..."]) -> tuple[Array, Array]:
    """Cosine and sine of a phase: the nearest quarter turn, and an eighth at most."""
    bits = jnp.uint32(_QUARTER_BITS)
    quarter = (phase + jnp.uint32(1 << _QUARTER_BITS - 1)) >> bits
    rest = lax.bitcast_convert_type(phase - (quarter << bits), jnp.int32)
    angle = rest.astype(jnp.float32) * _RADIANS
    c, s = jnp.cos(angle), jnp.sin(angle)
    odd = (quarter & jnp.uint32(1)) == 1
    cos, sin = jnp.where(odd, s, c), jnp.where(odd, c, s)
    left = ((quarter + jnp.uint32(1)) & jnp.uint32(2)) == 2
    below = (quarter & jnp.uint32(2)) == 2
    return jnp.where(left, -cos, cos), jnp.where(below, -sin, sin)
