"""Where the time of a decode step goes: the host's part, and what the device does.

    python -m benchmarks.bench_decode_step [--quick] [--json]

A step of 1, 64 or 512 requests, one token each, with the sizes of the demo's model
(SmolLM2-135M) and random weights: the host builds positions (`BatchPositions`) and
hands a copy over; the device looks rows up once and runs 12 layers of attention with
paged keys and values. Requests are text, or text with an image in half of them, with
three axes (M-RoPE). At 64 requests the whole model of 30 layers runs as well.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

import jrope.nnx
from benchmarks.position_cases import CASES
from benchmarks.timing import stamp
from jrope import mrope_axes
from jrope.demo.engine import PagedMemory, PagePool
from jrope.demo.model import Attention, Decoder, RMSNorm, Rotate
from jrope.demo.spec import ModelSpec
from jrope.positions import BatchPositions, plan, spec

REQUESTS = (1, 64, 512)
LAYERS = 12
GOAL = 0.05  # of a step of the whole model at 64 requests
# Tokens that a request may have, its page size, and how many it has at the first step.
_CONTEXT, _PAGE, _COMPUTED = 512, 32, 400

# HuggingFaceTB/SmolLM2-135M-Instruct config.json.
_MODEL = ModelSpec(
    architecture="llama",
    layers=30,
    width=576,
    heads=9,
    key_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    context=8192,
    theta=1e5,
    window=None,
)
_FEED_FORWARD, _VOCABULARY = 1536, 49_152


def random_weights(name: str) -> np.ndarray:
    """A tensor by its name in the demo's files, small enough for 30 layers."""
    width, key_width = _MODEL.width, _MODEL.key_heads * _MODEL.head_dim
    shapes = {
        "attn_k": (key_width, width),
        "attn_v": (key_width, width),
        "ffn_gate": (_FEED_FORWARD, width),
        "ffn_up": (_FEED_FORWARD, width),
        "ffn_down": (width, _FEED_FORWARD),
        "token_embd": (_VOCABULARY, width),
    }
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind.endswith("norm"):
        return np.ones(width, np.float32)
    rng = np.random.default_rng(len(name))
    shape = shapes.get(kind, (width, width))
    return 0.02 * rng.standard_normal(shape, np.float32)


class AttentionStack(nnx.Module):
    """Layers of attention alone, each added to what came in.

    Args:
      layers: how many.
      has_axes: whether positions have three axes, as Qwen2-VL's have.
    """

    def __init__(self, layers: int, *, has_axes: bool) -> None:
        """Draws the weights and builds the table."""
        self.attentions = nnx.List(
            [Attention(random_weights, _MODEL, layer) for layer in range(layers)]
        )
        self.norms = nnx.List(
            [
                RMSNorm(random_weights, "attn_norm", _MODEL.norm_eps)
                for _ in range(layers)
            ]
        )
        config = _MODEL.rope_configs()["full_attention"]
        if has_axes:
            axes = mrope_axes((8, 12, 12), rotary_dim=_MODEL.head_dim)
            config = dataclasses.replace(
                config, is_neox_style=True, axis_of_frequency=axes
            )
        self.rope = jrope.nnx.RotaryEmbedding(config)

    def rotation(self, rope_positions: Array) -> Rotate:
        """Looks the step's rows up once, for all layers."""
        cos, sin = self.rope.rows(rope_positions)
        return lambda query, key: self.rope.rotate(query, key, cos, sin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted step.

    Args:
      run: (features or tokens, pool, positions, rope positions) -> result, pool.
      fresh_pool: makes the pages.
      rotate: the rotations of such a step alone, from positions, or None.
    """

    run: Callable[..., Any]
    fresh_pool: Callable[[], PagePool]
    rotate: Callable[[np.ndarray], Any] | None


def _pool(requests: int, layers: int) -> Callable[[], PagePool]:
    pages = requests * _CONTEXT // _PAGE
    shape = (pages, _PAGE, _MODEL.key_heads, _MODEL.head_dim)

    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, jnp.float32) for _ in range(layers))

    return lambda: PagePool(zeros(), zeros())


def _table(requests: int) -> Array:
    pages = _CONTEXT // _PAGE
    return jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages)


def attention_program(requests: int, *, has_axes: bool) -> Program:
    """Twelve layers of attention over paged keys and values."""
    graph, state = nnx.split(AttentionStack(LAYERS, has_axes=has_axes))
    table = _table(requests)

    def step(
        state: nnx.State, x: Array, pool: PagePool, positions: Array, rope: Array
    ) -> tuple[Array, PagePool]:
        model = nnx.merge(graph, state)
        memory = PagedMemory(pool, table, positions)
        turn = model.rotation(rope[..., None])
        for norm, attention in zip(model.norms, model.attentions, strict=True):
            x = x + attention(norm(x), turn, memory, positions)
        return x, memory.pool

    def rotations(state: nnx.State, query: Array, key: Array, rope: Array) -> Any:
        turn = nnx.merge(graph, state).rotation(rope[..., None])
        for _ in range(LAYERS):
            query, key = turn(query, key)
        return query, key

    compiled = jax.jit(step, donate_argnums=2)
    turned = jax.jit(rotations)
    shape = (requests, 1, _MODEL.heads, _MODEL.head_dim)
    query, key = jnp.ones(shape), jnp.ones((*shape[:2], _MODEL.key_heads, shape[3]))
    x = jnp.ones((requests, 1, _MODEL.width))
    return Program(
        run=lambda *rest: compiled(state, x, *rest),
        fresh_pool=_pool(requests, LAYERS),
        rotate=lambda rope: turned(state, query, key, rope),
    )


def model_program(requests: int) -> Program:
    """The demo's whole model, to its logits' likeliest token."""
    graph, state = nnx.split(Decoder(random_weights, _MODEL, _MODEL.rope_configs()))
    table = _table(requests)

    def step(
        state: nnx.State, tokens: Array, pool: PagePool, positions: Array, rope: Array
    ) -> tuple[Array, PagePool]:
        model = nnx.merge(graph, state)
        memory = PagedMemory(pool, table, positions)
        turns = model.rotations(rope[..., None])
        x = model(model.embed(tokens), positions, memory, turns)
        return jnp.argmax(model.logits(x[:, 0]), axis=-1), memory.pool

    compiled = jax.jit(step, donate_argnums=2)
    tokens = jnp.zeros((requests, 1), jnp.int32)
    return Program(
        run=lambda *rest: compiled(state, tokens, *rest),
        fresh_pool=_pool(requests, _MODEL.layers),
        rotate=None,
    )


class Host:
    """The host's part: a running batch in which every request decodes."""

    def __init__(self, requests: int, *, has_axes: bool) -> None:
        """Admits all requests."""
        image = next(case for case in CASES if case.name == "image324")
        model = image.model if has_axes else spec("text")
        self.requests = requests
        self.batch = BatchPositions(model, requests, requests, _MODEL.context)
        self.slots = np.arange(requests, dtype=np.int32)
        self.one = np.ones(requests, np.int32)
        self.computed = np.full(requests, _COMPUTED, np.int32)
        for slot in range(requests):
            shown = image.media if has_axes and slot % 2 == 0 else {}
            ids = image.ids if shown else image.ids[:18]
            self.batch.add(slot, plan(model, ids, **shown))

    def build(self) -> None:
        """The next step's positions, into the buffer."""
        # Contexts grow and begin again, so that they never outgrow their pages.
        np.add(self.computed, 1, out=self.computed)
        if self.computed[0] == _CONTEXT:
            self.computed[:] = _COMPUTED
        self.batch.step(self.slots, self.computed, self.one)

    def hand_over(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies that no later step can change: cache places, and rotary positions."""
        return self.computed[:, None].copy(), self.batch.step_array()


def measure_step(program: Program, host: Host, *, seconds: float) -> dict[str, Any]:
    """Medians of every part of a step, and of steps in a row."""
    parts: dict[str, list[float]] = {
        name: [] for name in ("build", "hand_over", "dispatch", "wait", "rotate")
    }
    pool = program.fresh_pool()
    for _ in range(2):
        host.build()
        result, pool = program.run(pool, *host.hand_over())
    jax.block_until_ready(pool)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(parts["wait"]) < 3:
        marks = [time.perf_counter()]
        host.build()
        marks.append(time.perf_counter())
        given = host.hand_over()
        marks.append(time.perf_counter())
        result, pool = program.run(pool, *given)
        marks.append(time.perf_counter())
        jax.block_until_ready((result, pool))
        marks.append(time.perf_counter())
        if program.rotate is not None:
            jax.block_until_ready(program.rotate(given[1]))
            marks.append(time.perf_counter())
        for name, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append(end - start)
    us = {name: statistics.median(each) * 1e6 for name, each in parts.items() if each}
    step = sum(us[name] for name in ("build", "hand_over", "dispatch", "wait"))
    overlapped, _ = _in_flight(program, pool, host, count=max(4, len(parts["wait"])))
    return {
        **{f"{name}_us": _round(each) for name, each in us.items()},
        "step_us": _round(step),
        "overlapped_step_us": _round(overlapped * 1e6),
        "host_share": _round((us["build"] + us["hand_over"]) / step),
        "rotate_share": _round(us["rotate"] / step) if "rotate" in us else None,
    }


def _in_flight(
    program: Program, pool: PagePool, host: Host, *, count: int
) -> tuple[float, PagePool]:
    """Seconds a step while the host is one step ahead of the device."""
    results: list[Any] = []
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        host.build()
        result, pool = program.run(pool, *host.hand_over())
        results.append(result)
        if len(results) > 1:
            jax.block_until_ready(results.pop(0))
        times.append(time.perf_counter() - start)
    jax.block_until_ready(pool)
    return statistics.median(times), pool


def _round(number: float) -> float:
    return float(f"{number:.3g}")


def check(program: Program, host: Host) -> None:
    """Raises unless the program turns by the positions that the host says.

    A shift of all positions is invisible in attention, so the rotations alone are
    looked at: pairs of ones, turned 12 times by the angle of the first frequency.
    """
    if program.rotate is None:
        return
    host.build()
    _, rope = host.hand_over()
    query, _ = program.rotate(rope)
    first = rope.reshape(-1, host.requests)[0].astype(np.float64)
    want = np.cos(LAYERS * first) - np.sin(LAYERS * first)
    error = np.abs(np.asarray(query)[:, 0, 0, 0] - want).max()
    if not error < 1e-4:
        raise AssertionError(f"the step turns by other positions: off by {error:.2g}")


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_decode_step")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    parser.add_argument("--quick", action="store_true", help="1 and 64, attention only")
    options = parser.parse_args(arguments)
    made = stamp()
    seconds = 1.0 if options.quick else 2.0
    rows: list[dict[str, Any]] = []

    def add(requests: int, program: Program, *, has_axes: bool, work: str) -> None:
        host = Host(requests, has_axes=has_axes)
        check(program, host)
        named = {"jax": jax.__version__, "requests": requests, "work": work}
        named["positions"] = "three axes, half with an image" if has_axes else "text"
        rows.append({**named, **measure_step(program, host, seconds=seconds)})
        if not options.json:
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()))

    for requests in REQUESTS[:2] if options.quick else REQUESTS:
        for has_axes in (False, True):
            program = attention_program(requests, has_axes=has_axes)
            add(requests, program, has_axes=has_axes, work=f"{LAYERS} attentions")
    if not options.quick:
        add(64, model_program(64), has_axes=False, work="whole model")
    if options.json:
        whole = {"stamp": dataclasses.asdict(made), "goal_host_share": GOAL}
        print(json.dumps(whole | {"cells": rows}))


if __name__ == "__main__":
    main()
