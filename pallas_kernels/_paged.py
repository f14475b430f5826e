"""Slots of a paged cache, inside a kernel."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._heads import Heads

CacheLayout = Literal["NHD", "HND"]


def slot_heads(cache: Any, slot: Array, cache_layout: CacheLayout) -> Heads:
    """The heads in a slot of a cache [pages, page_size, K, H] or [pages, K, ...]."""
    size = jnp.int32(page_size(cache, cache_layout))
    # Never negative where it is used, and Mosaic divides unsigned numbers by shifts.
    page, place = slot // size, slot % size
    if cache_layout == "NHD":
        return Heads(ref=cache, before=(page, place))
    return Heads(ref=cache, before=(page,), after=(place,))


def page_size(cache: Any, cache_layout: CacheLayout) -> int:
    """Tokens in a page."""
    return cache.shape[1 if cache_layout == "NHD" else 2]


def is_used(cache: Any, slot: Array, cache_layout: CacheLayout) -> Array:
    """Whether a slot is one of the cache's: others are padding."""
    slots = cache.shape[0] * page_size(cache, cache_layout)
    return jnp.logical_and(slot >= jnp.int32(0), slot < jnp.int32(slots))
