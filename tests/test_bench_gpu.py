"""The GPU benchmark, dry, its cases, and what their kernels ask for."""

import csv
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_gpu, gpu_timing
from benchmarks.gpu_cases import KERNELS, Case, cases
from benchmarks.gpu_widths import NARROW, narrow
from benchmarks.workloads import WORKLOADS
from pallas_kernels import jax_too_old


@pytest.mark.skipif(jax_too_old() is not None, reason=str(jax_too_old()))
def test_dry_run_checks_every_kernel_and_writes_results(tmp_path):
    command = [sys.executable, "-m", "benchmarks.bench_gpu", "--dry", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all kernels are right" in done.stdout
    for name in KERNELS:
        assert done.stdout.count(f"\n{name} ") == 2
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["wrong"] == written["left_out"] == []
    assert written["copy"] > 0
    with (tmp_path / "gpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(written["results"]) == 4 * len(KERNELS)
    assert {row["implementation"] for row in rows} == {"pallas", "xla"}


def test_a_kernel_that_is_wrong_is_found_and_not_timed(monkeypatch, capsys):
    case = Case(
        kernel="rope", workload=WORKLOADS["llama3-8b"], tokens=2, rows=8, cache_tokens=8
    )

    def compiled(case, name, donate):
        factor = jnp.asarray(1.5 if name == "pallas" else 1, jnp.bfloat16)
        return (lambda query, key, *_: (query * factor, key)), 1

    monkeypatch.setattr(bench_gpu, "compiled", compiled)
    rng = np.random.default_rng(0)
    found = bench_gpu.check(case, rng)
    assert found is not None
    assert found.startswith("rope on llama3-8b at T = 2 differs in ")
    monkeypatch.setattr(bench_gpu, "checks", lambda dry: [case])
    monkeypatch.setattr(bench_gpu, "KERNELS", {"rope": KERNELS["rope"]})
    record = bench_gpu.Record()
    bench_gpu.run(record, lambda: None, dry=True)
    assert len(record.wrong) == 1
    assert record.results == []
    assert "WRONG: rope on llama3-8b" in capsys.readouterr().out


def test_time_on_a_gpu_is_that_of_its_streams():
    def plane(name, line):
        events = [types.SimpleNamespace(duration_ns=d) for d in (1000.0, 500.0)]
        return types.SimpleNamespace(
            name=name, lines=[types.SimpleNamespace(name=line, events=events)]
        )

    planes = [
        plane("/device:GPU:0", "Stream #20(Compute)"),
        plane("/device:GPU:0", "XLA Ops"),
        plane("/host:CPU", "Stream"),
    ]
    seconds = gpu_timing.stream_seconds(types.SimpleNamespace(planes=planes))
    assert seconds == pytest.approx(1.5e-6)
    effort = gpu_timing.Effort(profiled=2)
    assert gpu_timing.device_seconds(lambda i: jnp.arange(i + 1), effort) is None


def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "benchmarks.bench_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_every_workload_has_every_kernel():
    found = {(case.kernel, case.workload.name) for case in cases()}
    for name in WORKLOADS:
        # A rotation is either full or, if partial, in place.
        assert sum(workload == name for _, workload in found) == len(KERNELS) - 1


@pytest.mark.skipif(jax_too_old() is not None, reason=str(jax_too_old()))
def test_accesses_narrower_than_128_bits_are_those_on_the_list():
    """All that are; and none that is on it is wider, or gone."""
    from pallas_kernels import traffic

    found = []
    for case in dict.fromkeys(case.first_alike for case in cases()):
        run = functools.partial(case.run, implementation="pallas")
        with traffic() as accesses:
            traced = jax.jit(run).trace(*case.operands.values())
            traced.lower(lowering_platforms=("cuda",))
        assert accesses
        found += narrow(accesses)
    assert set(found) == set(NARROW)
    assert len(NARROW) == len({dataclasses.replace(row, reason="") for row in NARROW})


def test_an_access_that_is_not_on_the_list_is_an_error():
    from pallas_kernels import Access

    rows = Access(
        what="cos", store=False, start=0, shape=(64,), itemsize=4, asked=512, width=4
    )
    heads = dataclasses.replace(rows, what="heads", shape=(32, 64), itemsize=2)
    wide = dataclasses.replace(heads, width=16)
    assert narrow([rows, wide]) == []
    with pytest.raises(LookupError, match=r"got .* \[\(32, 64, 16, 32\)\]"):
        narrow([rows, wide, heads])


def test_the_page_has_the_list():
    page = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "gpu.md"
    row = r"\| (\d+) x (\d+) x (\d+) \| (\d+) \| (.+) \|"
    written = re.findall(row, page.read_text())
    assert written == [
        (f"{n.heads}", f"{n.features}", f"{n.bits}", f"{n.access}", n.reason)
        for n in NARROW
    ]
