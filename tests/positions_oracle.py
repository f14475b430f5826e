"""Random prompts with their positions, token by token in plain Python.

Written from the families' rules, apart from jrope: a layout is walked once, and every
token's id and position are appended side by side.

One file of a little over 400 lines, since it is one plain function a family and nothing
else.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

f32 = np.float32


@dataclasses.dataclass(kw_only=True)
class Prompt:
    """Ids and media as `plan` takes them, and what should come out.

    Args:
      axes: of the positions.
      ids, kinds: per token; kinds 0 text, 1 image, 2 video, 3 audio.
      positions: per token, a tuple with an entry per axis.
      images, videos, seconds, audio: descriptions, in order.
      cursor: position of the next text token.
    """

    axes: int = 3
    ids: list[int] = dataclasses.field(default_factory=list)
    kinds: list[int] = dataclasses.field(default_factory=list)
    positions: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    images: list[list[int]] = dataclasses.field(default_factory=list)
    videos: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    audio: list[int] = dataclasses.field(default_factory=list)
    cursor: float = 0

    def put(self, token: int, kind: int, position: tuple[float, ...]) -> None:
        self.ids.append(token)
        self.kinds.append(kind)
        self.positions.append(position)

    def text(self, *tokens: int) -> None:
        for token in tokens:
            self.put(token, 0, (self.cursor,) * self.axes)
            self.cursor += 1

    def words(self, chance: random.Random, most: int) -> None:
        self.text(*(chance.randint(1, 90) for _ in range(chance.randint(0, most))))

    def grid(self, token, kind, frames, rows, cols, time=lambda f: f) -> None:
        base = self.cursor
        placed = [
            (base + time(f), base + r, base + c)
            for f in range(frames)
            for r in range(rows)
            for c in range(cols)
        ]
        for position in placed:
            self.put(token, kind, position)
        self.cursor = max(max(position) for position in placed) + 1

    @property
    def delta(self) -> float:
        if not self.positions:
            return 0
        return max(max(p) for p in self.positions) + 1 - len(self.positions)


def patches(chance: random.Random, merge: int = 2) -> tuple[int, int]:
    return merge * chance.randint(1, 4), merge * chance.randint(1, 5)


def two_dimensional(
    chance: random.Random,
    prompt: Prompt,
    *,
    image: int,
    video: int,
    start: int,
    end: int,
    rate: float | None = None,
    halved: int = 1,
    video_start: int | None = None,
    video_end: int | None = None,
) -> None:
    """Qwen2-VL, Qwen2.5-VL, PaddleOCR-VL, ERNIE: a video is one grid."""
    h, w = patches(chance)
    wrapped = chance.random() < 0.8
    if chance.random() < 0.5:
        frames = chance.choice([1, 1, 1, 2])
        prompt.images.append([frames, h, w])
        if wrapped:
            prompt.text(start)
        prompt.grid(image, 1, frames, h // 2, w // 2)
        prompt.text(end)
        return
    frames = chance.randint(1, 6) * halved
    prompt.videos.append([frames, h, w])
    step = None
    if rate is not None:
        seconds = chance.choice([0.0, 0.041, 1 / 3, 0.5, 0.7, 1.5, 5.0])
        prompt.seconds.append(seconds)
        step = f32(rate) * f32(seconds)

    def time(f: int) -> int:
        return f if step is None else math.trunc(float(f32(f) * step))

    prompt.text(start if video_start is None else video_start)
    prompt.grid(video, 2, frames // halved, h // 2, w // 2, time)
    prompt.text(end if video_end is None else video_end)


def framewise(
    chance: random.Random,
    prompt: Prompt,
    *,
    image: int,
    video: int,
    start: int,
    end: int,
    between: bool = True,
    frame_id: int | None = None,
    opens: int | None = None,
    closes: int | None = None,
) -> None:
    """Qwen3-VL, GLM-4V, Keye, openPangu: every frame is a grid of its own."""
    h, w = patches(chance)
    if chance.random() < 0.5:
        prompt.images.append([1, h, w])
        prompt.text(start)
        prompt.grid(image, 1, 1, h // 2, w // 2)
        prompt.text(end)
        return
    frames = chance.randint(1, 5)
    prompt.videos.append([frames, h, w])
    if opens is not None:
        prompt.text(opens)
    for f in range(frames):
        if f == 0 or between:
            prompt.text(start)
        prompt.grid(video if frame_id is None else frame_id, 2, 1, h // 2, w // 2)
        if between:
            prompt.text(end)
            prompt.words(chance, 3)
    if closes is not None:
        prompt.text(closes)


def hunyuan_vl(chance: random.Random, prompt: Prompt, *, image: int) -> None:
    """XD-RoPE: (index, w, h, ordinal), text keeps its index."""
    h, w = patches(chance)
    rows, cols = h // 2, w // 2 + 1
    ordinal = len(prompt.images)
    prompt.images.append([1, h, w])
    longer = chance.random() < 0.6
    cells = [(c, r, ordinal) for r in range(rows) for c in range(cols)]
    for k in range(-longer, len(cells) + longer):
        index = len(prompt.ids)
        inside = 0 <= k < len(cells)
        place = cells[k] if inside else (index,) * 3
        prompt.put(image, 1, ((index, *place) if prompt.axes == 4 else place))
    prompt.cursor = len(prompt.ids)
    prompt.text(2)


def hy_v4_vl(chance: random.Random, prompt: Prompt, *, image: int, video: int) -> None:
    """Frames drift along all axes by the larger side."""
    h, w = patches(chance)
    rows, cols = h // 2, w // 2 + 1
    moves = max(rows, cols)
    still = chance.random() < 0.5
    frames = 1 if still else chance.randint(1, 4)
    (prompt.images if still else prompt.videos).append([frames, h, w])
    base = prompt.cursor
    for f in range(frames):
        for r in range(rows):
            for c in range(cols):
                d = base + f * moves
                token, kind = (image, 1) if still else (video, 2)
                prompt.put(token, kind, (d, d + r, d + c))
    prompt.cursor = base + (frames - 1) * moves + max(rows - 1, cols - 1) + 1
    prompt.text(3)


def isaac(chance: random.Random, prompt: Prompt, *, image: int, last: bool) -> None:
    """Rows and columns begin at 0; after the last image only time counts."""
    h, w = patches(chance)
    prompt.images.append([1, h, w])
    t = prompt.cursor
    for r in range(h // 2):
        for c in range(w // 2):
            prompt.put(image, 1, (t, r, c))
    prompt.cursor = t + 1 if last else max(t, h // 2 - 1, w // 2 - 1) + 1


def audio_length(tokens_of: Callable[[int], int], chance: random.Random) -> int:
    return next(
        n for n in iter(lambda: chance.randint(3, 350), None) if tokens_of(n) > 0
    )


def two_convolutions(length: int) -> int:
    return ((length - 1) // 2 + 1 - 2) // 2 + 1


def blocks(length: int) -> int:
    rest = (length % 100 - 1) // 2 + 1
    return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + 13 * (length // 100)


def omni(
    chance: random.Random,
    prompt: Prompt,
    *,
    chunked: bool,
    fractional: bool,
    ids: dict[str, int],
) -> None:
    """Qwen2.5-Omni and Qwen3-Omni: images, videos, sounds, and videos with sound."""
    rate = 25 if chunked else 13
    tokens_of = two_convolutions if chunked else blocks
    h, w = patches(chance)
    kind = chance.choice(["image", "video", "audio", "both", "both"])
    if kind == "image":
        prompt.images.append([1, h, w])
        prompt.text(ids["VS"])
        prompt.grid(ids["IMG"], 1, 1, h // 2, w // 2)
        prompt.text(ids["VE"])
        return
    length = audio_length(tokens_of, chance)
    if kind == "audio":
        prompt.audio.append(length)
        prompt.text(ids["AS"])
        for _ in range(tokens_of(length)):
            prompt.text(ids["AUD"])
            prompt.kinds[-1] = 3
        prompt.text(ids["AE"])
        return
    frames = chance.randint(1, 5)
    # Eighths are exact in float32, whichever way a run of text is rounded.
    seconds = chance.choice([0.125, 0.5, 1.0, 2.5])
    if not fractional:
        seconds = chance.choice([seconds, 0.04, 0.3, 1 / 3, 0.7, 4.0])
    prompt.videos.append([frames, h, w])
    prompt.seconds.append(seconds)

    def time(f: int) -> float:
        value = f32(f32(f) * f32(seconds)) * f32(rate)
        return float(value) if fractional else math.trunc(float(value))

    if kind == "video":
        prompt.text(ids["VS"])
        prompt.grid(ids["VID"], 2, frames, h // 2, w // 2, time)
        prompt.text(ids["VE"])
        return
    prompt.audio.append(length)
    cells = [
        (time(f), r, c)
        for f in range(frames)
        for r in range(h // 2)
        for c in range(w // 2)
    ]
    sounds = [(a, a, a) for a in range(tokens_of(length))]
    pieces = in_chunks(cells, sounds) if chunked else by_time(cells, sounds)
    _with_sound(prompt, pieces, chunked, ids)


Piece = tuple[int, list[tuple[float, ...]]]


def in_chunks(cells: list, sounds: list) -> list[Piece]:
    """Chunk j of the video, then chunk j of the sound."""
    streams = []
    for stream in (cells, sounds):
        parts: list[list] = [[]]
        for position in stream:
            if position[0] >= 50 * len(parts):
                parts.append([])
            parts[-1].append(position)
        streams.append(parts)
    pieces: list[Piece] = []
    for j in range(max(len(parts) for parts in streams)):
        for kind, parts in zip((2, 3), streams, strict=True):
            if j < len(parts) and parts[j]:
                pieces.append((kind, parts[j]))
    return pieces


def by_time(cells: list, sounds: list) -> list[Piece]:
    """Single tokens while both streams last, then the rest of the longer one."""
    pieces: list[Piece] = []
    v = a = 0
    while v < len(cells) and a < len(sounds):
        if cells[v][0] <= sounds[a][0]:
            pieces.append((2, [cells[v]]))
            v += 1
        else:
            pieces.append((3, [sounds[a]]))
            a += 1
    for kind, rest in ((2, cells[v:]), (3, sounds[a:])):
        if rest:
            pieces.append((kind, rest))
    return pieces


def _with_sound(
    prompt: Prompt, pieces: list[Piece], chunked: bool, ids: dict[str, int]
) -> None:
    p = prompt.cursor
    prompt.put(ids["VS"], 0, (p,) * 3)
    p += 0 if chunked else 1
    prompt.put(ids["AS"], 0, (p,) * 3)
    base = p + 1
    for kind, part in pieces:
        for position in part:
            token = ids["VID"] if kind == 2 else ids["AUD"]
            prompt.put(token, kind, tuple(base + x for x in position))
    last = max(max(position) for position in pieces[-1][1])
    q = base + last + 1
    prompt.put(ids["AE"], 0, (q,) * 3)
    q += 0 if chunked else 1
    prompt.put(ids["VE"], 0, (q,) * 3)
    prompt.cursor = q + 1


QWEN: dict[str, Any] = {
    "image": 151655,
    "video": 151656,
    "start": 151652,
    "end": 151653,
}
QWEN3_5: dict[str, Any] = {
    "image": 248056,
    "video": 248057,
    "start": 248053,
    "end": 248054,
}
GLM: dict[str, Any] = {"image": 151343, "video": 151344, "start": 151339, "end": 151340}
OMNI = {"VS": 151652, "VE": 151653, "IMG": 151655, "VID": 151656}
OMNI_2_5 = {**OMNI, "AS": 151647, "AE": 151648, "AUD": 151646}
OMNI_3 = {**OMNI, "AS": 151669, "AE": 151670, "AUD": 151675}


def one_medium(family: str, chance: random.Random, prompt: Prompt, last: bool) -> None:
    """Appends a random medium of the family."""
    if family == "qwen2_vl":
        two_dimensional(chance, prompt, **QWEN)
    elif family == "qwen2_5_vl":
        two_dimensional(chance, prompt, rate=2.0, **QWEN)
    elif family == "paddleocr_vl":
        ids = {"image": 100295, "video": 100296, "start": 101305, "end": 101306}
        two_dimensional(chance, prompt, **ids)
    elif family == "ernie4_5_vl_moe":
        ids = {"image": 100295, "video": 103367, "start": 101304, "end": 101305}
        ends = {"video_start": 101306, "video_end": 101307}
        two_dimensional(chance, prompt, halved=2, **ids, **ends)
    elif family in ("qwen3_vl", "openpangu_vl", "keye_vl1_5"):
        framewise(chance, prompt, **QWEN)
    elif family == "qwen3_5":
        framewise(chance, prompt, **QWEN3_5)
    elif family == "keye":
        framewise(chance, prompt, between=False, **QWEN)
    elif family == "glm4v":
        framewise(chance, prompt, frame_id=151343, opens=151341, closes=151342, **GLM)
    elif family in ("hunyuan_vl", "hunyuan_vl_3ax"):
        hunyuan_vl(chance, prompt, image=120120)
    elif family == "hy_v4_vl":
        hy_v4_vl(chance, prompt, image=120120, video=120124)
    elif family == "isaac":
        isaac(chance, prompt, image=151655, last=last)
    elif family == "glm_image":
        h, w = patches(chance, 1)
        prompt.images.append([1, h, w])
        prompt.text(16384)
        prompt.grid(167855, 1, 1, h, w)
        prompt.text(16385)
    elif family == "qwen3_asr":
        length = audio_length(blocks, chance)
        prompt.audio.append(length)
        for _ in range(blocks(length)):
            prompt.text(151676)
            prompt.kinds[-1] = 3
        prompt.text(4)
    elif family == "qwen2_5_omni":
        omni(chance, prompt, chunked=True, fractional=False, ids=OMNI_2_5)
    else:
        fractional = family == "qwen3_omni_moe"
        omni(chance, prompt, chunked=False, fractional=fractional, ids=OMNI_3)


FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "ernie4_5_vl_moe", "qwen3_vl"),
    *("openpangu_vl", "keye_vl1_5", "qwen3_5", "keye", "glm4v", "hunyuan_vl"),
    *("hunyuan_vl_3ax", "hy_v4_vl", "isaac", "glm_image", "qwen3_asr"),
    *("qwen2_5_omni", "qwen3_omni_moe", "qwen3_omni_moe:whole"),
)


def random_prompt(family: str, seed: int) -> Prompt:
    """A prompt of up to four media with text around them."""
    chance = random.Random(f"{family} {seed}")
    prompt = Prompt(axes=4 if family == "hunyuan_vl" else 3)
    media = chance.randint(0, 4)
    prompt.words(chance, 6)
    for k in range(media):
        one_medium(family, chance, prompt, last=k + 1 == media)
        if k + 1 < media or chance.random() < 0.8:
            prompt.words(chance, 6)
    return prompt
