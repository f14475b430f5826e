"""Positions equal, exactly, what transformers, vLLM and SGLang build."""

from typing import Any

import numpy as np
import pytest
from positions_golden import errors, families, rows, steps

from jrope.positions import (
    BatchPositions,
    PositionError,
    PositionPlan,
    PositionSpec,
    plan,
    plan_from_spans,
    spec,
)
from jrope.positions._table import COLUMNS

FAMILIES = families()
CASES = 1374


def given(media):
    """Without what the case does not have."""
    return {name: value for name, value in media.items() if value is not None}


def test_no_case_is_missing():
    names = [{row.name.partition("[")[0] for row in rows(name)} for name in FAMILIES]
    assert sum(map(len, names)) >= CASES


# vllm-project/vllm#16878
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_and_delta_by_ids(family):
    model = spec(family)
    for row in rows(family):
        if row.positions is None:
            continue
        made = plan(model, row.ids, **given(row.media))
        np.testing.assert_array_equal(made.positions(), row.positions, row.name)
        assert made.delta == row.delta, row.name
        assert made.num_tokens == len(row.ids)
        planned = made.positions(0, made.num_planned)
        assert made.max_position == planned.max(initial=-1), row.name


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_where_no_peer_gives_any(family):
    for row in rows(family):
        if row.positions is not None:
            continue
        try:
            made = plan(spec(family), row.ids, **given(row.media))
        except PositionError as error:
            assert error.code in ("token_count", "truncated")
        else:
            assert made.positions().shape == (made.axes, len(row.ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_by_token_types(family):
    model = spec(family)
    for row in rows(family):
        # What asks for a delimiter cannot be told by types alone.
        if row.positions is None or "notail" in row.tags:
            continue
        made = plan(model, row.ids, token_types=row.types, **given(row.media))
        np.testing.assert_array_equal(made.positions(), row.positions, row.name)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "minicpm" not in name])
def test_positions_by_spans(family):
    model = spec(family)
    for row in rows(family):
        if row.positions is None:
            continue
        made = plan_from_spans(model, len(row.ids), row.spans, **given(row.media))
        np.testing.assert_array_equal(made.positions(), row.positions, row.name)
        assert made.delta == row.delta, row.name


def test_a_canvas_cannot_be_planned_from_spans():
    with pytest.raises(PositionError, match="markers matter here"):
        plan_from_spans(spec("minicpmv4_7"), 3, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_any_window_equals_the_whole(family, seed=0):
    model = spec(family)
    random = np.random.default_rng(seed)
    for row in rows(family):
        if row.positions is None:
            continue
        made = plan(model, row.ids, **given(row.media))
        tail = made.positions(len(row.ids), len(row.ids) + 5)
        whole = np.concatenate([row.positions, tail], axis=1)
        out = np.full((made.axes, whole.shape[1] + 3), -7, model.dtype)
        for _ in range(4):
            start, stop = np.sort(random.integers(0, whole.shape[1] + 1, 2)).tolist()
            out[:] = -7
            made.fill(out, start, stop, out_offset=2)
            written = out[:, 2 : 2 + stop - start]
            np.testing.assert_array_equal(written, whole[:, start:stop], row.name)
            assert (out[:, :2] == -7).all() and (out[:, 2 + stop - start :] == -7).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_through_the_batch_buffer(family):
    model = spec(family)
    plans = [
        (row, plan(model, row.ids, **given(row.media)))
        for row in rows(family)
        if row.positions is not None
    ][:40]
    batch = BatchPositions(model, 4, max_tokens=40, max_position=10**6)
    for row, made in plans:
        batch.add(3, made)
        parts = []
        for start in range(0, len(row.ids) + 8, 8):
            parts.append(batch.step([3], [start], [8]).copy())
        seen = np.concatenate(parts, axis=1)[:, : len(row.ids)]
        np.testing.assert_array_equal(seen, row.positions, row.name)
        batch.remove(3)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe"])
def test_hf5_advance_repeats_transformers(family):
    checked = 0
    for row in rows(family):
        if "pos_hf" not in row.others:
            continue
        made = plan(spec(family), row.ids, advance="hf5", **given(row.media))
        np.testing.assert_array_equal(made.positions(), row.others["pos_hf"], row.name)
        assert made.delta == row.others["delta_hf"], row.name
        checked += 1
    assert checked > 10


def test_whole_numbers_for_qwen3_omni():
    model = spec("qwen3_omni_moe", fractional=False)
    checked = 0
    for row in rows("qwen3_omni_moe"):
        want = row.others.get("pos_int", row.positions)
        if want is None:
            continue
        made = plan(model, row.ids, **given(row.media))
        np.testing.assert_array_equal(made.positions(), want, row.name)
        assert made.positions().dtype == np.int32
        assert made.delta == row.others.get("delta_int", row.delta)
        checked += "pos_int" in row.others
    assert checked > 20


def test_glm_image_begins_to_decode_where_transformers_does():
    model = spec("glm_image")
    for row in rows("glm_image"):
        if "decode" not in row.others or "notail" in row.tags:
            continue
        made = plan(model, row.ids, **given(row.media))
        first = made.positions(len(row.ids), len(row.ids) + 1)
        np.testing.assert_array_equal(first, row.others["decode"][:, :1], row.name)


@pytest.mark.parametrize("case", errors(), ids=lambda c: f"{c['family']}-{c['name']}")
def test_broken_input(case):
    model = spec(case["family"])
    media: dict[str, Any] = {
        "image_grid_thw": case["ig"] or None,
        "video_grid_thw": case["vg"] or None,
        "second_per_grid_ts": case["sec"] or None,
        "audio_lengths": case["al"] or None,
    }
    ids = np.asarray(case["ids"], np.int32)
    wanted = case["recommended"]
    code = wanted.partition("code='")[2].partition("'")[0]
    if case["name"] == "audio_lens_missing":
        media["audio_lengths"] = None
    if not code:
        made = plan(model, ids, **media)
        assert made.positions().shape == (3, len(ids))
        return
    with pytest.raises(PositionError, match=code) as caught:
        plan(model, ids, **media)
    assert caught.value.code == code
    if code == "truncated":
        clipped = plan(model, ids, truncate="clip", **media)
        assert clipped.positions().shape == (3, len(ids))
        assert clipped.delta == clipped.positions().max() + 1 - len(ids)


class Stored(PositionPlan):
    """A plan of positions that are known: one segment of one cell for each token."""

    def __init__(self, model: PositionSpec, positions: np.ndarray, delta: int) -> None:
        tokens = positions.shape[1]
        table = np.zeros((1 + tokens, COLUMNS))
        table[0, :9] = tokens, tokens, delta, positions.max(), 0, 1, 2, -1, 0
        table[1:, 0] = np.arange(tokens)
        table[1:, [1, 3, 4]] = 1
        table[1:, 5:8] = positions.T
        super().__init__(model, tokens, table)


@pytest.mark.parametrize(
    "name,case", [*steps()], ids=lambda v: v if isinstance(v, str) else ""
)
def test_batch_step(name, case):
    axes = case["pos"].shape[0]
    model = PositionSpec(family=name, axes=3)
    requests = len(case["prompt_len"])
    ends = np.cumsum(case["prompt_len"])
    prompts = np.split(case["prompt_pos"], ends[:-1], axis=1)
    halves = ((0, 1, 2),) if axes == 3 else ((0, 1, 2), (1, 2, 3))
    for half in halves:
        batch = BatchPositions(model, requests, 4096, max_position=10**6)
        for slot, prompt in enumerate(prompts):
            delta = int(case["delta"][slot])
            batch.add(slot, Stored(model, prompt[list(half)], delta))
        slots = np.arange(requests, dtype=np.int32)
        got = batch.step(slots, case["computed"], case["scheduled"])
        np.testing.assert_array_equal(got, case["pos"][list(half)], name)
        assert (batch.buffer[:, got.shape[1] :] == -1).all()
