"""Runs the model on the device: one jitted step, compiled for two shapes.

The page pool holds keys and values of all requests: [pages, page, K, H] for each layer.
A request's table lists its pages in order, so the token at position p lives in page
`table[p // page]`, row `p % page`.
"""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jrope.demo.media import MediaRows
from jrope.demo.model import Decoder

SAMPLE_STRIDE = 64  # every 64th logit is kept for the self-check


class Batch(NamedTuple):
    """What a step needs of its B sequences: arrays made on the host, integers int32.

    Attributes:
      tokens: ids [B, T].
      positions: [B, T]; negative where there is no token.
      rope_positions: what the rotary layers are told, [3, B, T] for M-RoPE and [B, T]
        else, negative as `positions` are.
      table: page numbers [B, pages a sequence].
      media: images and videos among the tokens; None if the model takes none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rope_positions: np.ndarray
    table: np.ndarray
    media: MediaRows | None = None


class StepResult(NamedTuple):
    """What a step gives, on the host.

    Attributes:
      tokens: the likeliest next token after each sequence's last [B].
      sample: its logit, then every 64th logit [B, 1 + V/64].
    """

    tokens: np.ndarray
    sample: np.ndarray


class PagePool(NamedTuple):
    """Keys and values of all requests, an array [pages, page, K, H] a layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class PagedMemory:
    """A step's way into the page pool; afterwards `pool` holds the new one."""

    def __init__(
        self,
        pool: PagePool,
        table: Int[Array, "B pages"],
        positions: Int[Array, "B T"],
    ) -> None:
        """Works out where each token goes, once for all layers."""
        self._keys, self._values = list(pool.keys), list(pool.values)
        self._table = table
        pages, page = pool.keys[0].shape[:2]
        where = jnp.maximum(positions, 0)
        own = jnp.take_along_axis(table, where // page, axis=1)
        self._page = jnp.where(positions < 0, pages, own)  # padding: written nowhere
        self._row = where % page

    def exchange(
        self, layer: int, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keeps this step's [B, T, K, H]; returns all in the tables, [B, S, K, H]."""
        self._keys[layer] = self._write(self._keys[layer], key)
        self._values[layer] = self._write(self._values[layer], value)
        return self._read(self._keys[layer]), self._read(self._values[layer])

    @property
    def pool(self) -> PagePool:
        """The pool after all that was exchanged."""
        return PagePool(tuple(self._keys), tuple(self._values))

    def _write(self, pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[self._page, self._row].set(new, mode="drop")

    def _read(self, pages: jax.Array) -> jax.Array:
        found = pages[self._table]  # [B, pages a sequence, page, K, H]
        return found.reshape(found.shape[0], -1, *found.shape[3:])


class CompileCounter:
    """Counts the programs that JAX compiles while it is open.

    Attributes:
      count: so far.
    """

    def __init__(self) -> None:
        """Starts at zero."""
        self.count = 0

    def __enter__(self) -> Self:
        """Begins to listen."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops listening; the count stays."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event.endswith("backend_compile_duration")


class Engine:
    """The model, its page pool and the one jitted step.

    Args:
      model: serves; its state is handed to the step as an argument at each call.
      slots: sequences that decode together.
      chunk: tokens that a prefill step takes.
      pages: in the pool.
      page_size: tokens a page.
      context: tokens a sequence may have; a multiple of `page_size`.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        chunk: int,
        pages: int,
        page_size: int,
        context: int,
    ) -> None:
        """Allocates the pool; compiles nothing yet."""
        self._graph, self._state = nnx.split(model)
        self._step = jax.jit(
            functools.partial(_step, self._graph), donate_argnames="pool"
        )
        self.shapes = {"prefill": (1, chunk), "decode": (slots, 1)}
        self.context = context
        self.page_size = page_size
        self.pages = pages
        self._spec = spec = model.spec
        shape = (pages, page_size, spec.key_heads, spec.head_dim)

        def zeros() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, jnp.float32) for _ in range(spec.layers))

        self._pool = PagePool(zeros(), zeros())

    def empty_batch(self, shape: tuple[int, int]) -> Batch:
        """A batch [B, T] in which nothing is a token."""
        table = np.zeros((shape[0], self.context // self.page_size), np.int32)
        tokens, nowhere = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        if not self._spec.takes_media:
            return Batch(tokens, nowhere, nowhere.copy(), table)
        axes = np.full((3, *shape), -1, np.int32)
        media = MediaRows.empty(shape, self._spec.width)
        return Batch(tokens, nowhere, axes, table, media)

    def compile(self, name: str) -> None:
        """Compiles the step for the shape of "prefill" or "decode" by running it."""
        self.run(self.empty_batch(self.shapes[name]))

    def run(self, batch: Batch) -> StepResult:
        """Runs one step and waits for what it gives."""
        tokens, sample = self.dispatch(batch)
        return StepResult(np.asarray(tokens), np.asarray(sample))

    def dispatch(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Begins one step; `StepResult`'s two arrays are still on their way."""
        # On CPU, JAX may read an aligned numpy array in place while the step is in
        # flight, so it gets arrays that nobody will fill again.
        mine = jax.tree.map(np.copy, batch)
        tokens, sample, self._pool = self._step(
            state=self._state, pool=self._pool, batch=mine
        )
        return tokens, sample

    @property
    def programs(self) -> int:
        """How many programs the step has been compiled to."""
        return self._step._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def pool_bytes(self) -> int:
        """Size of the page pool."""
        return sum(array.nbytes for array in jax.tree.leaves(self._pool))


def _step(
    graph: nnx.GraphDef[Decoder], *, state: nnx.State, pool: PagePool, batch: Batch
) -> tuple[Int[Array, " B"], Float[Array, "B n"], PagePool]:
    """One forward step; the next token after each sequence's last one."""
    model = nnx.merge(graph, state)
    positions = jnp.asarray(batch.positions)
    memory = PagedMemory(pool, jnp.asarray(batch.table), positions)
    features = model(
        embed(model, jnp.asarray(batch.tokens), batch.media),
        positions,
        memory,
        model.rotations(jnp.asarray(batch.rope_positions)),
    )
    last = jnp.maximum(jnp.sum(positions >= 0, axis=1, dtype=jnp.int32) - 1, 0)
    logits = model.logits(
        jnp.take_along_axis(features, last[:, None, None], axis=1)[:, 0]
    )
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, sample_logits(logits, tokens), memory.pool


def embed(
    model: Decoder, tokens: Int[Array, "B T"], media: MediaRows | None
) -> Float[Array, "B T D"]:
    """What the first layer takes: embeddings of tokens, features in media."""
    x = model.embed(tokens)
    if media is None:
        return x
    return jnp.where(jnp.asarray(media.is_media)[..., None], media.features, x)


def sample_logits(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> Float[Array, "B n"]:
    """The logits that the self-check compares: of the token, and every 64th."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    return jnp.concatenate([chosen, logits[:, ::SAMPLE_STRIDE]], axis=1)
