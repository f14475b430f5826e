"""The prompts that position builders are timed on: those of the pull requests to vLLM.

Media stand between their delimiters, as processors write them.
"""

import dataclasses
from typing import Any

import numpy as np

from jrope.positions import PositionSpec, spec

IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
VISION = (151652, 151653)
SOUND = (151647, 151648)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt as `plan` takes it, and what engines know of it besides.

    Args:
      name: of the case.
      model: whose positions they are.
      ids: int32 [N].
      media: the descriptions that `plan` takes, by their names there.
      offsets: first token of every medium; of audio in video its first delimiter.
      together: whether a video holds its sound.
    """

    name: str
    model: PositionSpec
    ids: np.ndarray
    media: dict[str, Any]
    offsets: tuple[int, ...]
    together: bool


def _case(family: str, name: str, items: list[tuple[Any, ...]]) -> Case:
    """Items: ("text", n), ("image" or "video", T, h, w), ("audio", n), ("av", ...)."""
    ids: list[int] = []
    images, videos, audio, offsets = [], [], [], []
    for kind, *sizes in items:
        if kind == "text":
            ids += [7] * sizes[0]
        elif kind == "audio":
            offsets.append(len(ids) + 1)
            ids += [SOUND[0], *[AUDIO] * sizes[0], SOUND[1]]
            audio.append(4 * sizes[0])
        elif kind == "av":
            frames, height, width, sounds = sizes
            offsets.append(len(ids))
            order = _interleaved(frames, height * width // 4, sounds)
            ids += [VISION[0], SOUND[0], *order, SOUND[1], VISION[1]]
            videos.append([frames, height, width])
            audio.append(4 * sounds)
        else:
            frames, height, width = sizes
            offsets.append(len(ids) + 1)
            pad = IMAGE if kind == "image" else VIDEO
            ids += [VISION[0], *[pad] * (frames * height * width // 4), VISION[1]]
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
        together=any(kind == "av" for kind, *_ in items),
    )


def _interleaved(frames: int, cells: int, sounds: int) -> list[int]:
    """Chunks of two seconds, a frame a second, 25 audio tokens a second."""
    ids: list[int] = []
    for chunk in range(0, max(frames, sounds // 25), 2):
        ids += [VIDEO] * (cells * max(0, min(2, frames - chunk)))
        ids += [AUDIO] * max(0, min(50, sounds - 25 * chunk))
    return ids


_TEXT = ("text", 17)
_SHARED: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("text360", [("text", 360)]),
    ("image324", [_TEXT, ("image", 1, 36, 36), _TEXT]),
    ("image10x324", [_TEXT, *[("image", 1, 36, 36)] * 10, _TEXT]),
    ("image1296", [_TEXT, ("image", 1, 72, 72), _TEXT]),
    ("video20", [_TEXT, ("video", 20, 18, 36), _TEXT]),
    ("video200", [_TEXT, ("video", 200, 18, 36), _TEXT]),
]
_SOUND = [("audio200", [_TEXT, ("audio", 200), _TEXT])]
CASES = [
    *(_case("qwen2_5_vl", name, items) for name, items in _SHARED),
    *(_case("qwen2_5_omni", f"omni_{n}", items) for n, items in _SHARED + _SOUND),
    _case("qwen2_5_omni", "av1296_200", [_TEXT, ("av", 4, 36, 36, 200), _TEXT]),
]
