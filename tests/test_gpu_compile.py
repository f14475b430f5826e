"""Every kernel as compiled for NVIDIA GPUs: launches, registers, widths and bytes.

These tests run where jax has its CUDA plugin (`make gpu`). Under CI they must.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jrope
from benchmarks import gpu_compile
from benchmarks.gpu_cases import KERNELS, Case, cases
from benchmarks.workloads import WORKLOADS
from pallas_kernels import jax_too_old

pytestmark = pytest.mark.gpu_compile
# Where they must run, under `make gpu`, they fail rather than be left out.
LACKS = jax_too_old() or gpu_compile.missing()
if LACKS is not None and "GPU_COMPILE_REQUIRED" not in os.environ:
    pytest.skip(f"not run: {LACKS}", allow_module_level=True)

# Of Llama 3, whose blocks then fill a multiprocessor; no workload may spill.
MOST_REGISTERS = {"plain": 64, "fused": 104}
PLAIN = ("rope", "rope_in_place", "qkv_rope", "qkv_rope_packed", "rerope_cache")
# Groups of heads with fewer features than 128 threads x 16 bytes are read by narrower
# accesses, so that no thread idles: the rest of 28 = 16 + 8 + 4 heads, and few keys.
WIDE = ("llama3-8b", "llama3.1-8b", "qwen3-8b", "gpt-j-6b", "deepseek-v3-mla")


@functools.cache
def inspected(kernel, workload):
    """Of the first workload with the same heads: the same program."""
    from benchmarks.gpu_inspect import inspect_definition, inspect_kernel

    case = Case(kernel=kernel, workload=workload)
    found = inspect_kernel(case, "sm_90a")
    if kernel.startswith("rope_append_kv"):
        found |= inspect_definition(case, "sm_90a")
    return found


def heads_of(case):
    workload = case.workload
    return workload.query_heads, workload.key_heads, case.layout


def inspect(case):
    first = next(
        other.workload
        for other in cases()
        if heads_of(other) == heads_of(case) and other.kernel == case.kernel
    )
    return inspected(case.kernel, first)


def named(case):
    return f"{case.kernel}-{case.workload.name}"


@pytest.mark.parametrize("case", cases(), ids=named)
def test_one_launch_without_spills_and_the_bytes_that_must_move(case):
    found = inspect(case)
    assert found["launches"] == 1
    assert found["spills"] == found["local"] == 0
    assert found["asked_bytes"] == found["noted_bytes"]
    assert 0.99 <= found["bytes_over_ideal"] <= 1.05
    assert found["alias_bytes"] == case.alias_bytes
    if case.workload.name.startswith("llama3"):
        kind = "plain" if case.kernel in PLAIN else "fused"
        assert found["registers"] <= MOST_REGISTERS[kind]
    if case.workload.name in WIDE and not case.kernel.startswith("rerope"):
        assert found["widest_heads"][-1] == 16
    if case.kernel.startswith("rope_append_kv"):
        # For one key head XLA of JAX 0.12 writes keys and values in one launch.
        single = case.workload.key_heads == 1
        assert found["xla_launches"] >= (3 if single else 4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_copy_of_the_caches_would_be_seen(kernel):
    """Without donation what is rewritten is copied first: more than one launch."""
    case = next(case for case in cases() if case.kernel == kernel)
    run = functools.partial(case.run, implementation="pallas")
    program = gpu_compile.compile_for(run, list(case.operands.values()))
    assert len(program.launches) == 1 + len(case.donate)
    assert program.alias_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures_compile(arch):
    """Mosaic keeps the first one that it sees, so each has its own process."""
    command = [sys.executable, "-m", "benchmarks.gpu_inspect", "--arch", arch]
    command += ["--no-forms", "--workload", "llama3-8b", "--kernel"]
    fp8 = [kernel for kernel in KERNELS if kernel.endswith(("_fp8", "_amax"))]
    kernels = [kernel for kernel in KERNELS if arch != "sm_80" or kernel not in fp8]
    done = subprocess.run(
        [*command, *kernels], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" llama3-8b ") == len(kernels) - 1
    if arch == "sm_80":
        done = subprocess.run(
            [*command, fp8[0]], capture_output=True, text=True, check=False
        )
        assert "needs compute capability 8.9 (Ada, Hopper), this GPU" in done.stderr


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def on_8_gpus(function, operands, specs, out_specs):
    return gpu_compile.compile_for(
        function,
        operands,
        topology="1x1x8",
        mesh_shape=(("dp", 2), ("tp", 4)),
        specs=specs,
        out_specs=out_specs,
    )


def test_the_sharded_rotation_has_no_collectives():
    case = Case(kernel="rope", workload=WORKLOADS["llama3-8b"])
    heads, row = PartitionSpec("dp", "tp"), PartitionSpec("dp")
    program = on_8_gpus(
        functools.partial(case.run, implementation="pallas"),
        list(case.operands.values()),
        [heads, heads, row, row],
        (heads, heads),
    )
    assert len(program.launches) == 1
    assert not any(name in program.hlo for name in COLLECTIVES)
    assert "[2048,8,128]" in program.hlo


def test_a_sharded_norm_has_no_collectives():
    case = Case(kernel="qk_norm_rope", workload=WORKLOADS["qwen3-8b"])
    heads, row, all_ = PartitionSpec("dp", "tp"), PartitionSpec("dp"), PartitionSpec()
    program = on_8_gpus(
        functools.partial(case.run, implementation="pallas"),
        list(case.operands.values()),
        [row, heads, heads, all_, all_, all_],
        (heads, heads),
    )
    assert not any(name in program.hlo for name in COLLECTIVES)


def test_a_layer_of_a_model_has_no_all_gather_caused_by_the_rotation():
    """Projections, the rotation and scores, tokens and heads split."""
    workload = WORKLOADS["llama3-8b"]
    layout = workload.config.layout

    def layer(x, wq, wk, table, positions, implementation):
        query, key = (jnp.einsum("tm,mnh->tnh", x, w) for w in (wq, wk))
        cos, sin = jrope.lookup(table, positions, layout=layout)
        options = {"layout": layout, "implementation": implementation}
        return jrope.rotate(query, key, cos, sin, **options)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = [
        array(4096, 4096),
        array(4096, 32, 128),
        array(4096, 8, 128),
        array(8192, 128, dtype=jnp.float32),
        array(4096, dtype=jnp.int32),
    ]
    heads, row, model = PartitionSpec("dp", "tp"), PartitionSpec("dp"), PartitionSpec
    specs = [row, model(None, "tp"), model(None, "tp"), model(), row]
    counts = []
    for implementation in ("xla", "pallas"):
        run = functools.partial(layer, implementation=implementation)
        program = on_8_gpus(run, operands, specs, (heads, heads))
        counts.append(sum(program.hlo.count(f" {name}(") for name in COLLECTIVES))
    assert counts == [0, 0]
