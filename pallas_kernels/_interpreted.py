"""A kernel in Pallas' interpreter, inside a program that knows nothing of it.

The interpreter keeps the memory of the GPU in callbacks whose order is an effect of
the program, which a primitive's lowering cannot add to it. So the kernel runs as a
program of its own, in one callback without effects.
"""

import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array

# The interpreter has one memory for the whole process.
_ALONE = threading.Lock()


def interpreted(
    run: Callable[..., tuple[Array, ...]], operands: Sequence[Array]
) -> tuple[Array, ...]:
    """Calls `run(*operands)`, which interprets a kernel, for tests without a GPU."""
    shapes = jax.eval_shape(run, *operands)

    def on_host(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        with _ALONE:
            return tuple(map(np.asarray, jax.jit(run)(*values)))

    return jax.pure_callback(on_host, shapes, *operands)
