"""rope_p: the rotation as one JAX primitive, with its transformation rules.

`rope_p.bind(*xs, cos, sin)` rotates every x [*B, T, N, H] by the same rows [*B, T,
R/2]. All leading axes of the operands agree; a row axis of length 1 is shared. One
lowering rule serves every platform: it asks the table of routes, by the name that the
PJRT client reports, at the time of lowering. `lax.platform_dependent` would leave a
`case` in the program and cannot be differentiated; a custom_vjp would forbid forward
mode; a rule registered for a platform's name fails until that platform's plugin is
loaded.

A route whose kernel is partitioned over a mesh must know the devices when it is
lowered. It is bound as `rope_on_devices_p`, the same in all else: programs with it
cannot be lowered for an abstract mesh, as those with `rope_p` can.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jrope._rotate import rotate_one
from jrope._routes import Rotation, choose_route, needs_devices

rope_p = Primitive("jrope_rope")
rope_on_devices_p = Primitive("jrope_rope_on_devices")
PRIMITIVES = (rope_p, rope_on_devices_p)
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(rope_on_devices_p)


def _bind(*operands: Array, implementation: str | None, **params: Any) -> list[Array]:
    """Binds the primitive that serves the implementation."""
    on_devices = needs_devices(implementation)
    primitive = rope_on_devices_p if on_devices else rope_p
    return primitive.bind(*operands, implementation=implementation, **params)


def bind_rope(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    *,
    is_neox_style: bool,
    rotary_offset: int,
    implementation: str | None,
) -> list[Array]:
    """Binds the primitive to operands that vary over the same mesh axes."""
    return _bind(
        *vary_alike([*xs, cos, sin]),
        is_neox_style=is_neox_style,
        rotary_offset=rotary_offset,
        implementation=implementation,
    )


def vary_alike(operands: Sequence[Array]) -> list[Array]:
    """Makes all operands vary over the same mesh axes.

    Inside `shard_map` with `check_vma`, an operand that is the same on every device of
    an axis must be cast before it meets one that is not.
    """
    varying = [getattr(jax.typeof(operand), "vma", frozenset()) for operand in operands]
    union = frozenset().union(*varying)
    return [
        lax.pcast(operand, tuple(sorted(union - own)), to="varying")
        if union - own
        else operand
        for operand, own in zip(operands, varying, strict=True)
    ]


@functools.partial(
    jax.jit, static_argnames=("is_neox_style", "rotary_offset", "implementation")
)
def _eager(*operands: Array, **params: Any) -> list[Array]:
    return _bind(*operands, **params)


def _impl(*operands: Array, **params: Any) -> list[Array]:
    """Eager calls run the jitted program: the same bits, and the arrays' own device.

    Where jit is disabled, to look into a program, they run the definition.
    """
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return _eager(*operands, **params)
    *xs, cos, sin = operands
    style = {key: params[key] for key in ("is_neox_style", "rotary_offset")}
    return [rotate_one(x, cos, sin, **style) for x in xs]


def _abstract_eval(*operands: Any, **params: Any) -> list[Any]:
    """Each result has its operand's shape, dtype, sharding and varying axes."""
    del params
    cos, sin = operands[-2:]
    if cos.shape != sin.shape:
        raise ValueError(f"rope_p's rows must be alike, got {cos.shape}, {sin.shape}")
    return list(operands[:-2])


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    alone = len(ctx.module_context.platforms) == 1
    # The platform's index, where there are several, counts as one of the variables.
    dimensions = ctx.module_context.shape_poly_state.dim_vars[0 if alone else 1 :]
    run = functools.partial(_run, is_symbolic=bool(dimensions), **params)
    if len(platforms) == 1:
        rule = functools.partial(run, platforms[0], is_multi_platform=not alone)
    else:
        run = functools.partial(run, is_multi_platform=True)
        rule = functools.partial(_run_on_each, platforms, run)
    return lower_as(rule, ctx, operands)


def lower_as(
    rule: Callable[..., Any], ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """Lowers a function of the operands.

    To it they vary over no mesh axes: inside `shard_map` with `check_vma`, Pallas takes
    no references to arrays that do. What varies was checked before.
    """
    given: Any = ctx.avals_in
    avals = [
        ShapedArray(
            aval.shape,
            aval.dtype,
            aval.weak_type,
            sharding=aval.sharding,
            memory_space=aval.memory_space,
        )
        for aval in given
    ]
    lower = mlir.lower_fun(rule, multiple_results=True)
    return lower(ctx.replace(avals_in=avals), *operands)


def _run(
    platform: str,
    *operands: Array,
    is_neox_style: bool,
    rotary_offset: int,
    implementation: str | None,
    is_multi_platform: bool,
    is_symbolic: bool,
) -> tuple[Array, ...]:
    """Runs the platform's route on `(*xs, cos, sin)`."""
    *xs, cos, sin = operands
    rotation = Rotation(
        platform=platform,
        xs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs),
        rows=jax.ShapeDtypeStruct(cos.shape, cos.dtype),
        is_neox_style=is_neox_style,
        rotary_offset=rotary_offset,
        is_multi_platform=is_multi_platform,
        is_symbolic=is_symbolic,
    )
    route = choose_route(rotation, implementation)
    return route.run(rotation, tuple(xs), cos, sin)


def _run_on_each(platforms: tuple[str, ...], run: Any, *operands: Array) -> Any:
    """A program for several platforms (`jax.export`) branches on the platform."""
    branches = {platform: functools.partial(run, platform) for platform in platforms}
    return lax.platform_dependent(*operands, **branches)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    """Linear in every x; a tangent of the rows is a rotation of x by that tangent."""
    *xs, cos, sin = primals
    *x_dots, cos_dot, sin_dot = tangents
    outs = _bind(*primals, **params)
    dots: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    moving = [i for i, dot in enumerate(x_dots) if not isinstance(dot, ad.Zero)]
    if moving:
        turned = _bind(*(x_dots[i] for i in moving), cos, sin, **params)
        for i, dot in zip(moving, turned, strict=True):
            dots[i] = dot
    if not (isinstance(cos_dot, ad.Zero) and isinstance(sin_dot, ad.Zero)):
        row_dots = tuple(map(ad.instantiate_zeros, (cos_dot, sin_dot)))
        for i, x in enumerate(xs):
            by_rows = _rotate_by_row_tangents(x, (cos, sin), row_dots, params)
            dots[i] = ad.add_tangents(dots[i], by_rows)
    return outs, dots


def _rotate_by_row_tangents(x: Array, rows: Any, dots: Any, params: Any) -> Array:
    """The rotated features' change with the rows; features that pass do not change."""
    style = {key: params[key] for key in ("is_neox_style", "rotary_offset")}
    turn = functools.partial(rotate_one, **style)
    return jax.jvp(lambda cos, sin: turn(x, cos, sin), rows, dots)[1]


def _transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    """The transpose of a rotation negates sin."""
    *xs, cos, sin = operands
    if ad.is_undefined_primal(cos) or ad.is_undefined_primal(sin):
        raise NotImplementedError("rope_p is linear in its operands, not in its rows")
    wanted = [
        i
        for i, (ct, x) in enumerate(zip(cotangents, xs, strict=True))
        if ad.is_undefined_primal(x) and not isinstance(ct, ad.Zero)
    ]
    results: list[Any] = [
        ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs
    ]
    if wanted:
        back = _bind(*(cotangents[i] for i in wanted), cos, -sin, **params)
        for i, ct in zip(wanted, back, strict=True):
            results[i] = ct
    return [*results, None, None]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    """Moves the batch axis to the front.

    Operands without one stay as they are when the rows have none either.
    """
    *xs, cos, sin = operands
    *x_dims, cos_dim, sin_dim = dims
    rows_mapped = cos_dim is not None or sin_dim is not None
    size = next(
        operand.shape[dim]
        for operand, dim in zip(operands, dims, strict=True)
        if dim is not None
    )

    def front(operand: Array, dim: Any) -> Array:
        return operand[None] if dim is None else jnp.moveaxis(operand, dim, 0)

    outs: list[Any] = list(xs)
    out_dims: list[Any] = [None] * len(xs)
    moved = [i for i, dim in enumerate(x_dims) if rows_mapped or dim is not None]
    still = [i for i in range(len(xs)) if i not in moved]
    stacked = [front(xs[i], x_dims[i]) for i in moved]
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape[1:])) if x.shape[0] != size else x
        for x in stacked
    ]
    rows = front(cos, cos_dim), front(sin, sin_dim)
    if rows_mapped:
        rows = [jnp.broadcast_to(row, (size, *row.shape[1:])) for row in rows]
    turned = _bind(*stacked, *rows, **params)
    for i, out in zip(moved, turned, strict=True):
        outs[i], out_dims[i] = out, 0
    if still:
        turned = _bind(*(xs[i] for i in still), cos, sin, **params)
        for i, out in zip(still, turned, strict=True):
            outs[i] = out
    return outs, out_dims


for _primitive in PRIMITIVES:
    _primitive.def_impl(_impl)
    _primitive.def_abstract_eval(_abstract_eval)
    mlir.register_lowering(_primitive, _lower)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch
