"""Compiling for an NVIDIA GPU on a machine that has none, and reading the result.

Needs the CUDA plugin of the same version as jax, and ptxas and nvdisasm from the
package index (`make gpu` installs them). Neither a driver nor a GPU is asked for.
"""

import collections
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# As in openxla/xla, xla/backends/gpu/target_config/specs/h200.txtpb, less its rates.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"  device_address_bits: 64
  name: "NVIDIA H200"  driver_version: "13.0.0"  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_A100 = (
    _H200.replace(
        "{ major: 9 feature_extension: ACCELERATED_FEATURES }", "{ major: 8 }"
    )
    .replace("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    .replace("core_count: 132", "core_count: 108")
    .replace("fpus_per_core: 128", "fpus_per_core: 64")
    .replace("optin: 232448", "optin: 166912")
)
_B200 = (
    _H200.replace("major: 9", "major: 10", 1)
    .replace("NVIDIA H200", "NVIDIA B200")
    .replace("core_count: 132", "core_count: 148")
)
TARGETS = {"sm_80": _A100, "sm_90a": _H200, "sm_100a": _B200}

# Bytes of one thread's access, by its suffix in the machine code.
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}
_GLOBAL, _LOCAL = ("LD", "LDG", "ST", "STG"), ("LDL", "STL")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def missing() -> str | None:
    """What this environment lacks to compile for a GPU, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax's CUDA plugin is not installed here (`make gpu` makes its own)"
    for tool in ("ptxas", "nvdisasm"):
        if not _tool(tool).exists():
            return f"{tool} is not installed beside jax"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineCode:
    """One kernel as the GPU would run it.

    Args:
      name: of its entry.
      registers: of a thread.
      spilled: bytes that a thread spills, stores and loads together.
      instructions: in the whole kernel.
      accesses: memory instructions and how many there are, such as "LD.128".
    """

    name: str
    registers: int
    spilled: int
    instructions: int
    accesses: dict[str, int]

    def asked_bytes(self, threads: int) -> int:
        """What that many threads ask global memory for, loads and stores together."""
        return threads * sum(
            count * _WIDTHS[access.split(".")[1]]
            for access, count in self.accesses.items()
            if access.split(".")[0] in _GLOBAL
        )

    @property
    def local(self) -> int:
        """Instructions on local memory."""
        return sum(
            count
            for access, count in self.accesses.items()
            if access.split(".")[0] in _LOCAL
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program.

    Args:
      hlo: its optimised HLO.
      launches: instructions of its entry computation that run something.
      kernels: the machine code of each.
      alias_bytes: results that take the place of operands.
      temporary_bytes: of buffers in between.
    """

    hlo: str
    launches: tuple[str, ...]
    kernels: tuple[MachineCode, ...]
    alias_bytes: int
    temporary_bytes: int

    def moved_bytes(self, tokens: int) -> int:
        """Bytes that the entry's instructions read and write: an upper bound.

        Of an array with more rows than tokens, which is gathered from or scattered
        into, so many rows count.
        """
        shapes = {name: shape for name, shape, _, _ in _entry(self.hlo)}
        return sum(
            _bytes(shape, tokens)
            + sum(_bytes(shapes.get(each, ""), tokens) for each in operands)
            for _, shape, kind, operands in _entry(self.hlo)
            if kind not in _FREE
        )


def compile_for(
    function: Callable[..., Any],
    operands: Sequence[jax.ShapeDtypeStruct],
    *,
    arch: str = "sm_90a",
    donate: tuple[int, ...] = (),
    topology: str = "1x1x1",
    mesh_shape: tuple[tuple[str, int], ...] = (("x", 1),),
    specs: Sequence[PartitionSpec] | None = None,
    out_specs: Any = None,
) -> Program:
    """Compiles a function for GPUs that are not there.

    Mosaic keeps the first architecture that it sees: one process for each.

    Args:
      function: to be jitted.
      operands: its types.
      arch: a key of `TARGETS`.
      donate: operands that it may overwrite.
      topology: slices x hosts x GPUs.
      mesh_shape: axes of the mesh over them.
      specs: how operands lie on it; replicated by default.
      out_specs: likewise results.
    """
    described = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[arch], topology=topology
    )
    names, sizes = zip(*mesh_shape, strict=True)
    mesh = topologies.make_mesh(described, sizes, names)
    specs = [PartitionSpec()] * len(operands) if specs is None else specs
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    options: dict[str, Any] = {}
    if out_specs is not None:
        options["out_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            out_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    with tempfile.TemporaryDirectory() as folder:
        _dump_mosaic_to(folder)
        devices = described.devices
        with (
            jax.default_device(devices[0]),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        ):
            jitted = jax.jit(function, donate_argnums=donate, **options)
            compiled = jitted.lower(*placed).compile(
                compiler_options={
                    "xla_dump_to": folder,
                    "xla_dump_emitter_re": "llvm|ptx",
                    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
                }
            )
        kernels = [
            kernel
            for path in sorted(pathlib.Path(folder).glob("*.ptx"))
            if ".version" in path.read_text()
            for kernel in _machine_code(path, arch)
        ]
    memory, hlo = compiled.memory_analysis(), str(compiled.as_text())
    assert memory is not None
    return Program(
        hlo=hlo,
        launches=tuple(name for name, _, kind, _ in _entry(hlo) if kind not in _FREE),
        kernels=tuple(kernels),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
    )


def _dump_mosaic_to(folder: str) -> None:
    """Mosaic's kernels are not in XLA's dump; it reads these when it compiles."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"


def _tool(name: str) -> pathlib.Path:
    site = pathlib.Path(jax.__file__).parent.parent
    return site / "nvidia" / "cu13" / "bin" / name


def _machine_code(ptx: pathlib.Path, arch: str) -> list[MachineCode]:
    """Assembles one PTX file and takes the result apart."""
    cubin = ptx.with_suffix(".cubin")
    command = [_tool("ptxas"), "-v", f"-arch={arch}", ptx, "-o", cubin]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = re.split(r"Compiling entry function '", done.stdout + done.stderr)[1:]
    command = [_tool("nvdisasm"), "-c", cubin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies = {
        part.split()[0]: part for part in re.split(r"\n//-+ \.text\.", listing)[1:]
    }
    return [_kernel(part, bodies) for part in report]


def _kernel(report: str, bodies: dict[str, str]) -> MachineCode:
    name = report.split("'")[0]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    registers = re.search(r"Used (\d+) registers", report)
    if registers is None:
        raise RuntimeError(f"ptxas reported no registers for {name}: {report}")
    return MachineCode(
        name=name,
        registers=int(registers[1]),
        spilled=sum(map(int, spills)),
        instructions=len(re.findall(r"/\*[0-9a-f]{4,}\*/", bodies[name])),
        accesses=_accesses(bodies[name]),
    )


def _accesses(body: str) -> dict[str, int]:
    """Memory instructions by kind and width, 32 bits where none is written."""
    counts: collections.Counter[str] = collections.Counter()
    kinds = r"LDG|STG|LDS|STS|LDL|STL|LD|ST|ATOMG|RED"
    found = re.finditer(rf"\b({kinds})(?![A-Z0-9])((?:\.[A-Za-z0-9_]+)*)", body)
    for match in found:
        suffixes = match[2].split(".")
        width = next((each for each in suffixes if each in _WIDTHS), "32")
        counts[f"{match[1]}.{width}"] += 1
    return dict(sorted(counts.items()))


def _entry(hlo: str) -> list[tuple[str, str, str, list[str]]]:
    """The entry computation: name, shape, kind and operands of each instruction."""
    body = re.search(r"\nENTRY [^\n]*\{\n(.*?)\n\}", hlo, re.S)
    if body is None:
        raise RuntimeError("the compiled program has no entry computation")
    pattern = r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
    found = [re.match(pattern, line) for line in body[1].splitlines()]
    return [
        (m[1], m[2], m[3], re.findall(r"%([\w.\-]+)", m[4].split("), ")[0]))
        for m in found
        if m is not None
    ]


def _bytes(shape: str, tokens: int) -> int:
    sizes = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
    sizes |= {"f32": 4, "f8e4m3fn": 1, "s64": 8}
    total = 0
    for kind, written in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        lengths = [int(each) for each in written.split(",") if each]
        row = math.prod(lengths[-2:] if len(lengths) > 2 else lengths[-1:])
        total += min(math.prod(lengths), tokens * row) * sizes.get(kind, 4)
    return total
