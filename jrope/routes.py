"""Routes from outside: register a platform's own, and see the program that it gets.

For whoever brings a platform, a compiler or a kernel. A platform that jrope does not
know needs nothing from here: it receives the composite form. `python -m jrope.routes
--platform hpu --shape 2,16,8,128` prints that program without the platform's plugin.
"""

import argparse
import collections
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jrope._axes import AXIS_ORDERS, mrope_axes
from jrope._gather import OutOfRange
from jrope._layout import RotaryLayout, check_bool, check_int, check_layout
from jrope._ops import apply_rope
from jrope._routes import ROUTES, Rotation, Route, keys_of, routes_for
from jrope._routes._platforms import (
    ALIASES,
    ENVIRONMENT_VARIABLE,
    canonical_platform,
    check_platform,
    follow,
)
from jrope._routes.composite import (
    BLOCKWISE,
    COMPOSITE,
    COMPOSITE_NARROW_ROWS,
    PAIRWISE,
    FullWidthRoute,
    Kernel,
    Mode,
    definition,
)
from jrope._show import show

__all__ = [
    "BLOCKWISE",
    "COMPOSITE",
    "COMPOSITE_NARROW_ROWS",
    "ENVIRONMENT_VARIABLE",
    "PAIRWISE",
    "FullWidthRoute",
    "Kernel",
    "Mode",
    "Rotation",
    "Route",
    "alias",
    "definition",
    "lower_step",
    "operations",
    "register",
    "unregister",
]

_ABSENT = object()


def register(platform: str, route: Route) -> None:
    """Puts a route before all others of a platform, whether or not it is loaded.

    Programs that are already compiled are dropped, so that functions that have run
    before take the new route too.

    Args:
      platform: the name that its PJRT client reports (`jax.devices()[0].platform`), or
        one of the aliases; "gaudi" and "habana" stand for "hpu".
      route: follows `Route`; a kernel in Habana's form becomes one with
        `FullWidthRoute`.

    Raises:
      TypeError: if it does not follow `Route`, or the platform is no name.
      ValueError: if the platform already has a route of that name.

    >>> register("my_chip", FullWidthRoute(name="mine", kernel=definition))
    >>> unregister("my_chip", "mine")
    """
    check_platform("platform", platform)
    _check_route(route)
    taken = [known.name for known in routes_for(platform)]
    if route.name in taken:
        raise ValueError(
            f"the route's name must be new on platform {platform!r}, which has {taken},"
            f" got {route.name!r}; was it registered twice?"
        )
    platform = canonical_platform(platform)
    ROUTES[platform] = (route, *ROUTES.get(platform, ()))
    jax.clear_caches()


def _check_route(route: object) -> None:
    if isinstance(route, type):
        raise TypeError(
            f"a route must be an object, got the class {route.__name__}; are the "
            f"parentheses missing?"
        )
    name = getattr(route, "name", _ABSENT)
    missing = [] if name is not _ABSENT else ["name"]
    missing += [
        method
        for method in ("declines", "run")
        if not callable(getattr(route, method, None))
    ]
    if missing:
        raise TypeError(
            f"a route must have name, declines and run, got {type(route).__name__} "
            f"without {missing}; FullWidthRoute makes one of a kernel"
        )
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"a route's name must be a str that implementation= can have, got {name!r}"
        )


def unregister(platform: str, name: str) -> None:
    """Takes a registered route away again.

    Raises:
      TypeError, ValueError: if the platform has none of that name.

    >>> register("my_chip", FullWidthRoute(name="mine", kernel=definition))
    >>> unregister("my_chip", "mine")
    """
    check_platform("platform", platform)
    held = _registered(platform)
    if name not in held:
        raise ValueError(
            f"the route must be one of {held}, which are registered for "
            f"{canonical_platform(platform)!r}, got {name!r}"
        )
    for key in keys_of(platform):
        ROUTES[key] = tuple(route for route in ROUTES[key] if route.name != name)
    jax.clear_caches()


def _registered(platform: str) -> list[str]:
    return [route.name for key in keys_of(platform) for route in ROUTES[key]]


def alias(reported: str, platform: str) -> None:
    """Makes a name that a PJRT client reports stand for another platform's routes.

    For a plugin under a name that jrope does not know. The environment variable
    `JROPE_PLATFORM_ALIASES`, such as `synapse=hpu,other=hpu`, does the same and goes
    first; it is read whenever a program is lowered. Aliases may lead to aliases, made
    in any order. Routes that `reported` has already are kept, after the platform's.

    Raises:
      TypeError, ValueError: if one is no name, aliases lead in a circle, or both have a
        route of the same name.

    >>> alias("my_npu", "hpu")
    """
    check_platform("reported", reported)
    check_platform("platform", platform)
    before = dict(ALIASES)
    follow(reported, before | {reported: platform})
    ALIASES[reported] = platform
    twice = [
        name for name, n in collections.Counter(_registered(platform)).items() if n > 1
    ]
    if twice:
        ALIASES.clear()
        ALIASES.update(before)
        raise ValueError(
            f"{reported!r} and {platform!r} must have routes of different names to "
            f"become one platform, got {twice} on both; unregister one of each"
        )
    jax.clear_caches()


def lower_step(
    platform: str,
    shape: tuple[int, ...],
    *,
    layout: RotaryLayout,
    dtype: str = "bfloat16",
    key_heads: int = 1,
    max_position_embeddings: int = 4096,
    out_of_range: OutOfRange = "clip",
    backward: bool = False,
    implementation: str | None = None,
) -> jax.stages.Lowered:
    """Lowers a step, a lookup and a rotation, for a platform that need not be there.

    Args:
      platform: the name that its PJRT client reports.
      shape: [*B, T, N, H] of the query.
      layout: which features turn.
      dtype: of query and key.
      key_heads: K.
      max_position_embeddings: rows of the table.
      out_of_range: as `lookup` takes it.
      backward: the gradients of query and key instead.
      implementation: the name of a route (docs/pages/platforms.md), or None.

    Returns:
      What `.as_text()` prints as StableHLO.

    Raises:
      TypeError, ValueError: if a size is none, or `apply_rope` refuses the case.

    >>> layout = RotaryLayout(head_dim=64, rotary_dim=64)
    >>> lowered = lower_step("hpu", (2, 16, 8, 64), layout=layout)
    >>> "jrope.apply_rope" in lowered.as_text()
    True
    """
    check_platform("platform", platform)
    if not isinstance(shape, tuple | list) or len(shape) < 3:
        raise ValueError(f"shape must be [*B, T, N, H] of the query, got {show(shape)}")
    check_layout(layout)
    check_bool("backward", backward)
    for size in shape:
        check_int("a size in shape", size, minimum=0)
    check_int("key_heads", key_heads, minimum=1)
    check_int("max_position_embeddings", max_position_embeddings, minimum=1)
    run = functools.partial(
        apply_rope,
        layout=layout,
        out_of_range=out_of_range,
        implementation=implementation,
    )

    def step(positions: Array, query: Array, key: Array, table: Array) -> Any:
        if not backward:
            return run(positions, query, key, table)
        turned, back = jax.vjp(lambda q, k: run(positions, q, k, table), query, key)
        return back(turned)

    def of(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    try:
        jnp.dtype(dtype)
    except TypeError as reason:
        raise TypeError(
            f"dtype must be one of JAX's, such as 'bfloat16', got {show(dtype)}"
        ) from reason
    axes = () if layout.position_axes is None else (layout.position_axes,)
    traced = jax.jit(step).trace(
        of((*axes, *shape[:-2]), "int32"),
        of(shape, dtype),
        of((*shape[:-2], key_heads, shape[-1]), dtype),
        of((max_position_embeddings, layout.rotary_dim), "float32"),
    )
    return traced.lower(lowering_platforms=(platform,))


def operations(
    lowered: jax.stages.Lowered,
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Counts of a program's operations: outside and inside its composites.

    A compiler that replaces the composites sees the first only.

    >>> layout = RotaryLayout(head_dim=64, rotary_dim=64)
    >>> outside, inside = operations(lower_step("hpu", (2, 16, 8, 64), layout=layout))
    >>> outside["stablehlo.composite"], outside["stablehlo.gather"]
    (2, 1)
    """
    module: Any = lowered.compiler_ir("stablehlo")
    outside, inside = collections.Counter(), collections.Counter()
    found = [(f, list(_inner(f))) for f in module.body.operations]
    hidden = {
        op.attributes["decomposition"].value
        for _, ops in found
        for op in ops
        if op.name == "stablehlo.composite"
    }
    for function, ops in found:
        name = function.attributes["sym_name"].value
        (inside if name in hidden else outside).update(op.name for op in ops)
    return outside, inside


def _inner(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation
                yield from _inner(child.operation)


def main(arguments: list[str] | None = None) -> int:
    """Prints a platform's program; the exit status, 1 where the case is refused."""
    given = _parser().parse_args(arguments)
    *_, head_dim = given.shape
    try:
        if given.narrow_rows:
            register(given.platform, COMPOSITE_NARROW_ROWS)
        rotary_dim = head_dim if given.rotary_dim is None else given.rotary_dim
        section, order = given.mrope_section, given.mrope_order
        layout = RotaryLayout(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            is_neox_style=given.pairing == "neox",
            axis_of_frequency=mrope_axes(section, rotary_dim=rotary_dim, order=order)
            if section
            else None,
        )
        lowered = lower_step(
            given.platform,
            given.shape,
            layout=layout,
            dtype=given.dtype,
            key_heads=given.key_heads,
            out_of_range=given.out_of_range,
            backward=given.backward,
            implementation=given.implementation,
        )
    except (TypeError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):  # The reader has seen enough.
        print(lowered.as_text())
        for title, counts in zip(
            ("operations", "operations inside composites"),
            operations(lowered),
            strict=True,
        ):
            listed = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
            print(f"// {title}: {listed or 'none'}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jrope.routes",
        description="Prints the StableHLO of a lookup and a rotation as a platform's "
        "plugin receives it, and the operations in it. The platform need not be there.",
    )
    parser.add_argument("--platform", required=True, help="as its client reports it")
    parser.add_argument(
        "--shape", required=True, type=_shape, help="of the query, such as 2,16,8,128"
    )
    parser.add_argument("--key-heads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rotary-dim", type=int, help="features that turn; all")
    parser.add_argument("--pairing", choices=("neox", "gptj"), default="neox")
    parser.add_argument("--mrope-section", type=_numbers, help="such as 16,24,24")
    parser.add_argument("--mrope-order", choices=tuple(AXIS_ORDERS), default="chunked")
    parser.add_argument("--out-of-range", choices=("clip", "nan"), default="clip")
    parser.add_argument("--backward", action="store_true", help="the gradients")
    parser.add_argument("--narrow-rows", action="store_true", help="cos, sin in dtype")
    parser.add_argument("--implementation", help="the name of a route")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _shape(text: str) -> tuple[int, ...]:
    shape = _numbers(text)
    if len(shape) < 3:
        raise argparse.ArgumentTypeError(f"must be [*B, T, N, H], got {text}")
    return shape


if __name__ == "__main__":
    sys.exit(main())
