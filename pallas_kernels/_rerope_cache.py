"""Cached keys turned in place, in one launch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Int32

from pallas_kernels._finish import FP8_MAX, LEAST_AMAX, Narrow
from pallas_kernels._heads import Box, Place
from pallas_kernels._launch import launch, rewritten
from pallas_kernels._memory import load_numbers, load_scalar, store_numbers
from pallas_kernels._paged import CacheLayout, is_used, slot_heads
from pallas_kernels._sources import Rows, check_tokens
from pallas_kernels._traffic import of_padding
from pallas_kernels._work import Job, work

_FP8 = jnp.dtype(jnp.float8_e4m3fn)


def rerope_cache(
    cache: Array,
    slots: Int32[Array, " S"],
    rows: Rows,
    *,
    place: Place,
    cache_layout: CacheLayout,
    amax: Float32[Array, "S K"] | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Reads each slot once and writes it once.

    Args:
      cache: [pages, page_size, K, H] (NHD) or [pages, K, page_size, H] (HND).
      slots: all distinct; what is not a slot of the cache is skipped.
      rows: what the keys in each slot turn by.
      place: the rotation within each head.
      cache_layout: "NHD" or "HND".
      amax: of keys in float8_e4m3fn with a scale for each token and head.
      interpret: run on the CPU, in Pallas' interpreter.

    Returns:
      The cache, and with `amax` the new ones; those of skipped slots as they were.
    """
    tokens = slots.shape[0]
    check_tokens(rows, tokens)
    given = () if amax is None else (amax,)

    def body(token: Any, *refs: Any) -> None:
        row_refs, (slots_ref, *amax_refs, cache_ref), new = (
            refs[:2],
            refs[2 : 4 + len(given)],
            refs[4 + len(given) :],
        )
        slot = load_scalar(slots_ref, token)

        def numbers(box: Box) -> Array:
            heads = pl.ds(box.head, box.spread.rows)
            return load_numbers(amax_refs[0].at[token, heads], box.spread)

        def factors(box: Box) -> Array:
            least = jnp.maximum(numbers(box), jnp.float32(LEAST_AMAX))
            return least * jnp.float32(1 / FP8_MAX)

        def keep(job: Job, new: Any, token: Any) -> None:
            for box, *_ in job.groups():
                heads = pl.ds(box.head, box.spread.rows)
                with of_padding():
                    store_numbers(new.at[token, heads], numbers(box), box.spread)

        narrow = None
        if given:
            narrow = Narrow(amax=new[0], token=token)
        elif cache.dtype == _FP8:
            # One scale for all cancels.
            narrow = Narrow(scale=jnp.float32(1))
        at = slot_heads(cache_ref, jnp.maximum(slot, jnp.int32(0)), cache_layout)
        job = Job(
            source=at,
            target=at,
            heads=cache.shape[2 if cache_layout == "NHD" else 1],
            place=place,
            in_place=True,
            dequantise=factors if given else None,
            narrow=narrow,
        )
        used = is_used(cache_ref, slot, cache_layout)
        pl.when(used)(lambda: work([job], lambda: rows.row(row_refs, token)))
        if given:
            pl.when(jnp.logical_not(used))(lambda: keep(job, new[0], token))

    out_type = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given]
    news, (turned,) = rewritten(
        lambda ref: launch(
            body,
            (*rows.operands, slots, *given, ref),
            tokens=tokens,
            out_type=out_type,
            name="rerope_cache",
            interpret=interpret,
        ),
        place.view(cache),
    )
    return (place.unview(turned), *news)
