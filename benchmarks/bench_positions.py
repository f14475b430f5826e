"""How far position building is from its floors, and from the rules it replaces.

    python -m benchmarks.bench_positions [--quick] [--json]

Every case is timed in interleaved rounds with its floors (a numba fill and np.copyto of
the same array) and with two re-expressed rules: vLLM's, in numpy, and the form of the
numba pull requests to vLLM, one compiled call a request. Values are checked first.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from benchmarks.timing import Plan, Timing, measure, stamp
from jrope.positions import BatchPositions, PositionSpec, plan, spec

IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
VISION = (151652, 151653)
SOUND = (151647, 151648)
# Goals, as ratios of medians: engine to the floor, and vLLM's rule to the whole call.
GOALS = {"text360": (3.0, 8.0), "image324": (None, 12.0), "image10x324": (3.0, 40.0)}
GOALS |= {"video200": (1.7, 20.0), "av1296_200": (5.0, 20.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt as `plan` takes it, and the first token of every medium in it."""

    name: str
    model: PositionSpec
    ids: np.ndarray
    media: dict[str, Any]
    offsets: tuple[int, ...]


def _case(family: str, name: str, items: list[tuple[Any, ...]]) -> Case:
    """Items: ("text", n), ("image" or "video", T, h, w), ("audio", n), ("av", ...)."""
    ids: list[int] = []
    images, videos, audio, offsets = [], [], [], []
    for kind, *sizes in items:
        if kind == "text":
            ids += [7] * sizes[0]
            continue
        offsets.append(len(ids))
        if kind in ("audio", "av"):
            audio.append(4 * sizes[-1])
        if kind == "audio":
            ids += [AUDIO] * sizes[0]
        elif kind == "av":
            frames, height, width, sounds = sizes
            order = _interleaved(frames, height * width // 4, sounds)
            ids += [VISION[0], SOUND[0], *order, SOUND[1], VISION[1]]
            videos.append([frames, height, width])
        else:
            frames, height, width = sizes
            pad = IMAGE if kind == "image" else VIDEO
            ids += [pad] * (frames * height * width // 4)
            (images if kind == "image" else videos).append([frames, height, width])
    media = {
        "image_grid_thw": images,
        "video_grid_thw": videos,
        "second_per_grid_ts": [1.0] * len(videos),
        "audio_lengths": audio,
    }
    return Case(
        name=name,
        model=spec(family),
        ids=np.asarray(ids, np.int32),
        media={
            key: np.asarray(value, np.float32 if "second" in key else np.int32)
            for key, value in media.items()
            if value
        },
        offsets=tuple(offsets),
    )


def _interleaved(frames: int, cells: int, sounds: int) -> list[int]:
    """Chunks of two seconds, a frame a second, 25 audio tokens a second."""
    ids: list[int] = []
    for chunk in range(0, max(frames, sounds // 25), 2):
        ids += [VIDEO] * (cells * max(0, min(2, frames - chunk)))
        ids += [AUDIO] * max(0, min(50, sounds - 25 * chunk))
    return ids


_SHARED: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("text360", [("text", 360)]),
    ("image324", [("text", 18), ("image", 1, 36, 36), ("text", 18)]),
    ("image10x324", [("text", 27), *[("image", 1, 36, 36), ("text", 1)] * 10]),
    ("image1296", [("text", 18), ("image", 1, 72, 72), ("text", 18)]),
    ("video20", [("text", 18), ("video", 20, 18, 36), ("text", 18)]),
    ("video200", [("text", 18), ("video", 200, 18, 36), ("text", 18)]),
]
_SOUND = [("audio200", [("text", 36), ("audio", 200)])]
_AV = [("text", 17), ("av", 4, 36, 36, 200), ("text", 17)]
CASES = [
    *(_case("qwen2_5_vl", name, items) for name, items in _SHARED),
    *(_case("qwen2_5_omni", f"omni_{n}", items) for n, items in _SHARED + _SOUND),
    _case("qwen2_5_omni", "av1296_200", _AV),
]


def vllm_rule(case: Case) -> np.ndarray:
    """The way of vLLM 0.33: arrays of text and of `np.indices`, joined at the end."""
    parts: list[np.ndarray] = []
    position = done = 0
    none = np.zeros((0, 3), np.int32)
    images = iter(case.media.get("image_grid_thw", none).tolist())
    videos = iter(case.media.get("video_grid_thw", none).tolist())
    for offset in case.offsets:
        pad = int(case.ids[offset])
        if pad == AUDIO:
            continue
        if pad == VISION[0]:
            length, joined = _vllm_av(case, position + offset - done)
            parts.append(_arange(offset - done) + position)
            parts.append(joined)
            position, done = int(joined.max()) + 1, offset + length
            continue
        frames, height, width = next(images if pad == IMAGE else videos)
        text = offset - done
        parts.append(_arange(text) + position)
        grid = np.indices((frames, height // 2, width // 2))
        if pad == VIDEO:
            grid[0] = (grid[0] * (1.0 * case.model.tokens_per_second)).astype(np.int64)
        parts.append(grid.reshape(3, -1) + (text + position))
        position = int(parts[-1].max()) + 1
        done = offset + frames * (height // 2) * (width // 2)
    parts.append(_arange(len(case.ids) - done) + position)
    whole = np.concatenate(parts, axis=1)
    _ = int(whole.max()) + 1 - len(case.ids)
    return whole


def _arange(count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(count), (3, count))


def _vllm_av(case: Case, base: int) -> tuple[int, np.ndarray]:
    """A video and its sound: a piece for every chunk of each stream."""
    frames, height, width = case.media["video_grid_thw"][0].tolist()
    sounds = int(case.media["audio_lengths"][0]) // 4
    start = base + 1
    times = (np.arange(frames) * 25.0).astype(np.int64)
    pieces = [np.full((3, 2), base)]
    for chunk in range(0, max(int(times[-1]) + 1, sounds), 50):
        chosen = np.flatnonzero((times >= chunk) & (times < chunk + 50))
        if chosen.size:
            grid = np.indices((chosen.size, height // 2, width // 2))
            grid[0] = times[chosen][:, None, None]
            pieces.append(grid.reshape(3, -1) + start)
        heard = min(50, sounds - chunk)
        if heard > 0:
            pieces.append(_arange(heard) + (start + chunk))
    pieces.append(np.full((3, 2), pieces[-1].max() + 1))
    joined = np.concatenate(pieces, axis=1)
    return joined.shape[1], joined


@numba.njit
def _seed_build(ids, images, videos, seconds, rate, out):
    """The seed's form: a compiled walk over tokens that fills int64."""
    position, i, image, video = np.int64(0), 0, 0, 0
    while i < ids.shape[0]:
        if ids[i] != IMAGE and ids[i] != VIDEO:
            for axis in range(3):
                out[axis, i] = position
            position += 1
            i += 1
            continue
        is_image = ids[i] == IMAGE
        grid = images[image] if is_image else videos[video]
        t, h, w = grid[0], grid[1] // 2, grid[2] // 2
        step = 1.0 if is_image else seconds[video] * rate
        image += int(is_image)
        video += int(not is_image)
        for f in range(t):
            for r in range(h):
                for c in range(w):
                    out[0, i] = position + np.int64(f * step)
                    out[1, i] = position + r
                    out[2, i] = position + c
                    i += 1
        position += max(np.int64((t - 1) * step), max(h - 1, w - 1)) + 1
    return position - ids.shape[0]


def seed_form(case: Case) -> np.ndarray | None:
    """One call of the seed's form; None where it has no rule (audio in video)."""
    if VISION[0] in case.ids:
        return None
    none = np.zeros((0, 3), np.int32)
    out = np.empty((3, len(case.ids)), np.int64)
    _seed_build(
        case.ids,
        case.media.get("image_grid_thw", none),
        case.media.get("video_grid_thw", none),
        case.media.get("second_per_grid_ts", np.zeros(0, np.float32)),
        case.model.tokens_per_second,
        out,
    )
    return out


@numba.njit
def numba_fill(out):
    """The floor: one value after the other into every row."""
    for axis in range(out.shape[0]):
        row = out[axis]
        for k in range(row.shape[0]):
            row[k] = k


def measure_case(case: Case, timing: Plan) -> dict[str, Any]:
    """Times of one case, and their ratios."""
    out = np.empty((3, len(case.ids)), np.int32)
    prepared = plan(case.model, case.ids, **case.media)
    prepared.fill(out)
    np.testing.assert_array_equal(out, vllm_rule(case))
    source = out.copy()

    def whole_call() -> None:
        plan(case.model, case.ids, **case.media).fill(out)

    calls: dict[str, Callable[[], Any]] = {
        "engine": lambda: prepared.fill(out),
        "call": whole_call,
        "vllm rule": lambda: vllm_rule(case),
        "numba fill": lambda: numba_fill(out),
        "copyto": lambda: np.copyto(out, source),
    }
    if (seed := seed_form(case)) is not None:
        np.testing.assert_array_equal(source, seed)
        calls["seed form"] = lambda: seed_form(case)
    times = measure(calls, plan=timing)
    result: dict[str, Any] = {
        "name": case.name,
        "tokens": len(case.ids),
        "engine_over_floor": _ratio(times["engine"], times["numba fill"]),
        "call_over_vllm_rule": _ratio(times["vllm rule"], times["call"]),
    }
    if "seed form" in times:
        result["call_over_seed_form"] = _ratio(times["seed form"], times["call"])
    result["times"] = {name: time.as_json() for name, time in times.items()}
    return result


def _ratio(one: Timing, other: Timing) -> float:
    """Of the medians; above 1 means that `one` is slower."""
    return round(one.median / other.median, 2)


def _batch(requests: int, kind: str) -> tuple[BatchPositions, list[Any], np.ndarray]:
    """A running batch, its plans, and [slots, computed, scheduled]."""
    model = spec("qwen2_5_vl")
    image = next(case for case in CASES if case.name == "image324")
    batch = BatchPositions(model, requests, 2**16, max_position=2**15)
    with_image = plan(model, image.ids, **image.media)
    text = plan(model, image.ids[:18])
    plans = [
        with_image if kind != "text" and slot % 2 else text for slot in range(requests)
    ]
    for slot, made in enumerate(plans):
        batch.add(slot, made)
    step = np.array([np.arange(requests), [500] * requests, [1] * requests], np.int32)
    if kind == "6% prefill":
        step[1, ::16], step[2, ::16] = 0, 360
    return batch, plans, step


def loop_rule(plans: list[Any], wholes: list[np.ndarray], step: np.ndarray) -> Any:
    """The per-request loop over Python objects, as vLLM runs it."""
    out = np.empty((3, int(step[2].sum())), np.int64)
    at = 0
    for slot, computed, scheduled in step.T.tolist():
        made = plans[slot]
        prompt = max(0, min(scheduled, made.num_tokens - computed))
        if prompt > 0:
            out[:, at : at + prompt] = wholes[slot][:, computed : computed + prompt]
        if (rest := scheduled - prompt) > 0:
            first = computed + prompt + made.delta
            out[:, at + prompt : at + scheduled] = np.arange(first, first + rest)
        at += scheduled
    return out


def measure_step(requests: int, kind: str, timing: Plan) -> dict[str, Any]:
    """Times of one step of a running batch."""
    batch, plans, step = _batch(requests, kind)
    slots, computed, scheduled = step
    wholes = [made.positions(dtype=np.int64) for made in plans]
    got = batch.step(slots, computed, scheduled)
    np.testing.assert_array_equal(got, loop_rule(plans, wholes, step))
    rows = np.empty((3, got.shape[1]), np.int32)
    delta = np.array([made.delta for made in plans], np.int32)
    source = got.copy()

    def add_into_rows() -> None:
        np.add(computed, delta, out=rows[0])
        rows[1:] = rows[0]

    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: batch.step(slots, computed, scheduled),
        "loop": lambda: loop_rule(plans, wholes, step),
        "copyto": lambda: np.copyto(rows, source),
    }
    if kind != "6% prefill":
        calls["np.add into rows"] = add_into_rows
    times = measure(calls, plan=timing)
    result: dict[str, Any] = {
        "requests": requests,
        "kind": kind,
        "tokens": got.shape[1],
        "step_over_loop": _ratio(times["loop"], times["step"]),
    }
    if "np.add into rows" in times:
        result["step_over_add"] = _ratio(times["step"], times["np.add into rows"])
    result["times"] = {name: time.as_json() for name, time in times.items()}
    return result


_FIRST_CALL = """
import time, numba
{before}
begin = time.perf_counter()
from jrope.positions import plan, spec
ids = [1, 151652, *[151655] * 4, 151653]
plan(spec("qwen2_vl"), [1, 2]).positions()
plan(spec("qwen2_vl"), ids, image_grid_thw=[[1, 4, 4]]).positions()
print(time.perf_counter() - begin)
"""


def first_call() -> dict[str, float]:
    """Seconds over importing numba, in a new process, with a warm cache.

    numba imports scipy.linalg for itself with the first kernel, where it is installed;
    a process that has jax has it already.
    """
    befores = {"numba imported": "", "scipy imported": "import scipy.linalg"}
    best = {}
    for name, before in befores.items():
        command = [sys.executable, "-c", _FIRST_CALL.format(before=before)]
        runs = [float(subprocess.check_output(command)) for _ in range(5)]
        best[name] = round(min(runs), 3)
    return best


def _print(name: str, result: dict[str, Any], goals: dict[str, str]) -> None:
    """Times of one case, then every ratio with its goal."""
    times = result["times"]
    parts = [f"{key} {time['median_us']:.2f}" for key, time in times.items()]
    print(f"{name}: us {', '.join(parts)}")
    for key in (key for key in result if "_over_" in key):
        goal = f" (goal {goals[key]})" if key in goals else ""
        print(f"    {key} {result[key]}{goal}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    timing = Plan(rounds=15, seconds=0.4 if options.quick else 2.0)
    named = [case for case in CASES if not options.quick or case.name in GOALS]
    cases = [measure_case(case, timing) for case in named]
    steps = [
        measure_step(requests, kind, timing)
        for requests in (1, 128, 1024)
        for kind in ("text", "mixed", "6% prefill")
    ]
    first = first_call()
    made = stamp()
    made.versions["numba"] = importlib.metadata.version("numba")
    if options.json:
        whole = {"cases": cases, "steps": steps, "first_call_seconds": first}
        print(json.dumps({**whole, "stamp": dataclasses.asdict(made)}))
        return
    for result in cases:
        engine, call = GOALS.get(result["name"], (None, None))
        goals = {"engine_over_floor": f"<= {engine}"} if engine else {}
        goals |= {"call_over_vllm_rule": f">= {call}"} if call else {}
        _print(f"{result['name']} ({result['tokens']} tokens)", result, goals)
    for result in steps:
        _print(f"step, {result['requests']} {result['kind']}", result, {})
    print(f"first call in a new process, seconds: {first}")


if __name__ == "__main__":
    main()
