"""Norms before or after a turn, and narrow numbers after it, over whole heads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels._heads import Box
from pallas_kernels._memory import store_numbers

# The largest float8_e4m3fn, and the least magnitude that a head is scaled by.
FP8_MAX = 448.0
LEAST_AMAX = 1e-12

# What `Box.fetch` returns for each box of some heads, in float32.
Values = list[list[Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """An RMS norm over the features of each head.

    Args:
      epsilon: added to the mean of squares.
      unit_offset: multiply by 1 + weight rather than by weight.
      first: norm, then turn; or the other way.
      rounded: cast to the heads' dtype in between.
      weight: [H], an array, and inside a kernel its reference; None for none.
    """

    epsilon: float
    unit_offset: bool
    first: bool
    rounded: bool
    weight: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow:
    """Results in float8_e4m3fn.

    Args:
      scale: what all are multiplied by, or None for 448 / amax of each head.
      amax: where those are written, [tokens, heads].
      token: the token's index there.
    """

    scale: Array | None = None
    amax: Any = None
    token: Any = None


def normed(values: Values, boxes: list[Box], norm: Norm, width: int) -> Values:
    """Heads of `width` features, divided by the root of their mean square."""
    energy = _over_features(values, boxes, lambda x: x * x, jnp.sum, jnp.add)
    mean = energy * jnp.float32(1 / width) + jnp.float32(norm.epsilon)
    scale = lax.rsqrt(mean)
    scaled = [
        [x * box.of_heads(scale) for x in each]
        for each, box in zip(values, boxes, strict=True)
    ]
    if norm.weight is None:
        return scaled
    offset = jnp.float32(1 if norm.unit_offset else 0)
    return [
        [
            x * (weight + offset if norm.unit_offset else weight)
            for x, weight in zip(each, box.per_feature(norm.weight), strict=True)
        ]
        for each, box in zip(scaled, boxes, strict=True)
    ]


def narrowed(values: Values, boxes: list[Box], narrow: Narrow) -> Values:
    """Multiplied, and kept within the range of float8_e4m3fn."""
    if narrow.scale is not None:
        return [[_saturated(x * narrow.scale) for x in each] for each in values]
    amax = _over_features(values, boxes, jnp.abs, jnp.max, jnp.maximum)
    first = boxes[0]
    heads = pl.ds(first.head, first.spread.rows)
    store_numbers(narrow.amax.at[narrow.token, heads], amax, first.spread)
    factor = jnp.float32(FP8_MAX) / jnp.maximum(amax, jnp.float32(LEAST_AMAX))
    return [
        [_saturated(x * box.of_heads(factor)) for x in each]
        for each, box in zip(values, boxes, strict=True)
    ]


def _saturated(x: Array) -> Array:
    return jnp.minimum(jnp.maximum(x, jnp.float32(-FP8_MAX)), jnp.float32(FP8_MAX))


def _over_features(
    values: Values,
    boxes: list[Box],
    of_each: Callable[[Array], Array],
    within: Callable[..., Array],
    between: Callable[[Array, Array], Array],
) -> Array:
    """One number for each head, from all its features."""
    total: Array | None = None
    for each, box in zip(values, boxes, strict=True):
        for x in each:
            x = of_each(x)
            if box.spread.paired:
                x = within(x, axis=2)
            part = within(x, axis=1)
            total = part if total is None else between(total, part)
    assert total is not None
    return total
