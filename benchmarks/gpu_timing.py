"""Times of programs on a GPU: of calls, and of what they run there alone."""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[int], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Args:
      rounds: samples, of which the median counts.
      seconds: of all of them together.
      profiled: calls under the profiler.
      rotated: bytes of operands to take in turn. Twice the 50 MB of the second level
        cache, so that no call finds its own there.
    """

    rounds: int = 9
    seconds: float = 0.4
    profiled: int = 20
    rotated: int = 100_000_000


def call_seconds(call: Call, effort: Effort) -> float:
    """Seconds of one of many calls in flight, the median of some rounds."""
    for i in range(2):
        jax.block_until_ready(call(i))
    start = time.perf_counter()
    jax.block_until_ready(call(2))
    one = time.perf_counter() - start
    wanted = int(effort.seconds / effort.rounds / max(one, 1e-7))
    repeats = max(1, min(500, wanted))
    samples = []
    for _ in range(effort.rounds):
        start, out = time.perf_counter(), None
        for i in range(repeats):
            out = call(i)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / repeats)
    return statistics.median(samples)


def device_seconds(call: Call, effort: Effort) -> float | None:
    """Seconds of kernels and copies of one call, or None where no GPU was seen.

    A kernel of few tokens takes less time than the host needs to launch it.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready([call(i) for i in range(effort.profiled)][-1])
        paths = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        found = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
    return sum(map(stream_seconds, found)) / effort.profiled or None


def stream_seconds(profile: Any) -> float:
    """Seconds of all that ran on the streams of a GPU."""
    return 1e-9 * sum(
        event.duration_ns
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def copy_rate(size: int, effort: Effort) -> float:
    """Bytes per second, read and written, of a copy far larger than the cache."""
    operands = [jnp.zeros(size // 4, jnp.float32) + i for i in range(2)]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)

    def call(i: int) -> Any:
        operands[i % 2] = step(operands[i % 2])
        return operands[i % 2]

    return 2 * size / call_seconds(call, effort)
