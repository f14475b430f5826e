"""Position builders on the host (numpy and numba; importing this never loads jax)."""

from jrope.positions._batch import BatchPositions
from jrope.positions._build import plan, plan_from_spans
from jrope.positions._errors import PositionError
from jrope.positions._families import ALIASES, FAMILIES
from jrope.positions._plan import PositionPlan
from jrope.positions._ragged import (
    offsets_from_positions,
    positions_from_indptr,
    positions_from_mask,
    positions_from_segment_ids,
)
from jrope.positions._rule import NO_TOKEN
from jrope.positions._spec import PositionSpec, spec
from jrope.positions._vision import vision_positions
from jrope.positions._warmup import warmup

__all__ = [
    "ALIASES",
    "FAMILIES",
    "NO_TOKEN",
    "BatchPositions",
    "PositionError",
    "PositionPlan",
    "PositionSpec",
    "offsets_from_positions",
    "plan",
    "plan_from_spans",
    "positions_from_indptr",
    "positions_from_mask",
    "positions_from_segment_ids",
    "spec",
    "vision_positions",
    "warmup",
]
