"""Compiles, or loads from numba's cache, everything before the first request."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from jrope.positions._batch import BatchPositions
from jrope.positions._build import plan
from jrope.positions._spec import spec


def warmup(dtypes: Sequence[DTypeLike] = (np.int32,)) -> None:
    """Makes the first real call as fast as all others.

    Costs seconds once on a machine, then a fraction of a second in a process.

    Args:
      dtypes: of the positions: int32 and int64, float32 for fractional families.

    Raises:
      PositionError: out_dtype.

    >>> warmup()
    """
    for kind in dtypes:
        dtype = np.dtype(kind)
        family = spec("qwen3_omni_moe" if dtype.kind == "f" else "qwen2_vl")
        pads = [family.vision_start_token_id, *[family.image_token_id] * 4]
        ids = np.array([1, *pads, 2], np.int32)
        grids = np.array([[1, 4, 4]], np.int32)
        for made in (plan(family, ids[:1]), plan(family, ids, image_grid_thw=grids)):
            made.positions(dtype=dtype)
        batch = BatchPositions(family, 1, max_tokens=1, max_position=1)
        batch.step(*np.zeros((3, 0), np.int32))
