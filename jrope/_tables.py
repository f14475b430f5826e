"""The cos/sin table, built once on the host."""

from collections.abc import Iterator

import numpy as np

from jrope._config import RopeConfig
from jrope.scalings import TWO_PI

# Rows made at a time: bounds the temporaries to a few megabytes.
_BLOCK_ROWS = 4096

# Rows of the fine half of a two-level table.
FINE_ROWS = 1024


def compute_cos_sin_cache(config: RopeConfig) -> np.ndarray:
    """The table that `lookup` reads: one row a position.

    With `angle_dtype="float64"` angles are exact far below a float32's rounding, and
    cos and sin are rounded once. With "float32" the frequencies and their product with
    the position are float32, as in Hugging Face's models.

    Args:
      config: what to tabulate.

    Returns:
      float32 [P, R]: cos in the first half of the last axis, sin in the second, both
      times the attention factor. NaN past `config.longest_request`.

    Raises:
      ValueError: if the config is of another kind of table (dual chunk, FoPE).

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=2)
    >>> compute_cos_sin_cache(config).round(4).tolist()
    [[1.0, 0.0], [0.5403000116348267, 0.8414999842643738]]
    """
    check_flat(config)
    positions = np.arange(config.max_position_embeddings)
    table = rows_at(config, positions, config.frequencies.attention_factor)
    table[config.longest_request :] = np.nan
    return table


def compute_two_level_cache(config: RopeConfig) -> np.ndarray:
    """The array of a `TwoLevelTable`.

    Args:
      config: what to tabulate, with exact angles.

    Returns:
      float32 [ceil(P / 1024) + 1024, R], one row more where that is P: rows of every
      1024th position, of amplitude 1, then of positions 0 to 1023, times the attention
      factor.

    Raises:
      ValueError: if the config asks for float32 angles, which do not add up.
    """
    check_two_level(config)
    coarse = FINE_ROWS * np.arange(coarse_row_count(config))
    fine = np.arange(FINE_ROWS)
    factor = config.frequencies.attention_factor
    return np.concatenate([rows_at(config, coarse, 1.0), rows_at(config, fine, factor)])


def coarse_row_count(config: RopeConfig) -> int:
    """Rows of the coarse half of a two-level table: ceil(P / 1024), or one more.

    One more where the table would be as long as the flat one, at P = 1026: layers tell
    the kind of an array that they are given by its rows.
    """
    length = config.max_position_embeddings
    rows = -(-length // FINE_ROWS)
    return rows + (rows + FINE_ROWS == length)


def compute_dual_chunk_cache(config: RopeConfig) -> np.ndarray:
    """The array of a `DualChunkTable`.

    Args:
      config: what to tabulate, with `dual_chunk`.

    Returns:
      float32 [4c, R] with c = chunk_size - local_size: rows of positions s, of
      min(s + c, chunk_size), of s + c and of s + chunk_size, for s from 0 to c - 1.

    Raises:
      ValueError: if the config has no `dual_chunk`.
    """
    if config.dual_chunk is None:
        raise ValueError("the config must have dual_chunk for a dual-chunk table")
    chunk = config.dual_chunk.chunk_size
    inside = np.arange(chunk - config.dual_chunk.local_size)
    after = inside + len(inside)
    positions = (inside, np.minimum(after, chunk), after, inside + chunk)
    factor = config.frequencies.attention_factor
    return rows_at(config, np.concatenate(positions), factor)


def check_flat(config: RopeConfig) -> None:
    """Raises unless the config has a flat table."""
    if config.dual_chunk is not None:
        raise ValueError(
            "a config with dual_chunk has no flat table; use jrope.DualChunkTable"
        )
    if config.fope is not None:
        raise ValueError(
            "a config with fope has no flat table: it depends on the checkpoint's "
            "coefficients; use jrope.FopeTable"
        )


def check_two_level(config: RopeConfig) -> None:
    """Raises unless the config has a two-level table."""
    if config.angle_dtype != "float64":
        raise ValueError(
            f"a two-level table must have angle_dtype='float64', got "
            f"{config.angle_dtype!r}: float32 angles are not sums of two others"
        )
    if config.dual_chunk is not None or config.fope is not None:
        raise ValueError("a config with dual_chunk or fope has no two-level table")


def rows_at(config: RopeConfig, positions: np.ndarray, amplitude: float) -> np.ndarray:
    """Rows of any positions, float32 [len(positions), R]."""
    table = np.empty((len(positions), config.layout.rotary_dim), np.float32)
    for block in _blocks(len(positions)):
        angles = _angles(config, positions[block])
        waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        table[block] = waves * amplitude
    return table


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _BLOCK_ROWS):
        yield slice(start, start + _BLOCK_ROWS)


def _angles(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Angles of these positions in radians, float64 [len(positions), R/2].

    Exact ones are reduced to (-pi, pi] in whole turns before they become float64: a
    float64 angle at position 131072 is off by 1.5e-11, which near a zero of cos or sin
    is more than half a unit in the last place of a float32.
    """
    inv_freq = config.frequencies.inv_freq
    if config.angle_dtype == "float32":
        product = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)
        return product.astype(np.float64)
    turns = positions.astype(np.longdouble)[:, None] * (inv_freq / TWO_PI)
    return (turns - np.rint(turns)).astype(np.float64) * float(TWO_PI)
