"""Call frames as XLA makes them, for handlers that are called without XLA.

Written from xla/ffi/api/c_api.h, which comes with jaxlib (`jax.ffi.include_dir()`).
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

DTYPES = {"float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}


class Base(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension_start", c_void_p)]


class Version(Base):
    _fields_ = [("major", c_int), ("minor", c_int)]


class Api(Base):
    _fields_ = [
        ("version", Version),
        ("internal_api", c_void_p),
        ("error_create", c_void_p),
        ("others", c_void_p * 18),
    ]


class ErrorArgs(Base):
    _fields_ = [("message", c_char_p), ("code", c_int)]


class Buffer(Base):
    _fields_ = [
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class Args(Base):
    _fields_ = [
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("args", POINTER(c_void_p)),
    ]


class ByteSpan(ctypes.Structure):
    _fields_ = [("ptr", c_char_p), ("len", c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", c_int), ("value", POINTER(c_int32))]


class Attrs(Base):
    _fields_ = [
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(ByteSpan))),
        ("attrs", POINTER(POINTER(Scalar))),
    ]


class Frame(Base):
    _fields_ = [
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("args", Args),
        ("rets", Args),
        ("attrs", Attrs),
        ("future", c_void_p),
    ]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
        ("state", c_int64),
    ]


class MetadataExtension(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(Metadata)),
    ]


def sized(structure, last):
    """XLA_FFI_STRUCT_SIZE: to the end of the last field."""
    field = getattr(type(structure), last)
    structure.struct_size = field.offset + field.size
    return structure


class Call:
    """One call of a handler: operands, cos, sin and results are NumPy arrays.

    Everything may be changed before `run`, which returns the error's text or None.
    """

    def __init__(self, xs, cos, sin, outs, *, is_neox_style=True, offset=0, dtype=None):
        self.errors = []
        self.kept = []
        self.api = sized(Api(), "others")
        self.api.version = sized(Version(major=0, minor=5), "minor")
        self.create = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorArgs))(self._error)
        self.api.error_create = ctypes.cast(self.create, c_void_p)
        self.buffers = [self._buffer(a, dtype) for a in (*xs, cos, sin, *outs)]
        given = len(xs) + 2
        self.attributes = [
            self._attribute(name, value)
            for name, value in (
                (b"is_neox_style", is_neox_style),
                (b"rotary_offset", offset),
            )
        ]
        self.frame = sized(
            Frame(
                api=ctypes.pointer(self.api),
                stage=3,
                args=self._args(self.buffers[:given]),
                rets=self._args(self.buffers[given:]),
                attrs=self._attrs(),
            ),
            "attrs",
        )

    def run(self, handler):
        done = handler(ctypes.addressof(self.frame))
        assert (done == 77) == bool(self.errors)
        return self.errors[-1] if self.errors else None

    def ask(self, handler, *, size=36, extension_size=32, kind=1):
        """Asks for the handler's metadata instead, as XLA does when it registers it."""
        metadata = Metadata(struct_size=size, traits=9)
        extension = MetadataExtension(
            struct_size=extension_size, type=kind, metadata=ctypes.pointer(metadata)
        )
        self.frame.extension_start = ctypes.addressof(extension)
        assert handler(ctypes.addressof(self.frame)) in (0, None)
        return metadata

    def _error(self, given):
        assert (given[0].struct_size, given[0].code) == (28, 3)
        self.errors.append(given[0].message.decode())
        return 77

    def _buffer(self, array, dtype):
        dims = (c_int64 * array.ndim)(*array.shape)
        self.kept.append((array, dims))
        buffer = Buffer(
            dtype=DTYPES[dtype or array.dtype.name],
            data=array.ctypes.data,
            rank=array.ndim,
            dims=ctypes.cast(dims, POINTER(c_int64)),
        )
        return sized(buffer, "dims")

    def _args(self, buffers):
        kinds = (c_int * len(buffers))(*[1] * len(buffers))
        places = (c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        self.kept.append((kinds, places))
        args = Args(
            size=len(buffers),
            types=ctypes.cast(kinds, POINTER(c_int)),
            args=ctypes.cast(places, POINTER(c_void_p)),
        )
        return sized(args, "args")

    def _attribute(self, name, value):
        number = c_int32(value)
        self.kept.append(number)
        return ByteSpan(name, len(name)), Scalar(4, ctypes.pointer(number))

    def _attrs(self):
        count = len(self.attributes)
        kinds = (c_int * count)(*[3] * count)
        names = (POINTER(ByteSpan) * count)(
            *(ctypes.pointer(name) for name, _ in self.attributes)
        )
        values = (POINTER(Scalar) * count)(
            *(ctypes.pointer(value) for _, value in self.attributes)
        )
        self.kept.append((kinds, names, values))
        attrs = Attrs(
            size=count,
            types=ctypes.cast(kinds, POINTER(c_int)),
            names=ctypes.cast(names, POINTER(POINTER(ByteSpan))),
            attrs=ctypes.cast(values, POINTER(POINTER(Scalar))),
        )
        return sized(attrs, "attrs")


def aligned(shape, dtype):
    """Zeros whose address is a multiple of 64, as XLA's are."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
