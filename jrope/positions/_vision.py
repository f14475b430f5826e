"""Positions of the patches inside a vision encoder: two axes, no text."""

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions._errors import PositionError
from jrope.positions._inputs import as_grids, check_tokens

PatchOrder = Literal["merge_blocks", "row_major", "one_based_with_cls"]


def vision_positions(
    grid_thw: ArrayLike, *, order: PatchOrder, spatial_merge_size: int | None = None
) -> np.ndarray:
    """Positions of every patch of images and videos, for a two-dimensional RoPE.

    Args:
      grid_thw: int [n, 3], T, H, W in patches; every frame has the same positions.
      order: of the patches of a frame, and what the two axes are.
        "merge_blocks" (Qwen2-VL and its kin): rows and columns, blocks of
        `spatial_merge_size` squared after each other, as their processors lay patches.
        "row_major" (Pixtral): rows and columns, row after row.
        "one_based_with_cls" (Llama 4): columns and rows counted from 1, row after row,
        and after each frame its class token at position 0.
      spatial_merge_size: side of a block, in patches; for "merge_blocks" alone.

    Returns:
      int32 [2, patches].

    Raises:
      PositionError: input, grid_nonpositive, grid_not_divisible, too_long.
      ValueError: an unknown order, no size where it needs one, or one without use.

    >>> vision_positions([[1, 2, 4]], order="merge_blocks", spatial_merge_size=2)
    array([[0, 0, 1, 1, 0, 0, 1, 1],
           [0, 1, 0, 1, 2, 3, 2, 3]], dtype=int32)
    """
    if order not in get_args(PatchOrder):
        raise ValueError(f"order must be one of {get_args(PatchOrder)}, got {order!r}")
    if (order == "merge_blocks") is (spatial_merge_size is None):
        raise ValueError(
            f"spatial_merge_size must be given for 'merge_blocks', and for no other "
            f"order, got {spatial_merge_size} with {order!r}"
        )
    merge = 1 if spatial_merge_size is None else spatial_merge_size
    if isinstance(merge, bool) or not isinstance(merge, int) or merge < 1:
        raise ValueError(
            f"spatial_merge_size must be an int of at least 1, got {merge!r}"
        )
    grids = as_grids("grid_thw", grid_thw)
    _check(grids, merge)
    check_tokens("patches", sum(map(math.prod, grids.tolist())))
    frames = [
        np.tile(_frame(height, width, order, merge), frames)
        for frames, height, width in grids.tolist()
    ]
    return np.concatenate([np.empty((2, 0), np.int32), *frames], axis=1)


def _check(grids: np.ndarray, merge: int) -> None:
    for index, grid in enumerate(grids):
        if (grid < 1).any():
            raise PositionError(
                "grid_nonpositive", index=index, expected=1, got=grid.tolist()
            )
        if (grid[1:] % merge).any():
            raise PositionError(
                "grid_not_divisible",
                index=index,
                expected=f"H and W in multiples of {merge}",
                got=grid[1:].tolist(),
            )


def _frame(height: int, width: int, order: PatchOrder, merge: int) -> np.ndarray:
    """Positions of one frame, int32 [2, patches]."""
    grid = np.indices((height, width), np.int32)
    if order == "one_based_with_cls":
        counted = np.pad(grid[::-1].reshape(2, -1) + 1, ((0, 0), (0, 1)))
        return counted.astype(np.int32)
    blocks = grid.reshape(2, height // merge, merge, width // merge, merge)
    return blocks.swapaxes(2, 3).reshape(2, -1)
