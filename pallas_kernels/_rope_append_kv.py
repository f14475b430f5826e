"""A packed qkv buffer to turned queries and a paged cache, in one launch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._finish import Narrow
from pallas_kernels._heads import Heads, Place
from pallas_kernels._launch import launch, rewritten
from pallas_kernels._memory import load_scalar
from pallas_kernels._norms import Norms, in_kernel, weight_operands
from pallas_kernels._paged import CacheLayout, is_used, slot_heads
from pallas_kernels._sources import Rows, check_tokens
from pallas_kernels._work import Job, work


def rope_append_kv(
    qkv: Float[Array, "T NKKH"],
    slots: Int32[Array, " T"],
    key_cache: Array,
    value_cache: Array,
    rows: Rows,
    *,
    place: Place,
    query_heads: int,
    key_heads: int,
    cache_layout: CacheLayout,
    norms: Norms = (None, None),
    rotate_padding: bool = True,
    scales: tuple[Float32[Array, ""], Float32[Array, ""]] | None = None,
    amax: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Reads the buffer once, and writes queries, keys and values once.

    Args:
      qkv: [T, (N + 2 K) H]: the queries' heads, the keys', the values'.
      slots: page * page_size + place in the page, all distinct; what is not a slot of
        the cache is padding, of which nothing is written there.
      key_cache: [pages, page_size, K, H] (NHD) or [pages, K, page_size, H] (HND).
      value_cache: likewise.
      rows: what each token turns by.
      place: the rotation within each head.
      query_heads: N.
      key_heads: K.
      cache_layout: "NHD" or "HND".
      norms: of queries and of keys.
      rotate_padding: whether the query of a negative slot turns; if not it is copied.
      scales: what keys and values are multiplied by, for caches of float8_e4m3fn.
      amax: scale each head by 448 / amax instead, and return those.
      interpret: run on the CPU, in Pallas' interpreter.

    Returns:
      query [T, N, H], the caches, and with `amax` float32 [T, K] of keys and values.
    """
    tokens = qkv.shape[0]
    check_tokens(rows, tokens)
    heads = (query_heads, key_heads, key_heads)
    view = place.view(qkv.reshape(tokens, sum(heads), place.head_dim))
    weights = weight_operands(norms, place)
    # Scalars as arrays of one: a reference must have something to index.
    scale_operands = [scale.reshape(1) for scale in scales or ()]
    operands = (*rows.operands, *weights, *scale_operands, slots, view)

    def body(token: Any, *refs: Any) -> None:
        row_refs, refs = refs[:2], refs[2:]
        found = in_kernel(norms, refs[: len(weights)])
        refs = refs[len(weights) :]
        scale_refs, refs = refs[: len(scale_operands)], refs[len(scale_operands) :]
        slots_ref, source, key_ref, value_ref, query_ref, *amax_refs = refs
        slot = load_scalar(slots_ref, token)
        used = is_used(key_ref, slot, cache_layout)
        caches = [
            slot_heads(cache, jnp.maximum(slot, jnp.int32(0)), cache_layout)
            for cache in (key_ref, value_ref)
        ]
        targets = [Heads(ref=query_ref, before=(token,)), *caches]
        narrows: list[Narrow | None] = [None] * 3
        if scales is not None:
            narrows[1:] = [Narrow(scale=load_scalar(ref, 0)) for ref in scale_refs]
        if amax:
            narrows[1:] = [Narrow(amax=ref, token=token) for ref in amax_refs]
        jobs = [
            Job(
                source=Heads(ref=source, before=(token,), first=sum(heads[:i])),
                target=targets[i],
                heads=heads[i],
                place=place,
                turns=i < 2,
                norm=found[i] if i < 2 else None,
                narrow=narrows[i],
                when=used if i else None,
                unless=None if i or rotate_padding else slot < jnp.int32(0),
            )
            for i in range(3)
        ]
        work(jobs, lambda: rows.row(row_refs, token))

    out_type = [
        jax.ShapeDtypeStruct((tokens, query_heads, *view.shape[2:]), qkv.dtype),
        *[jax.ShapeDtypeStruct((tokens, key_heads), jnp.float32)] * (2 if amax else 0),
    ]
    (query, *amaxes), caches = rewritten(
        lambda *refs: launch(
            body,
            (*operands, *refs),
            tokens=tokens,
            out_type=out_type,
            name="rope_append_kv",
            interpret=interpret,
        ),
        place.view(key_cache),
        place.view(value_cache),
    )
    return (place.unview(query), *map(place.unview, caches), *amaxes)
