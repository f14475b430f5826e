"""The cases that rotations are timed in, their operands, floors and exact values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from benchmarks.workloads import WORKLOADS
from jrope import RopeConfig

TOKENS = (1, 256, 8192)
FLOORS = ("floor: copy", "floor: x*c")
MODEL = WORKLOADS["llama3.1-8b"]
# Rows of the table: a short one, since the lookup must not be what is measured.
ROWS = 16_384
# Steps in one loop: enough to hide the dispatch of the call, few enough to wait for.
_LOOP_STEPS = ((1, 400), (64, 40), (256, 8), (8192, 2))

# (query, key, what the candidate keeps between steps, positions) -> query, key.
Step = Callable[[Array, Array, Any, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One case to decide: what the table of choices may depend on.

    Args:
      dtype: of queries and keys, by name.
      is_neox_style: the pairing.
      partial: rotate the first half of each head only.
      tokens: T.
    """

    dtype: str
    is_neox_style: bool
    partial: bool
    tokens: int

    def __str__(self) -> str:
        """The cell in a few words."""
        width = "partial" if self.partial else "full"
        return f"{self.dtype} {self.pairing} {width} T={self.tokens}"

    @property
    def pairing(self) -> str:
        """The pairing's name."""
        return "neox" if self.is_neox_style else "gptj"

    @property
    def config(self) -> RopeConfig:
        """The model's rotation, in this pairing and width."""
        head_dim = MODEL.config.head_dim
        return dataclasses.replace(
            MODEL.config,
            is_neox_style=self.is_neox_style,
            rotary_dim=head_dim // 2 if self.partial else head_dim,
        )

    @property
    def steps(self) -> int:
        """Steps of the loop."""
        return next(steps for most, steps in _LOOP_STEPS if self.tokens <= most)


def operands(cell: Cell) -> tuple[Array, Array, Array]:
    """Queries, keys, and positions that leave room for the loop's steps."""
    rng = np.random.default_rng(0)
    head_dim = cell.config.head_dim
    query, key = (
        jnp.asarray(
            rng.standard_normal((cell.tokens, heads, head_dim), np.float32), cell.dtype
        )
        for heads in (MODEL.query_heads, MODEL.key_heads)
    )
    positions = rng.integers(0, ROWS - cell.steps, cell.tokens, np.int32)
    return query, key, jnp.asarray(positions)


def copy(
    query: Array, key: Array, state: object, positions: Array
) -> tuple[Array, Array]:
    """The floor of one call: its result is fresh memory."""
    del state, positions
    return jnp.copy(query), jnp.copy(key)


def multiply(
    query: Array, key: Array, state: object, positions: Array
) -> tuple[Array, Array]:
    """The floor of a step in a loop, where a compiler removes copies."""
    del state
    # Depends on the step, so that a loop cannot fold its products; never overflows.
    factor = 1 / (1 + positions[0].astype(jnp.float32) * 1e-6)
    scaled = [x.astype(jnp.float32) * factor for x in (query, key)]
    return scaled[0].astype(query.dtype), scaled[1].astype(key.dtype)


def loop_of(step: Step) -> Callable[..., tuple[Array, Array]]:
    """Steps at advancing positions inside one program, as a server runs them."""

    def run(
        query: Array, key: Array, state: object, positions: Array, steps: ArrayLike
    ) -> tuple[Array, Array]:
        def body(i: Array, heads: tuple[Array, Array]) -> tuple[Array, Array]:
            return step(*heads, state, positions + i)

        return lax.fori_loop(0, steps, body, (query, key))

    return run


def exact_turn(
    x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, *, is_neox_style: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The rotation in float64 by its formula, and the size |a| + |b| of each pair.

    Args:
      x: [T, N, H], rotated as a whole.
      positions: [T].
      inv_freq: radians per position [H/2].
      is_neox_style: the pairing.
    """
    half = inv_freq.size
    angles = positions.astype(np.float64)[:, None, None] * inv_freq
    pair = np.arange(half)
    first = pair if is_neox_style else 2 * pair
    second = first + (half if is_neox_style else 1)
    a, b = (x.astype(np.float64)[..., index] for index in (first, second))
    out, size = np.empty(x.shape, np.float64), np.empty(x.shape, np.float64)
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = b * np.cos(angles) + a * np.sin(angles)
    size[..., first] = size[..., second] = np.abs(a) + np.abs(b)
    return out, size
