"""PTX assembled for a GPU and taken apart: registers, spills, access widths."""

import collections
import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile

import jax

THREADS = 128  # Of a block of each of our kernels.
# Bytes of one thread's access, by its suffix in the machine code.
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}
_LOADS, _STORES, _LOCAL = ("LD", "LDG"), ("ST", "STG"), ("LDL", "STL")


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

    @property
    def widths(self) -> dict[tuple[bool, int], int]:
        """Accesses to global memory: by whether they store, and bytes of a thread."""
        counts: collections.Counter[tuple[bool, int]] = collections.Counter()
        for access, count in self.accesses.items():
            kind, suffix = access.split(".")
            if kind in (*_LOADS, *_STORES):
                counts[kind in _STORES, WIDTHS[suffix]] += count
        return dict(counts)

    @property
    def accesses_per_byte(self) -> float:
        """Accesses to global memory for each byte that a thread stores there."""
        stored = sum(w * count for (store, w), count in self.widths.items() if store)
        return sum(self.widths.values()) / stored

    @property
    def local(self) -> int:
        """Instructions on local memory."""
        return sum(
            count
            for access, count in self.accesses.items()
            if access.split(".")[0] in _LOCAL
        )


def tool(name: str) -> pathlib.Path:
    """Where the package index's CUDA tools are installed, beside jax."""
    site = pathlib.Path(jax.__file__).parent.parent
    return site / "nvidia" / "cu13" / "bin" / name


@functools.cache
def machine_code(ptx: str, arch: str) -> tuple[MachineCode, ...]:
    """Assembles the kernels of one PTX text and takes the result apart."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = (pathlib.Path(folder) / name for name in ("k.ptx", "k.cubin"))
        source.write_text(ptx)
        report = _run("ptxas", "-v", f"-arch={arch}", source, "-o", cubin)
        listing = _run("nvdisasm", "-c", cubin)
    bodies = {
        part.split()[0]: part for part in re.split(r"\n//-+ \.text\.", listing)[1:]
    }
    entries = re.split(r"Compiling entry function '", report)[1:]
    return tuple(_kernel(entry, bodies) for entry in entries)


def _run(name: str, *arguments: str | pathlib.Path) -> str:
    command = [tool(name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


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
        width = next((each for each in suffixes if each in WIDTHS), "32")
        counts[f"{match[1]}.{width}"] += 1
    return dict(sorted(counts.items()))
