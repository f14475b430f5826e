"""Positions and rotation written down a second time, for the self-check only.

Slow and plain, and without anything of jrope but a model's constants: what was served
is compared with this.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jrope.demo.model import Rotate
from jrope.demo.requests import Request
from jrope.demo.spec import LayerType, ModelSpec

# cos and sin of each layer type [T, H/2]
Rows = dict[LayerType, tuple[jax.Array, jax.Array]]
RotateRow = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_MERGE = 2  # Qwen2-VL: a token stands for two by two patches


def reference_positions(request: Request, length: int) -> list[tuple[int, int, int]]:
    """Time, row and column of each token of a served sequence, text to the end.

    Source: Qwen2-VL, arXiv:2409.12191, section 2.1: in text the three are equal; those
    of a grid begin where the text before it ends, and text goes on past the largest.
    """
    positions: list[tuple[int, int, int]] = []
    grids = {medium.start: medium.grid_thw for medium in request.media}
    following = 0
    while len(positions) < length:
        if (grid := grids.get(len(positions))) is None:
            positions.append((following, following, following))
            following += 1
            continue
        frames, rows, columns = grid
        for frame in range(frames):
            for row in range(rows // _MERGE):
                for column in range(columns // _MERGE):
                    positions.append(
                        (following + frame, following + row, following + column)
                    )
        following += max(frames, rows // _MERGE, columns // _MERGE)
    return positions


def reference_rows(spec: ModelSpec, request: Request, length: int) -> Rows:
    """Cos and sin of the first `length` tokens, in float64 and then rounded."""
    exponents = np.arange(0, spec.head_dim, 2) / spec.head_dim
    positions = np.asarray(reference_positions(request, length), np.float64)
    # Axis by axis in runs, as Qwen2-VL has them; without sections the axes are equal.
    section = spec.mrope_section or (len(exponents), 0, 0)
    turning = positions[:, np.repeat([0, 1, 2], section)]  # [T, H/2]
    rows: Rows = {}
    for kind, config in spec.rope_configs().items():
        angles = turning * config.rope_theta**-exponents
        cos, sin = np.cos(angles), np.sin(angles)
        rows[kind] = jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)
    return rows


def reference_rotate(spec: ModelSpec, cos: jax.Array, sin: jax.Array) -> Rotate:
    """A rotation by these rows [T, H/2]."""
    turn: RotateRow = _turn_neox if spec.is_neox_style else _turn_gpt_j
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return lambda query, key: (turn(query, cos, sin), turn(key, cos, sin))


def _turn_neox(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + H/2)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def _turn_gpt_j(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (2i, 2i + 1)."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.stack(turned, axis=-1).reshape(x.shape)
