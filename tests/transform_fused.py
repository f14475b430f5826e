"""Cases of `jrope.fused` and `jrope.positions_jax`: see transform_cases."""

import numpy as np
import oracle
from transform_cases import (
    LAYOUT,
    PAGE,
    PAGES,
    STYLE,
    B,
    Case,
    H,
    K,
    N,
    T,
    heads,
    normal,
    places,
    rows,
    shifted,
    tables,
    turned,
)

from jrope import fused, positions_jax
from jrope.fused import QkNorm

NORM = QkNorm(epsilon=1e-6)
PACKED = {"layout": LAYOUT, "query_heads": N, "key_heads": K}
CACHE = "GSCH"


def normed(x, weight):
    size = np.sqrt(np.mean(np.float64(x) ** 2, -1, keepdims=True) + 1e-6)
    return x / size * np.float64(weight)


def split(qkv):
    apart = np.reshape(qkv, (*np.shape(qkv)[:-1], N + 2 * K, H))
    return np.split(apart, (N, N + K), axis=-2)


def weights(rng):
    return normal(rng, H), normal(rng, H)


def packed_exact(positions, qkv, table, query_weight, key_weight):
    query, key, value = split(qkv)
    wide = normed(query, query_weight), normed(key, key_weight)
    return (*turned(wide, *rows(table, positions)), value)


def again_exact(positions, qkv, table):
    query, key, value = split(qkv)
    wide = (*turned((query, key), *rows(table, positions)), value)
    return (np.concatenate(wide, axis=-2).reshape(np.shape(qkv)),)


def apart_exact(positions, query, key, table, query_weight, key_weight):
    wide = normed(query, query_weight), normed(key, key_weight)
    return turned(wide, *rows(table, positions))


def written(cache, slots, tokens):
    out = np.array(cache, np.float64)
    for slot, token in zip(slots, tokens, strict=True):
        if slot >= 0:
            out[slot // PAGE, slot % PAGE] = token
    return out


def append_exact(positions, qkv, table, slots, keys, values):
    query, key, value = split(qkv)
    query, key = turned((query, key), *rows(table, positions))
    return query, written(keys, slots, key), written(values, slots, value)


def rerope_exact(shifts, cache, table, slots):
    held = np.float64(cache).reshape(-1, K, H)[np.maximum(slots, 0)]
    cos, sin = shifted(table, shifts)
    return (written(cache, slots, oracle.rotate(held, cos, sin, **STYLE)),)


def slots_of(rng):
    """Distinct, and one of them padding."""
    made = rng.permutation(PAGES * PAGE)[:T].astype(np.int32)
    made[0] = -1
    return made


def caches(rng, count):
    return normal(rng, count, PAGES, PAGE, K, H)


def count_up(indptr, offsets, size):
    made = np.full(size, -1)
    for first, last, offset in zip(indptr[:-1], indptr[1:], offsets, strict=True):
        made[first:last] = offset + np.arange(last - first)
    return made


def runs(ids):
    """Positions within runs of one id, row by row."""
    made = np.full(np.shape(ids), -1)
    for at in np.ndindex(np.shape(ids)):
        before = (*at[:-1], at[-1] - 1)
        if ids[at] > 0:
            follows = at[-1] > 0 and ids[before] == ids[at]
            made[at] = made[before] + 1 if follows else 0
    return made


def masked(mask):
    return np.where(mask, np.cumsum(mask, axis=-1) - 1, -1)


SIZE = 9


def indptr_of(rng):
    lengths = rng.integers(0, 4, 2)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def requests(rng):
    return indptr_of(rng), rng.integers(0, 100, 2).astype(np.int32)


def positions_of(rng):
    indptr, offsets = requests(rng)
    return indptr, count_up(indptr, offsets, SIZE).astype(np.int32)


def offsets_exact(indptr, positions):
    lengths = np.diff(indptr)
    starts = positions[np.minimum(indptr[:-1], SIZE - 1)]
    return np.where(lengths > 0, starts, 0), np.array(True)


def each_row(row):
    """An oracle of one row, over any leading axes."""

    def over(x):
        leading = np.shape(x)[:-1]
        flat = [row(one) for one in np.reshape(x, (-1, np.shape(x)[-1]))]
        return (np.reshape(flat, (*leading, -1)),)

    return over


CASES = {
    "fused.qkv_rope": Case(
        make=lambda rng: (
            places(rng, B, T),
            normal(rng, B, T, (N + 2 * K) * H),
            tables(rng),
            *weights(rng),
        ),
        run=lambda route, p, qkv, table, q, k: fused.qkv_rope(
            p,
            qkv,
            table,
            norm=NORM,
            query_weight=q,
            key_weight=k,
            implementation=route,
            **PACKED,
        ),
        exact=packed_exact,
        letters=("BT", "BTF", "PR", "H", "H"),
        results=("BTNH", "BTKH", "BTKH"),
        moving=(1, 3, 4),
    ),
    "fused.qkv_rope, packed": Case(
        make=lambda rng: (
            places(rng, B, T),
            normal(rng, B, T, (N + 2 * K) * H),
            tables(rng),
        ),
        run=lambda route, *a: (
            fused.qkv_rope(*a, packed=True, implementation=route, **PACKED),
        ),
        exact=again_exact,
        letters=("BT", "BTF", "PR"),
        results=("BTF",),
        moving=(1,),
        carried={1: 0},
    ),
    "fused.qk_norm_rope": Case(
        make=lambda rng: (places(rng, B, T), *heads(rng), tables(rng), *weights(rng)),
        run=lambda route, *a: fused.qk_norm_rope(
            *a[:4],
            layout=LAYOUT,
            norm=NORM,
            query_weight=a[4],
            key_weight=a[5],
            implementation=route,
        ),
        exact=apart_exact,
        letters=("BT", "BTNH", "BTKH", "PR", "H", "H"),
        results=("BTNH", "BTKH"),
        moving=(1, 2, 4, 5),
        carried={1: 0, 2: 1},
    ),
    "fused.rope_append_kv": Case(
        make=lambda rng: (
            places(rng, T),
            normal(rng, T, (N + 2 * K) * H),
            tables(rng),
            slots_of(rng),
            *caches(rng, 2),
        ),
        run=lambda route, *a: fused.rope_append_kv(*a, implementation=route, **PACKED),
        exact=append_exact,
        letters=("T", "TF", "PR", "T", CACHE, CACHE),
        results=("TNH", CACHE, CACHE),
        moving=(1, 4, 5),
        carried={4: 1, 5: 2},
    ),
    "fused.rerope_cache": Case(
        make=lambda rng: (
            rng.integers(-5, 5, T).astype(np.int32),
            *caches(rng, 1),
            tables(rng),
            slots_of(rng),
        ),
        run=lambda route, *a: fused.rerope_cache(
            *a, layout=LAYOUT, implementation=route
        ),
        exact=rerope_exact,
        letters=("T", CACHE, "PR", "T"),
        results=(CACHE,),
        moving=(1,),
        carried={1: 0},
        float64_bits=21,
    ),
    "positions_jax.positions_from_indptr": Case(
        make=requests,
        run=lambda route, *a: (positions_jax.positions_from_indptr(*a, size=SIZE),),
        exact=lambda indptr, offsets: (count_up(indptr, offsets, SIZE),),
        letters=("I", "Q"),
        results=("S",),
    ),
    "positions_jax.offsets_from_positions": Case(
        make=positions_of,
        run=lambda route, *a: positions_jax.offsets_from_positions(*a),
        exact=offsets_exact,
        letters=("I", "S"),
        results=("Q", ""),
    ),
    "positions_jax.positions_from_mask": Case(
        make=lambda rng: (rng.integers(0, 2, (B, T)) > 0,),
        run=lambda route, mask: (positions_jax.positions_from_mask(mask),),
        exact=lambda mask: (masked(mask),),
        letters=("BT",),
        results=("BT",),
    ),
    "positions_jax.positions_from_segment_ids": Case(
        make=lambda rng: (rng.integers(0, 3, (B, T)).astype(np.int32),),
        run=lambda route, ids: (positions_jax.positions_from_segment_ids(ids),),
        exact=lambda ids: (runs(ids),),
        letters=("BT",),
        results=("BT",),
        carried={0: 0},
    ),
    "positions_jax.positions_from_cu_seqlens": Case(
        make=lambda rng: (np.stack([indptr_of(rng), indptr_of(rng)]),),
        run=lambda route, it: (positions_jax.positions_from_cu_seqlens(it, size=SIZE),),
        exact=each_row(lambda row: count_up(row, np.zeros(len(row) - 1, int), SIZE)),
        letters=("BC",),
        results=("BS",),
    ),
}
