"""MiniCPM-V 4.7: a thumbnail and the slices of its picture laid out on one canvas.

All tokens of a picture share t. The canvas is as large as the slices together; the
thumbnail is stretched over it. Positions therefore depend on the slices that follow,
and a prompt cannot be cut inside a picture.

Source: transformers 5.24.0, `MiniCPMV4_7Model.get_rope_index`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions import _table as columns
from jrope.positions._errors import PositionError
from jrope.positions._inputs import TYPED_PADS, as_grids, types_as_ids
from jrope.positions._spec import PositionSpec

_KINDS = {1: "image", 2: "video"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Crop:
    """A run of pads: a thumbnail, or a slice of the picture before it."""

    kind: int
    start: int
    stop: int


class _Grids:
    """Target sizes in tokens, taken in the order of the prompt."""

    def __init__(
        self, spec: PositionSpec, images: ArrayLike | None, videos: ArrayLike | None
    ) -> None:
        self._merge = spec.spatial_merge_size
        self._sizes = {
            1: as_grids("image target sizes", images, width=2),
            2: as_grids("video target sizes", videos, width=2),
        }
        self._used = {1: 0, 2: 0}

    def take(self, crop: _Crop, kind: int, num_tokens: int) -> tuple[int, int]:
        """Rows and columns of a crop, checked against its tokens."""
        sizes, k = self._sizes[kind], self._used[kind]
        place = {"kind": _KINDS[kind], "index": k, "token": crop.start}
        if k >= len(sizes):
            raise PositionError(
                "too_few_grids", expected=k + 1, got=len(sizes), **place
            )
        height, width = sizes[k].tolist()
        if min(height, width) < 1:
            raise PositionError(
                "grid_nonpositive", expected=1, got=[height, width], **place
            )
        if height % self._merge or width % self._merge:
            raise PositionError(
                "grid_not_divisible", expected=self._merge, got=[height, width], **place
            )
        rows, cols = height // self._merge, width // self._merge
        tokens = crop.stop - crop.start
        if tokens != rows * cols:
            cut = crop.stop == num_tokens and tokens < rows * cols
            code = "truncated" if cut else "token_count"
            hint = "a canvas cannot be clipped" if cut else None
            raise PositionError(
                code, expected=rows * cols, got=tokens, hint=hint, **place
            )
        self._used[kind] += 1
        return rows, cols

    def check_all_used(self) -> None:
        """Raises too_many_grids if sizes are left over."""
        for kind, sizes in self._sizes.items():
            if self._used[kind] < len(sizes):
                raise PositionError(
                    "too_many_grids",
                    kind=_KINDS[kind],
                    index=self._used[kind],
                    expected=self._used[kind],
                    got=len(sizes),
                )


def canvas_table(
    spec: PositionSpec,
    ids: np.ndarray,
    images: ArrayLike | None,
    videos: ArrayLike | None,
    token_types: ArrayLike | None,
) -> np.ndarray | None:
    """A plan's table, or None for text.

    Args:
      spec: of the family.
      ids: int32 [N].
      images: target sizes in patches, int [images, 2].
      videos: the same of the videos' frames.
      token_types: in place of the pads.

    Raises:
      PositionError: as `plan`.
    """
    assert spec.canvas is not None
    pads = (spec.image_token_id, spec.video_token_id)
    typed = ids
    if token_types is not None:
        typed, pads = types_as_ids(spec, ids, token_types), TYPED_PADS[:2]
    grids = _Grids(spec, images, videos)
    table = _Table()
    end = 0
    frames = _frames(ids, list(_crops(typed, pads)), spec.canvas)
    firsts = [frame[0].start - 1 for frame in frames] + [len(ids)]
    for frame, first, limit in zip(frames, firsts, firsts[1:], strict=False):
        if first < 0:
            raise PositionError(
                "token_count",
                token=0,
                expected="a start marker before a picture's tokens",
                got="none",
            )
        table.add_text(first - end)
        stop = min(_frame_stop(ids, frame[-1].stop, spec.canvas), limit)
        placed, after = _place(ids, frame, stop, grids, table.cursor)
        table.add(first, placed, after=after)
        end = stop
    grids.check_all_used()
    table.add_text(len(ids) - end)
    return table.finished(spec, len(ids))


def _crops(ids: np.ndarray, pads: tuple[int, ...]) -> Iterator[_Crop]:
    """Maximal runs of pads."""
    kinds = (ids == pads[0]) + 2 * (ids == pads[1])
    edges = np.flatnonzero(np.diff(kinds, prepend=0, append=0))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if kinds[start]:
            yield _Crop(kind=int(kinds[start]), start=start, stop=stop)


def _frames(
    ids: np.ndarray, crops: list[_Crop], canvas: tuple[int, ...]
) -> list[list[_Crop]]:
    """Pictures: a thumbnail, then the crops that a <slice> marker precedes."""
    frames: list[list[_Crop]] = []
    for crop in crops:
        if frames and crop.start > 0 and ids[crop.start - 1] == canvas[2]:
            frames[-1].append(crop)
        else:
            frames.append([crop])
    return frames


def _frame_stop(ids: np.ndarray, stop: int, canvas: tuple[int, ...]) -> int:
    """Where a picture ends: after the markers and newlines that follow its last crop.

    The marker that opens the next picture is among them; that picture then takes it.
    """
    while stop < len(ids) and ids[stop] in canvas:
        stop += 1
    return stop


def _place(
    ids: np.ndarray,
    frame: list[_Crop],
    stop: int,
    grids: _Grids,
    origin: int,
) -> tuple[np.ndarray, int]:
    """Positions of a picture, [3, tokens] from its <image> on, and of what follows."""
    first = frame[0].start - 1
    thumb, slices = frame[0], frame[1:]
    rows, cols = grids.take(thumb, thumb.kind, len(ids))
    sizes = [grids.take(crop, thumb.kind, len(ids)) for crop in slices]
    per_row = _slices_per_row(slices)
    high, wide = sizes[0] if sizes else (rows, cols)
    lines = len(slices) // per_row if slices else 1
    height, width = lines * high, (per_row if slices else 1) * wide
    out = np.full((3, stop - first), origin)
    out[1:, 0] = max(origin - 1, 0)
    if thumb.stop < stop:
        out[1:, thumb.stop - first] = origin + height, origin + width
    _paint(out, thumb.start - first, _stretched(rows, height), _stretched(cols, width))
    for k, (crop, size) in enumerate(zip(slices, sizes, strict=True)):
        top, left = k // per_row * high, k % per_row * wide
        begin, end = crop.start - first, crop.stop - first
        out[1:, begin - 1] = origin + top, origin + left
        if crop.stop < stop:
            out[1:, end] = origin + top + size[0] - 1, origin + left + size[1] - 1
        _paint(out, begin, top + np.arange(size[0]), left + np.arange(size[1]))
        if k + 1 < len(slices):
            gap = slice(end + 1, slices[k + 1].start - first - 1)
            out[1, gap] = origin + (k // per_row + 1) * high - 1
            out[2, gap] = origin + per_row * wide
    return out, origin + max(height, width) + 1


def _paint(out: np.ndarray, at: int, rows: np.ndarray, cols: np.ndarray) -> None:
    """Adds a crop's rows and columns to the picture's origin."""
    cells = slice(at, at + len(rows) * len(cols))
    out[1, cells] += np.repeat(rows, len(cols))
    out[2, cells] += np.tile(cols, len(rows))


def _slices_per_row(slices: list[_Crop]) -> int:
    """Slices before the first gap wider than two markers; all of them if none fits."""
    count = len(slices)
    for k in range(count - 1):
        if slices[k + 1].start - slices[k].stop > 2:
            return k + 1 if count % (k + 1) == 0 else count
    return max(count, 1)


def _stretched(count: int, size: int) -> np.ndarray:
    """`count` points over 0 to size - 1, as float32 `torch.linspace` rounds them."""
    if count == 1:
        return np.zeros(1, np.int64)
    step = np.float32(size - 1) / np.float32(count - 1)
    k = np.arange(count, dtype=np.float32)
    backwards = np.float32(size - 1) - step * k[::-1]
    return np.rint(np.where(k < count // 2, step * k, backwards)).astype(np.int64)


class _Table:
    """Rows of a plan's table, gathered one by one."""

    def __init__(self) -> None:
        self.cursor = 0
        self._top = -1
        self._rows: list[np.ndarray] = []

    def add_text(self, count: int) -> None:
        """Passes tokens that need no row."""
        if count > 0:
            self._top = max(self._top, self.cursor + count - 1)
            self.cursor += count

    def add(self, start: int, positions: np.ndarray, *, after: int) -> None:
        """Adds tokens with these positions, a row for each run along w."""
        steps = np.diff(positions, axis=1)
        broken = (steps[:2] != 0).any(axis=0) | (steps[2] != 1)
        begins = np.flatnonzero(np.append(True, broken))
        rows = np.zeros((len(begins), columns.COLUMNS))
        rows[:, columns.START] = start + begins
        rows[:, columns.COUNT] = np.diff(begins, append=positions.shape[1])
        rows[:, columns.HEIGHT] = 1
        rows[:, columns.WIDTH] = rows[:, columns.COUNT]
        rows[:, [columns.BASE_T, columns.BASE_H, columns.BASE_W]] = positions.T[begins]
        rows[:, columns.AFTER] = after
        self._rows.append(rows)
        self._top = max(self._top, int(positions.max()))
        self.cursor = after

    def finished(self, spec: PositionSpec, num_tokens: int) -> np.ndarray | None:
        """The table, None if there is no row in it."""
        if not self._rows:
            return None
        header = np.zeros((1, columns.COLUMNS))
        table = np.concatenate([header, *self._rows])
        table[0, columns.ROWS] = len(table) - 1
        table[0, columns.PLANNED] = num_tokens
        last = table[-1, [columns.START, columns.COUNT]].sum() - 1
        top = self._top if spec.row_index < 0 else max(self._top, last)
        table[0, columns.TOP] = top
        table[0, columns.SHIFT] = top + 1 - num_tokens
        axes = [columns.ROW_T, columns.ROW_H, columns.ROW_W, columns.ROW_INDEX]
        table[0, axes] = spec.row_t, spec.row_h, spec.row_w, spec.row_index
        table[0, columns.FRACTIONAL] = spec.fractional
        return table
