"""A stand-in for a Gaudi plugin: XLA's CPU compiler that reports platform "hpu".

No Gaudi plugin for JAX is public, and none was run. The wheel in pins.txt is a real
out-of-tree PJRT plugin around XLA:CPU. Raw, its client reports "cpu", and JAX lowers
for cpu whatever name it is registered under. So its table of functions is copied here
with other answers to the questions for a name, and with a watch on what is compiled and
run: JAX then lowers for a platform that it does not know, and a test can read the very
program that a plugin receives. It says nothing of Gaudi's compiler, numbers or speed.

Layout from xla/pjrt/c/pjrt_c_api.h: the table only ever grows, so these slots hold.
"""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
TABLE = 40  # Bytes of PJRT_Api before its functions.
CLIENT_PLATFORM_NAME, CLIENT_PLATFORM_VERSION, CLIENT_COMPILE = 12, 14, 20
DEVICE_KIND, EXECUTE, TOPOLOGY_PLATFORM_NAME = 26, 55, 84
FFI_EXTENSION = 5


class StandIn:
    """The plugin under another name.

    Attributes:
      programs: what the plugin was given to compile, portable StableHLO.
      executions: how many programs it was told to run.
    """

    def __init__(self, library: Path, platform: str) -> None:
        self.programs: list[bytes] = []
        self.executions = 0
        self._library = ctypes.CDLL(str(library))
        self._library.GetPjrtApi.restype = ctypes.c_void_p
        self._real: int = self._library.GetPjrtApi()
        size = ctypes.c_size_t.from_address(self._real).value
        self._table = ctypes.create_string_buffer(
            ctypes.string_at(self._real, size), size
        )
        self._kept: list[Any] = []  # JAX holds pointers into them to the very end.
        self._compile, self._execute = map(self._of_real, (CLIENT_COMPILE, EXECUTE))
        for slot in (CLIENT_PLATFORM_NAME, TOPOLOGY_PLATFORM_NAME):
            self._replace(slot, self._saying(platform))
        self._replace(CLIENT_PLATFORM_VERSION, self._saying("stand-in: XLA CPU"))
        self._replace(DEVICE_KIND, self._saying("stand-in"))
        self._replace(CLIENT_COMPILE, self._watch_compile)
        self._replace(EXECUTE, self._watch_execute)

    @property
    def _start(self) -> int:
        return ctypes.addressof(self._table)

    def _of_real(self, slot: int) -> Any:
        return FUNCTION(_pointer(self._real + TABLE + 8 * slot))

    def _replace(self, slot: int, function: Any) -> None:
        made = FUNCTION(function)
        self._kept.append(made)
        place = ctypes.c_void_p.from_address(self._start + TABLE + 8 * slot)
        place.value = ctypes.cast(made, ctypes.c_void_p).value

    def _saying(self, text: str) -> Any:
        raw = ctypes.create_string_buffer(text.encode())
        self._kept.append(raw)

        def say(arguments: int) -> None:  # {size, extension, object, text, length}
            place = ctypes.c_void_p.from_address(arguments + 24)
            place.value = ctypes.addressof(raw)
            ctypes.c_size_t.from_address(arguments + 32).value = len(text)

        return say

    def _watch_compile(self, arguments: int) -> Any:
        program = _pointer(arguments + 24)  # {size, extension, code, code size, ...}
        length = ctypes.c_size_t.from_address(program + 24).value
        self.programs.append(ctypes.string_at(_pointer(program + 16), length))
        return self._compile(arguments)

    def _watch_execute(self, arguments: int) -> Any:
        self.executions += 1
        return self._execute(arguments)

    def capsule(self) -> Any:
        """What JAX takes as a plugin."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(self._start, b"pjrt_c_api", None)

    def text(self, index: int = -1) -> str:
        """A program that the plugin received, as StableHLO's text."""
        from jax._src.interpreters import mlir
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        with mlir.make_ir_context() as context, ir.Location.unknown():
            return str(
                stablehlo.deserialize_portable_artifact(context, self.programs[index])
            )

    def texts_since(self, start: int) -> list[str]:
        """The programs received after the first `start` that hold a rotation."""
        texts = (self.text(i) for i in range(start, len(self.programs)))
        return [text for text in texts if "jrope" in text]

    def register_handler(
        self,
        name: str | bytes,
        function: Any,
        platform: str,
        /,
        api_version: int = 0,
        traits: Any = 0,
    ) -> None:
        """Gives the plugin a kernel, as a vendor's plugin does for JAX.

        JAX calls it, for targets registered earlier too. XLA knows the stand-in's
        devices as "Host".
        """
        del platform, api_version, traits
        extension = _pointer(self._start + 8)
        while ctypes.c_int.from_address(extension + 8).value != FFI_EXTENSION:
            extension = _pointer(extension + 16)
        register = FUNCTION(_pointer(extension + 40))
        name = name.encode() if isinstance(name, str) else name
        if isinstance(function, dict):
            function = function["execute"]
        given = _Handler(
            size=ctypes.sizeof(_Handler),
            name=name,
            name_size=len(name),
            handler=_of_capsule(function),
            platform=b"Host",
            platform_size=4,
            traits=0,
        )
        if register(ctypes.addressof(given)):
            raise RuntimeError(f"the plugin refused the handler {name!r}")


class _Handler(ctypes.Structure):
    """PJRT_FFI_Register_Handler_Args."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("handler", ctypes.c_void_p),
        ("platform", ctypes.c_char_p),
        ("platform_size", ctypes.c_size_t),
        ("traits", ctypes.c_uint32),
    )


def _pointer(address: int) -> int:
    value = ctypes.c_void_p.from_address(address).value
    assert value is not None
    return value


def _of_capsule(capsule: Any) -> int:
    name, pointer = (
        ctypes.pythonapi.PyCapsule_GetName,
        ctypes.pythonapi.PyCapsule_GetPointer,
    )
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name(capsule))


def find_library() -> Path | None:
    """The library in the installed wheel, or None where there is no wheel."""
    found = importlib.util.find_spec("fastatomstruct_xla_cpu")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "libpjrt_cpu.so"


def load(platform: str = "hpu") -> StandIn:
    """Registers the stand-in with JAX, as a vendor's `initialize()` does its plugin."""
    from jax._src import xla_bridge

    library = find_library()
    assert library is not None, "the wheel of pins.txt is not installed: make hpu"
    made = StandIn(library, platform)
    # Before cpu, whose priority is 0.
    xla_bridge.register_plugin(platform, priority=500, c_api=made.capsule())
    return made


def accept_targets(stand_in: StandIn, platform: str = "hpu") -> None:
    """Lets `jax.ffi.register_ffi_target` reach the stand-in, past calls included."""
    from jaxlib import xla_client

    xla_client.register_custom_call_handler(platform, stand_in.register_handler)
