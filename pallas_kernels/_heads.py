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
        first, second = (self._laid_out(each, (0, 1)) for each in values)
        return [jnp.where(self._is(0), first, second)]

    def over_heads(self, row: Array) -> Array:
        """Numbers of each pair, repeated for every head."""
        shape = (self.spread.rows, self.spread.columns)
        return plgpu.layout_cast(
            jax.lax.broadcast_in_dim(row, shape, (1,)), self.layout
        )

    def of_heads(self, numbers: Array) -> Array:
        """A number for each head, repeated for what `fetch` returns of it."""
        return self._laid_out(numbers, (0,))

    def per_feature(self, ref: Any) -> list[Array]:
        """Numbers [H] for the features, repeated for every head, in float32."""
        numbers = [
            load(ref.at[features], self.spread, axes=(0,), what="weight", start=start)
            for (start, _), features in zip(self.starts, self._features(), strict=True)
        ]
        axes = (1, 2) if self.spread.paired else (1,)
        return [self._laid_out(each.astype(jnp.float32), axes) for each in numbers]

    def _laid_out(self, numbers: Array, axes: tuple[int, ...]) -> Array:
        shape = (self.spread.rows, self.spread.columns)
        shape = (*shape, 2) if self.spread.paired else shape
        return plgpu.layout_cast(
            jax.lax.broadcast_in_dim(numbers, shape, axes), self.spread.layout
        )

    def _is(self, place: int) -> Array:
        shape = (self.spread.rows, self.spread.columns, 2)
        index = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=self.spread.layout)
        return index == place

    def _refs(self, heads: Heads) -> list[Any]:
        return [
            heads.at(self.head, self.spread.rows, *features)
            for features in self._features()
        ]

    def _features(self) -> list[tuple[Any, ...]]:
        """The indices of each start's features in a head."""
        indices = []
        for start, place in self.starts:
            features: tuple[Any, ...] = (pl.ds(start, self.spread.columns),)
            if self.spread.paired:
                features = (*features, pl.ds(0, 2))
            elif place is not None:
                features = (*features, place)
            indices.append(features)
        return indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Some heads of an array, to be cut into boxes.

    Args:
      place: the rotation within each.
      head: the first head.
      heads: a power of two.
      itemsize: bytes of a feature.
      column_lanes: for all boxes, if not as many as each can use.
    """

    place: Place
    head: int
    heads: int
    itemsize: int
    column_lanes: int | None = None

    def pairs(self) -> list[Box]:
        """The pairs that turn."""
        place = self.place
        half, offset = place.half, place.rotary_offset
        if place.is_neox_style:
            align = math.gcd(place.head_dim, offset, half)
            firsts, paired = ((offset, None), (offset + half, None)), False
        elif offset % 2:
            # Each pair straddles two of the array's.
            align, firsts, paired = 1, ((offset // 2, 1), (offset // 2 + 1, 0)), False
        else:
            align = math.gcd(place.head_dim // 2, offset // 2)
            firsts, paired = ((offset // 2, None),), True
        return [
            self._box(
                pair=pair,
                starts=tuple((first + pair, which) for first, which in firsts),
                columns=pairs,
                align=math.gcd(align, pair),
                paired=paired,
            )
            for pair, pairs in powers_of_two(half)
        ]

    def rest(self) -> list[Box]:
        """The features that do not turn."""
        end = self.place.rotary_offset + self.place.rotary_dim
        before = self._plain(0, self.place.rotary_offset)
        return before + self._plain(end, self.place.head_dim - end)

    def whole(self) -> list[Box]:
        """All features, none of which turns."""
        return self._plain(0, self.place.head_dim)

    def _plain(self, start: int, width: int) -> list[Box]:
        unit = 1 if self.place.is_neox_style else 2
        boxes = []
        # A feature whose neighbour turns stands alone.
        if start % unit and width:
            boxes.append(self._alone(start))
            start, width = start + 1, width - 1
        if width % unit:
            boxes.append(self._alone(start + width - 1))
        for column, columns in powers_of_two(width // unit):
            first = start // unit + column
            boxes.append(
                self._box(
                    pair=None,
                    starts=((first, None),),
                    columns=columns,
                    align=math.gcd(self.place.head_dim // unit, first),
                    paired=unit == 2,
                )
            )
        return boxes

    def _alone(self, feature: int) -> Box:
        start = feature // 2, feature % 2
        return self._box(pair=None, starts=(start,), columns=1, align=1, paired=False)

    def _box(
        self,
        *,
        pair: int | None,
        starts: tuple[tuple[int, int | None], ...],
        columns: int,
        align: int,
        paired: bool,
    ) -> Box:
        return Box(
            head=self.head,
            starts=starts,
            pair=pair,
            spread=spread(
                self.heads,
                columns,
                # The largest power of two that divides it.
                alignment=align & -align,
                itemsize=self.itemsize * (2 if paired else 1),
                paired=paired,
                column_lanes=self.column_lanes,
            ),
        )
