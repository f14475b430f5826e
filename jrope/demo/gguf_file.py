"""Reads a GGUF file: its metadata, and its tensors as float32.

`gguf.GGUFReader` needs over ten seconds for a vocabulary of 262k tokens, because it
keeps a numpy array per token; this reader needs 0.2 s. Every length in the file is
checked against the bytes that are left before it is used.

Source: the format, version 3, docs/gguf.md of ggml-org/ggml. The bits of quantised
blocks are left to `gguf.quants`.
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Buffer = bytes | bytearray | memoryview | mmap.mmap

_T = TypeVar("_T")
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LARGEST_RANK = 4


class GgufError(ValueError):
    """The bytes are not a whole GGUF file of a kind that this reader knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor as stored.

    Attributes:
      shape: row-major, as numpy has it (the file lists the fastest axis first).
      kind: how the numbers are stored.
      data: the bytes, one row of blocks per row of the tensor.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray

    def to_float32(self) -> np.ndarray:
        """The numbers, float32, in `shape`."""
        values = dequantize(self.data, self.kind)
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)


class GgufFile:
    """Metadata and tensors of one GGUF file held in memory or mapped.

    Args:
      buffer: the whole file; it must outlive the tensors.

    Raises:
      GgufError: if the bytes end too early or say something impossible.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, Tensor]

    def __init__(self, buffer: Buffer) -> None:
        """Reads the metadata; tensors stay as they are until they are asked for."""
        cursor = _Cursor(buffer)
        tensor_count, entry_count = _read_header(cursor)
        self.metadata = _each_once(_read_entry(cursor) for _ in range(entry_count))
        infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"general.alignment must be positive, got {alignment!r}")
        start = -(-cursor.offset // alignment) * alignment
        self.tensors = _each_once(
            (info.name, _view_tensor(buffer, info, start + info.offset))
            for info in infos
        )


def _each_once(entries: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    made: dict[str, _T] = {}
    for name, value in entries:
        if name in made:
            raise GgufError(f"a name must stand once in the file, got {name} twice")
        made[name] = value
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Cursor:
    """A place in the buffer that moves forward and never past the end."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.offset = 0

    def advance(self, count: int, what: str) -> int:
        """Steps over `count` bytes; returns the offset before the step."""
        start, left = self.offset, len(self.buffer) - self.offset
        if count > left:
            raise GgufError(
                f"the file ends inside {what}: {count} bytes wanted at byte {start}, "
                f"{left} left"
            )
        self.offset = start + count
        return start

    def number(self, code: str, what: str) -> int | float | bool:
        start = self.advance(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.buffer, start)[0]

    def count(self, code: str, what: str) -> int:
        return int(self.number(code, what))

    def string(self, what: str) -> str:
        length = self.count("Q", what)
        start = self.advance(length, what)
        try:
            return bytes(self.buffer[start : start + length]).decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{what} at byte {start} is not UTF-8") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns how many tensors and entries follow."""
    start = cursor.advance(4, "the magic number")
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != b"GGUF":
        raise GgufError(f"the file must start with b'GGUF', got {magic!r}")
    version = cursor.count("I", "the version")
    if version not in (2, 3):
        raise GgufError(f"GGUF version must be 2 or 3, got {version}")
    tensor_count = cursor.count("Q", "the tensor count")
    return tensor_count, cursor.count("Q", "the metadata count")


def _read_entry(cursor: _Cursor) -> tuple[str, object]:
    name = cursor.string("a metadata name")
    return name, _read_value(cursor, cursor.count("I", name), name)


def _read_value(cursor: _Cursor, kind: int, name: str) -> object:
    if kind == _STRING:
        return cursor.string(name)
    if kind == _ARRAY:
        return _read_array(cursor, name)
    if kind not in _SCALARS:
        raise GgufError(f"{name} has the unknown value type {kind}")
    return cursor.number(_SCALARS[kind], name)


def _read_array(cursor: _Cursor, name: str) -> list[object]:
    kind = cursor.count("I", name)
    count = cursor.count("Q", name)
    if kind == _STRING:
        return [cursor.string(name) for _ in range(count)]
    if kind not in _SCALARS:
        raise GgufError(f"{name} is an array of the unknown value type {kind}")
    dtype = np.dtype("<" + _SCALARS[kind])
    start = cursor.advance(count * dtype.itemsize, name)
    return np.frombuffer(cursor.buffer, dtype, count, start).tolist()


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string("a tensor name")
    rank = cursor.count("I", name)
    if not 1 <= rank <= _LARGEST_RANK:
        raise GgufError(f"{name} must have 1 to {_LARGEST_RANK} axes, got {rank}")
    axes = [cursor.count("Q", name) for _ in range(rank)]
    if min(axes) < 1:
        raise GgufError(f"{name} must have axes of at least 1, got {axes}")
    code = cursor.count("I", name)
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as error:
        raise GgufError(f"{name} has the unknown tensor type {code}") from error
    return _TensorInfo(
        name=name,
        shape=tuple(reversed(axes)),
        kind=kind,
        offset=cursor.count("Q", name),
    )


def _view_tensor(buffer: Buffer, info: _TensorInfo, start: int) -> Tensor:
    """The tensor's bytes as an array over the buffer, without a copy."""
    block_length, block_bytes = GGML_QUANT_SIZES[info.kind]
    *rows, row_length = info.shape
    if row_length % block_length:
        raise GgufError(
            f"{info.name}: rows of {row_length} are not whole blocks of {block_length}"
        )
    row_bytes = row_length // block_length * block_bytes
    size = math.prod(rows) * row_bytes
    if start + size > len(buffer):
        raise GgufError(
            f"the file ends inside {info.name}: it needs bytes {start} to "
            f"{start + size}, the file has {len(buffer)}"
        )
    data = np.frombuffer(buffer, np.uint8, size, start).reshape(*rows, row_bytes)
    return Tensor(shape=info.shape, kind=info.kind, data=data)
