"""Timing on a shared, noisy machine: interleaved rounds, paired ratios, a stamp.

Other programs slow a machine down for seconds at a time. All candidates are therefore
timed in turn within each round, and compared round by round: what disturbs one
disturbs its neighbours as well. The minimum says what the machine can do, the median
what one got.
"""

import dataclasses
import importlib.metadata
import math
import os
import pathlib
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds that one candidate took for one unit of work, a sample per round.

    Args:
      name: of the candidate.
      seconds: the samples, in the order of the rounds.
    """

    name: str
    seconds: tuple[float, ...]

    @property
    def minimum(self) -> float:
        """The best round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.seconds)

    @property
    def p20(self) -> float:
        """A fifth of the rounds are faster."""
        return float(np.percentile(self.seconds, 20))

    @property
    def p80(self) -> float:
        """A fifth of the rounds are slower."""
        return float(np.percentile(self.seconds, 80))

    def ratio_to(self, other: "Timing") -> float:
        """How many times slower than `other`: the median of the rounds' ratios."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(own / its for own, its in pairs)

    def as_json(self) -> dict[str, float]:
        """The figures in microseconds, for a results file."""
        figures = {
            "min_us": self.minimum,
            "median_us": self.median,
            "p20_us": self.p20,
            "p80_us": self.p80,
        }
        return {name: float(f"{1e6 * value:.4g}") for name, value in figures.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure.

    Args:
      rounds: samples of every candidate, at least.
      seconds: keep adding rounds until this much time went by.
      sample_seconds: call each candidate often enough in a row to fill this much time.
      warm_up: calls before the first round; the first of them compiles.
    """

    rounds: int = 5
    seconds: float = 1.0
    sample_seconds: float = 2e-3
    warm_up: int = 2


def measure(
    calls: Mapping[str, Callable[[], Any]], *, plan: Plan, work: int = 1
) -> dict[str, Timing]:
    """Times every call in interleaved rounds, each waited for with block_until_ready.

    Args:
      calls: candidates that do the same work.
      plan: how long to measure.
      work: units of work in one call; times are per unit.

    Returns:
      A Timing for each name, all with the same number of rounds.
    """
    for call in calls.values():
        for _ in range(plan.warm_up):
            jax.block_until_ready(call())
    once = {name: _once(call, plan) for name, call in calls.items()}
    repeats = {
        name: max(1, math.ceil(plan.sample_seconds / seconds))
        for name, seconds in once.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(0)
    start = time.perf_counter()
    done = 0
    while done < plan.rounds or time.perf_counter() - start < plan.seconds:
        # A new order each round keeps a candidate from always following the same one.
        order.shuffle(names)
        for name in names:
            samples[name].append(_sample(calls[name], repeats[name]) / work)
        done += 1
    return {
        name: Timing(name=name, seconds=tuple(values))
        for name, values in samples.items()
    }


def _once(call: Callable[[], Any], plan: Plan) -> float:
    """About how long a call takes: the shortest of some, as any may be disturbed."""
    first = _sample(call, 1)
    # A disturbance does not make a short call so long.
    if first > 30 * plan.sample_seconds:
        return first
    return min(first, _sample(call, 1), _sample(call, 1))


def _sample(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, over `repeats` calls that are in flight one after the other."""
    result: Any = None
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stamp:
    """Where and with what a measurement was made.

    Args:
      cpu: model name and vector width.
      cores: that this process may use.
      load: the machine's load average over a minute, when stamped.
      device: the accelerator or CPU that JAX uses.
      versions: of Python and of the packages that matter.
    """

    cpu: str
    cores: int
    load: float
    device: str
    versions: dict[str, str]


def stamp() -> Stamp:
    """This machine, now."""
    return Stamp(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        device=jax.devices()[0].device_kind,
        versions={
            "python": platform.python_version(),
            **{
                package: importlib.metadata.version(package)
                for package in ("jax", "jaxlib", "numpy")
            },
        },
    )


def _cpu_model() -> str:
    """The name, with family and model, since virtual machines have generic names."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    name = fields.get("model name", platform.machine())
    family, model = fields.get("cpu family", "?"), fields.get("model", "?")
    wide = "AVX-512" if "avx512f" in fields.get("flags", "") else "no AVX-512"
    return f"{name} (family {family}, model {model}, {wide})"


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
