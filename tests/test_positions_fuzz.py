"""Random prompts, against positions that plain Python builds token by token."""

import dataclasses

import numpy as np
import pytest
from fuzzing import CASES, cases
from hypothesis import strategies as st
from positions_oracle import FAMILIES, Prompt, random_prompt

from jrope.positions import (
    BatchPositions,
    PositionError,
    PositionPlan,
    PositionSpec,
    plan,
    plan_from_spans,
    spec,
)
from jrope.positions._jit import INTERPRETED

pytestmark = pytest.mark.fuzz

LAYOUTS = 40 if INTERPRETED else 2 * CASES


def model_of(family: str) -> PositionSpec:
    name, _, whole = family.partition(":")
    return spec(name, fractional=False) if whole else spec(name)


def planned(model: PositionSpec, prompt: Prompt, **options) -> PositionPlan:
    def array(values, dtype, *shape):
        return np.asarray(values, dtype).reshape(-1, *shape) if values else None

    return plan(
        model,
        np.asarray(prompt.ids, np.int32),
        image_grid_thw=array(prompt.images, np.int32, 3),
        video_grid_thw=array(prompt.videos, np.int32, 3),
        second_per_grid_ts=array(prompt.seconds, np.float32),
        audio_lengths=array(prompt.audio, np.int32),
        **options,
    )


def expected(model: PositionSpec, prompt: Prompt) -> np.ndarray:
    rows = np.asarray(prompt.positions, model.dtype).reshape(-1, prompt.axes)
    return rows.T


@pytest.mark.parametrize("family", FAMILIES)
def test_random_layouts(family):
    model = model_of(family)
    media = 0
    for seed in range(LAYOUTS):
        prompt = random_prompt(family, seed)
        made = planned(model, prompt)
        want = expected(model, prompt)
        np.testing.assert_array_equal(made.positions(), want, f"{family} {seed}")
        assert made.max_position == want.max(initial=-1), seed
        if family not in ("hunyuan_vl", "hunyuan_vl_3ax", "glm_image"):
            assert made.delta == prompt.delta, seed
        media += len(prompt.images) + len(prompt.videos) + len(prompt.audio)
        if seed % 8 == 0:
            by_types = planned(model, prompt, token_types=prompt.kinds)
            if family != "glm_image":
                np.testing.assert_array_equal(by_types.positions(), want)
    assert media > LAYOUTS


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "glm4v"])
def test_a_clipped_prompt_has_the_positions_of_its_tokens(family):
    model = model_of(family)
    for seed in range(LAYOUTS // 4):
        prompt = random_prompt(family, seed)
        want = expected(model, prompt)
        keep = (7 * seed) % (want.shape[1] + 1)
        # The delimiters that close a video with its sound share a position only
        # together; a prompt cut between them is text from there on.
        prompt.ids, prompt.positions = prompt.ids[:keep], prompt.positions[:keep]
        made = planned(model, prompt, truncate="clip")
        np.testing.assert_array_equal(made.positions(), want[:, :keep], str(seed))
        assert made.delta == prompt.delta


def spans_with_sound(model: PositionSpec, prompt: Prompt) -> list[list[int]]:
    """Runs of one kind; videos with their sound from delimiter to delimiter."""
    opens = (model.vision_start_token_id, model.audio_start_token_id)
    ids, k, spans = prompt.ids, 0, []
    while k < len(ids):
        stop = k + 1
        if k and (ids[k - 1], ids[k]) == opens:
            stop = ids.index(model.audio_end_token_id, k) + 1
            spans.append([4, k, stop - k])
        elif prompt.kinds[k]:
            while prompt.kinds[stop] == prompt.kinds[k]:
                stop += 1
            spans.append([prompt.kinds[k], k, stop - k])
        k = stop
    return spans


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_videos_with_sound_by_their_spans(family):
    """The order of the two streams is the processor's, also of a part of them."""
    model, both = model_of(family), 0
    for seed in range(LAYOUTS):
        prompt = random_prompt(family, seed)
        spans = spans_with_sound(model, prompt)
        want = expected(model, prompt)
        tokens = want.shape[1]
        for keep in (tokens, (7 * seed) % (tokens + 1)):
            kept = [span for span in spans if span[1] < keep]
            made = plan_from_spans(
                model,
                keep,
                np.array(kept, np.int32).reshape(-1, 3),
                image_grid_thw=prompt.images,
                video_grid_thw=prompt.videos,
                second_per_grid_ts=prompt.seconds,
                audio_lengths=prompt.audio,
                truncate="clip",
            )
            np.testing.assert_array_equal(made.positions(), want[:, :keep], str(seed))
        both += sum(span[0] == 4 for span in spans)
    assert both > LAYOUTS // 4


def with_index(model: PositionSpec) -> PositionSpec:
    """The family with one more row, of indices, if it has none."""
    if model.row_index >= 0:
        return model
    return dataclasses.replace(model, axes=model.axes + 1, row_index=model.axes)


@pytest.mark.parametrize("extended", [False, True], ids=["own rows", "with indices"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_row_passes_the_largest_position(family, extended):
    """Also of prompts that end in a medium, where indices can be the largest."""
    model = with_index(model_of(family)) if extended else model_of(family)
    for seed in range(LAYOUTS // 4):
        prompt = random_prompt(family, seed)
        keep = (7 * seed) % (len(prompt.ids) + 1)
        prompt.ids = prompt.ids[:keep]
        made = planned(model, prompt, truncate="clip")
        positions = made.positions(0, made.num_planned)
        assert made.max_position == positions.max(initial=-1), seed
        if made.max_position < 1:
            continue
        width, rows = made.num_planned, int(made.max_position) + 1
        BatchPositions(model, 1, max_tokens=width, max_position=rows).add(0, made)
        fewer = BatchPositions(model, 1, max_tokens=width, max_position=rows - 1)
        with pytest.raises(PositionError, match="position_beyond_table"):
            fewer.add(0, made)


STEP = st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(0, 25))


@cases(
    st.lists(STEP, max_size=6),
    st.integers(0, 10_000),
    st.integers(0, 2),
    count=30 if INTERPRETED else CASES,
)
def test_random_steps_of_random_batches(rows, seed, which):
    family = ("qwen2_5_vl", "hunyuan_vl", "qwen3_omni_moe")[which]
    model = model_of(family)
    batch = BatchPositions(model, 6, max_tokens=150, max_position=10_000, headroom=8)
    wholes = []
    for slot in range(6):
        prompt = random_prompt(family, seed + slot)
        made = planned(model, prompt)
        batch.add(slot, made)
        prompt_part = expected(model, prompt)
        tail = np.arange(len(prompt.ids), len(prompt.ids) + 90) + made.delta
        tail = np.broadcast_to(tail.astype(model.dtype), (prompt.axes, 90))
        wholes.append(np.concatenate([prompt_part, tail], axis=1))
    batch.swap(0, 5)
    wholes[0], wholes[5] = wholes[5], wholes[0]
    windows = [(slot, computed, count) for slot, computed, count in rows]
    for chosen in (windows, windows[:2], [(s, c, 1) for s, c, _ in windows]):
        columns = np.asarray(chosen, np.int32).reshape(-1, 3).T.copy()
        got = batch.step(*columns)
        parts = [wholes[s][:, c : c + n] for s, c, n in chosen]
        want = np.concatenate([np.empty((model.axes, 0), model.dtype), *parts], axis=1)
        np.testing.assert_array_equal(got, want)
        assert (batch.buffer[:, want.shape[1] :] == -1).all()
