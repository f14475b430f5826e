"""The handler that turns heads in place, compiled by numba.

XLA calls it with the address of a call frame. Nothing is written unless all of that
frame is as expected; see `_cpu_frames`.
"""

import logging
import pathlib
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from jrope import _products as products
from jrope._products import WIDE, WIDE_FLOAT16
from jrope._routes import _cpu_frames as frames
from jrope._routes import _ffi_layout as layout
from jrope._routes._cpu_frames import carray

_LOG = logging.getLogger(__name__)

# Whoever calls one gives no typing context.
_intrinsic: Any = intrinsic
_inlined = numba.njit(error_model="numpy", forceinline=True, boundscheck=False)
# Compiled once for all handlers.
_called = numba.njit(error_model="numpy", boundscheck=False)


def _reinterpreting(given: Any, made: Any, llvm_type: Any) -> Any:
    @_intrinsic
    def reinterpreted(typing_context, value):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], llvm_type)

        return made(given), generate

    return reinterpreted


_as_bits = _reinterpreting(types.float32, types.uint32, ir.IntType(32))
_as_float = _reinterpreting(types.uint32, types.float32, ir.FloatType())


@_intrinsic
def _copy(typing_context, target, source, size):
    """Copies bytes between places that do not overlap."""

    def generate(context, builder, signature, arguments):
        target, source = (
            builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2]
        )
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


# Values of each dtype as float32 or float64, and back, rounded to nearest even: in
# bits, since not every processor has 16-bit floats, and without subnormal float32,
# which XLA has the processor flush to zero.


@_inlined
def _same(value):
    return value


@_inlined
def _from_bfloat16(bits):
    return _as_float(np.uint32(bits) << np.uint32(16))


@_inlined
def _to_bfloat16(value):
    bits = _as_bits(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.uint16(rounded if value == value else _NAN)


@_inlined
def _from_float16(bits):
    magnitude = (np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)
    sign = (np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16)
    # The exponent's bias grows by 112; again by 112 for infinity and NaN.
    normal = np.uint32(magnitude + np.uint32(112 << 23))
    special = np.uint32(normal + np.uint32(112 << 23))
    # A subnormal as the fraction of 2^-14, which is then taken away.
    raised = _as_float(np.uint32(normal + np.uint32(1 << 23)))
    subnormal = _as_bits(raised - np.float32(2.0**-14))
    exponent = magnitude & np.uint32(0x1F << 23)
    wide = normal if exponent else subnormal
    wide = special if exponent == np.uint32(0x1F << 23) else wide
    return _as_float(wide | sign)


@_inlined
def _to_float16(value):
    bits = _as_bits(value)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    rounding = np.uint32(0xFFF) + odd
    normal = np.uint32(magnitude - np.uint32(112 << 23) + rounding) >> np.uint32(13)
    # Half of one has the subnormals' last place: adding it rounds to that.
    raised = _as_bits(_as_float(magnitude) + np.float32(0.5))
    subnormal = np.uint32(raised - _HALF)
    small = normal if magnitude >= np.uint32(113 << 23) else subnormal
    special = np.uint32(0x7E00 if magnitude > np.uint32(255 << 23) else 0x7C00)
    found = small if magnitude < np.uint32(143 << 23) else special
    return np.uint16(found | sign)


_HALF = np.uint32(126 << 23)  # The bits of 0.5.
_NAN = np.uint32(0x7FC0)  # A NaN of bfloat16.


def _joined(join: str, flags: tuple[str, ...]) -> Any:
    """Makes a * b joined to c * d; flags say whether the first product may be fused."""

    @_intrinsic
    def joined(typing_context, a, b, c, d):
        def generate(context, builder, signature, arguments):
            a, b, c, d = arguments
            product = builder.fmul(a, b, flags=flags)
            return getattr(builder, join)(product, builder.fmul(c, d), flags=flags)

        return a(a, b, c, d), generate

    return joined


_CONTRACT = ("contract",)
_fused_difference, _fused_sum = _joined("fsub", _CONTRACT), _joined("fadd", _CONTRACT)
_rounded_difference, _rounded_sum = _joined("fsub", ()), _joined("fadd", ())


@_inlined
def _fused(a, b, cos, sin):
    """A pair, turned. Where the processor can, the first product is not rounded."""
    return _fused_difference(a, cos, b, sin), _fused_sum(b, cos, a, sin)


@_inlined
def _rounded(a, b, cos, sin):
    """A pair, turned with every product rounded, as XLA's forms do for narrow heads."""
    return _rounded_difference(a, cos, b, sin), _rounded_sum(b, cos, a, sin)


@_inlined
def _turn_halves(head, half, cos, sin, kind, turned):
    """Turns the pairs (i, i + half) of one head."""
    widen, narrow = kind.widen, kind.narrow
    first = carray(frames.at(head), half, kind.element)
    second = carray(frames.at(head + kind.size * half), half, kind.element)
    for i in range(half):
        a, b = widen(first[i]), widen(second[i])
        a, b = turned(a, b, cos[i], sin[i])
        first[i], second[i] = narrow(a), narrow(b)


@_inlined
def _turn_neighbours(head, half, cos, sin, kind, turned):
    """Turns the pairs (2i, 2i + 1) of one head."""
    widen, narrow = kind.widen, kind.narrow
    pairs = carray(frames.at(head), (half, 2), kind.element)
    for i in range(half):
        a, b = widen(pairs[i, 0]), widen(pairs[i, 1])
        a, b = turned(a, b, cos[i], sin[i])
        pairs[i, 0], pairs[i, 1] = narrow(a), narrow(b)


@_inlined
def _turn_head(head, half, cos, sin, is_neox_style, kind, turned):
    """Turns one head, whose pairs start at an address."""
    if is_neox_style:
        _turn_halves(head, half, cos, sin, kind, turned)
    else:
        _turn_neighbours(head, half, cos, sin, kind, turned)


@_called
def _row_of(token, dims, row_dims, axes):
    """The row of a token, where rows are shared along axes of length 1."""
    row, stride = 0, 1
    for back in range(axes):
        axis = np.uintp(axes - 1 - back)
        if row_dims[axis] != 1:
            row += stride * (token % dims[axis])
        stride *= row_dims[axis]
        token //= dims[axis]
    return row


@_inlined
def _turn(x, out, cos, sin, is_neox_style, offset, kind):
    """Turns one operand; the three are the words of sound buffers."""
    size, axes = kind.size, x[layout.RANK] - 2
    dims, row_dims = (
        frames.words(x[layout.DIMS], axes + 2),
        frames.words(cos[layout.DIMS], axes + 1),
    )
    heads, width, half = dims[np.uintp(axes)], dims[np.uintp(axes + 1)], row_dims[axes]
    tokens = frames.product(dims, axes)
    shared = frames.product(row_dims, axes) != tokens
    for token in range(tokens):
        target = out[layout.DATA] + token * heads * width * size
        if x[layout.DATA] != out[layout.DATA]:
            source = x[layout.DATA] + token * heads * width * size
            _copy(target, source, heads * width * size)
        row = _row_of(token, dims, row_dims, axes) if shared else token
        place = row * half * kind.row_size
        c = carray(frames.at(cos[layout.DATA] + place), half, kind.row_element)
        s = carray(frames.at(sin[layout.DATA] + place), half, kind.row_element)
        for head in range(heads):
            start = target + (head * width + offset) * size
            if 2 * half < kind.wide:
                _turn_head(start, half, c, s, is_neox_style, kind, _rounded)
            else:
                _turn_head(start, half, c, s, is_neox_style, kind, _fused)


@_inlined
def _execute(frame, api, kind):
    """Checks all operands, then turns them; the number of what is wrong."""
    fault = frames.fault_of_frame(frame, api)
    if fault:
        return fault
    count = frame[layout.FRAME_RETS + layout.SIZE]
    args = frames.words(frame[layout.FRAME_ARGS + layout.ARGS], count + 2)
    rets = frames.words(frame[layout.FRAME_RETS + layout.ARGS], count)
    attrs = frames.words(frame[layout.FRAME_ATTRS + layout.ATTRS], 2)
    is_neox_style, offset = (
        frames.lower_half(frames.words(attrs[0], 2)[layout.VALUE], 0),
        np.int64(frames.lower_half(frames.words(attrs[1], 2)[layout.VALUE], 0)),
    )
    cos = frames.words(args[np.uintp(count)], 6)
    sin = frames.words(args[np.uintp(count + 1)], 6)
    fault = frames.fault_of_rows(cos, sin, kind.row_dtype, kind.row_size)
    if fault:
        return fault
    for i in range(count):
        x, out = frames.words(args[i], 6), frames.words(rets[i], 6)
        fault = frames.fault_of_operand(x, out, cos, offset, kind.dtype, kind.size)
        if fault:
            return fault
    for i in range(count):
        x, out = frames.words(args[i], 6), frames.words(rets[i], 6)
        _turn(x, out, cos, sin, is_neox_style, offset, kind)
    return frames.SOUND


@_inlined
def _answer(address, kind):
    """What a handler returns: 0, or the address of an error.

    The table of XLA's functions is the one that `_ffi` has looked at.
    """
    frame = frames.words(address, layout.FRAME_WORDS)
    api = frames.words(frame[layout.FRAME_API], layout.API_WORDS)
    extension = frame[layout.EXTENSION]
    if extension and frames.asks_for_metadata(extension):
        frames.describe(extension, api)
        return 0
    fault = _execute(frame, api, kind)
    return frames.error(api[layout.API_ERROR_CREATE], fault) if fault else 0


class _Kind(NamedTuple):
    """What a handler is for: how its buffers hold numbers, and how those are read."""

    dtype: int
    element: Any
    size: int
    row_dtype: int
    row_element: Any
    row_size: int
    widen: Any
    narrow: Any
    wide: int  # the least rotary_dim whose products are not rounded


_ROWS32, _ROWS64 = (layout.F32, np.float32, 4), (layout.F64, np.float64, 8)
_BFLOATS, _HALVES = (_from_bfloat16, _to_bfloat16), (_from_float16, _to_float16)
_FLOAT32 = _Kind(layout.F32, np.float32, 4, *_ROWS32, _same, _same, WIDE)
_FLOAT64 = _Kind(layout.F64, np.float64, 8, *_ROWS64, _same, _same, WIDE)
_BFLOAT16 = _Kind(layout.BF16, np.uint16, 2, *_ROWS32, *_BFLOATS, WIDE)
_FLOAT16 = _Kind(layout.F16, np.uint16, 2, *_ROWS32, *_HALVES, WIDE_FLOAT16)


def _float32(frame):
    return _answer(frame, _FLOAT32)


def _float64(frame):
    return _answer(frame, _FLOAT64)


def _bfloat16(frame):
    return _answer(frame, _BFLOAT16)


def _float16(frame):
    return _answer(frame, _FLOAT16)


# By the operands' dtype. A function each, since a closure would not be kept on disk.
HANDLERS = {
    "float32": _float32,
    "float64": _float64,
    "bfloat16": _bfloat16,
    "float16": _float16,
}


def compiled(dtype: str) -> Any:
    """The handler of a dtype, as numba.cfunc makes it: compiled, or read from disk."""
    function = HANDLERS[dtype]
    made: Any = CFunc(
        function, (types.int64(types.int64).args, types.int64), locals={}, options={}
    )
    try:
        made._cache = _Cache(function)
    except RuntimeError:  # numba's word for having no folder to write to
        _LOG.warning(
            "jrope compiles the handler of cpu_inplace anew in every process, since "
            "numba has no folder to keep it in; set NUMBA_CACHE_DIR to a writable one"
        )
    made.compile()
    return made


class _Cache(FunctionCache):
    """numba's cache on disk, which by itself asks only whether this file changed."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        file = self._cache_file
        others = [
            pathlib.Path(str(module.__file__)).stat()
            for module in (frames, layout, products)
        ]
        stamps = [(entry.st_mtime_ns, entry.st_size) for entry in others]
        file._source_stamp = (*file._source_stamp, *stamps)
