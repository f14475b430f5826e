"""The cos/sin table, built once on the host."""

import numpy as np

from jrope._config import RopeConfig

# Rows made at a time: bounds the float64 temporaries to a few megabytes.
_BLOCK_ROWS = 4096


def compute_cos_sin_cache(config: RopeConfig) -> np.ndarray:
    """The table that `lookup` reads: one row a position.

    With `angle_dtype="float64"` angles are exact to float64 and cos and sin are rounded
    once. With "float32" the frequencies and their product with the position are
    float32, as in Hugging Face's models.

    Args:
      config: what to tabulate.

    Returns:
      float32 [P, R]: cos in the first half of the last axis, sin in the second, both
      times the attention factor.

    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=2)
    >>> compute_cos_sin_cache(config).round(4).tolist()
    [[1.0, 0.0], [0.5403000116348267, 0.8414999842643738]]
    """
    frequencies = config.frequencies
    inv_freq = frequencies.inv_freq.astype(config.angle_dtype)
    half = inv_freq.shape[0]
    table = np.empty((config.max_position_embeddings, 2 * half), np.float32)
    for start in range(0, len(table), _BLOCK_ROWS):
        rows = table[start : start + _BLOCK_ROWS]
        positions = np.arange(start, start + len(rows), dtype=config.angle_dtype)
        angles = (positions[:, None] * inv_freq[None, :]).astype(np.float64)
        rows[:, :half] = np.cos(angles) * frequencies.attention_factor
        rows[:, half:] = np.sin(angles) * frequencies.attention_factor
    return table
