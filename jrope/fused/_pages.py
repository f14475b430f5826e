"""Paged caches of keys and values: reading and writing tokens by slot."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jrope._gather import check_array, device_positions

CacheLayout = Literal["NHD", "HND"]

FP8 = jnp.dtype(jnp.float8_e4m3fn)
# The largest float8_e4m3fn.
FP8_MAX = 448.0
# What a token and head of zeros is divided by.
LEAST_AMAX = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """How a cache lies: [pages, page_size, K, H] (NHD) or [pages, K, page_size, H]."""

    layout: CacheLayout

    def __post_init__(self) -> None:
        """Checks the name."""
        if self.layout not in get_args(CacheLayout):
            raise ValueError(
                f"cache_layout must be one of {get_args(CacheLayout)}, got "
                f"{self.layout!r}"
            )

    def page_size(self, cache: Array) -> int:
        """Tokens in a page."""
        return cache.shape[1 if self.layout == "NHD" else 2]

    def heads(self, cache: Array) -> int:
        """Heads of a token."""
        return cache.shape[2 if self.layout == "NHD" else 1]

    def check(self, name: str, cache: Array, heads: int | None, head_dim: int) -> None:
        """Raises unless `cache` is one, of so many heads."""
        check_array(name, cache)
        fits = cache.ndim == 4 and cache.shape[3] == head_dim
        if not fits or (heads is not None and self.heads(cache) != heads):
            order = "page_size, K" if self.layout == "NHD" else "K, page_size"
            raise ValueError(
                f"{name} must be [pages, {order}, H] with K = {heads or 'any'} and H = "
                f"{head_dim}, got shape {cache.shape}; is its layout "
                f"{self.layout}?"
            )
        if 0 in cache.shape:
            raise ValueError(
                f"{name} must have at least one page, one place in it and one head, "
                f"got shape {cache.shape}; was it made before its size was known?"
            )

    def write(self, cache: Array, slots: Array, values: Array) -> Array:
        """Tokens [T, K, H] into their slots; those outside the cache go nowhere."""
        page, place = self._found(cache, slots)
        index = (page, place) if self.layout == "NHD" else (page, slice(None), place)
        # Slots are distinct, which spares XLA an atomic write of each element.
        return cache.at[index].set(values, mode="drop", unique_indices=True)

    def read(self, cache: Array, slots: Array) -> Array:
        """The tokens [T, K, H] in slots; zeros for those outside the cache."""
        page, place = self._found(cache, slots)
        index = (page, place) if self.layout == "NHD" else (page, slice(None), place)
        return cache.at[index].get(mode="fill", fill_value=0)

    def _found(self, cache: Array, slots: Array) -> tuple[Array, Array]:
        """Page and place of each slot. Unused ones get pages past the end, distinct."""
        size = jnp.int32(self.page_size(cache))
        pages = cache.shape[0]
        count = slots.shape[0]
        inside = (slots >= 0) & (slots < pages * self.page_size(cache))
        unused = pages + jnp.arange(count, dtype=jnp.int32)
        return jnp.where(inside, slots // size, unused), slots % size


def check_slots(slots: ArrayLike, count: int, name: str) -> Array:
    """Slots as int32 [T].

    Raises:
      ValueError: if there are not `count`, or, on the host, if two are the same.
    """
    given = device_positions(slots, name="slots")
    if given.shape != (count,):
        raise ValueError(
            f"slots must be [T] with T = {count}, one for each of {name}, got shape "
            f"{given.shape}"
        )
    if isinstance(slots, np.ndarray | list | tuple):
        used = np.asarray(slots)
        used = used[used >= 0]
        if len(np.unique(used)) != len(used):
            raise ValueError("slots must be distinct, got two tokens for one slot")
    return given


def quantised(wide: Array, multiplier: Array) -> Array:
    """Float32 times the multiplier as float8_e4m3fn, saturated."""
    scaled = jnp.clip(wide * multiplier, jnp.float32(-FP8_MAX), jnp.float32(FP8_MAX))
    return scaled.astype(FP8)


def largest(wide: Array) -> Array:
    """The largest magnitude of each token and head [T, K]."""
    return jnp.max(jnp.abs(wide), axis=-1)


def by_amax(amax: Array) -> Array:
    """What brings a largest magnitude to that of float8_e4m3fn."""
    return jnp.float32(FP8_MAX) / jnp.maximum(amax, jnp.float32(LEAST_AMAX))
