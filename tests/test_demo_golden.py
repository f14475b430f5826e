"""The demo on real weights: golden logits, serving, and faults that must be seen."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jrope.nnx
from jrope.demo import __main__ as demo
from jrope.demo.engine import CompileCounter, Engine
from jrope.demo.faults import FAULTS, Fault
from jrope.demo.gguf_file import GgufFile
from jrope.demo.model import Decoder
from jrope.demo.paged_cache import PageBook
from jrope.demo.prompts import make_requests, sample_text
from jrope.demo.scheduler import Request, Scheduler
from jrope.demo.selfcheck import TOLERANCE, SelfCheck
from jrope.demo.spec import read_spec
from jrope.demo.tokenizer import Tokenizer, make_tokenizer
from jrope.demo.weights import CHECKPOINTS, ModelName, WeightsError, load_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    name: ModelName
    model: Decoder
    tokenizer: Tokenizer


def load_file(name: ModelName) -> GgufFile:
    """In CI both models must be there; elsewhere a missing one is skipped."""
    try:
        return GgufFile(load_bytes(CHECKPOINTS[name]))
    except WeightsError as error:
        if error.kind == "missing" and os.environ.get("CI") != "true":
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def load() -> Callable[[ModelName], Loaded]:
    """Loads each model once."""

    @functools.cache
    def load_once(name: ModelName) -> Loaded:
        file = load_file(name)
        spec = read_spec(file.metadata)

        def fetch(tensor: str) -> np.ndarray:
            return file.tensors[tensor].to_float32()

        model = Decoder(fetch, spec, spec.rope_configs())
        return Loaded(name=name, model=model, tokenizer=make_tokenizer(file.metadata))

    return load_once


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def loaded(request: pytest.FixtureRequest, load) -> Loaded:
    return load(request.param)


@pytest.fixture(scope="module")
def smollm2(load) -> Loaded:
    return load("smollm2")


def test_logits_are_those_of_transformers(loaded: Loaded):
    golden = SelfCheck(loaded.model).golden(loaded.name, loaded.tokenizer)
    assert golden.difference <= TOLERANCE
    assert golden.argmax_equal == golden.tokens > 570
    assert golden.same_ids
    assert golden.ok


def test_golden_logits_see_the_wrong_base_on_local_layers(load):
    gemma3: Loaded = load("gemma3")
    configs = FAULTS["local-base"]().change_configs(gemma3.model.spec.rope_configs())
    broken = nnx.merge(*nnx.split(gemma3.model))  # shares the weights
    broken.rotary = nnx.Dict(
        {kind: jrope.nnx.RotaryEmbedding(config) for kind, config in configs.items()}
    )
    golden = SelfCheck(broken).golden("gemma3", gemma3.tokenizer)
    assert golden.difference > 1.0
    assert golden.argmax_equal < golden.tokens
    assert not golden.ok


@pytest.mark.parametrize(
    "text", ["", " ", "a  b\n\n c", "na\u00efve \u2603 \U0001f9a9 2024", sample_text()]
)
def test_text_survives_the_tokenizer(loaded: Loaded, text: str):
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text


def test_rotary_tables_are_no_parameters(loaded: Loaded):
    tables = nnx.state(loaded.model, jrope.nnx.RotaryCache)
    kinds = len(loaded.model.spec.rope_configs())
    assert len(nnx.to_flat_state(tables)) == kinds == (1, 2)[loaded.name == "gemma3"]
    names = {
        path[0] for path, _ in nnx.to_flat_state(nnx.state(loaded.model, nnx.Param))
    }
    assert names == {"embedding", "norm", "blocks"}


@pytest.fixture(scope="module")
def engine(smollm2: Loaded) -> Engine:
    made = Engine(smollm2.model, slots=2, chunk=96, pages=40, page_size=32, context=384)
    made.compile("prefill")
    made.compile("decode")
    return made


@pytest.fixture(scope="module")
def checker(smollm2: Loaded) -> SelfCheck:
    return SelfCheck(smollm2.model)


def two_readers(loaded: Loaded) -> list[Request]:
    """The first two readers of the document."""
    first, _, second, *_ = make_requests(loaded.name, loaded.tokenizer)
    return [first, second]


@pytest.mark.parametrize("name", [None, "chunk+1", "prefix+1", "decode+1"])
def test_check_sees_faults_that_leave_answers_right(
    smollm2: Loaded, engine: Engine, checker: SelfCheck, name
):
    fault = FAULTS[name]() if name else Fault()
    requests = two_readers(smollm2)
    scheduler = Scheduler(
        engine, PageBook(engine.pages, 32), requests, new_tokens=4, fault=fault
    )
    with CompileCounter() as compiles:
        scheduler.run(lambda _: None)
    assert compiles.count == 0
    assert engine.programs == 2
    assert scheduler.totals.hit_tokens > 0
    assert fault.happened == (name is not None)
    worst = max(checker.served(request).difference for request in requests)
    if name is None:
        assert worst <= TOLERANCE
    else:
        assert worst > 20 * TOLERANCE


def run_main(
    monkeypatch, capsys, asked: slice, *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Runs the command line with some of its ten requests."""
    load_file("smollm2")
    monkeypatch.setattr(demo, "make_requests", lambda *all: make_requests(*all)[asked])
    code = demo.main(["--json", "--new-tokens", "3", "--slots", "2", *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_main_is_fine(monkeypatch, capsys):
    code, figures = run_main(monkeypatch, capsys, slice(0, 3, 2))
    assert code == 0
    assert figures["self_check"] == "ok"
    assert figures["recompiles_after_warmup"] == 0
    assert figures["programs"] == 2
    assert figures["requests"] == 2
    assert figures["prefix_hit_tokens"] == 288
    assert figures["worst_logit_difference"] <= TOLERANCE
    assert figures["golden_logit_difference"] <= TOLERANCE


def test_main_fails_when_broken_on_purpose(monkeypatch, capsys):
    code, figures = run_main(monkeypatch, capsys, slice(1, 2), "--break", "pairing")
    assert code == 1
    assert figures["self_check"] == "fail"
    assert figures["golden_argmax_equal"] < figures["golden_tokens"]
    assert figures["worst_logit_difference"] > 1.0


def test_main_says_when_a_fault_cannot_show(capsys):
    load_file("smollm2")
    assert demo.main(["--break", "local-base"]) == 2
    assert "--break local-base cannot show" in capsys.readouterr().err


def test_main_refuses_a_prompt_longer_than_the_context(capsys):
    load_file("smollm2")
    assert demo.main(["--prompt", "word " * 800]) == 2
    assert "prompt 0 must fit the context of 768" in capsys.readouterr().err
