"""M-RoPE in a model: the decoders of Qwen2-VL and Qwen3-VL against transformers' own.

The same random weights, pictures and video; see peers_vl.py. `make peers` runs it.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np
import peers_vl
import pytest
from peers_vl import Reference
from peers_vl_model import PAGE, Model, rope_config
from positions_oracle import random_prompt

from jrope.demo.engine import PagePool
from jrope.demo.paged_cache import PageBook
from jrope.positions import BatchPositions, PositionPlan, plan, spec

pytestmark = pytest.mark.peers

TOLERANCE = 2e-3  # of a logit; right ones agree within 2e-4
FAULT = 0.5  # every fault below moves some logit by more: 1.4 to 22
CHUNK = 7


@functools.cache
def load(family: str) -> tuple[Reference, Model, PositionPlan]:
    """Everything of a family, made once."""
    reference = peers_vl.make_reference(family)
    return reference, Model(reference), make_plan(reference, "hf5")


def make_plan(reference: Reference, advance: Literal["max", "hf5"]) -> PositionPlan:
    prompt = reference.prompt
    return plan(
        spec(reference.family, reference.config),
        prompt.ids,
        image_grid_thw=prompt.grids["image"],
        video_grid_thw=prompt.grids["video"],
        # Where text goes on after a long video: as this version of transformers.
        advance=advance,
    )


def difference(logits: np.ndarray, right: np.ndarray) -> float:
    """The largest of any logit."""
    assert logits.shape == right.shape and np.isfinite(logits).all()
    return float(np.abs(logits - right).max())


@pytest.fixture(params=sorted(peers_vl.SECTIONS))
def loaded(request) -> tuple[Reference, Model, PositionPlan]:
    return load(request.param)


def test_positions_are_those_that_the_model_sees(loaded):
    """In the prompt and, past it, in the steps that decode."""
    reference, _, made = loaded
    through = made.positions(stop=reference.positions.shape[1])
    np.testing.assert_array_equal(through, reference.positions)


@pytest.mark.parametrize("family", sorted(peers_vl.SECTIONS))
def test_positions_and_delta_are_those_of_get_rope_index(family):
    reference, _, made = load(family)
    model, prompt = peers_vl.make_model(family), reference.prompt
    right, delta = peers_vl.rope_index(model, prompt.ids, prompt.types, prompt.grids)
    np.testing.assert_array_equal(made.positions(), right)
    assert made.delta == delta != 0
    for seed in range(200):
        other = random_prompt(family, seed)
        grids = {"image": other.images, "video": other.videos}
        if not other.ids:  # which transformers cannot do
            continue
        planned = plan(
            spec(family),
            np.array(other.ids, np.int32),
            image_grid_thw=np.reshape(other.images, (-1, 3)),
            video_grid_thw=np.reshape(other.videos, (-1, 3)),
            advance="hf5",
        )
        right, delta = peers_vl.rope_index(model, other.ids, other.kinds, grids)
        np.testing.assert_array_equal(planned.positions(), right, f"seed {seed}")
        assert planned.delta == delta


def test_prompt_holds_what_it_should(loaded):
    reference, _, made = loaded
    images, video = (reference.prompt.grids[kind] for kind in ("image", "video"))
    assert len(images) == 2 and len(video) == 1
    assert (images[:, 1] != images[:, 2]).all() and video[0, 0] > video[0, 1] // 2
    assert reference.logits.std() > 1 and np.isfinite(reference.logits).all()
    assert made.num_tokens % CHUNK


def test_logits(loaded):
    reference, model, made = loaded
    logits = model.whole(made.positions(stop=len(reference.logits)))
    assert difference(logits, reference.logits) <= TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), reference.logits.argmax(-1))


def swap_height_and_width(positions: np.ndarray, reference: Reference) -> np.ndarray:
    return positions[[0, 2, 1]]


def swap_time_and_height(positions: np.ndarray, reference: Reference) -> np.ndarray:
    return positions[[1, 0, 2]]


def take_time_for_all(positions: np.ndarray, reference: Reference) -> np.ndarray:
    return positions[[0, 0, 0]]


def count_tokens(positions: np.ndarray, reference: Reference) -> np.ndarray:
    """1-D positions."""
    return np.tile(np.arange(positions.shape[1], dtype=np.int32), (3, 1))


def restart_grids(positions: np.ndarray, reference: Reference) -> np.ndarray:
    made, types = positions.copy(), reference.prompt.types
    edges = np.flatnonzero(np.diff(types, prepend=0, append=0))
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if types[start]:
            made[:, start:stop] -= made[:, start:stop].min()
    return made


def drop_delta(positions: np.ndarray, reference: Reference) -> np.ndarray:
    made, count = positions.copy(), len(reference.prompt.ids)
    made[:, count:] = np.arange(count, made.shape[1], dtype=np.int32)
    return made


FAULTS = (
    swap_height_and_width,
    swap_time_and_height,
    take_time_for_all,
    count_tokens,
    restart_grids,
    drop_delta,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_logits_see_wrong_positions(loaded, fault):
    reference, model, made = loaded
    right = made.positions(stop=len(reference.logits))
    logits = model.whole(fault(right, reference))
    assert difference(logits, reference.logits) > FAULT
    prompt = slice(len(reference.prompt.ids))
    if fault is drop_delta:  # which is for decoding
        assert difference(logits[prompt], reference.logits[prompt]) <= TOLERANCE


def test_logits_see_where_text_goes_on_after_a_long_video():
    reference, model, made = load("qwen2_vl")
    other = make_plan(reference, "max").positions(stop=len(reference.logits))
    video = np.flatnonzero(reference.prompt.types == 2)
    after = video[-1] + 1
    np.testing.assert_array_equal(other[:, :after], made.positions(stop=after))
    logits = model.whole(other)
    assert difference(logits[:after], reference.logits[:after]) <= TOLERANCE
    assert difference(logits[after:], reference.logits[after:]) > FAULT


def test_logits_see_the_other_order_of_axes(loaded):
    reference, model, made = loaded
    section = peers_vl.SECTIONS[reference.family]
    if reference.family == "qwen2_vl":  # by turns, as Qwen3-VL's
        axes = [i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section))]
    else:  # in runs, as Qwen2-VL's
        axes = np.repeat([0, 1, 2], section).tolist()
    right = rope_config(reference)
    assert right.axis_of_frequency != tuple(axes)
    config = dataclasses.replace(right, axis_of_frequency=tuple(axes))
    logits = Model(reference, config).whole(made.positions(stop=len(reference.logits)))
    assert difference(logits, reference.logits) > FAULT


def from_batch(made: PositionPlan):
    """Fills a window as a serving engine does, from the buffer of a batch."""
    batch = BatchPositions(made.spec, 4, max_tokens=CHUNK, max_position=1024)
    batch.add(2, made)

    def fill(out: np.ndarray, start: int, stop: int) -> None:
        out[:, : stop - start] = batch.step([2], [start], [stop - start])

    return fill


@pytest.mark.parametrize("source", ["plan", "batch"])
def test_chunks(loaded, source):
    """In chunks of 7, then token by token, through a paged cache: as the whole."""
    reference, model, made = loaded
    fill = made.fill if source == "plan" else from_batch(made)
    count, end, table = made.num_tokens, len(reference.logits), list(range(model.pages))
    prompt, pool = model.serve(model.pool(), table, fill, range(0, count, CHUNK))
    answer, _ = model.serve(pool, table, fill, range(count, end))
    logits = np.concatenate([prompt, answer])
    assert difference(logits, reference.logits) <= TOLERANCE
    assert difference(logits, model.whole(made.positions(stop=end))) <= TOLERANCE


def test_logits_see_chunks_that_start_anew(loaded):
    reference, model, made = loaded

    def fill(out: np.ndarray, start: int, stop: int) -> None:
        made.fill(out, 0, stop - start)

    tokens = range(0, made.num_tokens, CHUNK)
    logits, _ = model.serve(model.pool(), list(range(model.pages)), fill, tokens)
    assert difference(logits, reference.logits[: made.num_tokens]) > FAULT


@pytest.fixture(scope="module")
def cached():
    """A pool in which another request has computed the same prompt, and its books."""

    @functools.cache
    def compute(family: str) -> tuple[PagePool, PageBook]:
        reference, model, made = load(family)
        book = PageBook(2 * model.pages, PAGE)
        table = [book.take() for _ in range(model.pages)]
        tokens = range(0, made.num_tokens, CHUNK)
        _, pool = model.serve(model.pool(), table, made.fill, tokens)
        book.publish(reference.prompt.ids.tolist(), table)
        return pool, book

    return compute


@pytest.mark.parametrize("pages", [1, 5, 9])
@pytest.mark.parametrize("shift", [0, 1])
def test_prefix_hit(loaded, cached, pages, shift):
    """What follows cached pages is as in the whole, but not one position too far."""
    reference, model, made = loaded
    pool, book = cached(reference.family)
    ids, end = reference.prompt.ids.tolist(), len(reference.logits)
    hit = pages * PAGE
    # The first two end inside a picture and inside the video.
    assert reference.prompt.types[hit] == {1: 1, 5: 2, 9: 0}[pages]
    found = book.match(ids[: hit + 1])
    assert len(found) == pages
    own = [book.take() for _ in range(model.pages - pages)]

    def fill(out: np.ndarray, start: int, stop: int) -> None:
        made.fill(out, start, stop)
        out += shift * (out >= 0)

    prompt, pool = model.serve(pool, found + own, fill, range(hit, len(ids), CHUNK))
    answer, _ = model.serve(pool, found + own, fill, range(len(ids), end))
    book.release(found + own)
    logits = np.concatenate([prompt, answer])
    if shift:
        assert difference(logits, reference.logits[hit:]) > FAULT
    else:
        assert difference(logits, reference.logits[hit:]) <= TOLERANCE
        whole = model.whole(made.positions(stop=end))
        assert difference(logits, whole[hit:]) <= TOLERANCE
