"""Random arrays into plans, and windows of plans into random arrays."""

import functools
from typing import Any

import numpy as np
import pytest
from fuzzing import REFUSED, WRITABLE, cases, mostly, refused, ways, whole_as
from hypothesis import strategies as st
from positions_oracle import FAMILIES, Prompt, random_prompt
from test_fuzz_batch import Known
from test_positions_fuzz import model_of, planned

from jrope.positions import PositionError, plan, plan_from_spans, spec, vision_positions

pytestmark = pytest.mark.fuzz

LARGEST = 2**31 - 1
UNTOUCHED = 77


@functools.cache
def known(family: str, seed: int) -> Known:
    if family == "text":
        made = plan(spec("text"), np.zeros(seed, np.int32))
        return Known(made, tuple((k,) for k in range(seed)), 0)
    prompt = random_prompt(family, seed)
    shift = 0 if family.startswith("hunyuan") else prompt.delta
    made = planned(model_of(family), prompt)
    return Known(made, tuple(prompt.positions), shift)


# GLM-Image goes on with images that are to be generated: tests/test_positions.py.
families = st.sampled_from(("text", *(f for f in FAMILIES if f != "glm_image")))
starts = st.integers(-1, 60)
FAR = (
    2**31 - 9,
    2**31 - 3,
    2**31 - 2,
    LARGEST,
    2**31,
    2**62,
    2**63 - 9,
    2**63 - 1,
    2**70,
)
FAR_OR_BEFORE = (-(2**63), *FAR)
lengths = st.integers(-1, 30)
OUT = ("int32", "int64", "float32", "float64", "int16", "uint32")
# Drawn more often than what is refused: one wrong number spoils a window.
near = st.integers(0, 60)


@cases(
    families,
    st.integers(0, 80),
    mostly(near, starts | st.sampled_from(FAR)),
    mostly(st.integers(0, 30), lengths),
    mostly(near, st.integers(-1, 20) | st.sampled_from(FAR_OR_BEFORE)),
    mostly(near, st.integers(-30, -1)),
    st.sampled_from(["right"] * 12 + [*OUT]),
    st.sampled_from(sorted(WRITABLE)),
    st.sampled_from(["all"] * 6 + ["fewer", "flat"]),
)
def test_windows_into_arrays(family, seed, start, length, at, after, dtype, way, rows):
    request = known(family, seed)
    made, axes = request.plan, request.plan.axes
    dtype = made.spec.dtype if dtype == "right" else dtype
    columns = min(max(at + length + after, 0), 150)
    count = axes - 1 if rows == "fewer" else axes
    shape = (columns,) if rows == "flat" and axes == 1 else (count, columns)
    out = WRITABLE[way](np.full(shape, UNTOUCHED, dtype))
    stop = start + length
    fits_dtype = np.dtype(dtype) in (
        (np.float32,) if made.spec.fractional else (np.int32, np.int64)
    )
    fits_window = 0 <= start <= stop < LARGEST and 0 <= at <= columns - length
    in_range = request.top(start, length) <= LARGEST if fits_window else True
    fits = fits_dtype and fits_window and in_range and rows != "fewer"
    if fits:
        made.fill(out, start, stop, at)
        want = [request.position(k) for k in range(start, stop)]
        window = np.atleast_2d(out)[:, at : at + length]
        np.testing.assert_array_equal(window, np.array(want, dtype).reshape(-1, axes).T)
        np.atleast_2d(out)[:, at : at + length] = UNTOUCHED
    else:
        codes = "out_shape|out_dtype"
        if fits_window and not in_range:
            codes += "|position_beyond_table"
        with pytest.raises((PositionError, TypeError), match=codes) as caught:
            made.fill(out, start, stop, at)
        assert isinstance(caught.value, PositionError)
    assert (out == UNTOUCHED).all()
    return None if fits else REFUSED


def held(values: list, dtype: str, way: str, *shape: int) -> Any:
    if not values:
        return None
    return whole_as(np.asarray(values).reshape(-1, *shape), dtype, way)


@cases(
    st.sampled_from(FAMILIES),
    st.integers(0, 2000),
    st.tuples(ways, ways, ways),
    st.sampled_from(["int32", "int64", "uint32"]),
    st.sampled_from(["int32", "int64", "uint16", "uint8"]),
    st.sampled_from(["ids", "types", "spans"]),
)
def test_prompts_however_they_are_held(family, seed, ways, ids_dtype, dtype, by):
    prompt, model = random_prompt(family, seed), model_of(family)
    of_ids, of_media, of_types = ways
    media = {
        "image_grid_thw": held(prompt.images, dtype, of_media, 3),
        "video_grid_thw": held(prompt.videos, dtype, of_media, 3),
        "second_per_grid_ts": held(prompt.seconds, "float32", of_media),
        "audio_lengths": held(prompt.audio, "int64", of_media),
    }
    if by == "spans" and (spans := spans_of(family, prompt)) is not None:
        given = held(spans, "int64", of_types, 3)
        given = [] if given is None else given
        found = plan_from_spans(model, len(prompt.ids), given, **media)
    elif by == "types" and family != "glm_image":
        types = whole_as(prompt.kinds, dtype, of_types)
        found = plan(
            model, whole_as(prompt.ids, ids_dtype, of_ids), token_types=types, **media
        )
    else:
        found = plan(model, whole_as(prompt.ids, ids_dtype, of_ids), **media)
    want = np.asarray(prompt.positions, model.dtype).reshape(-1, prompt.axes)
    np.testing.assert_array_equal(found.positions(), want.T)


def spans_of(family: str, prompt: Prompt) -> list[tuple[int, int, int]] | None:
    """Runs of one kind; None where spans need more than kinds say."""
    if "omni" in family or family == "glm_image":
        return None
    spans: list[tuple[int, int, int]] = []
    before = (0, (0.0,))
    for k, kind in enumerate(prompt.kinds):
        if kind and before[0] == kind and k:
            spans[-1] = (kind, spans[-1][1], spans[-1][2] + 1)
        elif kind:
            spans.append((kind, k, 1))
        before = (kind, ())
    return spans


@cases(
    st.lists(
        st.tuples(st.integers(-1, 3), st.integers(-1, 9), st.integers(-1, 9)),
        max_size=4,
    ),
    st.sampled_from(["merge_blocks", "row_major", "one_based_with_cls"]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["int32", "int64"]),
    ways,
)
def test_patches_of_a_vision_encoder(grids, order, merge, valid, dtype, way):
    merge = merge if order == "merge_blocks" else 1
    if valid:
        grids = [
            (abs(t) or 1, (abs(h) or 1) * merge, (abs(w) or 1) * merge)
            for t, h, w in grids
        ]
    given = whole_as(np.asarray(grids).reshape(-1, 3), dtype, way)
    options = {"spatial_merge_size": merge} if order == "merge_blocks" else {}
    run = functools.partial(vision_positions, given, order=order, **options)
    bad = any(min(grid) < 1 or grid[1] % merge or grid[2] % merge for grid in grids)
    if bad:
        return refused(PositionError, "grid_nonpos|grid_not_div", run)
    want = [p for t, h, w in grids for p in patches(t, h, w, order, merge)]
    made = run()
    assert made.dtype == np.int32
    np.testing.assert_array_equal(made, np.array(want, np.int32).reshape(-1, 2).T)
    return None


def patches(frames: int, height: int, width: int, order: str, merge: int) -> list:
    """One frame after the other, patch by patch."""
    if order == "merge_blocks":
        frame = [
            (top + r, left + c)
            for top in range(0, height, merge)
            for left in range(0, width, merge)
            for r in range(merge)
            for c in range(merge)
        ]
    elif order == "row_major":
        frame = [(r, c) for r in range(height) for c in range(width)]
    else:
        frame = [(c + 1, r + 1) for r in range(height) for c in range(width)]
        frame.append((0, 0))
    return frame * frames
