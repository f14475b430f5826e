"""The GPU benchmark, dry, and its cases."""

import subprocess
import sys

import pytest

from benchmarks.gpu_cases import KERNELS, cases
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
    assert (tmp_path / "gpu.csv").exists()
    assert (tmp_path / "gpu.json").exists()


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
