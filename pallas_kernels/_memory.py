"""Loads and stores of global memory, the same on every supported jax."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._mosaic import plgpu
from pallas_kernels._threads import ACCESS_BYTES, THREADS, Spread
from pallas_kernels._traffic import Access, note

# jax 0.12 refuses plain stores that do not fill whole lines of 128 bytes, and has a
# function for them; before, there was nothing to refuse.
_STORE = getattr(plgpu, "store", None)


def load(
    ref: Any,
    spread: Spread,
    *,
    axes: tuple[int, ...] = (),
    what: str = "heads",
    start: int = 0,
) -> Array:
    """Loads a box, or what lies like a box less some of its axes.

    Args:
      ref: in global memory.
      spread: of the box.
      axes: of the box that `ref` has not.
      what: for `Access`.
      start: likewise.
    """
    layout = spread.layout.reduce(axes) if axes else spread.layout
    _note(ref, spread, what=what, store=False, start=start)
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, values: Array, spread: Spread) -> None:
    """Stores a box."""
    _note(ref, spread, what="heads", store=True, start=0)
    if spread.elements == 1:
        ref.at[(0,) * values.ndim][...] = _only(values)
    elif _STORE is not None:
        _STORE(ref, values, optimized=False)
    else:
        ref[...] = values


def store_numbers(ref: Any, numbers: Array, spread: Spread) -> None:
    """Stores one number for each row of a box, which all its columns' threads hold."""
    note(
        Access(
            what="amax",
            store=True,
            start=0,
            shape=(spread.rows,),
            itemsize=ref.dtype.itemsize,
            asked=THREADS * ref.dtype.itemsize * spread.held_rows,
            width=ref.dtype.itemsize,
        )
    )
    if spread.rows == 1:
        ref.at[0][...] = _only(numbers)
    elif _STORE is not None:
        _STORE(ref, numbers, optimized=False)
    else:
        ref[...] = numbers


def load_numbers(ref: Any, spread: Spread) -> Array:
    """Loads one number for each row of a box."""
    return load(ref, spread, axes=(1, 2) if spread.paired else (1,), what="amax")


def _only(values: Array) -> Array:
    """The one element."""
    while values.ndim:
        values = jnp.max(values, axis=values.ndim - 1)
    return values


def load_scalar(ref: Any, index: Any) -> Array:
    """Reads one number, in every thread."""
    size = ref.dtype.itemsize
    note(
        Access(
            what="scalar",
            store=False,
            start=0,
            shape=(),
            itemsize=size,
            asked=THREADS * size,
            width=size,
        )
    )
    return ref[index]


def _note(ref: Any, spread: Spread, *, what: str, store: bool, start: int) -> None:
    size = ref.dtype.itemsize
    pair = 2 if spread.paired and what in ("heads", "weight") else 1
    per_thread = {"heads": spread.held, "amax": spread.held_rows}.get(
        what, spread.held_columns * pair
    )
    run = 1 if what == "amax" else spread.vector * pair
    note(
        Access(
            what=what,
            store=store,
            start=start,
            shape=tuple(ref.shape),
            itemsize=size,
            asked=THREADS * per_thread * size,
            width=min(ACCESS_BYTES, run * size),
        )
    )
