"""The soak of the serving loop, shortened; and that it sees what it is there for."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from benchmarks import soak_serving
from jrope.demo.paged_cache import PageBook
from jrope.positions import BatchPositions


@pytest.mark.parametrize("producers", [0, 4])
def test_hundreds_of_steps_recompile_nothing_and_turn_as_they_should(producers):
    found = soak_serving.soak(steps=300, producers=producers)
    assert found.wrong == 0
    assert found.recompiles == 0
    assert found.steps >= 300 and found.checked > 10 * found.steps
    # Flat within 2 % is for the long run: this one is hardly past its warm-up.
    assert abs(found.growth) < 0.1


def test_arrays_that_are_filled_again_while_they_are_read_are_seen():
    found = soak_serving.soak(steps=100, producers=0, hand_over=lambda array: array)
    assert found.wrong > 0
    assert not found.ok


def test_wrong_positions_of_a_step_are_seen(monkeypatch):
    step = BatchPositions.step

    def shifted(self: BatchPositions, *columns: Any) -> np.ndarray:
        return step(self, *columns) + (columns[1] > 100).any()

    monkeypatch.setattr(BatchPositions, "step", shifted)
    assert soak_serving.soak(steps=100, producers=0).wrong > 0


def test_wrong_plans_of_a_thread_are_raised(monkeypatch):
    right = soak_serving.reference_positions

    def other(request: Any, length: int) -> list[tuple[int, int, int]]:
        return [(0, 0, 0), *right(request, length)[:-1]]

    monkeypatch.setattr(soak_serving, "reference_positions", other)
    for producers in (0, 2):
        with pytest.raises(AssertionError, match="other positions than the reference"):
            soak_serving.soak(steps=10, producers=producers)


def test_programs_that_are_compiled_while_serving_are_counted(monkeypatch):
    import jax

    publish = PageBook.publish

    def compiling(self: PageBook, prompt: Any, pages: Any) -> None:
        jax.jit(lambda x: x + len(prompt))(1.0)
        publish(self, prompt, pages)

    monkeypatch.setattr(PageBook, "publish", compiling)
    found = soak_serving.soak(steps=50, producers=0)
    assert found.recompiles > 0 and not found.ok


FOUND = soak_serving.Found(
    producers=0,
    steps=1,
    requests=1,
    checked=1,
    wrong=0,
    recompiles=0,
    resident_bytes_before=1000,
    resident_bytes_after=1019,
    seconds=1.0,
)


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"wrong": 1}, False),
        ({"recompiles": 1}, False),
        ({"resident_bytes_after": 1030}, False),
        ({"resident_bytes_after": 970}, False),
    ],
)
def test_what_a_run_must_be(monkeypatch, capsys, change, ok):
    found = dataclasses.replace(FOUND, **change)
    assert found.ok == ok
    monkeypatch.setattr(soak_serving, "soak", lambda **_: found)
    assert soak_serving.main(["--json"]) == (not ok)
    rows = json.loads(capsys.readouterr().out)["cells"]
    assert [row["wrong"] for row in rows] == [found.wrong] * 2
