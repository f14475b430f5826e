"""A packed qkv buffer to turned queries and keys, and values, in one launch."""

import math
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels._heads import Heads, Place
from pallas_kernels._launch import launch, rewritten
from pallas_kernels._norms import Norms, in_kernel, weight_operands
from pallas_kernels._sources import Rows, check_tokens
from pallas_kernels._work import Job, work


def qkv_rope(
    qkv: Float[Array, "*B T NKKH"],
    rows: Rows,
    *,
    place: Place,
    query_heads: int,
    key_heads: int,
    norms: Norms = (None, None),
    packed: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Reads the buffer once and writes each part once.

    Args:
      qkv: [*B, T, (N + 2 K) H]: the queries' heads, the keys', the values'.
      rows: what each token turns by.
      place: the rotation within each head.
      query_heads: N.
      key_heads: K.
      norms: of queries and of keys.
      packed: rewrite the buffer in place, values untouched, rather than make three.
      interpret: run on the CPU, in Pallas' interpreter.

    Returns:
      query [*B, T, N, H], key and value [*B, T, K, H]; or the buffer.
    """
    leading = qkv.shape[:-1]
    tokens = math.prod(leading)
    check_tokens(rows, tokens)
    heads = (query_heads, key_heads, key_heads)
    total = sum(heads)
    view = place.view(qkv.reshape(tokens, total, place.head_dim))
    weights = weight_operands(norms, place)

    def body(token: Any, *refs: Any) -> None:
        row_refs, weight_refs, rest = refs[:2], refs[2 : 2 + len(weights)], refs[2:]
        source, *targets = rest[len(weights) :]
        first, jobs = 0, []
        for i, count in enumerate(heads[:2] if packed else heads):
            at = Heads(ref=source, before=(token,), first=first)
            jobs.append(
                Job(
                    source=at,
                    target=at if packed else Heads(ref=targets[i], before=(token,)),
                    heads=count,
                    place=place,
                    turns=i < 2,
                    in_place=packed,
                    norm=in_kernel(norms, weight_refs)[i] if i < 2 else None,
                )
            )
            first += count
        work(jobs, lambda: rows.row(row_refs, token))

    options: dict[str, Any] = {
        "tokens": tokens,
        "name": "qkv_rope",
        "interpret": interpret,
    }
    operands = (*rows.operands, *weights)
    if packed:
        _, (out,) = rewritten(
            lambda ref: launch(body, (*operands, ref), **options), view
        )
        return (place.unview(out).reshape(qkv.shape),)
    out_type = [
        jax.ShapeDtypeStruct((tokens, count, *view.shape[2:]), qkv.dtype)
        for count in heads
    ]
    outs = launch(body, (*operands, view), out_type=out_type, **options)
    return tuple(
        place.unview(out).reshape(*leading, count, place.head_dim)
        for out, count in zip(outs, heads, strict=True)
    )
