"""How kernels are compiled: at their first call, for read-only inputs, kept on disk."""

import functools
import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, config, errors
from numba.extending import intrinsic, overload

# NUMBA_DISABLE_JIT=1 runs kernels as plain Python: slow, for coverage and debuggers.
INTERPRETED = bool(vars(config)["DISABLE_JIT"])

# What a call raises for arguments that a kernel was not compiled for.
UNMATCHED = (TypeError, ValueError, errors.NumbaError)

_LOG = logging.getLogger(__name__)
_COMPILING = threading.Lock()
_OUTPUTS: dict[Any, tuple[int, ...]] = {}


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that kernels call; it becomes part of each of them."""
    return numba.njit(error_model="numpy", forceinline=True)(function)


def kernel(
    *, outputs: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an entry point that never compiles behind its caller's back.

    A call with arguments it was not compiled for raises one of `UNMATCHED` at once; the
    caller then converts them, asks `compile_for` and calls again. Inputs are declared
    read-only, which writable arrays fit as well: one compilation serves both.

    Args:
      outputs: which of the function's arguments are arrays that it writes.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        if INTERPRETED:
            return function
        entry: Any = numba.njit(error_model="numpy")(function)
        entry._can_compile = False
        _OUTPUTS[entry] = outputs
        return entry

    return make


def compile_for(entry: Any, *arguments: Any) -> None:
    """Compiles `entry` for the types of these arguments, or loads it from the cache.

    Threads that race here wait for the first of them. A second dispatcher compiles, so
    that no thread ever sees the entry point itself ready to.
    """
    if INTERPRETED:
        return
    outputs = _OUTPUTS[entry]
    types = tuple(
        _declared(argument, index in outputs)
        for index, argument in enumerate(arguments)
    )
    with _COMPILING:
        if types not in entry.overloads:
            compiler = _with_cache(entry.py_func)
            compiler.compile(types)
            entry.add_overload(compiler.overloads[types])


def exact(value: float, row: np.ndarray) -> float:
    """`value` as an integer where `row` holds integers, else as float64."""
    return int(value) if row.dtype.kind == "i" else float(value)


@overload(exact)
def _exact(value, row):
    del value
    if isinstance(row.dtype, numba.types.Integer):
        return lambda value, row: np.int64(value)
    return lambda value, row: np.float64(value)


def holds_floats(row: np.ndarray) -> bool:
    """Whether an array holds floating point numbers."""
    return row.dtype.kind == "f"


@overload(holds_floats)
def _holds_floats(row):
    answer = isinstance(row.dtype, numba.types.Float)
    return lambda row: answer


def borrowed(array: np.ndarray) -> np.ndarray:
    """The same array without a reference count, for use within one kernel call.

    Every helper that takes an array counts a reference up and down, atomically, unless
    LLVM sees through all branches: half of a scan's time.
    """
    return array


@intrinsic
def _without_count(context, array):
    def build(target, builder, signature, arguments):
        made = target.make_array(signature.return_type)(
            target, builder, value=arguments[0]
        )
        made.meminfo = cgutils.get_null_value(made.meminfo.type)
        made.parent = cgutils.get_null_value(made.parent.type)
        return made._getvalue()

    return array(array), build


@overload(borrowed)
def _borrowed(array):
    make: Any = _without_count
    return lambda array: make(array)


def _declared(argument: Any, written: bool) -> Any:
    kind: Any = numba.typeof(argument)
    if isinstance(argument, np.ndarray) and not written:
        return kind.copy(readonly=True)
    return kind


def _with_cache(function: Callable[..., Any]) -> Any:
    try:
        made = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba's word for having no folder to write to
        _warn_once()
        return numba.njit(error_model="numpy")(function)
    # numba looks at the entry's own file only, and would run old helpers after an
    # upgrade; the stamp here covers the package.
    file = getattr(getattr(made, "_cache", None), "_cache_file", None)
    stamp = getattr(file, "_source_stamp", None)
    if file is not None and stamp is not None:
        file._source_stamp = (*stamp, *_package_stamp())
    return made


@functools.cache
def _package_stamp() -> tuple[int, ...]:
    """When and how large the files of this package are, and whether bounds are kept."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    stats = [file.stat() for file in files]
    return (
        max(entry.st_mtime_ns for entry in stats),
        sum(entry.st_size for entry in stats),
        int(bool(vars(config)["BOUNDSCHECK"])),
    )


@functools.cache
def _warn_once() -> None:
    _LOG.warning(
        "jrope.positions compiles anew in every process, since numba has no folder "
        "to keep its results in; set NUMBA_CACHE_DIR to a writable one"
    )
