"""The command line's options."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jrope.demo.faults import FAULTS, FaultName
from jrope.demo.sources import SOURCES
from jrope.demo.weights import CHECKPOINTS, ModelName

PAGE_SIZE = 32  # tokens a page of the cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    model: ModelName
    gguf: Path | None
    prompts: tuple[str, ...]
    slots: int
    chunk: int
    context: int
    new_tokens: int
    json: bool
    fault: FaultName | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line; exits with 2 and says why if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m jrope.demo",
        description="Serves a language model through jrope layers: continuous "
        "batching, paged cache, chunked prefill, prefix hits, two compiled programs.",
    )
    add = parser.add_argument
    add("--model", choices=sorted(SOURCES), default="smollm2")
    add("--gguf", type=Path, help="the model's file, if not in an installed package")
    add("--prompt", action="append", default=[], help="serve this too (repeatable)")
    add("--slots", type=_positive, default=4, help="answers that go on together")
    add("--chunk", type=_positive, default=64, help="tokens a prefill step takes")
    add("--context", type=_positive, default=768, help="most tokens a request has")
    add("--new-tokens", type=_positive, default=24, help="most tokens of an answer")
    add("--json", action="store_true", help="end with one JSON object on stdout")
    add("--break", dest="fault", choices=list(FAULTS), help="rotate wrongly on purpose")
    got = parser.parse_args(arguments)
    if got.context % PAGE_SIZE:
        parser.error(f"--context must be a multiple of {PAGE_SIZE}, got {got.context}")
    if got.chunk > got.context:
        parser.error(f"--chunk must be at most --context {got.context}")
    if got.gguf and got.model not in CHECKPOINTS:
        parser.error(f"--gguf is for models that come as a file, not {got.model}")
    if not all(prompt.strip() for prompt in got.prompt):
        parser.error("--prompt must not be empty")
    return Options(
        model=got.model,
        gguf=got.gguf,
        prompts=tuple(got.prompt),
        slots=got.slots,
        chunk=got.chunk,
        context=got.context,
        new_tokens=got.new_tokens,
        json=got.json,
        fault=got.fault,
    )


def _positive(text: str) -> int:
    """An argparse type."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value
