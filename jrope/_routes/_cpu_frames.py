"""What XLA hands to a handler: read word by word, and checked before it is used.

All that is read of a call is compared first with what `_ffi_layout` says of it; what
differs is an error for XLA to raise.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jrope._routes import _ffi_layout as layout

# What a handler refuses; the number of an error is its place, and 0 is none.
PROBLEMS = (
    "",
    "XLA's FFI must have a version and structures that it knows, and this has others",
    "must be called with n operands, cos and sin, for n results, all of them buffers",
    "must have the attributes is_neox_style and rotary_offset, both int32",
    "buffers must be of the dtype that the handler is for, with aligned addresses",
    "cos and sin must be [*B, T, R/2], each axis of the operands' length or 1",
    "operands must be [*B, T, N, H], each result of its operand's shape",
    "rotary_offset and R must lie within the head's features",
    "a result must lie on its operand or apart from it",
)
(
    SOUND,
    _UNKNOWN_FFI,
    _WRONG_COUNTS,
    _WRONG_ATTRIBUTES,
    _WRONG_BUFFER,
    _WRONG_ROWS,
    _WRONG_SHAPE,
    _WRONG_WIDTH,
    _OVERLAP,
) = range(len(PROBLEMS))

# Whoever calls an intrinsic gives no typing context; numba's arrays have numba's types.
_intrinsic: Any = intrinsic
carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_inlined = numba.njit(error_model="numpy", forceinline=True, boundscheck=False)
# Compiled once for all handlers.
_called = numba.njit(error_model="numpy", boundscheck=False)


@_intrinsic
def at(typing_context, address):
    """A pointer to an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@_inlined
def words(address, count):
    return carray(at(address), count, np.int64)


@_inlined
def lower_half(address, word):
    """The enumeration, or the int, in a word."""
    return carray(at(address + 8 * word), 2, np.int32)[0]


@_intrinsic
def error(typing_context, create, problem):
    """Has XLA make an error: the address of an XLA_FFI_Error, which XLA owns."""
    word, text = ir.IntType(64), cgutils.voidptr_t
    given_to_create = ir.LiteralStructType([word, word, text, ir.IntType(32)])

    def generate(context, builder, signature, arguments):
        create, problem = arguments
        message = ir.Constant(text, None)
        for number, words in enumerate(PROBLEMS[1:], 1):
            found = builder.icmp_signed("==", problem, ir.Constant(word, number))
            known = context.insert_const_string(
                builder.module, f"jrope's cpu_inplace: {words}"
            )
            message = builder.select(found, known, message)
        given = cgutils.alloca_once(builder, given_to_create)
        fields = (
            ir.Constant(word, layout.ERROR_ARGS_SIZE),
            ir.Constant(word, 0),
            message,
            ir.Constant(ir.IntType(32), layout.INVALID_ARGUMENT),
        )
        for number, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, given, 0, number))
        function = ir.FunctionType(word, [word]).as_pointer()
        return builder.call(
            builder.inttoptr(create, function), [builder.ptrtoint(given, word)]
        )

    return types.int64(types.int64, types.int64), generate


@_called
def product(dims, count):
    """The number of elements along the first axes."""
    total = 1
    for axis in range(count):
        total *= dims[axis]
    return total


@_called
def _fault_of_buffer(buffer, dtype, size):
    """What is wrong with a buffer that has to be of some dtype."""
    if buffer[0] != layout.BUFFER_SIZE:
        return _UNKNOWN_FFI
    if (
        np.int32(buffer[layout.DTYPE]) != dtype
        or buffer[layout.DATA] % size
        or buffer[layout.RANK] < 0
    ):
        return _WRONG_BUFFER
    dims = words(buffer[layout.DIMS], buffer[layout.RANK])
    for axis in range(buffer[layout.RANK]):
        if dims[axis] < 0:
            return _WRONG_BUFFER
    return SOUND


@_called
def fault_of_operand(x, out, cos, offset, dtype, size):
    """What is wrong with an operand and its result, given sound rows."""
    for buffer in (x, out):
        fault = _fault_of_buffer(buffer, dtype, size)
        if fault:
            return fault
    rank = x[layout.RANK]
    if rank < 3 or rank != out[layout.RANK] or rank != cos[layout.RANK] + 1:
        return _WRONG_SHAPE
    dims, out_dims = words(x[layout.DIMS], rank), words(out[layout.DIMS], rank)
    row_dims = words(cos[layout.DIMS], rank - 1)
    for axis in range(rank):
        if dims[axis] != out_dims[axis]:
            return _WRONG_SHAPE
    for axis in range(rank - 2):
        if row_dims[axis] != dims[axis] and row_dims[axis] != 1:
            return _WRONG_ROWS
    width, half = dims[np.uintp(rank - 1)], row_dims[np.uintp(rank - 2)]
    if offset < 0 or half > width or offset > width - 2 * half:
        return _WRONG_WIDTH
    apart = abs(out[layout.DATA] - x[layout.DATA])
    if apart and apart < product(dims, rank) * size:
        return _OVERLAP
    return SOUND


@_called
def fault_of_rows(cos, sin, dtype, size):
    """What is wrong with the rows alone."""
    for row in (cos, sin):
        fault = _fault_of_buffer(row, dtype, size)
        if fault:
            return fault
    if cos[layout.RANK] < 2 or cos[layout.RANK] != sin[layout.RANK]:
        return _WRONG_ROWS
    dims, sin_dims = (
        words(cos[layout.DIMS], cos[layout.RANK]),
        words(sin[layout.DIMS], cos[layout.RANK]),
    )
    for axis in range(cos[layout.RANK]):
        if dims[axis] != sin_dims[axis]:
            return _WRONG_ROWS
    return SOUND


@_called
def _has_known_version(api):
    packed = api[layout.API_VERSION]
    major, minor = np.int32(packed), np.int32(packed >> 32)
    return major == layout.MAJOR and (
        layout.FIRST_MINOR <= minor and minor <= layout.LAST_MINOR
    )


@_called
def fault_of_frame(frame, api):
    """What is wrong with the call itself: versions, sizes, counts and kinds."""
    args, rets, attrs = layout.FRAME_ARGS, layout.FRAME_RETS, layout.FRAME_ATTRS
    if frame[0] != layout.FRAME_SIZE or not _has_known_version(api):
        return _UNKNOWN_FFI
    if np.int32(frame[layout.FRAME_STAGE]) != layout.EXECUTE:
        return _UNKNOWN_FFI
    if frame[args] != layout.ARGS_SIZE:
        return _UNKNOWN_FFI
    if frame[rets] != layout.RETS_SIZE or frame[attrs] != layout.ATTRS_SIZE:
        return _UNKNOWN_FFI
    count = frame[rets + layout.SIZE]
    if count < 1 or frame[args + layout.SIZE] != count + 2:
        return _WRONG_COUNTS
    for start, size in ((args, count + 2), (rets, count)):
        kinds = carray(at(frame[start + layout.TYPES]), size, np.int32)
        for i in range(size):
            if kinds[i] != layout.BUFFER:
                return _WRONG_COUNTS
    return _fault_of_attributes(frame)


@_called
def _fault_of_attributes(frame):
    """Attributes are sorted by name: is_neox_style, rotary_offset."""
    attrs = layout.FRAME_ATTRS
    if frame[attrs + layout.SIZE] != 2:
        return _WRONG_ATTRIBUTES
    kinds = carray(at(frame[attrs + layout.TYPES]), 2, np.int32)
    names, given = (
        words(frame[attrs + layout.NAMES], 2),
        words(frame[attrs + layout.ATTRS], 2),
    )
    for i in range(2):
        # The address and the length of a name; both here have 13 letters.
        name = words(names[i], 2)
        letter = carray(at(name[0]), 1, np.uint8)[0]
        if name[1] != 13 or letter != (105, 114)[i]:
            return _WRONG_ATTRIBUTES
        if kinds[i] != layout.SCALAR or lower_half(given[i], 0) != layout.S32:
            return _WRONG_ATTRIBUTES
    return SOUND


@_called
def asks_for_metadata(extension):
    """Whether the call is a question, and no operands come with it."""
    return lower_half(extension, layout.KIND) == layout.METADATA_EXTENSION


@_called
def describe(extension, api):
    """Answers XLA's question which version the handler was made for: its own.

    Where that is unknown nothing is written, and XLA refuses the handler.
    """
    given = words(extension, 4)
    metadata = given[layout.METADATA]
    if given[0] != layout.EXTENSION_SIZE or not _has_known_version(api):
        return
    described = words(metadata, 5)
    if described[0] == layout.METADATA_SIZE:
        described[layout.METADATA_VERSION] = api[layout.API_VERSION]
        traits = carray(at(metadata + 8 * layout.METADATA_TRAITS), 1, np.int32)
        traits[0] = 0
