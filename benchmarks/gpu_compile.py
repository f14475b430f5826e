"""Compiling for an NVIDIA GPU on a machine that has none, and reading the result.

Needs the CUDA plugin of the same version as jax, and ptxas and nvdisasm from the
package index (`make gpu` installs them). Neither a driver nor a GPU is asked for.
"""

import collections
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu_machine_code import MachineCode, machine_code, tool

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

_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def missing() -> str | None:
    """What this environment lacks to compile for a GPU, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax's CUDA plugin is not installed here (`make gpu` makes its own)"
    for name in ("ptxas", "nvdisasm"):
        if not tool(name).exists():
            return f"{name} is not installed beside jax"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program.

    Args:
      hlo: its optimised HLO.
      arch: what it was compiled for.
      launches: instructions of its entry computation that run something.
      sources: PTX of its kernels.
      alias_bytes: results that take the place of operands.
    """

    hlo: str
    arch: str
    launches: tuple[str, ...]
    sources: tuple[str, ...]
    alias_bytes: int

    @functools.cached_property
    def kernels(self) -> tuple[MachineCode, ...]:
        """The machine code of each kernel."""
        texts = [machine_code(source, self.arch) for source in self.sources]
        return tuple(kernel for kernels in texts for kernel in kernels)

    @property
    def accesses(self) -> dict[str, int]:
        """Memory instructions of all kernels together."""
        counts: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            counts.update(kernel.accesses)
        return dict(sorted(counts.items()))

    def moved_bytes(self, tokens: int, tables: Iterable[jax.ShapeDtypeStruct]) -> int:
        """Bytes that the entry's instructions read and write: an upper bound.

        Args:
          tokens: T.
          tables: operands that are gathered from or scattered into, a row a token:
            of arrays as large as those so many rows count.
        """
        rows = {(_HLO_TYPES[x.dtype.name][0], x.size): _row(x) for x in tables}
        shapes = {name: shape for name, shape, _, _ in _entry(self.hlo)}
        return sum(
            _bytes(each, tokens, rows)
            for _, shape, kind, operands in _entry(self.hlo)
            if kind not in _FREE
            for each in (shape, *(shapes.get(name, "") for name in operands))
        )


# Names in HLO, and bytes of an element.
_HLO_TYPES = {
    "bfloat16": ("bf16", 2),
    "float16": ("f16", 2),
    "float32": ("f32", 4),
    "float8_e4m3fn": ("f8e4m3fn", 1),
    "int32": ("s32", 4),
    "uint32": ("u32", 4),
    "uint16": ("u16", 2),
    "int8": ("s8", 1),
    "bool": ("pred", 1),
}
_SIZES = dict(_HLO_TYPES.values())


def _row(table: jax.ShapeDtypeStruct) -> int:
    """Elements of a row of [P, R], and of a slot of [pages, page_size, K, H]."""
    return math.prod(table.shape[-2:] if table.ndim > 2 else table.shape[-1:])


def _bytes(shape: str, tokens: int, rows: dict[tuple[str, int], int]) -> int:
    """Of a shape as HLO writes it, which may be a tuple's."""
    total = 0
    for kind, written in re.findall(r"\b([a-z]+\d\w*|pred)\[([\d,]*)\]", shape):
        elements = math.prod(int(each) for each in written.split(",") if each)
        row = rows.get((kind, elements))
        total += _SIZES[kind] * (elements if row is None else tokens * row)
    return total


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        mosaic = _dump_mosaic_to(folder)
        devices = described.devices
        with (
            jax.default_device(devices[0]),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        ):
            jitted = jax.jit(function, donate_argnums=donate, **options)
            compiled = jitted.lower(*placed).compile(
                compiler_options={
                    "xla_dump_to": temporary,
                    "xla_dump_emitter_re": "llvm|ptx",
                    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
                }
            )
        hlo = str(compiled.as_text())
        texts = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
        sources = [text for text in texts if ".version" in text]
        sources += _mosaic_sources(hlo, arch, mosaic)
    memory = compiled.memory_analysis()
    assert memory is not None
    return Program(
        hlo=hlo,
        arch=arch,
        launches=launches_of(hlo),
        sources=tuple(sources),
        alias_bytes=memory.alias_size_in_bytes,
    )


def launches_of(hlo: str) -> tuple[str, ...]:
    """Instructions of a program's entry that run something."""
    return tuple(name for name, _, kind, _ in _entry(hlo) if kind not in _FREE)


# By architecture and hash: from 0.12 on Mosaic compiles a kernel once a process, and
# dumps it only then.
_MOSAIC_PTX: dict[tuple[str, str], str] = {}


def _dump_mosaic_to(folder: pathlib.Path) -> pathlib.Path:
    """Mosaic's kernels are not in XLA's dump; it reads these when it compiles."""
    mosaic = folder / "mosaic"
    mosaic.mkdir()
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(mosaic)
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    return mosaic


def _mosaic_sources(hlo: str, arch: str, folder: pathlib.Path) -> list[str]:
    """PTX of a program's Mosaic kernels, dumped now or when they were compiled."""
    hashes = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo))
    dumped = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    if len(hashes) > 1:
        # Before 0.12 every call has its own; a file does not say which.
        if len(dumped) != len(hashes):
            raise RuntimeError(
                f"a program's {len(hashes)} Mosaic kernels must all be dumped, got "
                f"{len(dumped)}"
            )
        return dumped
    for each in hashes:
        if dumped:
            _MOSAIC_PTX[arch, each] = dumped[0]
    return [_MOSAIC_PTX[arch, each] for each in hashes]


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
