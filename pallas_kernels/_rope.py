"""Queries and keys turned by this step's rows, in one launch."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels._heads import Heads, Place
from pallas_kernels._launch import launch, rewritten
from pallas_kernels._rows import GivenRow
from pallas_kernels._work import Job, work


def rope(
    xs: Sequence[Float[Array, "*B T N H"]],
    cos: Float32[Array, "*#B #T half"],
    sin: Float32[Array, "*#B #T half"],
    *,
    is_neox_style: bool,
    rotary_offset: int = 0,
    in_place: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Turns every pair of features by its token's angle.

    The transpose has sin negated; the inverse divides both rows by cos^2 + sin^2 as
    well. Neither needs another kernel.

    Args:
      xs: queries, or queries and keys: float32, bfloat16 or float16, with the same
        leading axes.
      cos: cosines; half = R/2. Axes of length 1 are shared.
      sin: likewise.
      is_neox_style: pairs are (i, i + half) if True, (2i, 2i + 1) if False.
      rotary_offset: index of the first feature that turns.
      in_place: rewrite the operands' buffers, and touch only what turns, rather than
        make fresh ones. An operand that is needed afterwards, or that comes into the
        program without being donated, is copied first, in a launch of its own.
      interpret: run on the CPU, in Pallas' interpreter.

    Returns:
      The turned xs.

    Raises:
      ValueError: if shapes do not fit.
    """
    leading = xs[0].shape[:-2]
    places = [
        Place(
            head_dim=x.shape[-1],
            rotary_dim=2 * cos.shape[-1],
            rotary_offset=rotary_offset,
            is_neox_style=is_neox_style,
        )
        for x in xs
    ]
    views = [
        place.view(_flat(x, leading, 2)) for x, place in zip(xs, places, strict=True)
    ]
    row_axes = cos.shape[:-1]
    rows = [_flat(row, row_axes, 1) for row in (cos, sin)]

    def body(token: Any, *refs: Any) -> None:
        cos_ref, sin_ref, *heads = refs
        sources, targets = heads[: len(xs)], heads[-len(xs) :]
        index = _shared_index(token, leading, row_axes)
        work(
            [
                Job(
                    source=Heads(ref=source, before=(token,)),
                    target=Heads(ref=target, before=(token,)),
                    heads=x.shape[-2],
                    place=place,
                    in_place=in_place,
                )
                for source, target, x, place in zip(
                    sources, targets, xs, places, strict=True
                )
            ],
            lambda: GivenRow(cos=cos_ref, sin=sin_ref, index=index),
        )

    options: dict[str, Any] = {
        "tokens": math.prod(leading),
        "name": "rope",
        "interpret": interpret,
    }
    if in_place:
        _, turned = rewritten(
            lambda *refs: launch(body, (*rows, *refs), **options), *views
        )
    else:
        out_type = [jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views]
        turned = launch(body, (*rows, *views), out_type=out_type, **options)
    return tuple(
        place.unview(out).reshape(x.shape)
        for out, x, place in zip(turned, xs, places, strict=True)
    )


def _flat(x: Array, leading: tuple[int, ...], rest: int) -> Array:
    """The leading axes as one."""
    if len(leading) + rest != x.ndim or x.shape[: len(leading)] != leading:
        raise ValueError(
            f"operands must have the leading axes {leading} and {rest} more, got shape "
            f"{x.shape}"
        )
    return x.reshape(math.prod(leading), *x.shape[len(leading) :])


def _shared_index(token: Any, leading: tuple[int, ...], rows: tuple[int, ...]) -> Any:
    """The row of a token, where rows' axes of length 1 are shared."""
    if leading == rows:
        return token
    index, stride, step = 0, 1, 1
    for length, own in zip(reversed(leading), reversed(rows), strict=True):
        if own == length:
            index = index + token // stride % length * step
        elif own != 1:
            raise ValueError(
                f"rows must have the leading axes of the heads, {leading}, or 1 where "
                f"they are shared, got {rows}"
            )
        stride, step = stride * length, step * own
    return index
