"""The rules that jrope.positions is timed beside: transformers', vLLM's, the seed's.

transformers' own functions run where the extra `peers` is installed; vLLM's rule and
the numba form of the pull requests to it are written again here.
"""

import importlib
import types
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from benchmarks.position_cases import AUDIO, IMAGE, SOUND, VIDEO, VISION, Case


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
        if case.together:
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


def seed_form(case: Case) -> np.ndarray:
    """One call of the seed's form, which has no rule for audio in video."""
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


def transformers_state() -> str:
    """The version that is compared with, or why none is."""
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
    except ImportError as reason:
        return f"skipped: {reason}; pip install '.[peers]'"
    # As the position builders do, on one core.
    torch.set_num_threads(1)
    return f"{transformers.__version__} with torch {torch.__version__}"


def transformers_rule(case: Case) -> Callable[[], np.ndarray]:
    """A call of the model's own `get_rope_index`, on tensors that are made before."""
    torch = importlib.import_module("torch")
    given = {name: torch.as_tensor(value) for name, value in case.media.items()}
    given["input_ids"] = ids = torch.as_tensor(case.ids.astype(np.int64))[None]
    if case.model.family == "qwen2_5_vl":
        given["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        model = _transformers_vl(case)
    else:
        for ours, theirs in _OMNI_NAMES.items():
            if ours in given:
                given[theirs] = given.pop(ours)
        given["use_audio_in_video"] = case.together
        given["attention_mask"] = torch.ones_like(ids)
        model = _transformers_omni(case)
    return lambda: model.get_rope_index(**given)[0][:, 0].numpy()


_OMNI_NAMES = {
    "second_per_grid_ts": "second_per_grids",
    "audio_lengths": "audio_seqlens",
}


def _transformers_vl(case: Case) -> Any:
    model = _without_weights("qwen2_5_vl", "Qwen2_5_VLModel")
    model.config = types.SimpleNamespace(
        vision_config=types.SimpleNamespace(
            spatial_merge_size=case.model.spatial_merge_size,
            tokens_per_second=case.model.tokens_per_second,
        )
    )
    return model


def _transformers_omni(case: Case) -> Any:
    kind = "Qwen2_5OmniPreTrainedModelForConditionalGeneration"
    model = _without_weights("qwen2_5_omni", kind)
    model.spatial_merge_size = case.model.spatial_merge_size
    model.config = types.SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION[0],
        audio_start_token_id=SOUND[0],
        position_id_per_seconds=int(case.model.tokens_per_second),
        seconds_per_chunk=2,
    )
    return model


def _without_weights(folder: str, kind: str) -> Any:
    """A model of a class of transformers, with nothing in it."""
    name = f"transformers.models.{folder}.modeling_{folder}"
    made = object.__new__(getattr(importlib.import_module(name), kind))
    importlib.import_module("torch").nn.Module.__init__(made)
    return made


def loop_rule(plans: list[Any], wholes: list[np.ndarray], step: np.ndarray) -> Any:
    """A batch's step as vLLM runs it: a loop over the requests' Python objects."""
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


@numba.njit
def numba_fill(out):
    """The floor: one value after the other into every row."""
    for axis in range(out.shape[0]):
        row = out[axis]
        for k in range(row.shape[0]):
            row[k] = k
