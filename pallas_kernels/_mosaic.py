"""Mosaic GPU, whose interface changes with every release: untyped on purpose."""

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu
TiledLayout: Any = fragmented_array.TiledLayout
