"""Where jrope runs: without numba or flax, read-only, forked, optimised, cut short.

Every test is a process of its own. What a process pays for kernels is in
test_positions_process.py.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import jrope

ROOT = pathlib.Path(__file__).parent.parent
# Of a clone it is the root; of a wheel, site-packages.
PACKAGES = pathlib.Path(jrope.__file__).parents[1]


def run(code, *options, path=ROOT, cwd=None, **environment):
    """Runs a program and returns what it printed and warned of."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def installed(tmp_path):
    """A copy of the packages alone, as in a folder of site-packages."""
    site = tmp_path / "site"
    for name in ("jrope", "pallas_kernels"):
        shutil.copytree(
            PACKAGES / name, site / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return site


POSITIONS = """
from jrope.positions import plan, spec
got = plan(spec("qwen2_vl"), [1, 2]).positions()
print(got.tolist())
"""
ROTATION = """
import jax, jax.numpy as jnp, numpy as np
from jrope import RopeConfig, apply_rope, compute_cos_sin_cache
config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=8)
table = jnp.asarray(compute_cos_sin_cache(config))
assert table.dtype == jnp.float32
query = jnp.ones((2, 1, 4), jnp.bfloat16)
got, _ = apply_rope(np.arange(2), query, None, table, layout=config.layout)
assert got.dtype == query.dtype
c, s = np.cos([0, 1]), np.sin([0, 1])
np.testing.assert_allclose(np.float32(got)[:, 0, 0], c - s, rtol=2**-8)
"""
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


# numba/numba#10033, FusionComputingLab/freegs4e#41
def test_without_numba():
    code = """
import jrope.nnx, jrope.linen, jrope.flashinfer, jrope.fused, jrope.hpu
import jrope.buckets, jrope.routes, jrope.context_parallel, jrope.positions_jax
import jrope.explain, jrope.adapters.hf, jrope.adapters.maxtext
for name in ("jrope.positions", "jrope.vllm"):
    try:
        __import__(name)
    except ImportError as error:
        assert "jrope.positions needs numba, which cannot be imported" in str(error)
        assert "for this numpy" in str(error)
    else:
        raise SystemExit(f"{name} was imported")
"""
    run(BLOCK.format(names={"numba", "llvmlite"}) + ROTATION + code)


def test_without_flax():
    code = """
import jrope.flashinfer, jrope.fused, jrope.vllm, jrope.buckets, jrope.routes
import jrope.context_parallel, jrope.positions_jax, jrope.positions, jrope.explain
import jrope.adapters.equinox, jrope.adapters.gemma, jrope.adapters.tunix
try:
    import jrope.nnx
except ModuleNotFoundError as error:
    assert error.name == "flax"
else:
    raise SystemExit("jrope.nnx was imported")
"""
    run(BLOCK.format(names={"flax"}) + ROTATION + code)


# LMCache/LMCache#4597, numba/numba#4908
def test_read_only_installations_without_a_home(installed, tmp_path):
    """Folders that not even root can write to: files stand where they would be."""
    for folder in {file.parent for file in installed.rglob("*.py")}:
        (folder / "__pycache__").touch()
    nowhere = "/dev/null/nowhere"
    homes = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": ""}
    done = run(POSITIONS + ROTATION, path=installed, cwd=tmp_path, **homes)
    assert "[[0, 1], [0, 1], [0, 1]]" in done.stdout
    assert done.stderr.count("jrope.positions compiles anew in every process") == 1


# numba/numba#8926, #9483: numba looks at an entry's own file, not at its helpers'.
def test_an_upgrade_of_a_helper_is_seen(installed, tmp_path):
    where = {"path": installed, "cwd": tmp_path, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert "[[0, 1], [0, 1], [0, 1]]" in run(POSITIONS, **where).stdout
    file = installed / "jrope" / "positions" / "_jit.py"
    old, new = "return lambda value, row: np.int64(value)\n", "np.int64(value) + 7\n"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, f"return lambda value, row: {new}"))
    assert "[[7, 8], [7, 8], [7, 8]]" in run(POSITIONS, **where).stdout


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A folder of compiled code that several first processes filled at once."""
    folder = tmp_path_factory.mktemp("raced")
    first = [
        subprocess.Popen(
            [sys.executable, "-c", POSITIONS],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "NUMBA_CACHE_DIR": str(folder),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(4)
    ]
    return folder, [process.communicate()[0] for process in first]


# numba/numba#10434, #10656
def test_processes_may_race_for_the_first_call(raced):
    folder, outputs = raced
    assert outputs == ["[[0, 1], [0, 1], [0, 1]]\n"] * 4
    assert not run(POSITIONS, NUMBA_CACHE_DIR=str(folder)).stderr


# numba/numba#10434, cta-observatory/ctapipe#2837
def test_broken_files_of_compiled_code_are_compiled_again(raced):
    folder, _ = raced
    index = sorted(folder.rglob("*.nbi"))
    code = sorted(folder.rglob("*.nbc"))
    assert len(index) == len(code) == 2
    index[0].write_bytes(b"")
    code[1].write_bytes(code[1].read_bytes()[:-100])
    done = run(POSITIONS, NUMBA_CACHE_DIR=str(folder))
    assert "[[0, 1], [0, 1], [0, 1]]" in done.stdout
    assert done.stderr.count("anew, since what numba kept of it in") == 2
    assert not run(POSITIONS, NUMBA_CACHE_DIR=str(folder)).stderr


def test_a_full_disk_is_said_and_survived(tmp_path):
    full = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (4096, 4096))\n"
    done = run(full + POSITIONS, NUMBA_CACHE_DIR=str(tmp_path))
    assert "[[0, 1], [0, 1], [0, 1]]" in done.stdout
    assert "cannot keep its compiled code in" in done.stderr


CHILDREN = """
import multiprocessing, pickle, sys
import numpy as np
from jrope.positions import BatchPositions, plan, spec

def work(batch):
    batch.add(0, plan(spec("text"), [1, 2, 3]))
    return batch.step([0], [0], [3]).tolist()

if __name__ == "__main__":
    batch = BatchPositions(spec("text"), 1, max_tokens=4, max_position=9)
    batch.step([], [], [])  # Its kernel is compiled in the parent.
    for how in sys.argv[1:]:
        with multiprocessing.get_context(how).Pool(2) as pool:
            assert pool.map(work, [batch] * 4) == [[[0, 1, 2]]] * 4
    assert work(batch) == [[0, 1, 2]]
    print("fine")
"""


# numba/numba#8563, #7872
def test_children_of_any_kind(tmp_path):
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    done = subprocess.run(
        [sys.executable, str(program), "fork", "spawn", "forkserver"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


# Checks are no assertions, which -O leaves out.
def test_optimised_python_checks_all_the_same():
    code = """
assert False, "not reached under -O"
from jrope import RopeConfig, config_from_hf
from jrope.positions import BatchPositions, plan, spec
refused = 0
for call in (
    lambda: RopeConfig(head_dim=3, rope_theta=1e4, max_position_embeddings=8),
    lambda: config_from_hf({"head_dim": 8}),
    lambda: plan(spec("qwen2_vl"), [0.5]),
    lambda: BatchPositions(spec("text"), 0, 1, 1),
):
    try:
        call()
    except ValueError:
        refused += 1
print(refused)
"""
    for option in ("-O", "-OO"):
        assert run(POSITIONS + code, option).stdout.endswith("\n4\n")


@pytest.mark.parametrize(
    ("platforms", "x64"), [("", "1"), ("cpu", "true"), ("cpu,nosuch", "0")]
)
def test_platforms_by_environment(platforms, x64):
    given = {"JAX_PLATFORMS": platforms, "JAX_ENABLE_X64": x64}
    code = "assert jax.config.jax_enable_x64 is (X64 != '0')"
    code = f"X64 = {x64!r}\n{ROTATION}{code}"
    if "nosuch" not in platforms:
        run(code, **given)
        return
    # jax itself refuses what it does not know; the host half never asks.
    with pytest.raises(AssertionError, match="nosuch"):
        run(code, **given)
    assert "[[0, 1]" in run(f"{POSITIONS}import jrope.explain", **given).stdout
