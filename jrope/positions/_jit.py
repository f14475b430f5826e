"""How kernels are compiled: once, for what they declare, and kept on disk."""

import functools
import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import config
from numba.core.caching import FunctionCache
from numba.extending import overload

from jrope.positions._arguments import ArrayArgument, WholeArgument, link_numpy

# NUMBA_DISABLE_JIT=1 runs kernels as plain Python: slow, for coverage and debuggers.
INTERPRETED = bool(vars(config)["DISABLE_JIT"])

_LOG = logging.getLogger(__name__)
_PREPARING = threading.Lock()


class _Helper:
    """A function that kernels call; only a compiler needs numba's form of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Runs it as Python."""
        return self.function(*arguments)

    @functools.cached_property
    def _dispatcher(self) -> Any:
        return numba.njit(error_model="numpy", forceinline=True)(self.function)

    @property
    def _numba_type_(self) -> Any:
        """What numba asks of a global that it does not know."""
        return numba.typeof(self._dispatcher)


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that kernels call; it becomes part of each of them."""
    return function if INTERPRETED else _Helper(function)


class Kernel:
    """An entry point that never compiles behind its caller's back.

    `run` raises TypeError for arguments that are not what was declared, and for all
    before `prepare`: the caller then converts them, prepares the kernel and runs it
    again.

    Args:
      function: what to compile.
      arguments: what it takes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: ArrayArgument | WholeArgument,
    ) -> None:
        """Compiles nothing yet."""
        self._function, self._arguments = function, arguments
        self.run: Callable[..., Any] = self._check_and_run if INTERPRETED else _refuse

    def prepare(self) -> None:
        """Compiles the kernel, or loads it from the cache, unless that is done.

        Threads that race here wait for the first of them.

        Raises:
          ImportError: numpy is not one whose arrays can be read.
        """
        with _PREPARING:
            if self.run is _refuse:
                self.run = _compiled(self._function, self._arguments)

    def _check_and_run(self, *arguments: Any) -> Any:
        for declared, given in zip(self._arguments, arguments, strict=True):
            if not declared.accepts(given):
                raise TypeError(f"expected {declared}")
        return self._function(*arguments)


def kernel(
    *arguments: ArrayArgument | WholeArgument,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a kernel of a function, for these arguments."""
    return lambda function: Kernel(function, *arguments)


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


def _refuse(*arguments: Any) -> Any:
    raise TypeError("the kernel is not prepared")


def _compiled(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    link_numpy()
    # Without reference counts: nothing is allocated, and the caller holds the arrays.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    made: Any = numba.njit(**options)(function)
    try:
        made._cache = _Cache(function)
    except RuntimeError:  # numba's word for having no folder to write to
        _warn_once()
    return made.compile(arguments)


class _Cache(FunctionCache):
    """numba's cache on disk, for a package, and without what only a compiler needs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._entry = function.__name__
        # numba looks at the entry's own file only, and would run old helpers after an
        # upgrade; the stamp here covers the package.
        file = self._cache_file
        file._source_stamp = (*file._source_stamp, *_package_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Links what is there; None, to compile anew, where a file is cut short.

        numba's own first loads every module that compiled code could refer to,
        scipy.linalg among them: 0.3 s. Ours refers to none.
        """
        try:
            return self._load_overload(sig, target_context)
        except Exception as reason:  # A cut pickle may raise anything.
            _LOG.warning(
                "jrope.positions compiles %s anew, since what numba kept of it in %s "
                "cannot be read: %r",
                *(self._entry, self.cache_path, reason),
            )
            self._keep(self._cache_file.flush)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps what was compiled; a full disk costs the next process a compilation."""
        self._keep(super().save_overload, sig, data)

    def _keep(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except (OSError, EOFError) as reason:
            _LOG.warning(
                "jrope.positions cannot keep its compiled code in %s: %r",
                *(self.cache_path, reason),
            )


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
