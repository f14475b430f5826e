"""The route that turns heads in place on CPUs, when asked for.

XLA:CPU writes the result of a rotation to fresh memory, whatever its operands were
donated for. Here an XLA FFI handler, compiled by numba without a C compiler, turns the
operands where they lie: XLA copies them first only where they are used again. The
handler is machine code that reads XLA's structures, so it serves only who names it.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array

from jrope._rotate import compute_dtype
from jrope._routes._route import Rotation

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuInplaceRoute:
    """Runs the rotation in a handler that numba compiles, in its operands' memory."""

    name: str = "cpu_inplace"

    def declines(self, rotation: Rotation) -> str | None:
        """Declines where there is no numba, or an XLA with an FFI that it cannot read.

        The handlers that the case needs are compiled and registered here, once in a
        process.
        """
        if rotation.platform != "cpu":
            return f"its handler is for the platform 'cpu', got {rotation.platform!r}"
        for operand in (*rotation.xs, rotation.rows):
            if not all(isinstance(size, int) for size in operand.shape):
                return (
                    f"shapes must be known, got {operand.shape}; export for fixed ones"
                )
        for x in rotation.xs:
            if x.dtype.name not in _DTYPES:
                return f"dtype must be one of {_DTYPES}, got {x.dtype.name}"
        if (reason := _no_compiler()) is not None:
            return reason
        reasons = map(_unregistered, sorted({x.dtype.name for x in rotation.xs}))
        return next((reason for reason in reasons if reason is not None), None)

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """A call for the operands of each dtype; on a mesh, on each device's part."""
        outs = list(xs)
        for dtype in sorted({x.dtype.name for x in xs}):
            places = [i for i, x in enumerate(xs) if x.dtype.name == dtype]
            alike = [xs[i] for i in places]
            for i, out in zip(places, _turned(rotation, alike, cos, sin), strict=True):
                outs[i] = out
        return tuple(outs)


def _turned(
    rotation: Rotation, xs: Sequence[Array], cos: Array, sin: Array
) -> tuple[Array, ...]:
    """Operands of one dtype, turned in one call on each device."""
    # Not at the top: whoever has no mesh to partition needs no custom_partitioning.
    from pallas_kernels import sharded

    dtype = xs[0].dtype
    rows = [row.astype(compute_dtype(dtype)) for row in (cos, sin)]
    tokens = [f"a{i}" for i in range(cos.ndim - 1)]
    row_axes = [
        name if own == length else f"s{i}"
        for i, (name, own, length) in enumerate(
            zip(tokens, cos.shape, xs[0].shape, strict=False)
        )
    ]
    heads = [(*tokens, f"n{i}", f"h{i}") for i in range(len(xs))]
    return sharded(
        functools.partial(
            _call,
            is_neox_style=rotation.is_neox_style,
            rotary_offset=rotation.rotary_offset,
        ),
        (*xs, *rows),
        axes=[*heads, (*row_axes, "p"), (*row_axes, "p")],
        out_axes=heads,
        whole=("p", *(f"h{i}" for i in range(len(xs)))),
    )


def _call(
    *operands: Array, is_neox_style: bool, rotary_offset: int
) -> tuple[Array, ...]:
    """The handler, whose results lie where its operands lay."""
    *xs, _, _ = operands
    call = jax.ffi.ffi_call(
        _target(xs[0].dtype.name),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs],
        input_output_aliases={i: i for i in range(len(xs))},
    )
    turned = call(
        *operands,
        is_neox_style=np.int32(is_neox_style),
        rotary_offset=np.int32(rotary_offset),
    )
    return tuple(turned)


def _target(dtype: str) -> str:
    return f"jrope_cpu_inplace_{dtype}"


def _no_compiler() -> str | None:
    """Why numba cannot compile the handler in this process, or None."""
    if sys.byteorder != "little" or sys.maxsize != 2**63 - 1:
        return "its handler is for little-endian machines with addresses of 64 bits"
    try:
        from numba.core import config
    except ImportError as error:
        return f"its handler must be compiled by numba, which is not there: {error}"
    if vars(config)["DISABLE_JIT"]:
        return "its handler must be compiled, and NUMBA_DISABLE_JIT forbids it"
    return None


def _unregistered(dtype: str) -> str | None:
    """Why the handler of a dtype cannot be called, or None, after registering it."""
    # Not at the top: jrope works without numba.
    from jrope._routes import _cpu_kernel, _ffi

    return _ffi.register(_target(dtype), lambda: _cpu_kernel.compiled(dtype))


CPU_INPLACE = CpuInplaceRoute()
