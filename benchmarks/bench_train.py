"""What a rotation costs a training step: time and residual bytes, beside its peers.

    python -m benchmarks.bench_train [--quick] [--json]

A stack of twelve attention layers under `lax.scan`, forward and backward, in one run by
jrope and by the forms of others, written again here: MaxText's and gemma's, which
compute cosines in every layer, and a plain split/concat by rows that are gathered once.
Losses and gradients are checked first. The last line of `--json` is one object, with
`time_over_best_peer` (of medians) and `residual_bytes_over_best_peer`.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks.timing import Plan, measure, stamp
from jrope import RopeConfig, compute_cos_sin_cache, lookup, rotate

LAYERS, BATCH, TOKENS = 12, 2, 128
QUERY_HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
WIDTH = QUERY_HEADS * HEAD_DIM
CONFIG = RopeConfig(head_dim=HEAD_DIM, rope_theta=1e4, max_position_embeddings=2048)
JROPE = "jrope"


class Form(NamedTuple):
    """A way to rotate: what is made once per step, and what each layer does with it."""

    prepare: Callable[[Array, Array], Any]
    turn: Callable[[Array, Any], Array]


def _jrope_rows(table: Array, positions: Array) -> tuple[Array, Array]:
    return lookup(table, positions, layout=CONFIG.layout)


def _jrope(query: Array, key: Array, rows: tuple[Array, Array]) -> tuple[Array, Array]:
    return rotate(query, key, *rows, layout=CONFIG.layout)


def _only_positions(table: Array, positions: Array) -> Array:
    del table
    return positions


def _angles(positions: Array) -> Array:
    """Angles [B, T, 1, R/2] in float32, from the positions, as both peers do."""
    fraction = 2 * jnp.arange(HEAD_DIM // 2, dtype=jnp.float32) / HEAD_DIM
    wavelength = jnp.float32(CONFIG.rope_theta) ** fraction
    return positions[..., None, None].astype(jnp.float32) / wavelength


def _maxtext(x: Array, positions: Array) -> Array:
    """Full-width waves in x's dtype, and x with its halves exchanged."""
    angles = _angles(positions)
    waves = [wave(angles).astype(x.dtype) for wave in (jnp.cos, jnp.sin)]
    cos, sin = (jnp.concatenate([wave, wave], axis=-1) for wave in waves)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def _gemma(x: Array, positions: Array) -> Array:
    """Half-width waves in float32, the halves apart."""
    angles = _angles(positions)
    return _halves(x, jnp.cos(angles), jnp.sin(angles))


def _halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def _rows_once(table: Array, positions: Array) -> tuple[Array, Array]:
    rows = table[positions]
    return rows[..., None, : HEAD_DIM // 2], rows[..., None, HEAD_DIM // 2 :]


def _split_concat(x: Array, rows: tuple[Array, Array]) -> Array:
    return _halves(x, *rows)


PEERS: dict[str, Form] = {
    "maxtext": Form(_only_positions, _maxtext),
    "gemma": Form(_only_positions, _gemma),
    "split/concat": Form(_rows_once, _split_concat),
}


def stack_of(name: str) -> Callable[..., Array]:
    """The loss of a stack that rotates in one way, of (params, table, positions, x)."""

    def turn(query: Array, key: Array, made: Any) -> tuple[Array, Array]:
        if name == JROPE:
            return _jrope(query, key, made)
        return PEERS[name].turn(query, made), PEERS[name].turn(key, made)

    prepare = _jrope_rows if name == JROPE else PEERS[name].prepare

    def layer(x: Array, weights: dict[str, Array], made: Any) -> Array:
        heads = (x @ weights["qkv"]).reshape(BATCH, TOKENS, -1, HEAD_DIM)
        query, key, value = jnp.split(
            heads, [QUERY_HEADS, QUERY_HEADS + KEY_HEADS], axis=2
        )
        query, key = turn(query, key, made)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return x + mixed.reshape(x.shape) @ weights["out"]

    def loss(params: Any, table: Array, positions: Array, x: Array) -> Array:
        made = prepare(table, positions)
        x, _ = lax.scan(lambda x, w: (layer(x, w, made), None), x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def operands() -> tuple[Any, Array, Array, Array]:
    """Weights of every layer, the table, packed positions and the input."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

    heads = QUERY_HEADS + 2 * KEY_HEADS
    params = {
        "qkv": weights(LAYERS, WIDTH, heads * HEAD_DIM),
        "out": weights(LAYERS, WIDTH, WIDTH),
    }
    positions = np.stack([np.arange(TOKENS), np.arange(TOKENS) % (TOKENS // 2)])
    table = jnp.asarray(compute_cos_sin_cache(CONFIG))
    return (
        params,
        table,
        jnp.asarray(positions, jnp.int32),
        weights(BATCH, TOKENS, WIDTH),
    )


def residual_bytes(loss: Callable[..., Array], args: tuple[Any, ...]) -> int:
    """Bytes that the backward pass keeps from the forward pass of one step."""
    params, *rest = args
    _, backward = jax.vjp(jax.jit(lambda params: loss(params, *rest)), params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(backward))


def run(plan: Plan) -> dict[str, Any]:
    """Checks, measures and compares."""
    args = operands()
    losses = {name: stack_of(name) for name in (JROPE, *PEERS)}
    steps = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in losses.items()}
    _check(steps, args)
    kept = {name: residual_bytes(loss, args) for name, loss in losses.items()}
    calls = {name: functools.partial(step, *args) for name, step in steps.items()}
    made = stamp()
    times = measure(calls, plan=plan)
    fastest = min(PEERS, key=lambda name: times[name].median)
    least = min(kept[name] for name in PEERS)
    return {
        "stamp": dataclasses.asdict(made),
        "shape": {"layers": LAYERS, "batch": BATCH, "tokens": TOKENS, "width": WIDTH},
        "best_peer": fastest,
        "time_over_best_peer": _rounded(times[JROPE].median / times[fastest].median),
        "residual_bytes_over_best_peer": _rounded(kept[JROPE] / least),
        "cells": [
            {
                "jax": jax.__version__,
                "form": name,
                "residual_bytes": kept[name],
                **times[name].as_json(),
                "over_jrope": _rounded(times[name].ratio_to(times[JROPE])),
            }
            for name in losses
        ],
    }


def _rounded(ratio: float) -> float:
    return round(ratio, 4)


def _check(steps: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Raises unless all stacks compute the same loss and gradients."""
    wanted = steps[JROPE](*args)
    for name, step in steps.items():
        for got, want in zip(
            jax.tree.leaves(step(*args)), jax.tree.leaves(wanted), strict=True
        ):
            scale = float(np.abs(want).max())
            if float(np.abs(got - want).max()) > 1e-3 * scale:
                raise AssertionError(f"{name!r} trains another model than jrope")


def _print(result: dict[str, Any]) -> None:
    print(f"{'':14}{'step, ms: median (min)':>26}{'residuals, MB':>16}")
    for row in result["cells"]:
        figures = f"{row['median_us'] / 1e3:.2f} ({row['min_us'] / 1e3:.2f})"
        print(f"{row['form']:14}{figures:>26}{row['residual_bytes'] / 1e6:>16.3f}")
    for key in ("best_peer", "time_over_best_peer", "residual_bytes_over_best_peer"):
        print(f"{key}: {result[key]}")
    print(result["stamp"])


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_train")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    options = parser.parse_args(arguments)
    result = run(Plan(rounds=9, seconds=5.0 if options.quick else 40.0))
    if options.json:
        print(json.dumps(result))
    else:
        _print(result)


if __name__ == "__main__":
    main()
