"""What a process pays and survives: caches, threads, bounds, no compiler at all."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SUBSET = ["tests/test_positions_golden.py", "-k", "test_batch_step or broken"]
BOUNDED = [SUBSET[0], "-k", "by_ids and (qwen2_5 or glm_image)"]
FUZZ = ["tests/test_positions_fuzz.py", "-k", "qwen2_5_omni or qwen3_vl or steps"]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


FIRST_CALL = """
import logging, sys, time
import numba
logging.basicConfig(stream=sys.stderr)
begin = time.perf_counter()
from jrope.positions import plan, spec
got = plan(spec("qwen2_vl"), [1, 2]).positions()
assert got.tolist() == [[0, 1]] * 3, got
assert "jax" not in sys.modules
print(time.perf_counter() - begin, "numba.np.arraymath" in sys.modules)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder in which a first process left its compiled kernels."""
    folder = str(tmp_path_factory.mktemp("numba"))
    first = run("-c", FIRST_CALL, NUMBA_CACHE_DIR=folder)
    assert first.returncode == 0, first.stderr
    seconds, compiler = first.stdout.split()
    assert compiler == "True"
    return folder, float(seconds)


def test_a_second_process_does_not_compile_or_load_the_compiler(cache):
    folder, cold = cache
    files = sorted(pathlib.Path(folder).rglob("*.nb*"))
    assert files
    stamps = [file.stat().st_mtime_ns for file in files]
    second = run("-c", FIRST_CALL, NUMBA_CACHE_DIR=folder)
    assert second.returncode == 0, second.stderr
    seconds, compiler = second.stdout.split()
    assert float(seconds) < cold / 3
    assert compiler == "False"
    assert sorted(pathlib.Path(folder).rglob("*.nb*")) == files
    assert [file.stat().st_mtime_ns for file in files] == stamps


COMPILE_MORE = """
import numba, numpy as np
assert numba.njit(lambda values: np.linalg.norm(values))(np.array([3.0, 4.0])) == 5.0
got = plan(spec("qwen2_vl"), [1, 2]).positions(dtype=np.int64)
assert got.tolist() == [[0, 1]] * 3, got
"""


def test_a_process_that_loaded_kernels_can_compile_others(cache):
    done = run("-c", FIRST_CALL + COMPILE_MORE, NUMBA_CACHE_DIR=cache[0])
    assert done.returncode == 0, done.stderr


NO_CACHE = """
import numba.core.caching as caching
def nowhere(cls, *arguments): return None
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(nowhere)
"""


# numba/numba#4908
def test_without_a_folder_to_write_to_it_compiles_and_says_so_once():
    done = run("-c", NO_CACHE + FIRST_CALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("jrope.positions compiles anew in every process") == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_bounds_are_kept(tmp_path):
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *BOUNDED),
        NUMBA_BOUNDSCHECK="1",
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("tests", [SUBSET, FUZZ], ids=["golden", "fuzz"])
def test_without_a_compiler(tests):
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *tests),
        NUMBA_DISABLE_JIT="1",
    )
    assert done.returncode == 0, done.stdout[-2000:]


RACE = """
import sys, threading
import numpy as np
from jrope.positions import plan, spec
ids = np.array([1, 2, 3], np.int32)
start, right = threading.Barrier(8), []
def work():
    start.wait()
    got = plan(spec("qwen2_vl"), ids).positions()
    right.append(got.tolist() == [[0, 1, 2]] * 3)
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(right != [True] * 8)
"""


def test_threads_may_race_for_the_first_call(tmp_path):
    done = run("-c", RACE, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


# numba/numba#8563
def test_plans_from_many_threads():
    from jrope.positions import plan, spec

    ids = np.array([1, 151652, *[151655] * 36, 151653], np.int32)
    grids = np.array([[1, 12, 12]], np.int32)
    want = plan(spec("qwen2_vl"), ids, image_grid_thw=grids).positions()
    wrong = []

    def work():
        for _ in range(300):
            made = plan(spec("qwen2_vl"), ids, image_grid_thw=grids)
            if not np.array_equal(made.positions(), want):
                wrong.append(made)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
