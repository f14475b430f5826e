"""The page of transforms: what every device operation does under each, on each route.

The tests run the same cells: tests/test_transforms.py compares those that hold with a
float64 definition and matches the error of those that are refused.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from docs.benchmark_page import markdown_table

_HEAD = """# Transforms

What each device operation does under JAX's transforms, on each of its routes. This
page is made from the table that the tests run: **yes** is a cell whose values, or
derivatives, are compared with a float64 definition; a letter is a note below. *plain*
is an operation that has no routes, *default* the route that jrope chooses by itself.

`pallas` needs jax 0.11.2 and is interpreted in these tests. Heads are of float32, pairs
GPT-J's, a part of each head turns, and the attention factor is not 1. What differs by
dtype, pairing, norm or cache has tests of its own, as have the transforms of Flax.

"""

_TAIL = """
A table has no derivative on any route: to ask for one is a `TypeError` that says so.
Where `grad` is refused, other columns that take it do so around the operation.

## What is not a number

`jax.debug_nans` finds nothing in positions that lie inside the table, or that are
padding (negative). A position of P or more is told as it should be: on the host by a
`ValueError` before anything runs; in a program by the NaN rows that it reads, which
`debug_nans` turns into a `FloatingPointError`. With `out_of_range="clip"` there are
none.
"""

TRANSFORMS = {
    "jit": "`jax.jit`",
    "vmap": "`jax.vmap` over each axis of batch, tokens and heads, one at a time",
    "vmap of all": "`jax.vmap` over a new axis of every operand, tables and weights "
    "too",
    "grad": "`jax.grad`: to heads, weights, rows and caches; through an operation that "
    "has none of them, to what its results are multiplied by",
    "jvp": "`jax.jvp`, likewise",
    "scan": "`lax.scan`: what the operation rewrites is carried, the rest comes by "
    "step",
    "remat": "`jax.grad` of `jax.checkpoint`",
    "shard_map": "`jax.shard_map`: batch over one axis, heads over another, and `grad` "
    "of it; what has no batch runs by itself on each device",
    "donated": "`donate_argnums`: what is rewritten is used up, all else is kept",
    "x64": "`jax_enable_x64` with JAX's standard promotion: no result is wider, and "
    "int64 positions on the device are an error",
    "float64": "with `jax_enable_x64`, heads and weights of float64: results are too",
    "debug_nans": "`jax_debug_nans`, and `grad` under it",
    "disable_jit": "`jax.disable_jit`, and `grad` under it; every route runs the "
    "definition, step by step",
    "strict": "`jax_numpy_dtype_promotion=strict`, "
    "`jax_numpy_rank_promotion=raise`: "
    "the program, with `grad`, is the same as without them",
}

_PLAIN = ("plain",)
_ROUTES = ("xla", "composite", "cpu_inplace", "pallas")
_FUSED = ("default", "xla", "pallas")

# Every device operation, and the routes that its cells are run on. A layer hands its
# route on to `rotate`.
OPERATIONS = {
    "lookup": _PLAIN,
    "lookup, axis map": _PLAIN,
    "lookup, fractions": _PLAIN,
    "lookup, two levels": _PLAIN,
    "lookup, dual chunk": _PLAIN,
    "lookup, stacked": _PLAIN,
    "lookup, FoPE": _PLAIN,
    "rotate": _ROUTES,
    "rotate, inverse": ("default",),
    "apply_rope": _ROUTES,
    "rerope": _ROUTES,
    "rotate_one": _PLAIN,
    "query_temperature": _PLAIN,
    "fused.qkv_rope": _FUSED,
    "fused.qkv_rope, packed": _FUSED,
    "fused.qk_norm_rope": _FUSED,
    "fused.rope_append_kv": _FUSED,
    "fused.rerope_cache": _FUSED,
    "positions_jax.positions_from_indptr": _PLAIN,
    "positions_jax.offsets_from_positions": _PLAIN,
    "positions_jax.positions_from_mask": _PLAIN,
    "positions_jax.positions_from_segment_ids": _PLAIN,
    "positions_jax.positions_from_cu_seqlens": _PLAIN,
    "nnx.RotaryEmbedding": ("default",),
    "linen.RotaryEmbedding": ("default",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """A cell that is an error by name.

    Args:
      error: its type.
      message: a pattern of what it says.
      says: why, and what to do.
    """

    error: type[Exception]
    message: str
    says: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent:
    """A cell that there is nothing to run for, and why."""

    says: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Cells that do not hold: every one of these operations, routes and transforms."""

    operations: tuple[str, ...]
    routes: tuple[str, ...]
    transforms: tuple[str, ...]
    outcome: Refused | Absent


_KERNELS = ("default", "pallas")
_CACHES = ("fused.rope_append_kv", "fused.rerope_cache")
_PACKED = ("fused.qkv_rope", "fused.qkv_rope, packed", "fused.qk_norm_rope")
_LOOKUPS = tuple(name for name in OPERATIONS if name.startswith("lookup"))
_POSITIONS = tuple(name for name in OPERATIONS if name.startswith("positions_jax"))

RULES = (
    Rule(
        operations=_PACKED,
        routes=_KERNELS,
        transforms=("vmap of all",),
        outcome=Refused(
            error=NotImplementedError,
            message="can be mapped by vmap over axes of tokens only, not over tables",
            says="A kernel has one table and one set of weights. With "
            "`implementation='xla'` the operation can be mapped over them.",
        ),
    ),
    Rule(
        operations=_CACHES,
        routes=_KERNELS,
        transforms=("vmap", "vmap of all"),
        outcome=Refused(
            error=NotImplementedError,
            message="cannot be mapped by vmap: its tokens share a cache",
            says="Tokens share a cache that is rewritten, so they are not independent."
            " With `implementation='xla'` the operation can be mapped, each entry over "
            "a cache of its own.",
        ),
    ),
    Rule(
        operations=_CACHES,
        routes=_KERNELS,
        transforms=("grad", "jvp", "remat"),
        outcome=Refused(
            error=NotImplementedError,
            message="has no derivative: it rewrites a paged cache",
            says="A cache is rewritten in place. Differentiate the separate "
            "operations, or name `implementation='xla'`.",
        ),
    ),
    Rule(
        operations=tuple(OPERATIONS),
        routes=("pallas",),
        transforms=("float64",),
        outcome=Refused(
            error=ValueError,
            message="declines .* dtype must be one of",
            says="The kernels are for the dtypes of models, up to float32.",
        ),
    ),
    Rule(
        operations=(*_LOOKUPS, *_POSITIONS, "query_temperature"),
        routes=_PLAIN,
        transforms=("float64",),
        outcome=Absent(
            says="It takes no heads: its results are float32 or int32 by definition."
        ),
    ),
    Rule(
        operations=(
            *_LOOKUPS,
            *(name for name in _POSITIONS if not name.endswith("segment_ids")),
            "query_temperature",
            "fused.qkv_rope",
        ),
        routes=("plain", *_FUSED),
        transforms=("donated",),
        outcome=Absent(
            says="No result has the shape and dtype of an operand, so there is nothing "
            "to donate."
        ),
    ),
)


def outcome(operation: str, route: str, transform: str) -> Refused | Absent | None:
    """What a cell is, or None where it holds."""
    for rule in RULES:
        if (
            operation in rule.operations
            and route in rule.routes
            and transform in rule.transforms
        ):
            return rule.outcome
    return None


def cells() -> Iterator[tuple[str, str, str]]:
    """Every operation, route and transform."""
    for operation, routes in OPERATIONS.items():
        for route, transform in itertools.product(routes, TRANSFORMS):
            yield operation, route, transform


def make_page() -> str:
    """The page, in Markdown."""
    notes = list(dict.fromkeys(rule.outcome for rule in RULES))
    letters = dict(zip(notes, "abcdefghijklmnopqrstuvwxyz", strict=False))

    def mark(found: Refused | Absent | None) -> str:
        return "yes" if found is None else letters[found]

    rows = [
        [f"`{operation}`", route]
        + [mark(outcome(operation, route, each)) for each in TRANSFORMS]
        for operation, routes in OPERATIONS.items()
        for route in routes
    ]
    table = markdown_table(["operation", "route", *TRANSFORMS], rows)
    said = [
        f"- **{letter}**: "
        + (f"`{note.error.__name__}`. " if isinstance(note, Refused) else "")
        + note.says
        for note, letter in letters.items()
    ]
    meant = [f"- **{name}**: {what}." for name, what in TRANSFORMS.items()]
    parts = [table, "", "Notes:", "", *said, "", "Columns:", "", *meant, _TAIL]
    return _HEAD + "\n".join(parts)
