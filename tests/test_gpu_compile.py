"""Every kernel as compiled for NVIDIA GPUs: launches, registers, widths and bytes.

These tests run where jax has its CUDA plugin (`make gpu`). Under CI they must.
"""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jrope.nnx
from benchmarks import gpu_compile
from benchmarks.gpu_cases import KERNELS, Case, cases
from benchmarks.gpu_forms import best, form_cases, inspect_form
from benchmarks.workloads import WORKLOADS
from jrope._routes._forms import FORMS
from pallas_kernels import jax_too_old

pytestmark = pytest.mark.gpu_compile
# Where they must run, under `make gpu`, they fail rather than be left out.
LACKS = jax_too_old() or gpu_compile.missing()
if LACKS is not None and "GPU_COMPILE_REQUIRED" not in os.environ:
    pytest.skip(f"not run: {LACKS}", allow_module_level=True)

# Of Llama 3, whose blocks then fill a multiprocessor; no workload may spill.
MOST_REGISTERS = {"plain": 64, "fused": 104}
LLAMA = WORKLOADS["llama3-8b"]
PLAIN = ("rope", "rope_in_place", "qkv_rope", "qkv_rope_packed", "rerope_cache")


def named(case):
    return f"{case.kernel}-{case.workload.name}"


@pytest.mark.parametrize("case", cases(), ids=named)
def test_one_launch_without_spills_and_the_bytes_that_must_move(case):
    from benchmarks.gpu_inspect import inspect_kernel

    found = inspect_kernel(case, "sm_90a")
    assert (found["name"], found["workload"]) == (case.kernel, case.workload.name)
    assert found["launches"] == 1
    assert found["spills"] == found["local"] == 0
    assert 0.99 <= found["bytes_over_ideal"] <= 1.05
    assert found["alias_bytes"] == case.alias_bytes
    # What the notes say of bytes and of heads is what the machine code does.
    assert found["widths"] == found["noted_widths"]
    if case.workload.name.startswith("llama3"):
        kind = "plain" if case.kernel in PLAIN else "fused"
        assert found["registers"] <= MOST_REGISTERS[kind]


# Norms and 8 bits only add to what XLA launches: those on one workload.
APPENDING = [
    case
    for case in cases()
    if case.kernel == "rope_append_kv"
    or (case.kernel.startswith("rope_append_kv_") and case.workload is LLAMA)
]


@pytest.mark.parametrize("case", APPENDING, ids=named)
def test_appending_replaces_four_launches_of_xlas(case):
    from benchmarks.gpu_inspect import inspect_definition

    # Of Gemma 3 270M, with one key head, XLA of JAX 0.12 writes both at once.
    at_once = "gemma3-270m" in case.workload.name and jax.__version_info__ >= (0, 12)
    launches = inspect_definition(case, "sm_90a")["xla_launches"]
    assert launches >= (3 if at_once else 4)


@pytest.mark.parametrize(
    "case", form_cases(), ids=lambda c: f"{c.workload.name}-{c.tokens}"
)
def test_the_xla_route_takes_the_best_of_its_forms(case):
    found = [inspect_form(case, form, "sm_90a") for form in FORMS]
    assert [row["form"] for row in found if row["chosen"]] == [best(found)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_copy_of_the_caches_would_be_seen(kernel):
    """Without donation what is rewritten is copied first: more than one launch."""
    case = next(case for case in cases() if case.kernel == kernel)
    run = functools.partial(case.run, implementation="pallas")
    program = gpu_compile.compile_for(run, list(case.operands.values()))
    assert len(program.launches) == 1 + len(case.donate)
    assert program.alias_bytes == 0


FP8 = [kernel for kernel in KERNELS if kernel.endswith(("_fp8", "_amax"))]


def start(arch, kernels):
    command = [sys.executable, "-m", "benchmarks.gpu_inspect", "--arch", arch]
    command += ["--kernels-only", "--json", "--kernel", *kernels]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_other_architectures_compile():
    """Mosaic keeps the first one that it sees, so each has its own process."""
    kernels = {
        "sm_80": [kernel for kernel in KERNELS if kernel not in FP8],
        "sm_100a": list(KERNELS),
    }
    running = {arch: start(arch, wanted) for arch, wanted in kernels.items()}
    for arch, process in running.items():
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        found = json.loads(out.splitlines()[-1])["kernels"]
        wanted = [case for case in cases() if case.kernel in kernels[arch]]
        assert len(found) == len(wanted)
        assert all(each["arch"] == arch and each["spills"] == 0 for each in found)


def test_an_architecture_without_8_bit_floats_declines_them():
    _, errors = start("sm_80", FP8[:1]).communicate()
    assert "needs compute capability 8.9 (Ada, Hopper), this GPU" in errors


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
    case = Case(kernel="rope", workload=LLAMA)
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


class Attention(nnx.Module):
    """A layer of a model: projections, the rotation, scores, the way back."""

    def __init__(self, workload, width, rngs):
        n, k = workload.query_heads, workload.key_heads
        size = workload.config.head_dim
        options = {"use_bias": False, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.query, self.key, self.value = (
            nnx.LinearGeneral(width, (heads, size), **options) for heads in (n, k, k)
        )
        self.out = nnx.LinearGeneral((n, size), width, axis=(-2, -1), **options)

    def __call__(self, x, rope, rows):
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key = rope.rotate(query, key, *rows)
        grouped = query.reshape(*key.shape[:-1], -1, key.shape[-1])
        scores = jnp.einsum("btkgh,bskh->bktgs", grouped, key)
        mixed = jnp.einsum("bktgs,bskh->btkgh", jax.nn.softmax(scores), value)
        return x + self.out(mixed.reshape(query.shape))


class Model(nnx.Module):
    """Two layers that share one table."""

    def __init__(self, workload, width, implementation, rngs):
        make = jrope.nnx.RotaryEmbedding
        self.rope = make(workload.config, implementation=implementation)
        self.layers = nnx.List([Attention(workload, width, rngs) for _ in range(2)])

    def __call__(self, x, positions):
        rows = self.rope.rows(positions)
        for layer in self.layers:
            x = layer(x, self.rope, rows)
        return x


def step_of_a_model(implementation):
    """Compiled for 8 GPUs: sequences over dp, heads over tp."""
    width, workload = 512, LLAMA
    abstract = nnx.eval_shape(
        lambda: Model(workload, width, implementation, nnx.Rngs(0))
    )
    graph, state = nnx.split(abstract)
    paths, leaves = zip(*nnx.to_flat_state(state), strict=True)
    heads = {"query": 1, "key": 1, "value": 1, "out": 0}

    def spec_of(path):
        axis = next((heads[part] for part in path if part in heads), None)
        split = [None] * axis + ["tp"] if axis is not None else []
        return PartitionSpec(*split)

    def step(x, positions, *values):
        flat = [
            (path, leaf.replace(value))
            for path, leaf, value in zip(paths, leaves, values, strict=True)
        ]
        return nnx.merge(graph, nnx.from_flat_state(flat))(x, positions)

    operands = [
        jax.ShapeDtypeStruct((4, 256, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256), jnp.int32),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves),
    ]
    tokens = PartitionSpec("dp")
    return on_8_gpus(
        step, operands, [tokens, tokens, *map(spec_of, paths)], PartitionSpec("dp")
    )


def test_a_model_has_no_collective_caused_by_a_kernel():
    counts = []
    for implementation in ("xla", "pallas"):
        hlo = step_of_a_model(implementation).hlo
        counts.append({name: hlo.count(f" {name}(") for name in COLLECTIVES})
        assert hlo.count('custom_call_target="mosaic_gpu_v2"') == (
            2 if implementation == "pallas" else 0
        )
    # The partial sums of each layer's way back, and nothing else.
    assert counts[1] == counts[0]
    assert counts[1] == dict.fromkeys(COLLECTIVES, 0) | {"all-reduce": 2}
