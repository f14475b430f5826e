"""Golden position cases: values that other projects' real functions gave.

Set JROPE_GOLDEN_MROPE to read another folder of the same form.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

FOLDER = pathlib.Path(
    os.environ.get("JROPE_GOLDEN_MROPE")
    or pathlib.Path(__file__).parent / "golden" / "mrope"
)
IMAGE, VIDEO, AUDIO, VIDEO_WITH_SOUND = 1, 2, 3, 4


def families() -> list[str]:
    """Every family with a file."""
    files = sorted(path.stem for path in FOLDER.glob("*.json"))
    return [name for name in files if name not in ("errors", "next_positions")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One request of a case.

    Args:
      name: of case and row.
      tags: of the case.
      is_single: the case has one row.
      ids, types: of the tokens that are no padding.
      media: keyword arguments of `plan`.
      spans: of `plan_from_spans`.
      positions, delta: right values; None where no peer gives any.
      others: further arrays of the row: pos_hf, delta_hf, pos_int, ...
    """

    name: str
    tags: tuple[str, ...]
    is_single: bool
    ids: np.ndarray
    types: np.ndarray
    media: dict[str, Any]
    spans: list[tuple[int, int, int]]
    positions: np.ndarray | None
    delta: float | None
    others: dict[str, np.ndarray]


@functools.cache
def rows(family: str) -> list[Row]:
    """All rows of all cases of a family."""
    found: list[Row] = []
    cases = json.loads((FOLDER / f"{family}.json").read_text())["cases"]
    with np.load(FOLDER / f"{family}.npz") as stored:
        for case in cases:
            name = case["name"]
            arrays = {key: stored[f"{name}__{key}"] for key in case["arrays"]}
            found += _rows_of(case, arrays)
    return found


def _rows_of(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> Iterator[Row]:
    used = {"ig": 0, "vg": 0, "al": 0}
    for r in range(case["rows"]):
        real = np.ones(arrays["ids"].shape[1], bool)
        if "am" in arrays:
            real = arrays["am"][r].astype(bool)
        types = arrays["mt"][r][real]
        # Offsets count from the first token that is no padding.
        table = arrays.get("media", np.zeros((0, 6), int))
        table = table[table[:, 0] == r]
        counts = _counts(arrays, table, types, single=case["rows"] == 1)
        media = {}
        for key, name in (("ig", "image_grid_thw"), ("vg", "video_grid_thw")):
            media[name] = _take(arrays, key, used[key], counts[key])
        media["second_per_grid_ts"] = _take(arrays, "sec", used["vg"], counts["vg"])
        media["audio_lengths"] = _take(arrays, "al", used["al"], counts["al"])
        for key in used:
            used[key] += counts[key]
        positions, delta = arrays.get("pos"), arrays.get("delta")
        others = {
            key: value[:, r][:, real] if key.startswith("pos") else value[r]
            for key, value in arrays.items()
            if key in ("pos_hf", "pos_int", "delta_hf", "delta_int")
        }
        if "decode_pos_hf" in arrays:
            others["decode"] = arrays["decode_pos_hf"][r]
        yield Row(
            name=f"{case['name']}[{r}]",
            tags=tuple(case["tags"]),
            is_single=case["rows"] == 1,
            ids=arrays["ids"][r][real],
            types=types,
            media=media,
            spans=list(_spans(table, types)),
            positions=None if positions is None else positions[:, r][:, real],
            delta=None if delta is None else delta[r].item(),
            others=others,
        )


def _counts(
    arrays: dict[str, np.ndarray], table: np.ndarray, types: np.ndarray, *, single: bool
) -> dict[str, int]:
    """How many grids and lengths of the case belong to this row."""
    if single:
        return {key: len(arrays.get(key, ())) for key in ("ig", "vg", "al")}
    if len(table):
        kinds = table[:, 1]
        return {
            "ig": int(np.isin(kinds, IMAGE).sum()),
            "vg": int(np.isin(kinds, (VIDEO, VIDEO_WITH_SOUND)).sum()),
            "al": int(np.isin(kinds, (AUDIO, VIDEO_WITH_SOUND)).sum()),
        }
    return {
        key: len(list(_runs(types == kind)))
        for key, kind in (("ig", IMAGE), ("vg", VIDEO), ("al", AUDIO))
    }


def _take(
    arrays: dict[str, np.ndarray], key: str, start: int, count: int
) -> np.ndarray | None:
    return arrays[key][start : start + count] if key in arrays else None


def _runs(where: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and length of the maximal runs."""
    edges = np.flatnonzero(np.diff(where.astype(int), prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield start, stop - start


def _spans(table: np.ndarray, types: np.ndarray) -> Iterator[tuple[int, int, int]]:
    for _, kind, offset, length, *_ in table.tolist():
        if kind == VIDEO_WITH_SOUND:
            yield kind, offset, length
            continue
        for start, count in _runs(types[offset : offset + length] == kind):
            yield kind, offset + start, count


def errors() -> list[dict[str, Any]]:
    """The broken inputs."""
    return json.loads((FOLDER / "errors.json").read_text())


def steps() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The batch steps: prompts' positions, and a step's."""
    cases = json.loads((FOLDER / "next_positions.json").read_text())["cases"]
    keys = ("prompt_pos", "prompt_len", "delta", "computed", "scheduled", "pos")
    with np.load(FOLDER / "next_positions.npz") as stored:
        for case in cases:
            name = case["name"]
            yield name, {key: stored[f"{name}__{key}"] for key in keys}
