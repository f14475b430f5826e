"""XLA's FFI as this process has it, asked before a handler is handed to it.

A probe, which is Python, is registered with the CPU client first. XLA calls it once, to
ask for its version, with the same structures that every handler gets: they are read
word by word as far as their own sizes allow. Only where all is as `_ffi_layout` knows
it is numba's code ever called.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from jrope._routes import _ffi_layout as layout

PLATFORM = "cpu"
PROBE = "jrope_ffi_probe"
# What XLA holds the address of must live as long as the process.
_HELD: dict[str, Any] = {}
_REGISTERING = threading.Lock()
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def register(name: str, make: Callable[[], Any]) -> str | None:
    """Registers the handler that `make` compiles, once in this process.

    Args:
      name: of the target, as programs call it.
      make: gives what numba.cfunc does; called only if XLA's FFI is as expected.

    Returns:
      None, or why it cannot be registered.
    """
    with _REGISTERING:
        reason = differs()
        if reason is not None or name in _HELD:
            return reason
        made = make()
        reason = _hand_over(name, made.address)
        if reason is None:
            _HELD[name] = made
        return reason


@functools.cache
def differs() -> str | None:
    """What XLA's FFI has that `_ffi_layout` does not know, or None."""
    try:
        jax.devices(PLATFORM)
    except RuntimeError as error:
        # Registered without a client, a handler that it refuses would keep it away.
        return f"this process has no CPU client for its handler: {error}"
    probe = Probe()
    _HELD[PROBE] = probe
    reason = _hand_over(PROBE, ctypes.cast(probe.callback, ctypes.c_void_p).value)
    return difference(probe.found) or reason


def _hand_over(name: str, address: int | None) -> str | None:
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(address))
    try:
        jax.ffi.register_ffi_target(name, capsule, platform=PLATFORM)
    except jax.errors.JaxRuntimeError as error:
        return f"XLA refuses its handler: {error}"
    return None


def difference(found: dict[str, int]) -> str | None:
    """What a probe found that `_ffi_layout` does not know, or None."""
    if not found:
        return "XLA did not ask the probe for its version, as every known XLA does"
    for name, (size, exact) in SIZES.items():
        given = found.get(name, 0)
        if given < size or (exact and given != size):
            least = "" if exact else " at least"
            return (
                f"{name} of XLA's FFI must have {size} bytes{least}, as in the "
                f"versions that it knows, got {given} with JAX {jax.__version__}"
            )
    first, last = layout.FIRST_MINOR, layout.LAST_MINOR
    major, minor = found["major"], found["minor"]
    if major != layout.MAJOR or not first <= minor <= last:
        return (
            f"XLA's FFI must have a version from {layout.MAJOR}.{first} to "
            f"{layout.MAJOR}.{last}, whose structures it reads, got {major}.{minor} "
            f"with JAX {jax.__version__}"
        )
    return None


# Sizes of what a handler reads, and whether they must be these and not more.
SIZES = {
    "XLA_FFI_CallFrame": (layout.FRAME_SIZE, True),
    "XLA_FFI_Args": (layout.ARGS_SIZE, True),
    "XLA_FFI_Rets": (layout.RETS_SIZE, True),
    "XLA_FFI_Attrs": (layout.ATTRS_SIZE, True),
    "XLA_FFI_Api": (layout.LEAST_API_SIZE, False),
    "XLA_FFI_Metadata_Extension": (layout.EXTENSION_SIZE, True),
    "XLA_FFI_Metadata": (layout.METADATA_SIZE, True),
}


class Probe:
    """A handler in Python that notes what it is called with."""

    def __init__(self) -> None:
        """Has found nothing yet."""
        self.found: dict[str, int] = {}
        self.callback = _CALLBACK(self._answer)

    def _answer(self, address: int) -> None:
        """Reads a frame; every size is looked at before what lies within it."""
        self.found["XLA_FFI_CallFrame"] = _words(address, 1)[0]
        if self.found["XLA_FFI_CallFrame"] != layout.FRAME_SIZE:
            return
        frame = _words(address, layout.FRAME_WORDS)
        self.found["XLA_FFI_Args"] = frame[layout.FRAME_ARGS]
        self.found["XLA_FFI_Rets"] = frame[layout.FRAME_RETS]
        self.found["XLA_FFI_Attrs"] = frame[layout.FRAME_ATTRS]
        self._read_api(frame[layout.FRAME_API])
        self._read_extension(frame[layout.EXTENSION])

    def _read_api(self, address: int) -> None:
        self.found["XLA_FFI_Api"] = size = _words(address, 1)[0] if address else 0
        if size >= layout.LEAST_API_SIZE:
            packed = _words(address, layout.API_WORDS)[layout.API_VERSION]
            self.found["major"], self.found["minor"] = packed & 0xFFFFFFFF, packed >> 32

    def _read_extension(self, address: int) -> None:
        """Notes the sizes of a metadata extension and leaves the caller's version."""
        if not address or _words(address, 2)[layout.KIND] & 0xFFFFFFFF != (
            layout.METADATA_EXTENSION
        ):
            return
        self.found["XLA_FFI_Metadata_Extension"] = size = _words(address, 1)[0]
        if size != layout.EXTENSION_SIZE:
            return
        metadata = _words(_words(address, 4)[layout.METADATA], 1)
        self.found["XLA_FFI_Metadata"] = metadata[0]
        if difference(self.found) is None:
            metadata = _words(ctypes.addressof(metadata), 5)
            version = self.found["minor"] << 32 | self.found["major"]
            metadata[layout.METADATA_VERSION] = version


def _words(address: int, count: int) -> Any:
    return (ctypes.c_int64 * count).from_address(address)
