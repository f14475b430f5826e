"""The handler of cpu_inplace, called without XLA: what it turns and what it refuses."""

import ctypes
import itertools
import re

import ml_dtypes
import numpy as np
import oracle
import pytest
from ffi_frames import Call, aligned

from jrope._routes import _cpu_frames, _cpu_kernel, _ffi

DTYPES = ("float32", "bfloat16", "float16", "float64")
HANDLERS = {}


def handler(dtype):
    if dtype not in HANDLERS:
        compiled = _cpu_kernel.compiled(dtype)
        HANDLERS[dtype] = (
            compiled,
            ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(compiled.address),
        )
    return HANDLERS[dtype][1]


def filled(shape, dtype, seed=0):
    array = aligned(shape, dtype)
    array[...] = np.random.default_rng(seed).standard_normal(shape)
    return array


def operands(dtype, *, leading=(3,), row_leading=None, width=12, half=4, heads=(3, 1)):
    """Operands, rows and results that lie apart from them."""
    row_dtype = "float64" if dtype == "float64" else "float32"
    xs = [filled((*leading, n, width), dtype) for n in heads]
    rows = [
        filled((*(row_leading or leading), half), row_dtype, seed) for seed in (1, 2)
    ]
    return xs, *rows, [np.copy(x) * 0 for x in xs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "apart"])
@pytest.mark.parametrize(
    ("leading", "row_leading"),
    [
        ((3,), (3,)),
        ((2, 3), (1, 3)),
        ((2, 3), (2, 1)),
        ((3, 2, 4), (1, 2, 1)),
        ((5,), (1,)),
        ((0, 2), (1, 2)),
    ],
)
def test_within_the_bound(dtype, is_neox_style, in_place, leading, row_leading):
    for width, half, offset in ((12, 4, 3), (64, 32, 0), (7, 1, 5), (34, 16, 2)):
        xs, cos, sin, outs = operands(
            dtype, leading=leading, row_leading=row_leading, width=width, half=half
        )
        before = [np.copy(x) for x in xs]
        outs = xs if in_place else outs
        style = {"is_neox_style": is_neox_style, "offset": offset}
        assert Call(xs, cos, sin, outs, **style).run(handler(dtype)) is None
        wide = [np.broadcast_to(row, (*leading, half)) for row in (cos, sin)]
        for x, out, given in zip(before, outs, xs, strict=True):
            exact = oracle.rotate(x, *wide, **style)
            limit = oracle.bound(x, *wide, dtype=dtype, **style)
            if out.size:
                oracle.assert_within(out, exact, limit)
            passing = np.r_[0:offset, offset + 2 * half : width]
            assert out[..., passing].tobytes() == x[..., passing].tobytes()
            assert in_place or given.tobytes() == x.tobytes()


def first_of_pairs(dtype, first, cos):
    """Turns pairs (first, 0) by (cos, 0) and gives the first of each."""
    count = len(first)
    xs = [np.zeros((count, 1, 2), dtype)]
    xs[0][:, 0, 0] = first
    sin = np.zeros((count, 1), np.float32)
    call = Call(xs, np.ascontiguousarray(cos[:, None], np.float32), sin, xs)
    assert call.run(handler(np.dtype(dtype).name)) is None
    return xs[0][:, 0, 0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_value_is_read_and_written(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    out = first_of_pairs(dtype, values, np.ones(2**16, np.float32))
    numbers = ~np.isnan(values.astype(np.float32))
    assert out[numbers].tobytes() == values[numbers].tobytes()
    assert np.isnan(out[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_are_rounded_to_nearest_even(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    # Ties and their neighbours, and the ends of float16's range.
    near = np.arange(0x33000000, 0x47900000, 0x800, dtype=np.uint32)
    bits = np.concatenate([bits, *(near + step for step in (0, 0xFFF, 0x1001))])
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        exact = values.astype(dtype)
    out = first_of_pairs(dtype, np.ones(len(values), dtype), values)
    numbers = ~np.isnan(values)
    assert out[numbers].tobytes() == exact[numbers].tobytes()
    assert np.isnan(out[~numbers].astype(np.float32)).all()


def test_features_that_pass_are_untouched_by_inf_and_nan():
    xs, cos, sin, outs = operands("float32", width=8, half=2)
    odd = np.array([np.inf, -0.0, np.nan, 1.0], np.float32)
    xs[0][..., [0, 1, 6, 7]] = odd
    for is_neox_style, to in itertools.product((True, False), (outs, xs)):
        call = Call(xs, cos, sin, to, is_neox_style=is_neox_style, offset=2)
        assert call.run(handler("float32")) is None
        assert to[0][..., [0, 1, 6, 7]].tobytes() == np.tile(odd, (3, 3, 1)).tobytes()
        assert np.isfinite(to[0][..., 2:6]).all()


def change(where, **fields):
    """A change of a call: fields of one of its structures."""

    def apply(call):
        structure = where(call)
        for name, value in fields.items():
            setattr(structure, name, value)

    return apply


def element(where, value):
    """A change of an array in a call: its first element."""

    def apply(call):
        where(call)[0] = value

    return apply


def frame(call):
    return call.frame


FFI, COUNTS = _cpu_frames.PROBLEMS[1], _cpu_frames.PROBLEMS[2]
ATTRIBUTES, BUFFER = _cpu_frames.PROBLEMS[3], _cpu_frames.PROBLEMS[4]
ROWS, SHAPE, WIDTH, OVERLAP = _cpu_frames.PROBLEMS[5:]

# Buffers of a call: 0 and 1 are operands, 2 is cos, 3 is sin, 4 and 5 are results.
CHANGES = {
    "an older interface": (change(lambda c: c.api.version, minor=2), FFI),
    "a newer interface": (change(lambda c: c.api.version, minor=6), FFI),
    "another major version": (change(lambda c: c.api.version, major=1), FFI),
    "a longer frame": (change(frame, struct_size=176), FFI),
    "a shorter frame": (change(frame, struct_size=120), FFI),
    "another stage": (change(frame, stage=1), FFI),
    "longer args": (change(lambda c: c.frame.args, struct_size=48), FFI),
    "longer rets": (change(lambda c: c.frame.rets, struct_size=48), FFI),
    "longer attrs": (change(lambda c: c.frame.attrs, struct_size=56), FFI),
    "a longer operand": (change(lambda c: c.buffers[0], struct_size=56), FFI),
    "a longer row": (change(lambda c: c.buffers[3], struct_size=56), FFI),
    "a longer result": (change(lambda c: c.buffers[5], struct_size=56), FFI),
    "no results": (change(lambda c: c.frame.rets, size=0), COUNTS),
    "fewer results": (change(lambda c: c.frame.rets, size=1), COUNTS),
    "fewer operands": (change(lambda c: c.frame.args, size=3), COUNTS),
    "an argument that is none": (element(lambda c: c.frame.args.types, 2), COUNTS),
    "a result that is none": (element(lambda c: c.frame.rets.types, 2), COUNTS),
    "one attribute": (change(lambda c: c.frame.attrs, size=1), ATTRIBUTES),
    "an array as attribute": (element(lambda c: c.frame.attrs.types, 1), ATTRIBUTES),
    "an int64 as attribute": (
        change(lambda c: c.frame.attrs.attrs[0][0], dtype=5),
        ATTRIBUTES,
    ),
    "a shorter name": (change(lambda c: c.frame.attrs.names[1][0], len=6), ATTRIBUTES),
    "another name": (
        change(lambda c: c.frame.attrs.names[0][0], ptr=b"a_neox_styles"),
        ATTRIBUTES,
    ),
    "integers as operand": (change(lambda c: c.buffers[0], dtype=4), BUFFER),
    "rows of another dtype": (change(lambda c: c.buffers[2], dtype=12), BUFFER),
    "results of another dtype": (change(lambda c: c.buffers[4], dtype=16), BUFFER),
    "a negative rank": (change(lambda c: c.buffers[0], rank=-1), BUFFER),
    "a negative length": (element(lambda c: c.buffers[0].dims, -3), BUFFER),
    "rows of rank 1": (change(lambda c: c.buffers[2], rank=1), ROWS),
    "sin longer than cos": (element(lambda c: c.buffers[3].dims, 4), ROWS),
    "more operands than rows": (
        lambda c: [element(lambda c, i=i: c.buffers[i].dims, 4)(c) for i in (0, 4)],
        ROWS,
    ),
    "an operand of rank 2": (change(lambda c: c.buffers[0], rank=2), SHAPE),
    "a result of another rank": (change(lambda c: c.buffers[5], rank=2), SHAPE),
    "a shorter result": (element(lambda c: c.buffers[5].dims, 2), SHAPE),
    "a negative offset": (element(lambda c: c.attributes[1][1].value, -1), WIDTH),
    "an offset past the head": (element(lambda c: c.attributes[1][1].value, 5), WIDTH),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_is_not_as_expected_is_an_error_and_writes_nothing(name):
    apply, message = CHANGES[name]
    xs, cos, sin, outs = operands("float32")
    for to in (outs, xs):
        before = [np.copy(x).tobytes() for x in (*xs, *to)]
        call = Call(xs, cos, sin, to, offset=2)
        apply(call)
        assert call.run(handler("float32")) == f"jrope's cpu_inplace: {message}"
        assert [x.tobytes() for x in (*xs, *to)] == before
        # A change is seen because of itself alone.
        assert Call(xs, cos, sin, outs, offset=2).run(handler("float32")) is None


def test_rows_wider_than_the_head_are_refused():
    xs, cos, sin, outs = operands("float32", width=6, half=4)
    assert WIDTH in str(Call(xs, cos, sin, outs).run(handler("float32")))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_handler_is_for_one_dtype(dtype):
    for other in DTYPES:
        xs, cos, sin, outs = operands(other)
        error = Call(xs, cos, sin, outs).run(handler(dtype))
        assert (error is None) == (dtype == other)


def test_results_across_their_operands_are_refused():
    whole = filled((5, 3, 12), "float32")
    _, cos, sin, _ = operands("float32", leading=(4,))
    before = whole.tobytes()
    for x, out in ((whole[:4], whole[1:]), (whole[1:], whole[:4])):
        assert OVERLAP in str(Call([x], cos, sin, [out]).run(handler("float32")))
    assert whole.tobytes() == before


def test_addresses_must_be_aligned():
    raw = np.zeros(3 * 4 * 12 * 4 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(3, 4, 12)
    _, cos, sin, _ = operands("float32")
    call = Call([x], cos, sin, [x])
    assert call.buffers[0].data % 4
    assert BUFFER in str(call.run(handler("float32")))


def test_a_handler_says_that_it_has_the_callers_version():
    for minor in (3, 4, 5):
        xs, cos, sin, outs = operands("float32")
        call = Call(xs, cos, sin, outs)
        call.api.version.minor = minor
        metadata = call.ask(handler("float32"))
        version = metadata.version
        assert (version.major, version.minor, metadata.traits) == (0, minor, 0)
        assert not any(out.any() for out in outs)


@pytest.mark.parametrize("sizes", [{"size": 32}, {"extension_size": 40}])
def test_into_unknown_metadata_nothing_is_written(sizes):
    xs, cos, sin, outs = operands("float32")
    metadata = Call(xs, cos, sin, outs).ask(handler("float32"), **sizes)
    assert (metadata.version.minor, metadata.traits) == (0, 9)


@pytest.mark.parametrize("version", [{"minor": 6}, {"minor": 2}, {"major": 1}])
def test_a_handler_has_no_version_that_it_does_not_know(version):
    xs, cos, sin, outs = operands("float32")
    call = Call(xs, cos, sin, outs)
    change(lambda c: c.api.version, **version)(call)
    metadata = call.ask(handler("float32"))
    assert (metadata.version.major, metadata.version.minor) == (0, 0)


def probed(*changes, **sizes):
    """What the probe finds in a call with some changes, and the metadata it left."""
    xs, cos, sin, outs = operands("float32")
    call = Call(xs, cos, sin, outs)
    for apply in changes:
        apply(call)
    probe = _ffi.Probe()
    return _ffi.difference(probe.found), call.ask(probe.callback, **sizes), probe


def test_the_probe_knows_the_interface_and_says_its_version():
    for minor in (3, 4, 5):
        _, metadata, probe = probed(change(lambda c: c.api.version, minor=minor))
        assert _ffi.difference(probe.found) is None
        assert metadata.version.minor == minor


@pytest.mark.parametrize(
    ("apply", "sizes", "reason"),
    [
        (change(lambda c: c.api.version, minor=6), {}, r"0\.3 to 0\.5, .* got 0\.6"),
        (change(lambda c: c.api.version, major=1), {}, r"got 1\.5 with JAX"),
        (change(frame, struct_size=176), {}, "CallFrame .*168 bytes.* got 176 with"),
        (change(lambda c: c.frame.args, struct_size=48), {}, "_Args .* 40 .* got 48"),
        (change(lambda c: c.frame.rets, struct_size=48), {}, "_Rets .* 40 .* got 48"),
        (change(lambda c: c.frame.attrs, struct_size=8), {}, "_Attrs .* 48 .* got 8"),
        (change(lambda c: c.api, struct_size=48), {}, "_Api .* 56 bytes at least.*48"),
        (change(frame, api=None), {}, "_Api .* 56 bytes at least, .* got 0"),
        (change(frame, future=0), {"extension_size": 40}, "_Extension .* 32 .* got 40"),
        (change(frame, future=0), {"kind": 2}, "_Extension .* 32 bytes, .* got 0"),
        (change(frame, future=0), {"size": 44}, "_Metadata .* 36 bytes, .* got 44"),
    ],
)
def test_the_probe_names_what_it_does_not_know(apply, sizes, reason):
    _, metadata, probe = probed(apply, **sizes)
    assert re.search(reason, str(_ffi.difference(probe.found)))
    assert metadata.traits == 9


def test_an_xla_that_asks_nothing_is_declined():
    assert "did not ask the probe" in str(probed()[0])
