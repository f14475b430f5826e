"""The models that the demo can serve, and how each is come by."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jrope.demo import tiny
from jrope.demo.gguf_file import GgufFile
from jrope.demo.model import Fetch
from jrope.demo.spec import ModelSpec, read_spec
from jrope.demo.tokenizer import Tokenizer, make_tokenizer
from jrope.demo.weights import CHECKPOINTS, Checkpoint, ModelName, load_bytes
from jrope.positions import PositionSpec, spec

# Called with how much is done, of how much, and what is being done.
OnProgress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a model is built from.

    Attributes:
      spec: its sizes.
      fetch: gives its tensors by name.
      tensors: how many there are.
      tokenizer: its own.
      positions: the rule of its rotary positions.
    """

    spec: ModelSpec
    fetch: Fetch
    tensors: int
    tokenizer: Tokenizer
    positions: PositionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model by name.

    Attributes:
      title: its name, for people.
      weights: what they are, for people: a licence.
      origin: the same in few words, once they are loaded.
      read: gives its parts, from a file or, with None, from where they belong.
    """

    title: str
    weights: str
    origin: str
    read: Callable[[Path | None, OnProgress], Parts]


def _from_checkpoint(checkpoint: Checkpoint) -> Source:
    return Source(
        title=checkpoint.title,
        weights=checkpoint.notice,
        origin="every byte as published",
        read=functools.partial(_read_gguf, checkpoint),
    )


def _read_gguf(
    checkpoint: Checkpoint, path: Path | None, on_progress: OnProgress
) -> Parts:
    buffer = load_bytes(
        checkpoint,
        path,
        on_progress=lambda done, all: on_progress(done, all, "checking the weights"),
    )
    file = GgufFile(buffer)

    def fetch(name: str) -> np.ndarray:
        return file.tensors[name].to_float32()

    return Parts(
        spec=read_spec(file.metadata),
        fetch=fetch,
        tensors=len(file.tensors),
        tokenizer=make_tokenizer(file.metadata),
        positions=spec("text"),
    )


def _make_tiny(path: Path | None, on_progress: OnProgress) -> Parts:
    del path, on_progress  # nothing to read, and no time to speak of
    shapes = tiny.tensor_shapes()
    return Parts(
        spec=tiny.SPEC,
        fetch=lambda name: tiny.random_tensor(name, shapes[name]),
        tensors=len(shapes),
        tokenizer=tiny.ByteTokenizer(),
        positions=tiny.POSITIONS,
    )


SOURCES: dict[ModelName, Source] = {
    **{name: _from_checkpoint(checkpoint) for name, checkpoint in CHECKPOINTS.items()},
    "tiny-qwen2-vl": Source(
        title="a tiny Qwen2-VL decoder",
        weights=(
            f"random, from a fixed seed, standard deviation {tiny.SPREAD}: its answers "
            "are noise. There is no vision tower; a picture's features are drawn from "
            "a seed"
        ),
        origin="random",
        read=_make_tiny,
    ),
}
