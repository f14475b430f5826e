"""What a fused operation is, and the primitive that runs one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jrope._primitive import lower_as, vary_alike
from jrope.fused._kernels import Axes, choose_kernel


class Operation(Protocol):
    """A fused operation with its options, hashable."""

    @property
    def name(self) -> str:
        """As users call it."""
        ...

    @property
    def refuses_gradients(self) -> str | None:
        """Why it has no derivative, or None where it has one."""
        ...

    @property
    def token_operands(self) -> tuple[int, ...] | None:
        """Which operands start with the axes of tokens, as all results then do.

        None where tokens are not independent of each other.
        """
        ...

    def define(self, *operands: Array) -> tuple[Array, ...]:
        """The definition of right, in plain JAX; it is what is differentiated."""
        ...

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """The same in one launch."""
        ...

    def declines(self, *operands: Any) -> str | None:
        """Why the kernel does not take operands of these types, or None."""
        ...

    def axes(self, *operands: Any) -> Axes:
        """How the kernel may be split over a mesh."""
        ...


fused_p = Primitive("jrope_fused")
# Bound where a kernel is named: see `jrope._primitive` on what needs devices.
fused_on_devices_p = Primitive("jrope_fused_on_devices")
dispatch.prim_requires_devices_during_lowering.add(fused_on_devices_p)


def run(
    operation: Operation, operands: Sequence[Array], implementation: str | None
) -> tuple[Array, ...]:
    """Runs an operation by its kernel or its definition.

    Args:
      operation: with its options.
      operands: arrays, in the order in which the operation names them.
      implementation: "xla" for the definition, "pallas" for the kernel, None for the
        kernel where a single device of the platform runs it and it takes the case.

    Raises:
      ValueError: if the kernel is named and declines, or the platform has none.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"implementation must be None, 'xla' or 'pallas', got {implementation!r}"
        )
    if implementation == "xla":
        return _define(*operands, operation=operation)
    return tuple(
        _bind(*vary_alike(operands), operation=operation, named=implementation)
    )


@functools.partial(jax.jit, static_argnames="operation")
def _define(*operands: Array, operation: Operation) -> tuple[Array, ...]:
    return operation.define(*operands)


def _bind(*operands: Array, operation: Operation, named: str | None) -> list[Array]:
    primitive = fused_p if named is None else fused_on_devices_p
    return primitive.bind(*operands, operation=operation, named=named)


@functools.partial(jax.jit, static_argnames=("operation", "named"))
def _eager(*operands: Array, operation: Operation, named: str | None) -> list[Array]:
    return _bind(*operands, operation=operation, named=named)


def _impl(*operands: Array, operation: Operation, named: str | None) -> Any:
    """As `rope_p`'s: the jitted program, or the definition where jit is disabled."""
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return _eager(*operands, operation=operation, named=named)
    return operation.define(*operands)


def _abstract_eval(*operands: Any, operation: Operation, named: str | None) -> Any:
    del named
    traced = jax.make_jaxpr(operation.define)(*operands)
    return list(traced.out_avals)


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    operation: Operation,
    named: str | None,
) -> Any:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)

    def on(platform: str) -> Callable[..., tuple[Array, ...]]:
        kernel = choose_kernel(
            platform,
            operation,
            ctx.avals_in,
            named=named,
            axis_context=ctx.module_context.axis_context,
        )
        return operation.define if kernel is None else kernel

    if len(platforms) == 1:
        rule = on(platforms[0])
    else:
        branches = {platform: on(platform) for platform in platforms}
        rule = functools.partial(jax.lax.platform_dependent, **branches)
    return lower_as(rule, ctx, operands)


def _jvp(
    primals: Any, tangents: Any, *, operation: Operation, named: str | None
) -> tuple[Any, Any]:
    """The tangent is the definition's, whose rotations have rules of their own."""
    outs = _bind(*primals, operation=operation, named=named)
    moving = [i for i, dot in enumerate(tangents) if not isinstance(dot, ad.Zero)]
    if not moving:
        return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if operation.refuses_gradients is not None:
        raise NotImplementedError(
            f"jrope.fused.{operation.name} has no derivative: "
            f"{operation.refuses_gradients}; differentiate the separate operations, or "
            f"stop the gradient with jax.lax.stop_gradient"
        )

    def of_moving(*values: Array) -> tuple[Array, ...]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return operation.define(*operands)

    _, dots = jax.jvp(
        of_moving, [primals[i] for i in moving], [tangents[i] for i in moving]
    )
    return outs, list(dots)


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    operation: Operation,
    named: str | None,
) -> tuple[Any, Any]:
    """A mapped axis becomes one more axis of tokens."""
    tokens = operation.token_operands
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    if tokens is None:
        raise NotImplementedError(
            f"jrope.fused.{operation.name} cannot be mapped by vmap: its tokens share "
            f"a cache that it rewrites; use implementation='xla'"
        )
    if not set(mapped) <= set(tokens):
        raise NotImplementedError(
            f"jrope.fused.{operation.name} can be mapped by vmap over axes of tokens "
            f"only, not over tables, weights or caches; use implementation='xla'"
        )
    size = operands[mapped[0]].shape[dims[mapped[0]]]
    moved = list(operands)
    for i in tokens:
        if dims[i] is None:
            moved[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
        else:
            moved[i] = jnp.moveaxis(operands[i], dims[i], 0)
    outs = _bind(*moved, operation=operation, named=named)
    return outs, [0] * len(outs)


for _primitive in (fused_p, fused_on_devices_p):
    _primitive.multiple_results = True
    _primitive.def_impl(_impl)
    _primitive.def_abstract_eval(_abstract_eval)
    mlir.register_lowering(_primitive, _lower)
    ad.primitive_jvps[_primitive] = _jvp
    batching.primitive_batchers[_primitive] = _batch
