"""Separate queries and keys normed and turned, in one launch."""

import math
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels._heads import Heads, Place
from pallas_kernels._launch import launch
from pallas_kernels._norms import Norms, in_kernel, weight_operands
from pallas_kernels._sources import Rows, check_tokens
from pallas_kernels._work import Job, work


def qk_norm_rope(
    query: Float[Array, "*B T N G"],
    key: Float[Array, "*B T K H"],
    rows: Rows,
    *,
    place: Place,
    norms: Norms,
    gated: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Reads queries and keys once and writes them once.

    Args:
      query: [*B, T, N, H]; with `gated` [*B, T, N, 2 H], each head and its gate.
      key: [*B, T, K, H].
      rows: what each token turns by.
      place: the rotation within each head.
      norms: of queries and of keys.
      gated: cut the gates off.
      interpret: run on the CPU, in Pallas' interpreter.

    Returns:
      query and key, and with `gated` the gates [*B, T, N, H].
    """
    leading, head_dim = query.shape[:-2], place.head_dim
    tokens = math.prod(leading)
    check_tokens(rows, tokens)
    counts = (query.shape[-2], key.shape[-2])
    shape = (tokens, counts[0], *((2,) if gated else ()), head_dim)
    views = [
        place.view(query.reshape(shape)),
        place.view(key.reshape(tokens, counts[1], head_dim)),
    ]
    weights = weight_operands(norms, place)

    def body(token: Any, *refs: Any) -> None:
        row_refs, refs = refs[:2], refs[2:]
        found = in_kernel(norms, refs[: len(weights)])
        query_ref, key_ref, *targets = refs[len(weights) :]
        # Of a head and its gate, index 0 or 1 after the head's own.
        head, gate = ((0,), (1,)) if gated else ((), ())
        sources = [
            Heads(ref=query_ref, before=(token,), after=head),
            Heads(ref=key_ref, before=(token,)),
            Heads(ref=query_ref, before=(token,), after=gate),
        ]
        jobs = [
            Job(
                source=source,
                target=Heads(ref=target, before=(token,)),
                heads=counts[i % 2],
                place=place,
                turns=i < 2,
                norm=found[i] if i < 2 else None,
            )
            for i, (source, target) in enumerate(zip(sources, targets, strict=False))
        ]
        work(jobs, lambda: rows.row(row_refs, token))

    features = views[1].shape[2:]
    out_type = [
        jax.ShapeDtypeStruct((tokens, count, *features), x.dtype)
        for count, x in zip((*counts, counts[0]), (query, key, query), strict=True)
    ][: 3 if gated else 2]
    outs = launch(
        body,
        (*rows.operands, *weights, *views),
        tokens=tokens,
        out_type=out_type,
        name="qk_norm_rope",
        interpret=interpret,
    )
    return tuple(place.unview(out).reshape(*leading, -1, head_dim) for out in outs)
