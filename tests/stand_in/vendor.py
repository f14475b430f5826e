"""What a vendor would bring: a fused kernel behind a `jax.ffi` target, and its route.

The kernel is numpy behind XLA's FFI calling convention (xla/ffi/api/c_api.h), written
out with ctypes: no compiler and no header is needed, and the version of the convention
is the plugin's, not that of the headers that some jaxlib carries.
"""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrope import routes

HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
EXECUTE_STAGE, METADATA = 3, 1


class Operands(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class Attributes(ctypes.Structure):
    """XLA_FFI_Attrs."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class Frame(ctypes.Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", Operands),
        ("results", Operands),
        ("attributes", Attributes),
    )


class Buffer(ctypes.Structure):
    """XLA_FFI_Buffer."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


def _array(address: int | None) -> np.ndarray:
    assert address is not None
    buffer = Buffer.from_address(address)
    shape = tuple(buffer.dims[: buffer.rank])
    flat = (ctypes.c_float * int(np.prod(shape))).from_address(buffer.data)
    return np.ctypeslib.as_array(flat).reshape(shape)


class FusedRope:
    """Fused rotation of float32 x [T, N, R] by rows [T, 1, R], in both Habana modes.

    Attributes:
      calls: the modes that it ran with.
      errors: what went wrong; a test looks here.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.errors: list[Exception] = []
        self._handler = HANDLER(self._handle)

    def capsule(self) -> Any:
        """What `jax.ffi.register_ffi_target` takes."""
        return jax.ffi.pycapsule(self._handler)

    def _handle(self, address: int) -> None:
        try:
            frame = Frame.from_address(address)
            if frame.extension and _is_metadata(frame.extension):
                _answer(frame.extension)
            elif frame.stage == EXECUTE_STAGE:
                self._run(frame)
        except Exception as error:  # Nobody above could report it.
            self.errors.append(error)

    def _run(self, frame: Frame) -> None:
        x, cos, sin = (_array(frame.operands.values[i]) for i in range(3))
        out = _array(frame.results.values[0])
        value = ctypes.c_void_p.from_address(frame.attributes.values[0] + 8).value
        assert value is not None  # XLA_FFI_Scalar: {dtype, pointer}
        mode = ctypes.c_int32.from_address(value).value
        half = x.shape[-1] // 2
        if mode == routes.BLOCKWISE:
            partner = np.concatenate([-x[..., half:], x[..., :half]], -1)
        else:
            partner = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        out[...] = x * cos + partner * sin
        self.calls.append(mode)


def _is_metadata(extension: int) -> bool:
    return ctypes.c_int.from_address(extension + 8).value == METADATA


def _answer(extension: int) -> None:
    """Says which version of the convention this is: 0.1, of no traits and no state."""
    metadata = ctypes.c_void_p.from_address(extension + 24).value
    assert metadata is not None
    for offset, value in ((24, 0), (28, 1), (32, 0)):
        ctypes.c_int32.from_address(metadata + offset).value = value


def route(target: str) -> routes.FullWidthRoute:
    """The vendor's route to its target, as the page on platforms writes it."""

    def kernel(x: Any, cos: Any, sin: Any, *, mode: routes.Mode) -> Any:
        *leading, heads, width = x.shape
        tokens = int(np.prod(leading))
        rows = [
            jnp.broadcast_to(row, (*leading, 1, width)).reshape(tokens, 1, width)
            for row in (cos, sin)
        ]
        call = jax.ffi.ffi_call(
            target, jax.ShapeDtypeStruct((tokens, heads, width), x.dtype)
        )
        flat = call(x.reshape(tokens, heads, width), *rows, mode=np.int32(mode))
        return flat.reshape(x.shape)

    def refuses(rotation: routes.Rotation) -> str | None:
        if any(x.dtype != jnp.float32 for x in rotation.xs):
            return "the kernel is for float32"
        return None

    return routes.FullWidthRoute(name="vendor", kernel=kernel, refuses=refuses)
