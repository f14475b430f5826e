"""Starts the tests on the stand-in for a Gaudi plugin, in a process of their own.

A plugin must come before JAX's backends, which the other tests have started. No Gaudi
plugin for JAX is public: tests/stand_in/plugin.py says what poses as one.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hpu
HERE = Path(__file__).parent / "stand_in"


def wheel_is_there():
    """In CI a missing wheel is a failure; elsewhere one line says what was not run."""
    if importlib.util.find_spec("fastatomstruct_xla_cpu") is not None:
        return
    message = "not run: the wheel of tests/stand_in/pins.txt is missing; make hpu"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "JROPE_STAND_IN": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_on_the_stand_in():
    wheel_is_there()
    done = run("-m", "hpu", str(HERE))
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", done.stdout)
    # As many as were written: a run that collects nothing must not look green.
    assert passed and int(passed[1]) >= 44


@pytest.mark.parametrize(("ci", "outcome"), [("true", "failed"), ("", "skipped")])
def test_a_missing_wheel_fails_in_ci_and_is_named_elsewhere(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kinds = {"failed": pytest.fail.Exception, "skipped": pytest.skip.Exception}
    with pytest.raises(kinds[outcome], match="not run: the wheel of .*make hpu"):
        wheel_is_there()


def test_other_runs_leave_the_stand_in_alone():
    done = run("--collect-only", "-q", "-m", "hpu", str(HERE), JROPE_STAND_IN="")
    assert "test_rotation.py" not in done.stdout, done.stdout
