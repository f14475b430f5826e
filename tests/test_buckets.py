"""Buckets: sizes, padding, and that nothing compiles once they are warm."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jrope.buckets import BucketedStep, Buckets, trim
from jrope.hpu import HpuRotaryEmbedding

RNG = np.random.default_rng(0)
H, P = 8, 512
BUCKETS = Buckets((1, 8, 32))


class Batch(NamedTuple):
    positions: np.ndarray
    query: np.ndarray
    key: np.ndarray


PADDING = Batch(positions=-1, query=0, key=0)  # pyright: ignore[reportArgumentType]


def batch(tokens):
    positions = RNG.integers(0, P, tokens).astype(np.int32)
    query, key = (RNG.standard_normal((tokens, n * H)) for n in (4, 1))
    return Batch(positions, query.astype(np.float32), key.astype(np.float32))


def rope_step():
    graph, state = nnx.split(HpuRotaryEmbedding(H, H, P))
    return (lambda state, batch: nnx.merge(graph, state)(*batch)), state


def test_nothing_compiles_after_the_warm_up(compilations):
    step, state = rope_step()
    bucketed = BucketedStep(step, BUCKETS, padding=PADDING)
    cold = len(compilations)
    bucketed.warm_up(state, batch(5))
    assert len(compilations) == cold + len(BUCKETS.sizes)
    plain, warm = jax.jit(step), len(compilations)
    given = [batch(tokens) for tokens in (1, 2, 7, 8, 9, 20, 32, 1, 31)]
    outs = [trim(bucketed(state, one), len(one.positions)) for one in given]
    assert len(compilations) == warm
    for one, out in zip(given, outs, strict=True):
        chex.assert_trees_all_close(out, plain(state, one), atol=1e-6)
    assert len(compilations) > warm  # The counter does count.


def aligned(length):
    """A float32 array as JAX likes to read in place on CPU: on a 64-byte boundary."""
    raw = np.zeros(4 * length + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * length].view(np.float32)


def test_arrays_may_be_refilled_while_the_step_runs():
    length = 1024

    def slow(state, batch):
        busy = jax.lax.fori_loop(0, 20, lambda _, m: jnp.tanh(m @ m), state)
        return batch["x"] + 0 * busy.sum()

    bucketed = BucketedStep(slow, Buckets((length,)), padding={"x": 0})
    state, mine = jnp.ones((300, 300)) / 300, {"x": aligned(length)}
    bucketed.warm_up(state, mine)
    outs = []
    for i in range(8):
        mine["x"][:] = i
        outs.append(bucketed(state, mine))
    assert [float(out[0]) for out in outs] == list(range(8))


def test_padding_is_what_was_asked_for():
    bucketed = BucketedStep(lambda s, b: b, Buckets((4,)), padding={"p": -1, "x": 0})
    given = {"p": np.arange(2, dtype=np.int32), "x": np.ones((2, 3), np.float32)}
    bucketed.warm_up(None, given)
    out = bucketed(None, given)
    assert out["p"].tolist() == [0, 1, -1, -1]
    assert out["x"].shape == (4, 3) and out["x"][2:].sum() == 0
    assert trim(out, 2)["p"].tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_state_is_used_up():
    bucketed = BucketedStep(
        lambda s, b: (s + b["x"].sum(), b["x"]),
        Buckets((2,)),
        padding={"x": 0},
        donate_state=True,
    )
    state, given = jnp.zeros(()), {"x": np.ones(1, np.float32)}
    bucketed.warm_up(state, given)
    new, _ = bucketed(state, given)
    assert state.is_deleted() and float(new) == 1.0


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((1, 8, 24), (1, 2, 4, 8, 16, 24)),
        ((3, 8, 20), (3, 6, 8, 16, 20)),
        ((16, 16, 16), (16,)),
        ((8, 8, 9), (8, 9)),
    ],
)
def test_ramps(arguments, sizes):
    assert Buckets.ramp(*arguments).sizes == sizes


def test_buckets_are_the_smallest_that_fit():
    assert [BUCKETS.bucket(n) for n in (0, 1, 2, 8, 9, 32)] == [1, 1, 8, 8, 32, 32]
    with pytest.raises(ValueError, match="at most 32 tokens.*got 33; split the prompt"):
        BUCKETS.bucket(33)


@pytest.mark.parametrize("sizes", [(), (8, 4), (4, 4)])
def test_sizes_that_do_not_grow_are_refused(sizes):
    with pytest.raises(ValueError, match="bucket sizes must grow"):
        Buckets(sizes)


def test_sizes_that_are_no_sizes_are_refused():
    with pytest.raises(ValueError, match="a bucket size must be at least 1"):
        Buckets((0, 4))
    with pytest.raises(ValueError, match="maximum must be at least 8"):
        Buckets.ramp(4, 8, 6)


def test_misuse_is_an_error():
    step, state = rope_step()
    bucketed = BucketedStep(step, BUCKETS, padding=PADDING)
    with pytest.raises(RuntimeError, match="warm_up must run before the first step"):
        bucketed(state, batch(2))
    bucketed.warm_up(state, batch(2))
    uneven = batch(3)._replace(query=batch(4).query)
    whole = batch(3)._replace(key=np.zeros((3, H), np.int32))
    with pytest.raises(TypeError, match="compiled"):
        bucketed(state, whole)
    with pytest.raises(ValueError, match=r"same tokens on their first axis.*\[3, 4\]"):
        bucketed(state, uneven)
