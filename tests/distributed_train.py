"""Trains a small nnx model for 20 steps on 8 devices, by one process or by two.

    python tests/distributed_train.py

runs it in one process with 8 CPU devices and in two with 4 each, joined by
`jax.distributed` over loopback, prints both lists of losses and fails if they differ.
It stops by itself: a process that fails ends the others, and so does the deadline.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrope import RopeConfig
from jrope.nnx import RotaryCache, RotaryEmbedding, place_tables

STEPS, DEVICES = 20, 8
BATCH, TOKENS, VOCABULARY, LAYERS = 8, 16, 32, 2
HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM
DEADLINE_S = 300
MARK = "losses: "  # The collectives' library writes lines of its own.
CONFIG = RopeConfig(head_dim=HEAD_DIM, rope_theta=1e4, max_position_embeddings=TOKENS)


class Layer(nnx.Module):
    """Causal attention with rotated queries and keys; heads over the mesh's tensor."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, rope: RotaryEmbedding, x: jax.Array, rows) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, HEAD_DIM)
        heads = jax.lax.with_sharding_constraint(heads, P("data", None, None, "tensor"))
        query, key = rope.rotate(heads[:, :, 0], heads[:, :, 1], *rows)
        mixed = jax.nn.dot_product_attention(query, key, heads[:, :, 2], is_causal=True)
        return x + self.out(mixed.reshape(x.shape))


class Model(nnx.Module):
    """One table for all layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.rope = RotaryEmbedding(CONFIG)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = self.rope.rows(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(self.rope, x, rows)
        return self.logits(x)


def batch_of(step: int) -> np.ndarray:
    """Sequences that count up by one, from anywhere."""
    start = np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, 1))
    return ((start + np.arange(TOKENS + 1)) % VOCABULARY).astype(np.int32)


def train() -> list[float]:
    """The losses, by whichever processes take part."""
    assert len(jax.devices()) == DEVICES
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    model = Model(nnx.Rngs(0))
    place_tables(model, mesh)
    graph, params, tables = nnx.split(model, nnx.Param, RotaryCache)

    def loss_of(params, tables, tokens):
        logits = nnx.merge(graph, params, tables)(tokens[:, :-1])
        chosen = jax.nn.one_hot(tokens[:, 1:], VOCABULARY, dtype=logits.dtype)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1))

    @jax.jit
    def step(params, tables, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(params, tables, tokens)
        return jax.tree.map(lambda p, g: p - g, params, gradient), loss

    def place(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, sharding, lambda index: np.asarray(x)[index]
            ),
            tree,
        )

    losses = []
    with jax.set_mesh(mesh):
        params = place(params, P())
        for i in range(STEPS):
            params, loss = step(params, tables, place(batch_of(i), P("data")))
            losses.append(float(loss))
    return losses


def worker(processes: int, port: int, rank: int) -> None:
    """One process of the run; the first prints the losses."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    losses = train()
    if rank == 0:
        print(f"{MARK}{json.dumps(losses)}", flush=True)
    if processes > 1:
        jax.distributed.shutdown()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses_by(processes: int) -> list[float]:
    """Runs that many processes, until the first that fails or the deadline."""
    arguments = [sys.executable, __file__, str(processes), str(free_port())]
    with contextlib.ExitStack() as held:
        logs = [
            held.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)
        ]
        started = [
            subprocess.Popen(
                [*arguments, str(rank)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            for rank, log in enumerate(logs)
        ]
        for process in started:
            held.callback(process.wait)
            held.callback(process.kill)
        wait_for(started)
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read())
        # None is a process that had not ended.
        codes = [process.returncode for process in started]
        if any(codes):
            raise RuntimeError(f"return codes {codes}:\n" + "\n".join(said))
        if None in codes:
            raise TimeoutError(f"not done in {DEADLINE_S} s:\n" + "\n".join(said))
        return json.loads(said[0].split(MARK)[1].splitlines()[0])


def wait_for(processes: list[subprocess.Popen]) -> None:
    """Until all have ended well, one has not, or the deadline passes."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def main() -> None:
    """Both runs, compared, or one process of a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Of a process that this program starts: how many there are, a port, its rank.
    parser.add_argument("worker", nargs="*", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args().worker
    if given:
        worker(*given)
    else:
        compare()


def compare() -> None:
    """Both runs, compared."""
    alone, together = losses_by(1), losses_by(2)
    print("one process, 8 devices:      ", *(f"{loss:.6f}" for loss in alone))
    print("two processes, 4 devices each:", *(f"{loss:.6f}" for loss in together))
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    assert alone[-1] < 0.9 * alone[0], "the model does not learn"
    print("equal to the bit" if alone == together else "equal within 1e-6")


if __name__ == "__main__":
    main()
