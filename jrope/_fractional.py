"""Rows of positions between two rows of a table: Qwen3-Omni's moments of a video."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange
from jrope._kinds import Table
from jrope._kinds._base import add_angles


def is_fractional(positions: object) -> bool:
    """Whether positions are float32, on the host or on the device."""
    return getattr(positions, "dtype", None) == np.float32


def check_frequencies(config: RopeConfig, positions: object) -> None:
    """Raises if float positions come to frequencies that a table cannot tell apart.

    A table's rows are the same for a frequency and for one that is a turn less.
    """
    if not is_fractional(positions):
        return
    largest = float(config.frequencies.inv_freq.max())
    if largest >= math.pi or config.angle_dtype != "float64":
        raise ValueError(
            f"float32 positions must come with frequencies below pi and "
            f"angle_dtype='float64', got {largest:.4g} and {config.angle_dtype!r}"
        )


def fractional_positions(
    positions: ArrayLike, *, rows: int, out_of_range: OutOfRange
) -> Float32[Array, "..."]:
    """Float positions on the device; those that lie on the host are checked there.

    Raises:
      ValueError: if one on the host is not a number or lies past the table.
    """
    if not isinstance(positions, jax.Array):
        host = np.asarray(positions)
        wrong = np.isnan(host)
        if out_of_range == "nan":
            wrong |= host >= rows
        if wrong.any():
            raise ValueError(
                f"positions must be below the table's {rows} rows, got "
                f"{host[wrong].flat[0]}; does the context exceed "
                f"max_position_embeddings? Pad with negative positions"
            )
    return jnp.asarray(positions)


def rows_between(
    kind: Table, positions: Float32[Array, "..."], out_of_range: OutOfRange
) -> Float32[Array, "..."]:
    """Rows [..., R] of float positions: the row below each, turned on by the rest.

    A product of position and frequency would be off by the position's own rounding,
    1e-3 at 32k; so only the fraction, below 1, is multiplied. Frequencies come from
    the table: the angles of row 1, which must be below pi (`check_frequencies`).
    """
    # Not a maximum, whose gradient at 0 would be halved.
    places = jnp.where(positions < 0, jnp.float32(0), positions)
    past = places >= jnp.float32(kind.max_position_embeddings)
    places = jnp.where(past, jnp.float32(0), places)
    below = jnp.floor(places)
    # What is not a number has no integer; its fraction, NaN, makes its rows NaN.
    known = jnp.where(jnp.isnan(below), jnp.float32(0), below)
    far = jnp.int32(kind.max_position_embeddings)
    indices = jnp.where(past, far, known.astype(jnp.int32))
    rows = kind.rows(indices, None, out_of_range)
    first = kind.rows(jnp.int32(1), None, "nan")
    return _turn_on(rows, first, places - below)


@jax.jit
def _turn_on(rows: Array, first: Array, part: Array) -> Array:
    half = first.shape[-1] // 2
    frequencies = jnp.arctan2(first[half:], first[:half])
    frequencies = jnp.expand_dims(frequencies, tuple(range(part.ndim)))
    angles = part[..., None] * frequencies
    return add_angles(rows, jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))
