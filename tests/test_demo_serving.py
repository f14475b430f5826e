"""The demo's host half: page book, scheduler, faults, figures; no weights."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence

import numpy as np
import pytest

from jrope.demo.engine import Batch, StepResult
from jrope.demo.faults import FAULTS, Fault, FaultError, StepFacts
from jrope.demo.figures import Memory, Seconds, make_figures
from jrope.demo.paged_cache import OutOfPagesError, PageBook
from jrope.demo.prompts import make_requests
from jrope.demo.scheduler import Request, RequestError, Scheduler, Totals
from jrope.demo.selfcheck import GoldenResult, ServedResult
from jrope.demo.weights import (
    CHECKPOINTS,
    ModelName,
)


def successor(sequence: list[int]) -> int:
    """A token that depends on every one before it."""
    text = ",".join(map(str, sequence))
    return int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) % 50


class PaperEngine:
    """Keeps tokens where a real engine keeps keys, and reads them back by table."""

    def __init__(
        self, *, slots: int, chunk: int, pages: int, page_size: int, context: int
    ):
        self.shapes = {"prefill": (1, chunk), "decode": (slots, 1)}
        self.context = context
        self.page_size = page_size
        self.memory = np.full((pages, page_size), -1)
        self.seen_shapes: set[tuple[int, ...]] = set()

    def empty_batch(self, shape: tuple[int, int]) -> Batch:
        table = np.zeros((shape[0], self.context // self.page_size), np.int32)
        nowhere = np.full(shape, -1, np.int32)
        return Batch(np.zeros(shape, np.int32), nowhere, nowhere.copy(), table)

    def run(self, batch: Batch) -> StepResult:
        self.seen_shapes.add(batch.tokens.shape)
        tokens = np.zeros(len(batch.tokens), np.int32)
        for row, (ids, positions) in enumerate(
            zip(batch.tokens, batch.positions, strict=True)
        ):
            for token, position in zip(ids, positions, strict=True):
                if position >= 0:
                    self.memory[self._place(batch.table[row], position)] = token
            last = positions.max()
            if last >= 0:
                places = (self._place(batch.table[row], p) for p in range(last + 1))
                tokens[row] = successor([int(self.memory[place]) for place in places])
        return StepResult(tokens, np.zeros((len(tokens), 1), np.float32))

    def _place(self, table: np.ndarray, position: int) -> tuple[int, int]:
        return table[position // self.page_size], position % self.page_size


def one_pass(prompt: list[int], new_tokens: int, stop: frozenset[int]) -> list[int]:
    sequence, output = list(prompt), []
    while len(output) < new_tokens and not (output and output[-1] in stop):
        output.append(successor(sequence))
        sequence.append(output[-1])
    return output


def make_request(name: int, prompt: list[int], arrival: int = 0) -> Request:
    return Request(name=name, text=str(name), prompt=prompt, arrival=arrival)


@pytest.mark.parametrize("seed", range(30))
def test_random_scripts_give_the_answers_of_one_pass_and_leak_no_page(seed: int):
    rng = np.random.default_rng(seed)
    page_size, context = int(rng.integers(1, 9)), 72
    context -= context % page_size
    slots, chunk = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    pages = context // page_size + int(rng.integers(0, 40))  # often too few for all
    engine = PaperEngine(
        slots=slots, chunk=chunk, pages=pages, page_size=page_size, context=context
    )
    shared = rng.integers(0, 50, 40).tolist()
    requests = [
        make_request(
            name,
            shared[: rng.integers(0, 40)] + rng.integers(0, 50, 9).tolist(),
            arrival=int(rng.integers(0, 200)),
        )
        for name in range(12)
    ]
    book, stop = PageBook(pages, page_size), frozenset({7, 8})
    Scheduler(engine, book, requests, new_tokens=8, stop=stop).run(lambda _: None)
    for request in requests:
        assert request.output == one_pass(request.prompt, 8, stop)
    assert book.available == pages
    assert engine.seen_shapes <= {(1, chunk), (slots, 1)}
    taken = {book.take() for _ in range(pages)}
    assert taken == set(range(pages))


def test_later_readers_of_a_document_find_its_pages():
    engine = PaperEngine(slots=2, chunk=8, pages=40, page_size=4, context=64)
    document = list(range(30))
    requests = [make_request(0, [*document, 1]), make_request(1, [*document, 2], 31)]
    scheduler = Scheduler(engine, PageBook(40, 4), requests, new_tokens=3)
    scheduler.run(lambda _: None)
    assert requests[1].hit_tokens == 28
    assert scheduler.totals.hit_tokens == 28
    assert scheduler.totals.prefill_tokens == 31 + 3


def test_a_request_finds_only_what_is_computed_when_it_comes():
    engine = PaperEngine(slots=2, chunk=8, pages=40, page_size=4, context=64)
    document = list(range(30))
    requests = [make_request(0, [*document, 1]), make_request(1, [*document, 2], 8)]
    Scheduler(engine, PageBook(40, 4), requests, new_tokens=3).run(lambda _: None)
    assert requests[1].hit_tokens == 8
    assert requests[1].output == one_pass([*document, 2], 3, frozenset())


def test_requests_decode_together_and_are_served_in_turn():
    engine = PaperEngine(slots=2, chunk=8, pages=40, page_size=4, context=64)
    requests = [make_request(name, [name] * 5) for name in range(3)]
    scheduler = Scheduler(engine, PageBook(40, 4), requests, new_tokens=6)
    scheduler.run(lambda _: None)
    assert scheduler.totals.decode_steps < 3 * 5
    starts = [request.admitted for request in requests]
    assert starts == sorted(starts)
    assert requests[2].admitted >= min(requests[0].finished, requests[1].finished)


def test_requests_that_cannot_be_served_are_refused():
    engine = PaperEngine(slots=1, chunk=8, pages=4, page_size=4, context=32)
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        Scheduler(engine, PageBook(8, 4), [make_request(0, [])], new_tokens=1)
    with pytest.raises(RequestError, match="context of 32 .* got 30 tokens"):
        Scheduler(engine, PageBook(8, 4), [make_request(0, [1] * 30)], new_tokens=3)
    with pytest.raises(RequestError, match="needs 5 pages, the pool has 4"):
        Scheduler(engine, PageBook(4, 4), [make_request(0, [1] * 15)], new_tokens=3)


def test_a_shared_page_stays_until_its_last_user_leaves():
    book = PageBook(2, 2)
    pages = [book.take(), book.take()]
    book.publish([1, 2, 3, 4], pages)
    assert book.match([1, 2, 9]) == pages[:1]
    book.release(pages)
    assert book.available == 1
    assert book.take() == pages[1]
    with pytest.raises(OutOfPagesError, match="all 2 pages are in use"):
        book.take()
    book.release(pages[:1])
    assert book.available == 1


def test_the_page_that_waited_longest_goes_first_and_is_forgotten():
    book = PageBook(3, 2)
    first, second, third = book.take(), book.take(), book.take()
    book.publish([1, 1], [first])
    book.publish([2, 2], [second])
    book.release([first])
    book.release([second])
    assert book.match([1, 1, 5]) == [first]  # used again, so second is the oldest
    book.release([first])
    assert book.take() == second
    assert book.match([2, 2, 5]) == []
    assert book.match([1, 1, 5]) == [first]
    book.release([first, second, third])
    assert book.available == 3


def test_a_prefix_is_lost_from_its_end():
    book = PageBook(3, 1)
    pages = [book.take() for _ in range(3)]
    book.publish([1, 2, 3], pages)
    book.release(pages)
    assert book.take() == pages[2]
    assert book.match([1, 2, 3, 4]) == pages[:2]


def test_a_page_is_known_by_all_tokens_before_it():
    book = PageBook(4, 2)
    pages = [book.take(), book.take()]
    book.publish([1, 2, 3, 4], pages)
    assert book.match([9, 9, 3, 4, 5]) == []
    assert book.match([1, 2, 3, 4]) == pages[:1]  # a token must be left to compute
    assert book.match([1, 2, 3, 4, 5]) == pages


def test_a_second_copy_of_a_prefix_changes_nothing():
    book = PageBook(2, 1)
    first, second = book.take(), book.take()
    book.publish([1], [first])
    book.publish([1], [second])
    book.release([second])
    assert book.match([1, 2]) == [first]


def test_a_page_is_not_released_twice():
    book = PageBook(1, 1)
    page = book.take()
    book.release([page])
    with pytest.raises(ValueError, match="released but nobody uses it"):
        book.release([page])


@pytest.mark.parametrize(
    ("name", "step", "shift"),
    [
        ("chunk+1", StepFacts(chunk=2, prefix_hit=False, decoding=False), 2),
        ("chunk+1", StepFacts(chunk=2, prefix_hit=False, decoding=True), 0),
        ("prefix+1", StepFacts(chunk=2, prefix_hit=True, decoding=False), 1),
        ("prefix+1", StepFacts(chunk=2, prefix_hit=False, decoding=False), 0),
        ("decode+1", StepFacts(chunk=2, prefix_hit=True, decoding=True), 1),
        ("decode+1", StepFacts(chunk=2, prefix_hit=True, decoding=False), 0),
    ],
)
def test_faults_move_positions_and_leave_padding(name, step: StepFacts, shift: int):
    fault = FAULTS[name]()
    moved = fault.move(np.array([-1, 0, 5], np.int32), step)
    assert moved.tolist() == [-1, shift, 5 + shift]
    assert fault.happened == (shift != 0)


def test_no_fault_changes_nothing():
    fault = Fault()
    step = StepFacts(chunk=3, prefix_hit=True, decoding=True)
    assert fault.move(np.array([4], np.int32), step).tolist() == [4]
    assert fault.change_configs({}) == {}
    assert not fault.happened


def test_local_base_needs_a_second_base():
    with pytest.raises(FaultError, match="one base only"):
        FAULTS["local-base"]().change_configs({"full_attention": None})  # type: ignore[dict-item]


class OneTokenAWord:
    """A tokenizer, but a simple one."""

    stop = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [1 + len(word) for word in text.split()]

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("model", sorted(CHECKPOINTS))
def test_own_prompts_come_first_and_all_others_over_time(model: ModelName):
    requests = make_requests(model, OneTokenAWord(), ["my own", "another"])
    assert [request.text for request in requests[:2]] == ["my own", "another"]
    arrivals = [request.arrival for request in requests]
    assert arrivals[:4] == [0, 0, 0, 0]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 9
    shared = os.path.commonprefix([requests[2].prompt, requests[4].prompt])
    assert len(shared) > 200


def test_figures_of_a_run_gone_wrong_are_json_and_fail():
    request = make_request(0, [1] * 200)
    golden = GoldenResult(difference=math.nan, argmax_equal=1, tokens=1, same_ids=True)
    right = ServedResult(difference=1e-5, agreeing=2, tokens=2)
    figures = make_figures(
        model="smollm2",
        broken="pairing",
        golden=golden,
        redone=[right],
        programs=2,
        recompiles=0,
        requests=[request],
        totals=Totals(),
        memory=Memory(weights=1, rope_tables=1, page_pool=1, peak_resident=None),
        seconds=Seconds(load=1, compile=1, serve=1, check=1, total=4),
    )
    assert not figures.ok
    got = json.loads(figures.to_json())
    assert got["self_check"] == "fail"
    assert got["golden_logit_difference"] is None
    assert got["seconds_to_first_token_with_hit"] is None
    fine = dataclasses.replace(figures, self_check="ok")
    assert fine.ok
    assert not dataclasses.replace(fine, recompiles_after_warmup=1).ok
