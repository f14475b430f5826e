"""Heads in memory, cut into boxes of pairs that turn and features that pass."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels._memory import load, store
from pallas_kernels._mosaic import plgpu
from pallas_kernels._threads import Spread, powers_of_two, spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a head the rotation acts.

    Args:
      head_dim: features of a head, H: even.
      rotary_dim: features that turn, R: even.
      rotary_offset: the first of them.
      is_neox_style: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.
    """

    head_dim: int
    rotary_dim: int
    rotary_offset: int = 0
    is_neox_style: bool = True

    def __post_init__(self) -> None:
        """Checks that the rotation fits."""
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ValueError(
                f"head_dim and rotary_dim must be even, got {self.head_dim} and "
                f"{self.rotary_dim}"
            )
        if not 0 <= self.rotary_offset <= self.head_dim - self.rotary_dim:
            raise ValueError(
                f"rotary_offset + rotary_dim must be at most head_dim = "
                f"{self.head_dim}, got {self.rotary_offset} + {self.rotary_dim}"
            )

    @property
    def half(self) -> int:
        """Pairs in a head, R/2."""
        return self.rotary_dim // 2

    def view(self, x: Array) -> Array:
        """[..., H] as the boxes index it: GPT-J's pairs are an axis of their own."""
        if self.is_neox_style:
            return x
        return x.reshape(*x.shape[:-1], self.head_dim // 2, 2)

    def unview(self, x: Array) -> Array:
        """The other way."""
        if self.is_neox_style:
            return x
        return x.reshape(*x.shape[:-2], self.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of one token inside an array.

    Args:
      ref: `Place.view` of the array.
      before: indices in front of the axis of heads.
      first: the first of the heads.
      after: indices between heads and features.
    """

    ref: Any
    before: tuple[Any, ...]
    first: int = 0
    after: tuple[Any, ...] = ()

    def at(self, head: int, heads: int, *features: Any) -> Any:
        """The reference of a box."""
        head_slice = pl.ds(self.first + head, heads)
        return self.ref.at[(*self.before, head_slice, *self.after, *features)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """Some features of some heads, as one block of threads holds them.

    Args:
      head: the first head.
      starts: where the box's features start. Two starts for pairs whose first features
        lie apart from the second; one for pairs side by side and for what passes.
      pair: the first pair, or None for features that pass.
      spread: on the threads.
    """

    head: int
    starts: tuple[tuple[int, int | None], ...]
    pair: int | None
    spread: Spread

    @property
    def layout(self) -> Any:
        """Of one feature of each pair, or of the features that pass."""
        return self.spread.layout.reduce((2,)) if self._split else self.spread.layout

    @property
    def _split(self) -> bool:
        return self.pair is not None and self.spread.paired

    def fetch(self, heads: Heads) -> list[Array]:
        """Issues the loads."""
        return [load(ref, self.spread) for ref in self._refs(heads)]

    def put(self, heads: Heads, values: list[Array]) -> None:
        """Stores what `fetch` would return."""
        for ref, each in zip(self._refs(heads), values, strict=True):
            store(ref, each, self.spread)

    def split(self, values: list[Array]) -> list[Array]:
        """Fetched values in float32: first and second features, or what passes."""
        wide = [each.astype(jnp.float32) for each in values]
        if not self._split:
            return wide
        (both,) = wide
        return [
            jnp.sum(jnp.where(self._is(i), both, jnp.float32(0)), axis=2)
            for i in range(2)
        ]

    def join(self, values: list[Array]) -> list[Array]:
        """The other way, still in float32."""
        if not self._split:
            return values
        shape = (self.spread.rows, self.spread.columns, 2)
        first, second = (
            plgpu.layout_cast(
                jax.lax.broadcast_in_dim(each, shape, (0, 1)), self.spread.layout
            )
            for each in values
        )
        return [jnp.where(self._is(0), first, second)]

    def over_heads(self, row: Array) -> Array:
        """Numbers of each pair, repeated for every head."""
        shape = (self.spread.rows, self.spread.columns)
        return plgpu.layout_cast(
            jax.lax.broadcast_in_dim(row, shape, (1,)), self.layout
        )

    def _is(self, place: int) -> Array:
        shape = (self.spread.rows, self.spread.columns, 2)
        index = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=self.spread.layout)
        return index == place

    def _refs(self, heads: Heads) -> list[Any]:
        rows, columns = self.spread.rows, self.spread.columns
        refs = []
        for start, place in self.starts:
            features: tuple[Any, ...] = (pl.ds(start, columns),)
            if self.spread.paired:
                features = (*features, pl.ds(0, 2))
            elif place is not None:
                features = (*features, place)
            refs.append(heads.at(self.head, rows, *features))
        return refs


def pair_boxes(place: Place, head: int, heads: int, itemsize: int) -> list[Box]:
    """The pairs that turn, of a power of two of heads."""
    half, offset = place.half, place.rotary_offset
    straddling = not place.is_neox_style and offset % 2 == 1
    paired = not place.is_neox_style and not straddling
    if place.is_neox_style:
        alignment = math.gcd(place.head_dim, offset, half)
    else:
        alignment = 1 if straddling else math.gcd(place.head_dim // 2, offset // 2)
    boxes = []
    for pair, pairs in powers_of_two(half):
        if place.is_neox_style:
            starts = ((offset + pair, None), (offset + half + pair, None))
        elif straddling:
            start = offset // 2 + pair
            starts = ((start, 1), (start + 1, 0))
        else:
            starts = ((offset // 2 + pair, None),)
        boxes.append(
            Box(
                head=head,
                starts=starts,
                pair=pair,
                spread=spread(
                    heads,
                    pairs,
                    alignment=_power_of_two(math.gcd(alignment, pair)),
                    itemsize=itemsize * (2 if paired else 1),
                    paired=paired,
                ),
            )
        )
    return boxes


def pass_boxes(place: Place, head: int, heads: int, itemsize: int) -> list[Box]:
    """The features that do not turn."""
    end = place.rotary_offset + place.rotary_dim
    parts = ((0, place.rotary_offset), (end, place.head_dim - end))
    boxes = []
    for start, width in parts:
        if place.is_neox_style:
            boxes += _plain(place, head, heads, itemsize, start, width)
            continue
        # A feature whose neighbour turns stands alone.
        if start % 2 and width:
            boxes.append(_alone(head, heads, itemsize, start))
            start, width = start + 1, width - 1
        boxes += _plain(place, head, heads, itemsize, start, width)
        if width % 2:
            boxes.append(_alone(head, heads, itemsize, start + width - 1))
    return boxes


def whole_boxes(place: Place, head: int, heads: int, itemsize: int) -> list[Box]:
    """All features of a power of two of heads, none of which turns."""
    return _plain(place, head, heads, itemsize, 0, place.head_dim)


def _plain(
    place: Place, head: int, heads: int, itemsize: int, start: int, width: int
) -> list[Box]:
    paired = not place.is_neox_style
    unit = 2 if paired else 1
    boxes = []
    for column, columns in powers_of_two(width // unit):
        first = start // unit + column
        alignment = math.gcd(place.head_dim // unit, first)
        boxes.append(
            Box(
                head=head,
                starts=((first, None),),
                pair=None,
                spread=spread(
                    heads,
                    columns,
                    alignment=_power_of_two(alignment),
                    itemsize=itemsize * unit,
                    paired=paired,
                ),
            )
        )
    return boxes


def _alone(head: int, heads: int, itemsize: int, feature: int) -> Box:
    return Box(
        head=head,
        starts=((feature // 2, feature % 2),),
        pair=None,
        spread=spread(heads, 1, alignment=1, itemsize=itemsize),
    )


def _power_of_two(number: int) -> int:
    """The largest power of two that divides `number`."""
    return number & -number
