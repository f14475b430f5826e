"""Ways to write one rotation, for compilers that fuse them differently.

All have one signature, give the same bits when jitted, and take any pairing, any
partial width and any offset; `turn_pairs` holds the arithmetic of all of them. Only the
last axis is ever reshaped, sliced or padded, so heads and tokens may be sharded in any
way.

Every form but the definition holds its rows: without a barrier XLA:CPU fuses the lookup
of a token's rows into the loop over its heads and repeats it for each of them.
"""

import functools
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jrope._rotate import rotate_one, turn_pairs


class Form(Protocol):
    """A way to rotate x [*B, T, N, H] by the rows cos and sin [*B, T, R/2]."""

    def __call__(
        self,
        x: Array,
        cos: Array,
        sin: Array,
        *,
        is_neox_style: bool,
        rotary_offset: int = 0,
    ) -> Array:
        """Rotates x, as `rotate_one` does."""
        ...


def concat_held(
    x: Array, cos: Array, sin: Array, *, is_neox_style: bool, rotary_offset: int = 0
) -> Array:
    """The definition, with its rows held as one array, which is looked up at once.

    A `concatenate` over the features is a loop of its own with full-size temporaries up
    to JAX 0.10; from 0.11 on it fuses inside loops and is then the cheapest for few
    tokens.
    """
    half = cos.shape[-1]
    rows = lax.optimization_barrier(jnp.concatenate([cos, sin], axis=-1))
    cos, sin = rows[..., :half], rows[..., half:]
    return rotate_one(
        x, cos, sin, is_neox_style=is_neox_style, rotary_offset=rotary_offset
    )


def stack(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    is_neox_style: bool,
    rotary_offset: int = 0,
    as_bits: bool = False,
) -> Array:
    """The two halves stacked on an axis of their own, which a reshape then drops.

    A stack becomes a fused select where a concatenate over the features does not.
    """
    cos, sin = lax.optimization_barrier((cos, sin))
    halves = _turned_halves(x, cos, sin, is_neox_style, rotary_offset)
    move = _to_bits if as_bits else _as_is
    width = 2 * cos.shape[-1]
    block = jnp.stack([move(half) for half in halves], axis=-2 if is_neox_style else -1)
    block = block.reshape(*x.shape[:-1], width)
    if width != x.shape[-1]:
        rest = x.shape[-1] - rotary_offset - width
        padded = _pad(block, rotary_offset, rest)
        block = jnp.where(_inside(x, width, rotary_offset), padded, move(x))
    return lax.bitcast_convert_type(block, x.dtype) if as_bits else block


def stack_held(
    x: Array, cos: Array, sin: Array, *, is_neox_style: bool, rotary_offset: int = 0
) -> Array:
    """`stack` in bits, with rows that JAX 0.10 holds as well.

    XLA:CPU drops the barrier there before it fuses, but neither drops nor fuses a join
    of the rows with themselves. One copy of few rows costs less than their lookup in
    the loop over heads.
    """
    half = cos.shape[-1]
    twice = jnp.concatenate([cos, sin, cos, sin], axis=-1)
    rows = lax.optimization_barrier(twice)[..., 2 * half :]
    return stack(
        x,
        rows[..., :half],
        rows[..., half:],
        is_neox_style=is_neox_style,
        rotary_offset=rotary_offset,
        as_bits=True,
    )


def select(
    x: Array, cos: Array, sin: Array, *, is_neox_style: bool, rotary_offset: int = 0
) -> Array:
    """The two halves padded to the width of a head and joined by a select.

    One fusion with no temporary, like `stack`, but it computes both halves for every
    feature, and in 16 bits the pads cost a cast each.
    """
    cos, sin = lax.optimization_barrier((cos, sin))
    width = 2 * cos.shape[-1]
    rest = x.shape[-1] - rotary_offset - width
    first, second = _turned_halves(x, cos, sin, is_neox_style, rotary_offset)
    apart, gap = (cos.shape[-1], 0) if is_neox_style else (1, 1)
    first = _pad(first, rotary_offset, rest + apart, gap)
    second = _pad(second, rotary_offset + apart, rest, gap)
    turned = jnp.where(_is_first(x, width, is_neox_style, rotary_offset), first, second)
    if width == x.shape[-1]:
        return turned
    return jnp.where(_inside(x, width, rotary_offset), turned, x)


def swap(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    is_neox_style: bool,
    rotary_offset: int = 0,
    as_bits: bool = False,
) -> Array:
    """Every feature turned with its partner, by rows as wide as a head.

    The result is written feature by feature, with nothing to join: the second of a pair
    turns like the first with sin negated. The partner is x moved by the distance within
    a pair; rows are widened once for all heads, which the barrier keeps so.
    """
    width = 2 * cos.shape[-1]
    rest = x.shape[-1] - rotary_offset - width
    apart = cos.shape[-1] if is_neox_style else 1
    moved = _to_bits(x) if as_bits else x
    is_first = _is_first(x, width, is_neox_style, rotary_offset)
    partner = jnp.where(
        is_first, _pad(moved, -apart, apart), _pad(moved, apart, -apart)
    )
    if as_bits:
        partner = lax.bitcast_convert_type(partner, x.dtype)
    axis = -2 if is_neox_style else -1
    rows = [
        _pad(jnp.stack(pair, axis).reshape(*cos.shape[:-1], width), rotary_offset, rest)
        for pair in ((cos, cos), (sin, -sin))
    ]
    wide_cos, wide_sin = lax.optimization_barrier(tuple(rows))
    turned, _ = turn_pairs(x, partner, wide_cos, wide_sin, rotary_dim=width)
    if width == x.shape[-1]:
        return turned
    # A select, not rows of 1 and 0: those would turn inf beside a feature into NaN.
    return jnp.where(_inside(x, width, rotary_offset), turned, x)


def swap_update(
    x: Array, cos: Array, sin: Array, *, is_neox_style: bool, rotary_offset: int = 0
) -> Array:
    """`swap` of the rotated features alone, written into x in place.

    Saves the work on features that pass, and inside a loop the copy of them as well.
    The turned block is held: fused with the update, XLA:CPU reads features that it has
    overwritten, wherever moving an axis of the result costs no copy (heads before the
    tokens of a decode step). Before JAX 0.12 it fuses across the barrier: wrong there.
    """
    width = 2 * cos.shape[-1]
    block = x[..., rotary_offset : rotary_offset + width]
    turned = swap(block, cos, sin, is_neox_style=is_neox_style)
    if width == x.shape[-1]:
        return turned
    turned = lax.optimization_barrier(turned)
    return lax.dynamic_update_slice_in_dim(x, turned, rotary_offset, axis=-1)


# The dispatch: the XLA route, the tests and the benchmark all read this table. The
# forms in bits move 16-bit floats as integers: up to JAX 0.10 XLA:CPU widens floats to
# move them inside a fusion and rounds them again, at several times the cost.
FORMS: dict[str, Form] = {
    "concat": rotate_one,
    "concat_held": concat_held,
    "stack": stack,
    "stack_bits": functools.partial(stack, as_bits=True),
    "stack_held": stack_held,
    "select": select,
    "swap": swap,
    "swap_bits": functools.partial(swap, as_bits=True),
    "swap_update": swap_update,
}


def _turned_halves(
    x: Array, cos: Array, sin: Array, is_neox_style: bool, offset: int
) -> tuple[Array, Array]:
    half = cos.shape[-1]
    middle, end = offset + half, offset + 2 * half
    first, second = (
        (x[..., offset:middle], x[..., middle:end])
        if is_neox_style
        else (x[..., offset:end:2], x[..., offset + 1 : end : 2])
    )
    return turn_pairs(first, second, cos, sin, rotary_dim=2 * half)


def _pad(x: Array, before: int, after: int, between: int = 0) -> Array:
    """Zeros around (or, if negative, features off) the last axis."""
    none = (0, 0, 0)
    widths = [none] * (x.ndim - 1) + [(before, after, between)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _inside(x: Array, width: int, offset: int) -> np.ndarray:
    """Which features turn, [1, ..., H]."""
    feature = np.arange(x.shape[-1]) - offset
    mask = (feature >= 0) & (feature < width)
    return mask.reshape((1,) * (x.ndim - 1) + (-1,))


def _is_first(x: Array, width: int, is_neox_style: bool, offset: int) -> np.ndarray:
    """Which features are the first of their pair, [1, ..., H]; any value outside."""
    feature = np.arange(x.shape[-1]) - offset
    mask = feature < width // 2 if is_neox_style else feature % 2 == 0
    return mask.reshape((1,) * (x.ndim - 1) + (-1,))


def _to_bits(x: Array) -> Array:
    unsigned = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned)


def _as_is(x: Array) -> Array:
    return x
