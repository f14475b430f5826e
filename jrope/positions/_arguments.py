"""What kernels take: arrays and integers, read straight from the Python objects.

numba's own entry works out the type of every argument at every call and counts a
reference to every array: 50 ns an array, more than most kernels run. Here a kernel says
beforehand what it takes; its entry looks at each object itself (8 ns an array) and
raises TypeError, before anything is read or written, for whatever is not exactly that.
"""

import ctypes
import functools
import operator
from typing import Any

import numpy as np

try:
    from llvmlite import binding as llvm
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import (
        NativeValue,
        lower_builtin,
        models,
        register_model,
        type_callable,
        unbox,
    )
except ImportError as reason:
    raise ImportError(
        f"jrope.positions needs numba, which cannot be imported: {reason}; the rest of "
        f"jrope works without. Is it installed, and for this numpy, {np.__version__}?"
    ) from reason

_BYTE, _INT, _SIZE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
# What the address of numpy's array type is called in compiled code.
_ARRAY_TYPE = "jrope_numpy_ndarray"
# Flags of an array. Source: numpy's ndarraytypes.h, as for the two structures.
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class _Array(ctypes.Structure):
    """The fields of an array object (PyArrayObject_fields) as far as they are read."""

    _fields_ = [
        ("head", ctypes.c_char * (object.__basicsize__ - _POINTER)),
        ("type", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("nd", ctypes.c_int),
        ("dimensions", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("descr", ctypes.c_void_p),
        ("flags", ctypes.c_int),
    ]


class _Descr(ctypes.Structure):
    """The fields of a dtype object (PyArray_Descr) as far as they are read."""

    _fields_ = [
        ("head", ctypes.c_char * object.__basicsize__),
        ("scalar", ctypes.c_void_p),
        ("kind", ctypes.c_char),
        ("letter", ctypes.c_char),
        ("byteorder", ctypes.c_char),
        ("former_flags", ctypes.c_char),
        ("number", ctypes.c_int),
        ("flags", ctypes.c_uint64),
        ("elsize", ctypes.c_ssize_t),
    ]


class ArrayArgument(types.Array):
    """A plain array of one dtype, aligned, in the machine's byte order.

    Within a kernel it is an array as any other. Nothing holds on to it there: the
    caller does.

    Args:
      dtype: of the elements.
      ndim: number of axes.
      written: whether the kernel writes it; read-only arrays are taken otherwise.
      rows: of two axes, the second contiguous, read with `row_of`; else all of it is
        contiguous.
      columns: size of the second axis, where it has to be that.
    """

    def __init__(
        self,
        dtype: str,
        ndim: int,
        *,
        written: bool = False,
        rows: bool = False,
        columns: int | None = None,
    ) -> None:
        """Describes the type to numba."""
        self.numpy_dtype, self.written = np.dtype(dtype), written
        self.rows, self.columns = rows, columns
        super().__init__(
            getattr(types, dtype),
            ndim,
            "A" if rows else "C",
            readonly=not written,
            name=f"array({dtype}, ndim={ndim}, {written=}, {rows=}, {columns=})",
        )

    def accepts(self, value: Any) -> bool:
        """Whether the compiled entry takes `value`."""
        if type(value) is not np.ndarray or value.ndim != self.ndim:
            return False
        if self.rows:
            dense = value.shape[1] < 2 or value.strides[1] == value.itemsize
        else:
            dense = value.flags.c_contiguous
        return (
            dense
            and value.dtype == self.numpy_dtype
            and value.flags.aligned
            and (value.flags.writeable or not self.written)
            and (self.columns is None or value.shape[1] == self.columns)
        )

    @property
    def key(self) -> Any:
        """What tells it from other types."""
        return self.name


class WholeArgument(types.Type):
    """An integer, or what has `__index__`; `whole` makes it an int64 in a kernel."""

    def __init__(self) -> None:
        """Describes the type to numba."""
        super().__init__(name="whole number")

    def accepts(self, value: Any) -> bool:
        """Whether the compiled entry takes `value`."""
        return hasattr(type(value), "__index__")


register_model(ArrayArgument)(models.ArrayModel)


@register_model(WholeArgument)
class _WholeModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _SIZE)


@unbox(WholeArgument)
def _read_whole(kind, value, c):
    del kind
    # Asks for __index__ itself, which floats and strings do not have.
    made = c.pyapi.long_as_longlong(value)
    return NativeValue(made, is_error=c.pyapi.c_api_error())


@unbox(ArrayArgument)
def _read_array(kind, value, c):
    builder = c.builder
    made = c.context.make_array(kind)(c.context, builder)
    refused = cgutils.alloca_once_value(builder, cgutils.true_bit)
    with builder.if_then(_is_array(builder, value), likely=True):
        axes = _field(builder, value, _Array.nd, _INT)
        with builder.if_then(_equal(builder, axes, kind.ndim), likely=True):
            _read_fields(builder, value, kind, made)
            builder.store(builder.not_(_fits(builder, value, kind, made)), refused)
    refused = builder.load(refused)
    with builder.if_then(refused, likely=False):
        c.pyapi.err_set_string("PyExc_TypeError", f"expected {kind.name}")
    return NativeValue(builder.load(made._getpointer()), is_error=refused)


def _is_array(builder, value):
    """Whether an object is a plain numpy array."""
    known = builder.module.globals.get(_ARRAY_TYPE)
    if known is None:
        known = ir.GlobalVariable(builder.module, _BYTE, _ARRAY_TYPE)
    kind = _field(builder, value, _Array.type, _BYTE.as_pointer())
    return builder.icmp_unsigned("==", kind, known)


def _read_fields(builder, value, kind, made):
    """Reads where an array of `kind.ndim` axes is and how large."""
    start = _field(builder, value, _Array.data, _BYTE.as_pointer())
    made.data = builder.bitcast(start, made.data.type)
    for name in ("shape", "strides"):
        field = _Array.dimensions if name == "shape" else _Array.strides
        sizes = _field(builder, value, field, _SIZE.as_pointer())
        places = [builder.gep(sizes, [_SIZE(axis)]) for axis in range(kind.ndim)]
        loaded = [builder.load(place) for place in places]
        setattr(made, name, cgutils.pack_array(builder, loaded))
    shape = cgutils.unpack_tuple(builder, made.shape)
    made.nitems = functools.reduce(builder.mul, shape)
    made.itemsize = _SIZE(kind.numpy_dtype.itemsize)
    _without_owner(made)


def _without_owner(made):
    """Nothing is counted or freed by what a kernel does with an array."""
    for owner in ("meminfo", "parent"):
        setattr(made, owner, cgutils.get_null_value(getattr(made, owner).type))


def _fits(builder, value, kind, made):
    """Whether an array of `kind.ndim` axes is what was declared."""
    flags = _ALIGNED | (_WRITEABLE if kind.written else 0)
    flags |= 0 if kind.rows else _C_CONTIGUOUS
    found = builder.and_(_field(builder, value, _Array.flags, _INT), _INT(flags))
    descr = _field(builder, value, _Array.descr, _BYTE.as_pointer())
    letter = _field(builder, descr, _Descr.kind, _BYTE)
    order = _field(builder, descr, _Descr.byteorder, _BYTE)
    size, wanted = _field(builder, descr, _Descr.elsize, _SIZE), kind.numpy_dtype
    tests = [
        _equal(builder, found, flags),
        _equal(builder, letter, ord(wanted.kind)),
        _equal(builder, order, ord(wanted.byteorder)),
        _equal(builder, size, wanted.itemsize),
    ]
    if kind.ndim == 2:
        columns = builder.extract_value(made.shape, 1)
        if kind.columns is not None:
            tests.append(_equal(builder, columns, kind.columns))
        if kind.rows:
            step = builder.extract_value(made.strides, 1)
            dense = _equal(builder, step, wanted.itemsize)
            single = builder.icmp_signed("<", columns, _SIZE(2))
            tests.append(builder.or_(single, dense))
    return functools.reduce(builder.and_, tests)


def _field(builder, value, field, kind):
    """A field of an object that numpy made."""
    base = builder.bitcast(value, _BYTE.as_pointer())
    place = builder.gep(base, [_SIZE(field.offset)])
    return builder.load(builder.bitcast(place, kind.as_pointer()))


def _equal(builder, value, wanted):
    return builder.icmp_signed("==", value, value.type(wanted))


def link_numpy() -> None:
    """Tells kernels where numpy's array type is; before any is compiled or loaded.

    Raises:
      ImportError: numpy does not lay arrays out as they are read here.
    """
    probe = np.zeros((2, 3), np.float32)
    array = _Array.from_address(id(probe))
    sizes = ctypes.c_ssize_t * 2
    right = (
        array.type == id(np.ndarray)
        and array.data == probe.ctypes.data
        and array.nd == 2
        and array.descr == id(probe.dtype)
        and array.flags == probe.flags.num
        and tuple(sizes.from_address(array.dimensions)) == probe.shape
        and tuple(sizes.from_address(array.strides)) == probe.strides
    )
    if right:
        descr = _Descr.from_address(array.descr)
        found = (descr.kind, descr.letter, descr.byteorder, descr.elsize)
        right = found == (b"f", b"f", b"=", 4)
    if not right:
        raise ImportError(
            "jrope.positions reads arrays as numpy 2 lays them out, and numpy "
            f"{np.__version__} does not; install another, or set NUMBA_DISABLE_JIT=1"
        )
    llvm.add_symbol(_ARRAY_TYPE, id(np.ndarray))


def whole(number: Any) -> int:
    """The value of an argument that was declared as a whole number."""
    return operator.index(number)


@type_callable(whole)
def _type_of_whole(context):
    del context
    return lambda number: types.int64


@lower_builtin(whole, WholeArgument)
def _make_whole(context, builder, signature, arguments):
    del context, builder, signature
    return arguments[0]


def row_of(array: np.ndarray, index: int) -> np.ndarray:
    """One row, contiguous, of an array that was declared with `rows`."""
    return array[index]


@type_callable(row_of)
def _type_of_row(context):
    del context

    def typer(array, index):
        del index
        return types.Array(array.dtype, 1, "C", readonly=not array.mutable)

    return typer


@lower_builtin(row_of, ArrayArgument, types.Integer)
def _make_row(context, builder, signature, arguments):
    kind, _ = signature.args
    source = context.make_array(kind)(context, builder, value=arguments[0])
    made = context.make_array(signature.return_type)(context, builder)
    skip = builder.mul(arguments[1], builder.extract_value(source.strides, 0))
    start = builder.gep(builder.bitcast(source.data, _BYTE.as_pointer()), [skip])
    columns = builder.extract_value(source.shape, 1)
    made.data = builder.bitcast(start, made.data.type)
    made.nitems, made.itemsize = columns, source.itemsize
    made.shape = cgutils.pack_array(builder, [columns])
    made.strides = cgutils.pack_array(builder, [source.itemsize])
    _without_owner(made)
    return made._getvalue()
