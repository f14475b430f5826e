"""Buckets: sizes, padding, and that nothing compiles once they are warm."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
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


@pytest.mark.parametrize("sizes", [[1, 2], {1, 2}, range(1, 3)])
def test_sizes_are_a_tuple_so_that_buckets_are_hashable(sizes):
    with pytest.raises(TypeError, match="must be a tuple of ints.*hashable"):
        Buckets(sizes)


@pytest.mark.parametrize(
    ("tokens", "error"), [(-1, ValueError), (3.5, TypeError), (True, TypeError)]
)
def test_what_is_no_number_of_tokens_is_refused(tokens, error):
    with pytest.raises(error, match="tokens must be"):
        BUCKETS.bucket(tokens)
    with pytest.raises(error, match="tokens must be"):
        trim({"x": np.zeros(4)}, tokens)


@pytest.mark.parametrize("output", [np.zeros(2), np.zeros(())])
def test_outputs_that_have_fewer_tokens_are_not_cut_in_silence(output):
    with pytest.raises(ValueError, match=r"outputs\['x'\] must have 3 tokens or more"):
        trim({"x": output}, 3)


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
    with pytest.raises(TypeError, match=r"key must be float32, as it was compiled"):
        bucketed(state, whole)
    with pytest.raises(ValueError, match=r"same tokens on their first axis.*\[3, 4\]"):
        bucketed(state, uneven)


def echo(example, fill=0, sizes=(4,)):
    """A warm step that returns its batch, one array."""
    bucketed = BucketedStep(lambda s, b: b, Buckets(sizes), padding={"x": fill})
    bucketed.warm_up(None, {"x": example})
    return bucketed


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint32", "int16", ">i4"])
def test_positions_of_another_dtype_are_not_wrapped(dtype):
    bucketed = echo(np.zeros(2, np.int32))
    far = np.asarray([7, 2**31 + 5]).astype(dtype)
    with pytest.raises(TypeError, match=r"batch\['x'\] must be int32, as it was comp"):
        bucketed(None, {"x": far})


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128", ">i4"])
def test_dtypes_that_jax_narrows_are_refused_at_the_warm_up(dtype):
    wide = np.zeros(2, dtype)
    with pytest.raises(
        TypeError, match=r"batch\['x'\] must have a dtype that JAX keeps"
    ):
        echo(wide)
    bucketed = echo(np.zeros(2, np.int32))
    for call in (bucketed.warm_up, bucketed):
        with pytest.raises(TypeError, match="an array of the state must have a dtype"):
            call({"step": wide}, {"x": np.zeros(2, np.int32)})


def test_with_64_bits_wide_arrays_are_kept():
    with jax.enable_x64(True):
        bucketed = echo(np.zeros(2, np.int64))
        out = bucketed(None, {"x": np.asarray([2**31 + 5])})
        assert out["x"].tolist() == [2**31 + 5, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["<U3", "O", "datetime64[s]"])
def test_arrays_that_are_not_of_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match=r"batch\['x'\] must be of numbers, got"):
        echo(np.zeros(2, dtype))


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 3, 1)])
def test_another_trailing_shape_is_refused(shape):
    bucketed = echo(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"\('tokens', 3\), as it was compiled, got"):
        bucketed(None, {"x": np.zeros(shape, np.float32)})


X = np.zeros(2, np.float32)


@pytest.mark.parametrize("given", [{}, {"x": X, "y": X}, {"y": X}, {"x": {"z": X}}, X])
def test_another_structure_is_refused(given):
    bucketed = echo(X)
    for call in (bucketed, bucketed.warm_up):
        with pytest.raises(ValueError, match="must have the structure of padding"):
            call(None, given)


@pytest.mark.parametrize("leaf", [3, np.float32(3), np.zeros(()), jnp.zeros(2)])
def test_what_is_no_array_of_tokens_on_the_host_is_refused(leaf):
    bucketed = echo(X)
    for call in (bucketed, bucketed.warm_up):
        with pytest.raises(TypeError, match=r"batch\['x'\] must be a numpy array with"):
            call(None, {"x": leaf})


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        *((0.5, "int32"), (np.nan, "int32"), (2**31, "int32"), (2**70, "int32")),
        *((-1, "uint8"), (-1, "uint32"), (-1, "bool"), (2, "bool"), (1j, "float32")),
        *((0.1, "float32"), (1e300, "float32"), (257, "bfloat16")),
        *((2**24 + 1, "float32"), ("1", "int32"), ("0", "float32")),
        (np.zeros(1), "int32"),
    ],
)
def test_padding_that_the_dtype_does_not_hold_is_refused(fill, dtype):
    with pytest.raises(ValueError, match=r"the padding of batch\['x'\] must be a numb"):
        echo(np.zeros(2, jnp.dtype(dtype)), fill)


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        *((np.nan, "float32"), (-np.inf, "bfloat16"), (-1, "int8"), (False, "bool")),
        *((2.0, "int32"), (255, "uint8"), (-1.5, "bfloat16"), (1j, "complex64")),
        (ml_dtypes.bfloat16(0.1), "float32"),
    ],
)
def test_padding_that_the_dtype_holds_is_kept(fill, dtype):
    example = np.zeros(1, jnp.dtype(dtype))
    padded = np.asarray(echo(example, fill)(None, {"x": example})["x"])
    assert padded.dtype == dtype
    np.testing.assert_array_equal(padded, np.asarray([0, fill, fill, fill], dtype))


def test_a_warm_up_that_fails_midway_leaves_nothing():
    refused = []

    def step(state, batch):
        if batch["x"].shape[0] in refused:
            raise RuntimeError("too large")
        return batch["x"] + state

    bucketed = BucketedStep(step, Buckets((2, 4)), padding={"x": 0})
    one = {"x": np.zeros(1, np.float32)}
    refused.append(4)
    with pytest.raises(RuntimeError, match="too large"):
        bucketed.warm_up(np.float32(1), one)
    with pytest.raises(RuntimeError, match="warm_up must run before"):
        bucketed(np.float32(1), one)

    refused.clear()
    bucketed.warm_up(np.float32(1), one)
    refused.append(4)
    with pytest.raises(RuntimeError, match="too large"):
        bucketed.warm_up(np.int32(1), {"x": np.zeros(1, np.int32)})
    for tokens in (1, 3):  # Both programs are those of the call that succeeded.
        out = bucketed(np.float32(1), {"x": np.zeros(tokens, np.float32)})
        assert out.dtype == np.float32
