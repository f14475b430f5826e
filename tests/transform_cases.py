"""Every device operation as a function of arrays, beside its float64 definition.

An operation is told by the letters of its operands' axes; what a transform does to it
follows from them. Oracles take tables as operands too: that those are right is tested
elsewhere (test_tables, test_kinds).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracle
from flax import nnx

from jrope import (
    DualChunk,
    DualChunkTable,
    Fope,
    FopeTable,
    QueryTemperature,
    RopeConfig,
    TwoLevelTable,
    apply_rope,
    compute_cos_sin_cache,
    linen,
    lookup,
    mrope_axes,
    query_temperature,
    rerope,
    rotate,
    rotate_one,
    stack_tables,
)
from jrope.nnx import RotaryEmbedding
from jrope.scalings import Default, Yarn

B, T, N, K, H, R, P = 2, 3, 4, 2, 64, 48, 32
PAGES, PAGE = 2, 4
CONFIG = RopeConfig(
    head_dim=H,
    rotary_dim=R,
    rotary_offset=8,
    is_neox_style=False,
    rope_theta=1e4,
    max_position_embeddings=P,
    # An attention factor other than 1 tells the inverse from the transpose.
    scaling=Yarn(factor=4.0, original_max_position_embeddings=8),
)
LAYOUT = CONFIG.layout
TABLE = compute_cos_sin_cache(CONFIG)
PLAIN = dataclasses.replace(CONFIG, scaling=Default())
STYLE = {"is_neox_style": False, "offset": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation.

    Args:
      make: operands, NumPy arrays, from a random generator.
      run: the operation on a route and device arrays; a tuple.
      exact: the same in float64 on NumPy arrays.
      letters: the axes of each operand. B, T, N and K can be mapped.
      results: likewise.
      moving: which operands are differentiated.
      carried: which operands become which results, so that it can run again on them.
      float64_bits: how exact results of float64 are.
    """

    make: Callable[[np.random.Generator], Any]
    run: Callable[..., Any]
    exact: Callable[..., Any]
    letters: tuple[str, ...]
    results: tuple[str, ...]
    moving: tuple[int, ...] = ()
    carried: dict[int, int] = dataclasses.field(default_factory=dict)
    float64_bits: int = 40


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def places(rng, *shape, end=P):
    """Positions, the last of which is padding."""
    made = rng.integers(0, end, shape).astype(np.int32)
    made[..., -1] = -1
    return made


def tables(rng):
    """The table, or another that no two instances share: its rows moved on."""
    return np.roll(TABLE, -int(rng.integers(0, 8)), axis=0)


def rows(table, positions):
    return np.split(np.asarray(table)[np.maximum(positions, 0)], 2, axis=-1)


def turned(xs, cos, sin):
    return tuple(oracle.rotate(x, cos, sin, **STYLE) for x in xs)


def back(cos, sin):
    """Rows that undo these."""
    energy = np.asarray(cos, np.float64) ** 2 + np.asarray(sin, np.float64) ** 2
    return cos / energy, -sin / energy


def shifted(table, shifts):
    cos, sin = rows(table, np.abs(shifts))
    size = np.hypot(np.asarray(cos, np.float64), sin)
    return cos / size, np.sign(shifts + 0.5)[..., None] * sin / size


HEADS = ("BTNH", "BTKH")


def heads(rng):
    return normal(rng, B, T, N, H), normal(rng, B, T, K, H)


def given_rows(rng):
    return rows(TABLE, places(rng, B, T))


def rotation(inverse):
    undo = back if inverse else lambda *rows: rows
    return Case(
        make=lambda rng: (*heads(rng), *given_rows(rng)),
        run=lambda route, *a: rotate(
            *a, layout=LAYOUT, inverse=inverse, implementation=route
        ),
        exact=lambda q, k, cos, sin: turned((q, k), *undo(cos, sin)),
        letters=(*HEADS, "BTh", "BTh"),
        results=HEADS,
        moving=(0, 1) if inverse else (0, 1, 2, 3),
        carried={0: 0, 1: 1},
    )


def layer(call):
    """An operation of (positions, query, key, table)."""
    return Case(
        make=lambda rng: (places(rng, B, T), *heads(rng), tables(rng)),
        run=call,
        exact=lambda p, q, k, table: turned((q, k), *rows(table, p)),
        letters=("BT", *HEADS, "PR"),
        results=HEADS,
        moving=(1, 2),
        carried={1: 0, 2: 1},
    )


def in_nnx(route, positions, query, key, table):
    graph, state = nnx.split(RotaryEmbedding(CONFIG, implementation=route))
    tree = jax.tree.structure(state)
    return nnx.merge(graph, jax.tree.unflatten(tree, [table]))(positions, query, key)


def in_linen(route, positions, query, key, table):
    module = linen.RotaryEmbedding(CONFIG, implementation=route)
    variables = {"rope_cache": {"cos_sin_cache": table}}
    return module.apply(variables, positions, query, key)


def looked_up(array, exact, make=None, letters="BT", end=P, **options):
    """A lookup of (positions, table): `array` wraps the table that is an operand."""
    kind, wrap = array
    given: dict[str, Any] = {"layout": LAYOUT} | options
    return Case(
        make=make or (lambda rng: (places(rng, B, T, end=end), kind(rng))),
        run=lambda route, p, table: lookup(wrap(table), p, **given),
        exact=exact,
        letters=(letters, "PR"),
        results=("BTh", "BTh"),
    )


def wrapped(table):
    """A table kind around an array that may be another or a tracer."""
    return (
        lambda rng: np.asarray(table.cos_sin_cache),
        lambda array: dataclasses.replace(table, cos_sin_cache=array),
    )


FLAT = (tables, lambda array: array)
SECTION = mrope_axes((8, 8, 8), rotary_dim=R, order="chunked")
AXES = dataclasses.replace(LAYOUT, axis_of_frequency=SECTION)
CHUNKED = dataclasses.replace(PLAIN, dual_chunk=DualChunk(chunk_size=8, local_size=2))
FAR = dataclasses.replace(CONFIG, max_position_embeddings=3000)
FOPE = RopeConfig(
    head_dim=H,
    rope_theta=1e4,
    max_position_embeddings=P,
    fope=Fope(num_inv_freq=3, separate_heads=True),
)
WAVES = compute_cos_sin_cache(dataclasses.replace(FOPE, fope=None))


def by_axis(positions, table):
    per_axis = [rows(table, p) for p in positions]
    pick = np.asarray(SECTION)
    return tuple(np.choose(pick, [found[i] for found in per_axis]) for i in range(2))


def between(positions, table):
    angles = np.maximum(positions, 0)[..., None] * np.asarray(
        oracle.frequencies(
            "default", {"head_dim": R, "rope_theta": 1e4, "max_position_embeddings": P}
        )[0]
    )
    del table
    return np.cos(angles), np.sin(angles)


def fope(route, positions, cos_mixes, sin_mixes):
    table = FopeTable.from_config(FOPE, cos_mixes, sin_mixes)
    return lookup(table, positions, layout=FOPE.layout)


def fope_exact(positions, *mixes):
    out = []
    for row, mix, passing in zip(rows(WAVES, positions), mixes, (1, 0), strict=True):
        wide = np.full((*row.shape[:-1], len(mix), H // 2), passing, np.float64)
        wide[..., :3] = np.einsum("...n,knm->...km", row[..., :3], np.float64(mix))
        out.append(wide)
    return tuple(out)


def stacked_exact(positions, offset, table):
    return rows(table, np.maximum(positions, 0) + offset)


STACK = stack_tables([PLAIN, dataclasses.replace(PLAIN, rope_theta=1e6)])
TEMPERATURE = QueryTemperature(scale=0.1, length=8)

CASES = {
    "lookup": looked_up(FLAT, lambda p, table: rows(table, p)),
    "lookup, axis map": looked_up(
        FLAT,
        by_axis,
        make=lambda rng: (places(rng, 3, B, T), tables(rng)),
        letters="ABT",
        layout=AXES,
    ),
    "lookup, fractions": looked_up(
        (lambda rng: compute_cos_sin_cache(PLAIN), lambda array: array),
        between,
        make=lambda rng: (
            rng.uniform(0, P - 1, (B, T)).astype(np.float32),
            compute_cos_sin_cache(PLAIN),
        ),
    ),
    "lookup, two levels": looked_up(
        wrapped(TwoLevelTable.from_config(FAR)),
        lambda p, _: rows(compute_cos_sin_cache(FAR), p),
        end=3000,
    ),
    "lookup, dual chunk": looked_up(
        wrapped(DualChunkTable.from_config(CHUNKED)),
        lambda p, _: rows(compute_cos_sin_cache(PLAIN), np.maximum(p, 0) % 6),
    ),
    "lookup, stacked": Case(
        make=lambda rng: (
            places(rng, B, T),
            np.asarray(STACK.starts, np.int32)[rng.integers(0, 2, (B, T))],
            np.asarray(STACK.cos_sin_cache),
        ),
        run=lambda route, p, offset, table: lookup(
            dataclasses.replace(STACK, cos_sin_cache=table),
            p,
            layout=LAYOUT,
            row_offset=offset,
        ),
        exact=stacked_exact,
        letters=("BT", "BT", "PR"),
        results=("BTh", "BTh"),
    ),
    "lookup, FoPE": Case(
        make=lambda rng: (places(rng, B, T), *normal(rng, 2, K, 3, 3)),
        run=fope,
        exact=fope_exact,
        letters=("BT", "Knn", "Knn"),
        results=("BTKh", "BTKh"),
        moving=(1, 2),
    ),
    "rotate": rotation(False),
    "rotate, inverse": rotation(True),
    "apply_rope": layer(
        lambda route, *a: apply_rope(*a, layout=LAYOUT, implementation=route)
    ),
    "rerope": Case(
        make=lambda rng: (
            normal(rng, B, T, K, H),
            rng.integers(1 - P, P, (B, T)).astype(np.int32),
            tables(rng),
        ),
        run=lambda route, *a: (rerope(*a, layout=LAYOUT, implementation=route),),
        exact=lambda key, shifts, table: turned((key,), *shifted(table, shifts)),
        letters=("BTKH", "BT", "PR"),
        results=("BTKH",),
        moving=(0,),
        carried={0: 0},
        float64_bits=21,  # Its rows of amplitude 1 are float32.
    ),
    "rotate_one": Case(
        make=lambda rng: (normal(rng, B, T, N, H), *given_rows(rng)),
        run=lambda route, *a: (rotate_one(*a, is_neox_style=False, rotary_offset=8),),
        exact=lambda x, cos, sin: turned((x,), cos, sin),
        letters=("BTNH", "BTh", "BTh"),
        results=("BTNH",),
        moving=(0, 1, 2),
        carried={0: 0},
    ),
    "query_temperature": Case(
        make=lambda rng: (places(rng, B, T, end=100),),
        run=lambda route, p: (query_temperature(p, TEMPERATURE),),
        exact=lambda p: (1 + 0.1 * np.log1p(np.maximum(p // 8, 0)),),
        letters=("BT",),
        results=("BT",),
    ),
    "nnx.RotaryEmbedding": layer(in_nnx),
    "linen.RotaryEmbedding": layer(in_linen),
}
