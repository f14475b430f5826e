"""tiny-qwen2-vl, served: pictures through M-RoPE, and faults that must be seen."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jrope import RopeConfig
from jrope.demo import __main__ as demo
from jrope.demo import requests as requests_module
from jrope.demo import tiny
from jrope.demo.engine import CompileCounter, Engine
from jrope.demo.faults import FAULTS, Fault, FaultError, FaultName, StepFacts
from jrope.demo.media import MediaRows
from jrope.demo.model import Decoder, Linear, NoMemory
from jrope.demo.paged_cache import PageBook
from jrope.demo.prompts import make_requests
from jrope.demo.reference import reference_positions
from jrope.demo.requests import Request
from jrope.demo.scheduler import Scheduler, Totals
from jrope.demo.selfcheck import TOLERANCE, SelfCheck
from jrope.demo.sources import SOURCES
from jrope.demo.tiny import ByteTokenizer, Picture, encode_parts

MEDIA_FAULTS: tuple[FaultName, ...] = (
    "axes-swapped",
    "delta-dropped",
    "grid-restarted",
)
# Some of the ten requests. The street has the harbour's grid, so the same token ids.
FILM, HARBOUR, HARBOUR_AGAIN, STREET, FILM_AGAIN = 0, 2, 4, 5, 6


@pytest.fixture(scope="module")
def model() -> Decoder:
    parts = SOURCES["tiny-qwen2-vl"].read(None, lambda *_: None)
    return Decoder(parts.fetch, parts.spec, parts.spec.rope_configs())


@pytest.fixture(scope="module")
def engine(model: Decoder) -> Engine:
    made = Engine(model, slots=3, chunk=40, pages=80, page_size=32, context=512)
    made.compile("prefill")
    made.compile("decode")
    return made


@pytest.fixture(scope="module")
def checker(model: Decoder) -> SelfCheck:
    return SelfCheck(model)


def serve(engine: Engine, fault: Fault | None = None) -> tuple[list[Request], Totals]:
    """Serves the demo's ten requests."""
    requests = make_requests("tiny-qwen2-vl", ByteTokenizer())
    scheduler = Scheduler(
        engine,
        PageBook(engine.pages, engine.page_size),
        requests,
        new_tokens=6,
        positions=tiny.POSITIONS,
        fault=fault,
    )
    scheduler.run(lambda _: None)
    return requests, scheduler.totals


def test_every_sequence_is_its_one_pass_and_nothing_is_compiled(
    engine: Engine, checker: SelfCheck
):
    with CompileCounter() as compiles:
        requests, totals = serve(engine)
    assert compiles.count == 0
    assert engine.programs == 2
    results = [checker.served(request) for request in requests]
    assert max(result.difference for result in results) <= TOLERANCE
    assert all(result.ok for result in results)
    media = [medium for request in requests for medium in request.media]
    assert {medium.kind for medium in media} == {"image", "video"}
    assert len({medium.grid_thw for medium in media}) == 5
    assert any(not request.media for request in requests)
    assert totals.media_cuts > 10
    assert totals.decode_steps < 6 * len(requests)  # they decode together


def test_the_run_that_is_checked_is_not_blind(engine: Engine):
    requests, _ = serve(engine)
    samples = np.concatenate([request.samples for request in requests])
    assert samples.std() > 1.0  # logits far apart: not the flat ones of small weights
    harbour, street = requests[HARBOUR], requests[STREET]
    assert harbour.prompt == street.prompt
    apart = np.abs(np.stack(harbour.samples) - np.stack(street.samples)).max()
    assert apart > 1.0  # what is in a picture counts


@pytest.mark.parametrize("name", MEDIA_FAULTS)
def test_check_sees_every_fault_of_mrope(
    engine: Engine, checker: SelfCheck, name: FaultName
):
    fault = FAULTS[name]()
    requests, _ = serve(engine, fault)
    assert fault.happened
    for request in requests:
        difference = checker.served(request).difference
        if request.media:
            assert difference > 100 * TOLERANCE
        else:
            assert difference <= TOLERANCE


@pytest.mark.parametrize("name", ["chunk+1", "prefix+1", "decode+1"])
def test_check_sees_the_faults_of_all_models(
    engine: Engine, checker: SelfCheck, name: FaultName
):
    requests, _ = serve(engine, FAULTS[name]())
    assert max(checker.served(each).difference for each in requests) > 100 * TOLERANCE


def test_a_picture_shown_again_is_found_and_another_is_not(engine: Engine):
    requests, _ = serve(engine)
    for again in (HARBOUR_AGAIN, FILM_AGAIN):
        request = requests[again]
        assert request.hit_tokens > request.media[0].start + engine.page_size
    street = requests[STREET]
    assert 0 < street.hit_tokens <= street.media[0].start


def test_a_cache_that_went_by_token_ids_would_be_seen(
    engine: Engine, checker: SelfCheck, monkeypatch
):
    monkeypatch.setattr(requests_module, "cache_keys", lambda prompt, _: list(prompt))
    requests, _ = serve(engine)
    street = requests[STREET]
    assert street.hit_tokens > street.media[0].start + engine.page_size
    assert checker.served(street).difference > 100 * TOLERANCE


def test_a_medium_is_known_by_all_that_it_is():
    image = Picture(kind="image", grid_thw=(1, 4, 8), seed=1).placed(3)
    assert Picture(kind="image", grid_thw=(1, 4, 8), seed=1).placed(9).identity == (
        image.identity
    )
    others = [
        dataclasses.replace(image, kind="video"),
        dataclasses.replace(image, grid_thw=(1, 8, 4)),
        dataclasses.replace(image, features=image.features + np.float32(1)),
    ]
    assert image.identity not in {other.identity for other in others}
    assert image.identity < 0  # so no token's id


# Image: one frame of 2 x 3 tokens. Video: three frames of 1 x 2. Worked out by hand.
BY_HAND = [
    *[(0, 0, 0), (1, 1, 1)],
    *[(2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)],
    *[(5, 5, 5), (6, 6, 6), (7, 7, 7)],
    *[(8, 8, 8), (8, 8, 9), (9, 8, 8), (9, 8, 9), (10, 8, 8), (10, 8, 9)],
    *[(11, 11, 11), (12, 12, 12), (13, 13, 13)],
]


def hand_request() -> Request:
    image = Picture(kind="image", grid_thw=(1, 4, 6), seed=1)
    video = Picture(kind="video", grid_thw=(3, 2, 4), seed=2)
    ids, media = encode_parts(("a", image, "b", video), ByteTokenizer())
    return Request(name=0, text="", prompt=ids, arrival=0, media=media)


def test_reference_and_plan_have_the_positions_worked_out_by_hand():
    request = hand_request()
    request.make_plan(tiny.POSITIONS)
    assert len(request.prompt) == 18
    assert request.plan.delta == -6
    assert reference_positions(request, 20) == BY_HAND
    planned = request.plan.positions(0, 20).T
    assert [tuple(row) for row in planned.tolist()] == BY_HAND


def test_media_come_in_windows_as_they_come_whole():
    request = hand_request()
    whole = MediaRows.empty((1, 18), tiny.SPEC.width)
    whole.write(0, request.media, 0, 18)
    assert whole.is_media[0].nonzero()[0].tolist() == [*range(2, 8), *range(11, 17)]
    first, second = request.media
    np.testing.assert_array_equal(whole.features[0, 2:8], first.features)
    np.testing.assert_array_equal(whole.features[0, 11:17], second.features)
    for start in range(18):
        for stop in range(start + 1, 19):
            part = MediaRows.empty((2, 18), tiny.SPEC.width)
            part.write(1, request.media, start, stop)
            columns = slice(0, stop - start)
            for got, wanted in zip(part, whole, strict=True):
                assert not got[0].any()
                np.testing.assert_array_equal(got[1, columns], wanted[0, start:stop])
                assert not got[1, stop - start :].any()


def test_faults_of_media_move_positions_as_they_say():
    step = StepFacts(
        chunk=0,
        prefix_hit=False,
        decoding=True,
        delta=-6,
        grid_starts=np.array([0, 8, 8], np.int32),
    )
    positions = np.array([[7, 8, 9], [7, 8, 8], [7, 8, 10]], np.int32)
    moved = {name: FAULTS[name]().move(positions, step) for name in MEDIA_FAULTS}
    assert moved["axes-swapped"].tolist() == [[7, 8, 9], [7, 8, 10], [7, 8, 8]]
    assert moved["delta-dropped"].tolist() == (positions + 6).tolist()
    assert moved["grid-restarted"].tolist() == [[7, 0, 1], [7, 0, 0], [7, 0, 2]]
    reading = dataclasses.replace(step, decoding=False)
    still = FAULTS["delta-dropped"]()
    assert still.move(positions, reading).tolist() == positions.tolist()
    assert not still.happened


@pytest.mark.parametrize("name", MEDIA_FAULTS)
def test_faults_of_media_need_positions_with_axes(name: FaultName):
    config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=8)
    with pytest.raises(FaultError, match=r"one axis only; try --model tiny-qwen2-vl"):
        FAULTS[name]().change_configs({"full_attention": config})


def test_a_linear_layer_adds_its_bias():
    tensors = {
        "x.weight": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
        "x.bias": np.array([10, 20, 30], np.float32),
    }
    x = jnp.array([[[1.0, -1.0]]])
    assert Linear(tensors.__getitem__, "x", has_bias=True)(x).tolist() == [
        [[9.0, 19.0, 29.0]]
    ]
    assert Linear(tensors.__getitem__, "x")(x).tolist() == [[[-1.0, -1.0, -1.0]]]


def test_deepstack_is_for_models_that_have_it(model: Decoder):
    x, positions = jnp.zeros((1, 1, tiny.SPEC.width)), jnp.zeros((1, 1), jnp.int32)
    rotations = model.rotations(jnp.zeros((3, 1, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"deepstack_layers = 0, got 1"):
        model(x, positions, NoMemory(), rotations, deepstack=(x,))


def run_main(capsys, *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = demo.main(["--model", "tiny-qwen2-vl", "--json", *arguments])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out else {}, err


def test_main_is_fine_and_says_that_there_is_nothing_golden(capsys):
    code, figures, shown = run_main(capsys, "--new-tokens", "4", "--prompt", "Hello?")
    assert code == 0
    assert figures["self_check"] == "ok"
    assert figures["golden"] == "none"
    assert figures["golden_logit_difference"] is None
    assert figures["golden_argmax_equal"] is figures["golden_tokens"] is None
    assert figures["recompiles_after_warmup"] == 0
    assert figures["programs"] == 2
    assert figures["requests"] == 11
    assert figures["images"] == 8
    assert figures["videos"] == 3
    assert figures["media_tokens"] > 1000
    assert figures["prefix_hit_tokens"] > 500
    assert figures["worst_logit_difference"] <= TOLERANCE
    assert "golden logits: none" in shown
    assert "no vision tower" in " ".join(shown.split())


def test_main_fails_when_broken_on_purpose(capsys):
    code, figures, _ = run_main(capsys, "--break", "axes-swapped")
    assert code == 1
    assert figures["self_check"] == "fail"
    assert figures["worst_logit_difference"] > 1.0


def test_main_says_when_a_fault_had_no_occasion(monkeypatch, capsys):
    def only_text(*arguments):
        return [each for each in make_requests(*arguments) if not each.media]

    monkeypatch.setattr(demo, "make_requests", only_text)
    code, figures, err = run_main(capsys, "--break", "grid-restarted")
    assert code == 2
    assert not figures
    assert "cannot show: no prompt had an image or a video" in err


def test_a_model_without_a_file_takes_none(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--model", "tiny-qwen2-vl", "--gguf", "some.gguf"])
    assert stopped.value.code == 2
    assert "--gguf is for models that come as a file" in capsys.readouterr().err
