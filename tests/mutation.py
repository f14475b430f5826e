"""How many mutants the tests kill: `make mutants`; the score is in CONTRIBUTING.md.

A mutant is killed when a test fails, or does not end. Each runs in a copy of the
project and in a process of its own, forked from one that has loaded jax, numba and
pytest but nothing of jrope. No compiled file is kept, by Python or by numba: it could
hide a mutant.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence

from mutants import Mutant, drawn, made, mutants_of

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("jrope", "pallas_kernels", "tests", "pyproject.toml")
# A mutant of a size may ask for all there is.
MEMORY = 12 << 30
# A test that takes so much longer than the slowest one took before does not end.
PATIENCE = 3.0
# Seconds for all tests of a stage, also where nothing is computed.
WHOLE_RUN = 900


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Tests that look for a fault, the quickest to fail first.

    Args:
      arguments: of pytest.
      interpreted: whether kernels run as plain Python.
      compiled_ones: whether it is for mutants that only a compiler reads, or for those
        that also Python does.
    """

    arguments: tuple[str, ...]
    interpreted: bool = False
    compiled_ones: bool = False

    def takes(self, mutant: Mutant) -> bool:
        """Whether the stage is for the mutant."""
        decorates = "RemoveDecorator" in mutant.operator
        compiled = pathlib.Path(mutant.path).name in ("_arguments.py", "_jit.py")
        in_kernels = "/positions/" in mutant.path
        return (compiled or (decorates and in_kernels)) is self.compiled_ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Files that are scored together.

    Args:
      files: patterns, from the project's folder.
      stages: a mutant that survives one goes on to the next.
      sample: places drawn.
    """

    files: tuple[str, ...]
    stages: tuple[Stage, ...]
    sample: int


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_{name}.py" for name in names)


_KERNELS = ("positions", "positions_arguments", "positions_messages", "positions_spec")
# Routes and widths that share all of the definition's lines would only cost time.
_LEFT_OUT = ("cpu_inplace", "composite", "pallas", "96", "128", "192", "256")
_DEFINITION = ("-k", " and ".join(f"not {word}" for word in _LEFT_OUT))
GROUPS = {
    "scalings": Group(
        files=("jrope/scalings/*.py",),
        stages=(
            Stage(
                arguments=(
                    *_tests("scaling", "scaling_limits"),
                    "jrope/scalings",
                    *_tests("hf", "reported_config", "fuzz_configs"),
                )
            ),
            Stage(
                arguments=_tests(
                    *("reported_scaling", "explain", "hostile_config", "hf_models"),
                    "exactness",
                )
            ),
        ),
        sample=120,
    ),
    "layout and rotate": Group(
        files=("jrope/_layout.py", "jrope/_rotate.py"),
        stages=(
            Stage(
                arguments=(
                    *_tests("layout", "lookup", "tables"),
                    *("jrope/_layout.py", "jrope/_rotate.py"),
                    *_tests("fractional", "axes", "hostile_config"),
                )
            ),
            Stage(arguments=(*_tests("rotate", "reported_layout"), *_DEFINITION)),
        ),
        sample=100,
    ),
    "positions": Group(
        files=("jrope/positions/*.py",),
        stages=(
            Stage(arguments=_tests(*_KERNELS), interpreted=True),
            Stage(
                arguments=_tests("positions_golden", "positions_batch"),
                interpreted=True,
            ),
            Stage(
                arguments=(
                    *_tests("vision", "fuzz_ragged", "fuzz_batch", "positions_fuzz"),
                    *_tests("fuzz_positions", "hostile_positions", "reported_mrope"),
                    *("jrope/positions", "-k", "not compiled"),
                ),
                interpreted=True,
            ),
            Stage(
                arguments=_tests(*_KERNELS, "positions_golden", "positions_process"),
                compiled_ones=True,
            ),
        ),
        sample=160,
    ),
}


class Watch:
    """A pytest plugin: ends the process at a test that does not end.

    It counts the processor's seconds, which do not depend on what else runs.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.slowest = 0.0

    def pytest_runtest_logstart(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.limit)
        self.began = time.process_time()

    def pytest_runtest_logfinish(self) -> None:
        self.slowest = max(self.slowest, time.process_time() - self.began)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run of tests ended: `status` 0 if all passed, negative by a signal."""

    status: int
    slowest: float
    words: str


def run_tests(copy: pathlib.Path, stage: Stage, limit: float) -> Ended:
    """Runs a stage's tests in a process of their own, on the copy."""
    with tempfile.TemporaryDirectory() as held:
        folder = pathlib.Path(held)
        child = os.fork()
        if not child:
            _become_tests(copy, stage, limit, folder)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        slowest = folder / "slowest"
        lines = (folder / "log").read_text(errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return Ended(
            status=status,
            slowest=float(slowest.read_text()) if slowest.exists() else limit,
            words=(failed or lines[-1:] or [""])[-1][:160],
        )


def _become_tests(
    copy: pathlib.Path, stage: Stage, limit: float, folder: pathlib.Path
) -> None:
    """Never returns: the forked process exits with pytest's status."""
    status = 70
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(folder)}
        os.environ["NUMBA_DISABLE_JIT"] = str(int(stage.interpreted))
        sys.path[0] = str(copy)
        del sys.modules["mutants"]
        status = _call_pytest(copy, stage, limit, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _call_pytest(
    copy: pathlib.Path, stage: Stage, limit: float, folder: pathlib.Path
) -> int:
    import pytest
    from numba.core import config

    config.reload_config()  # It was read before the environment was set.
    watch = Watch(limit)
    signal.setitimer(signal.ITIMER_PROF, WHOLE_RUN)
    signal.alarm(WHOLE_RUN)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--rootdir", "."]
    # What is loaded beforehand keeps its plain assertions.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = int(pytest.main([*options, *stage.arguments], plugins=[watch]))
    loaded = sys.modules.get("jrope")
    if not status and (
        loaded is None or not str(loaded.__file__).startswith(str(copy))
    ):
        raise RuntimeError(f"the tests ran on another jrope: {loaded}")
    (folder / "slowest").write_text(str(watch.slowest))
    return status


def _load() -> None:
    """What tests import besides jrope: once for all of them."""
    import beartype
    import chex
    import flax
    import hypothesis
    import jax
    import jax.numpy
    import jaxtyping
    import mpmath
    import numba
    import pytest

    del beartype, chex, flax, hypothesis, jax, jaxtyping, mpmath, numba, pytest


_copy: pathlib.Path


def _make_copy(folder: str) -> None:
    """Makes this worker's own copy of the project."""
    global _copy
    _copy = pathlib.Path(tempfile.mkdtemp(dir=folder))
    for name in COPIED:
        source, target = ROOT / name, _copy / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)


def _try(task: tuple[Mutant, tuple[Stage, ...]]) -> tuple[Mutant, Ended]:
    """Runs one mutant through its stages until one kills it."""
    mutant, stages = task
    file = _copy / mutant.path
    held = file.read_text()
    changed = made(mutant, held)
    ended = Ended(status=0, slowest=0.0, words="no stage takes it")
    for stage in stages:
        limit = _limit(stage)
        file.write_text(changed)
        try:
            ended = run_tests(_copy, stage, limit)
        finally:
            file.write_text(held)
        if ended.status:
            break
    return mutant, ended


@functools.cache
def _limit(stage: Stage) -> float:
    """Seconds for a test, from how long the slowest takes without a mutant."""
    began = time.monotonic()
    ended = run_tests(_copy, stage, 600.0)
    if ended.status:
        raise RuntimeError(f"without a mutant the tests fail: {ended.words}")
    limit = PATIENCE * max(ended.slowest, 2.0)
    print(
        f"  clean: {time.monotonic() - began:.0f} s, a test may take {limit:.0f} s",
        flush=True,
    )
    return limit


def score(
    name: str, group: Group, chosen: list[Mutant], before: set[str], jobs: int
) -> None:
    """Runs a group's mutants that were not killed before, and prints each."""
    print(f"{name}: {len(chosen)} mutants", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        with context.Pool(jobs, _make_copy, (folder,)) as pool:
            tasks = [
                (mutant, tuple(stage for stage in group.stages if stage.takes(mutant)))
                for mutant in chosen
                if mutant.name not in before
            ]
            # Compiled kernels last: their tests take longest.
            tasks.sort(key=lambda task: task[1][0].compiled_ones)
            for mutant, ended in pool.imap_unordered(_try, tasks):
                survivors += not ended.status
                print(f"  {_verdict(ended):9s}{mutant.name}  {ended.words}", flush=True)
    killed = len(chosen) - survivors
    print(f"{name}: {killed} of {len(chosen)} killed", flush=True)


def _killed_before(logs: list[str]) -> set[str]:
    """Names of the mutants that earlier output says are killed."""
    lines = [line for log in logs for line in pathlib.Path(log).read_text().split("\n")]
    return {line.split()[1] for line in lines if line.startswith(_KILLED)}


# How lines of the output begin.
_KILLED = ("  killed ", "  timeout ")


def _verdict(ended: Ended) -> str:
    if ended.status == -signal.SIGPROF:
        return "timeout"
    return "killed" if ended.status else "SURVIVED"


def _chosen(group: Group, options: argparse.Namespace, name: str) -> list[Mutant]:
    paths = sorted(
        str(path.relative_to(ROOT))
        for pattern in group.files
        for path in ROOT.glob(pattern)
    )
    if options.only:
        found = [mutant for path in paths for mutant in mutants_of(ROOT, path)]
        return [mutant for mutant in found if mutant.name in options.only]
    count = options.sample or group.sample
    return drawn(ROOT, paths, count, f"{options.seed} {name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws, runs and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--sample", type=int, help="places a group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="these mutants, by name")
    parser.add_argument("--resume", nargs="+", default=[], help="logs of runs before")
    options = parser.parse_args(arguments)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JROPE_FUZZ_EXAMPLES": "25"}
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    os.nice(10)
    _load()
    before = _killed_before(options.resume)
    for name in options.groups:
        chosen = _chosen(GROUPS[name], options, name)
        if chosen:
            score(name, GROUPS[name], chosen, before, options.jobs)


if __name__ == "__main__":
    main()
