"""How often a program is compiled while the context grows: ours, and forms that slice.

    python -m benchmarks.bench_recompile [--quick] [--json]

Each case runs a rotation for 20 and for 1,000 context lengths in turn and counts what
JAX compiles, helpers of eager operations included. The program is a small one (one head
of 8 features), so that compiling it is as cheap as can be: a model's step that
recompiles pays for the whole model instead.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.timing import stamp
from jrope import RopeConfig, apply_rope, compute_cos_sin_cache

LENGTHS = (20, 1000)
# Counted over 20 lengths only: 1,000 programs take half a minute, and the two others
# that compile for every length show it.
_SHORT_ONLY = "table cut to the length"
# Longer than any length; chunks of a prompt are padded to this many tokens.
_ROWS, _CHUNK = 1024, 128
_CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=_ROWS)

# A context length to its last token, rotated.
Run = Callable[[int], Array | np.ndarray]


def _heads(tokens: int) -> np.ndarray:
    return np.ones((tokens, 1, _CONFIG.head_dim), np.float32)


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    """Half a head and the other, joined: the textbook form."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def ours_decode(table: Array) -> Run:
    """One token at the end of the context; its position is an argument."""

    @jax.jit
    def step(x: Array, table: Array, positions: Array) -> Array:
        return apply_rope(positions, x, None, table, layout=_CONFIG.layout)[0]

    return lambda length: step(_heads(1), table, np.array([length - 1], np.int32))


def ours_prefill(table: Array) -> Run:
    """The whole context in chunks of one shape, the last one padded with -1."""

    @jax.jit
    def step(x: Array, table: Array, positions: Array) -> Array:
        return apply_rope(positions, x, None, table, layout=_CONFIG.layout)[0]

    def run(length: int) -> np.ndarray:
        chunks = []
        for start in range(0, length, _CHUNK):
            positions = np.arange(start, start + _CHUNK, dtype=np.int32)
            positions[positions >= length] = -1
            chunks.append(step(_heads(_CHUNK), table, positions))
        # On the host, where a row can be taken without a program.
        return np.asarray(chunks[-1])[(length - 1) % _CHUNK]

    return run


def dynamic_slice(table: Array) -> Run:
    """A slice at a traced start: one program, but it clamps in silence past the end."""

    @jax.jit
    def step(x: Array, table: Array, start: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(table, start, 1)
        return _turn(x, *jnp.split(row, 2, axis=-1))

    return lambda length: step(_heads(1), table, np.int32(length - 1))


def static_slice(table: Array) -> Run:
    """`table[start : start + 1]` with a Python number: a constant of the program."""

    @functools.partial(jax.jit, static_argnames="start")
    def step(x: Array, table: Array, start: int) -> Array:
        row = table[start : start + 1]
        return _turn(x, *jnp.split(row, 2, axis=-1))

    return lambda length: step(_heads(1), table, start=length - 1)


def table_to_length(table: Array) -> Run:
    """`table[:length]` handed over and read at its end: its shape is the length."""
    host = np.asarray(table)

    @jax.jit
    def step(x: Array, rows: Array) -> Array:
        return _turn(x, *jnp.split(rows[-1:], 2, axis=-1))

    return lambda length: step(_heads(1), host[:length])


def whole_context(table: Array) -> Run:
    """Rotates the whole context by `table[:length]`, as a layer without positions."""

    @jax.jit
    def step(x: Array, table: Array) -> Array:
        rows = table[: x.shape[0]]
        return _turn(x, *jnp.split(rows, 2, axis=-1))[-1:]

    return lambda length: step(_heads(length), table)


CASES: dict[str, Callable[[Array], Run]] = {
    "jrope, decode": ours_decode,
    "jrope, prefill in chunks": ours_prefill,
    "dynamic_slice at a traced start": dynamic_slice,
    "slice at a static start": static_slice,
    "table cut to the length": table_to_length,
    "whole context, no positions": whole_context,
}


class _Compiles:
    """Counts and times the programs that JAX compiles while it is open."""

    def __enter__(self) -> "_Compiles":
        """Begins to listen."""
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening; the counts stay."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            self.count += 1
            self.seconds += duration_secs


def lengths(count: int) -> Iterator[int]:
    """So many lengths, from short to long, spread over the table."""
    yield from np.linspace(2, _ROWS - 1, count).astype(int).tolist()


def run_case(name: str, count: int) -> dict[str, Any]:
    """Runs one case with empty caches, and checks its last result."""
    jax.clear_caches()
    table = jnp.asarray(compute_cos_sin_cache(_CONFIG))
    run = CASES[name](table)
    last, length = np.zeros(0), 0
    start = time.perf_counter()
    with _Compiles() as compiles:
        for length in lengths(count):
            last = run(length)
        jax.block_until_ready(last)
    seconds = time.perf_counter() - start
    _check(name, np.asarray(last), length - 1)
    return {
        "jax": jax.__version__,
        "case": name,
        "lengths": count,
        "compiles": compiles.count,
        "compile_seconds": round(compiles.seconds, 3),
        "seconds": round(seconds, 3),
    }


def _check(name: str, got: np.ndarray, position: int) -> None:
    """Raises unless the last token, all ones, was turned by its angle."""
    half = _CONFIG.head_dim // 2
    angles = position * _CONFIG.rope_theta ** -(np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    want = np.concatenate([cos - sin, cos + sin])
    if not np.abs(got.reshape(-1) - want).max() < 1e-5:
        raise AssertionError(f"{name!r} is another rotation at position {position}")


def main(arguments: list[str] | None = None) -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_recompile")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    parser.add_argument("--quick", action="store_true", help="20 lengths only")
    options = parser.parse_args(arguments)
    made = stamp()
    rows = []
    for count in LENGTHS[:1] if options.quick else LENGTHS:
        for name in CASES:
            if name == _SHORT_ONLY and count > LENGTHS[0]:
                continue
            rows.append(run_case(name, count))
            if not options.json:
                row = rows[-1]
                print(
                    f"{count:5} lengths, {name:32}: {row['compiles']:5} compiles, "
                    f"{row['compile_seconds']:.2f} s of {row['seconds']:.2f} s"
                )
    if options.json:
        print(json.dumps({"stamp": dataclasses.asdict(made), "cells": rows}))


if __name__ == "__main__":
    main()
