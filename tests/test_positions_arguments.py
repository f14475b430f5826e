"""What kernels take and refuse: compiled entries, which read objects' own memory."""

import ctypes
import operator

import numpy as np
import pytest

from jrope.positions import PositionError, _arguments, plan, spec, warmup
from jrope.positions._arguments import ArrayArgument, WholeArgument, link_numpy, row_of
from jrope.positions._fill import FILL_TEXT
from jrope.positions._inputs import NO_GRIDS, NO_LENGTHS, NO_SECONDS
from jrope.positions._jit import INTERPRETED, Kernel
from jrope.positions._scan import count_text, scan
from jrope.positions._step import STEP_BATCH
from jrope.positions._table import COLUMNS

RULE = spec("qwen2_vl").rule
IDS = np.arange(7, dtype=np.int32)
ROWS = np.zeros((3, 8), np.int32)


class Odd(np.ndarray):
    """An array that is not a plain one."""


class Indexed:
    def __index__(self):
        return 2


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array):
    raw = np.frombuffer(bytearray(b"x" + array.tobytes()), np.uint8)[1:]
    return raw.view(array.dtype).reshape(array.shape)


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


VECTORS = {
    "plain": (IDS, True),
    "a view": (np.arange(9, dtype=np.int32)[1:8], True),
    "read-only": (read_only(IDS), True),
    "empty": (IDS[:0], True),
    "one element of many": (np.zeros((1, 4), np.int32)[:, 0], True),
    "strided": (np.repeat(IDS, 2)[::2], False),
    "backwards": (IDS[::-1], False),
    "unaligned": (unaligned(IDS), False),
    "swapped": (swapped(IDS), False),
    "int64": (IDS.astype(np.int64), False),
    "uint32": (IDS.astype(np.uint32), False),
    "float32": (IDS.astype(np.float32), False),
    "datetimes": (IDS.astype("m8[s]"), False),
    "two axes": (IDS[None], False),
    "no axis": (np.array(3, np.int32), False),
    "most axes": (np.zeros((1,) * 64, np.int32), False),
    "a subclass": (IDS.view(Odd), False),
    "masked": (np.ma.array(IDS), False),
    "a scalar": (np.int32(3), False),
    "a list": ([1, 2], False),
    "bytes": (b"12345678", False),
    "None": (None, False),
    "a small int": (1, False),
    "a class": (np.ndarray, False),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_a_vector_is_read_or_refused(kind):
    value, taken = VECTORS[kind]
    count_text.prepare()
    assert ArrayArgument("int32", 1).accepts(value) is taken
    if taken:
        assert count_text.run(value, RULE) == len(value)
        return
    with pytest.raises(TypeError, match="int32"):
        count_text.run(value, RULE)


OUTPUTS = {
    "plain": (ROWS.copy(), True),
    "part of a larger one": (np.zeros((5, 30), np.int32)[1:4, 9:20], True),
    "every other row": (np.zeros((6, 8), np.int32)[::2], True),
    "rows backwards": (np.zeros((3, 8), np.int32)[::-1], True),
    "one column": (np.zeros((3, 8), np.int32)[:, :1], True),
    "no column": (np.zeros((3, 0), np.int32), True),
    "every other column": (np.zeros((3, 8), np.int32)[:, ::2], False),
    "transposed": (np.zeros((8, 3), np.int32).T, False),
    "read-only": (read_only(ROWS), False),
    "one axis": (np.zeros(8, np.int32), False),
    "int64": (np.zeros((3, 8), np.int64), False),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_is_written_or_refused(kind):
    out, taken = OUTPUTS[kind]
    kernel = FILL_TEXT[np.dtype(np.int32)]
    kernel.prepare()
    assert ArrayArgument("int32", 2, written=True, rows=True).accepts(out) is taken
    if not taken:
        with pytest.raises(TypeError):
            kernel.run(out, 3, 0, out.shape[-1], 0)
        assert not out.any()
        return
    columns = out.shape[1]
    assert kernel.run(out, 3, 4, 4 + columns, 0) == 0
    np.testing.assert_array_equal(out, [list(range(4, 4 + columns))] * 3)
    if out.base is not None:
        assert np.count_nonzero(out.base) == out.size


@pytest.mark.parametrize(
    "value,taken",
    [
        (2, True),
        (True, True),
        (np.int64(2), True),
        (np.uint8(2), True),
        (Indexed(), True),
        (2.0, False),
        (np.float64(2), False),
        ("2", False),
        (None, False),
        (np.zeros(2), False),
    ],
)
def test_a_whole_number_is_read_or_refused(value, taken):
    kernel, out = FILL_TEXT[np.dtype(np.int32)], ROWS.copy()
    kernel.prepare()
    if not isinstance(value, np.ndarray):  # whose type has __index__, for some
        assert WholeArgument().accepts(value) is taken
    if not taken:
        with pytest.raises(TypeError):
            kernel.run(out, 3, value, 4, 0)
        return
    assert kernel.run(out, 3, value, 4, 0) == 0
    assert out[0, 0] == operator.index(value)


def test_numbers_that_are_too_large_are_refused_as_python_does():
    with pytest.raises((OverflowError, PositionError)):
        plan(spec("qwen2_vl"), IDS).fill(ROWS.copy(), start=2**70, stop=2**70 + 1)


def test_grids_need_three_columns():
    wrong = np.array([[4, 6]], np.int32)
    with pytest.raises(PositionError, match="shape \\[n, 3\\], got shape \\[1, 2\\]"):
        plan(spec("qwen2_vl"), IDS, image_grid_thw=wrong)


def test_outputs_that_kernels_refuse_are_filled_all_the_same():
    made = plan(spec("qwen2_vl"), IDS)
    want = made.positions()
    for out in (
        np.zeros((3, 14), np.int32)[:, ::2],
        np.zeros((7, 3), np.int64).T,
        unaligned(np.zeros((3, 7), np.int32)),
        np.zeros((3, 7), np.int32).view(Odd),
        np.zeros((3, 7), np.longlong),
    ):
        made.fill(out)
        np.testing.assert_array_equal(out, want)


def test_a_kernel_that_is_not_prepared_refuses():
    fresh = Kernel(lambda number: 1, WholeArgument())
    if INTERPRETED:
        assert fresh.run(3) == 1
        return
    with pytest.raises(TypeError, match="not prepared"):
        fresh.run(3)


def test_rows_are_views():
    assert np.shares_memory(row_of(ROWS, 1), ROWS[1])


class Shifted(ctypes.Structure):
    """An array object as it would be with one more field before its flags."""

    _fields_ = [
        *_arguments._Array._fields_[:-1],
        ("more", ctypes.c_void_p),
        _arguments._Array._fields_[-1],
    ]


def test_another_layout_of_arrays_is_refused(monkeypatch):
    link_numpy()
    monkeypatch.setattr(_arguments, "_Array", Shifted)
    with pytest.raises(ImportError, match="as numpy 2 lays them out"):
        link_numpy()


FAR = (2**63 - 1, 2**63 - 5, 2**63, 2**70, -(2**63), -(2**70))


@pytest.mark.parametrize("at", FAR)
def test_windows_that_no_int64_holds_are_refused(at):
    around = np.full((1, 64), -7, np.int32)
    made = plan(spec("text"), IDS)
    for start, stop, column in ((0, 5, at), (at, at + 5, 0), (0, at, 0)):
        expected = "5 columns from column" if column else "0 <= start <= stop < 2\\^31"
        with pytest.raises(PositionError, match=f"out_shape: expected {expected}"):
            made.fill(around[:, 16:32], start, stop, column)
    assert (around == -7).all()


def test_decoding_past_int32_is_refused():
    ids = [1, 151652, 151656, 151656, 151653]
    seconds = {"video_grid_thw": [[2, 2, 2]], "second_per_grid_ts": [50.0]}
    made = plan(spec("qwen2_5_vl"), ids, **seconds)
    last = 2**31 - 1 - int(made.delta)
    assert made.positions(last, last + 1).tolist() == [[2**31 - 1]] * 3
    with pytest.raises(PositionError, match="within int32, got 2147483648"):
        made.positions(last, last + 2, dtype=np.int64)


def test_a_flat_array_that_is_too_short_is_refused_by_name():
    with pytest.raises(PositionError, match="out_shape: expected 7 columns .* got 3"):
        plan(spec("text"), IDS).fill(np.zeros(3, np.int32))


def test_an_array_without_rows_is_refused_however_it_is_held():
    for held in (
        np.zeros((0, 4), np.int32)[:, ::-1],
        np.zeros((0, 8), np.int32)[:, 1::2],
    ):
        with pytest.raises(PositionError, match="out_shape: expected 1 rows, got 0"):
            plan(spec("text"), IDS).fill(held, 0, 2)


def test_kernels_refuse_outputs_that_cannot_be_written():
    warmup([np.int32, np.float32])
    for fractional in (False, True):
        model = spec("qwen3_omni_moe" if fractional else "qwen2_vl")
        one = np.ones(1, np.int32)
        ids, table = np.array([7, 7], np.int32), np.empty((1, COLUMNS))
        out, numbers = np.zeros((3, 2), model.dtype), np.array([0, 9, 2, 0, 0, 0.0])
        calls = [
            (
                scan.run,
                (*(ids, model.rule, NO_GRIDS, NO_GRIDS, NO_SECONDS, NO_LENGTHS), table),
                (0,),
                (6,),
            ),
            (FILL_TEXT[model.dtype].run, (out,), (model.shape_code, 0, 2, 0), (0,)),
            (
                STEP_BATCH[fractional].run,
                (
                    np.zeros((2, 1), np.int32),
                    np.zeros(1, np.float64 if fractional else np.int32),
                    table,
                    out,
                    numbers,
                ),
                (0 * one, 0 * one, one),
                (3, 4),
            ),
        ]
        for run, arrays, others, outputs in calls:
            assert run(*arrays, *others) >= 0
            for output in outputs:
                held = list(arrays)
                held[output] = read_only(held[output])
                with pytest.raises(TypeError, match="expected array"):
                    run(*held, *others)
