"""Serving in buckets: tokens padded to a few sizes, all compiled before the first.

For engines whose programs depend on shapes and are slow to compile (vllm-gaudi's
bucketing). After `warm_up` nothing can compile: a step runs programs that are compiled
already, and has no way to make another.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from jrope._layout import check_int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that numbers of tokens are padded to.

    Args:
      sizes: growing.

    Raises:
      TypeError, ValueError: if they are not whole, positive and growing.

    >>> Buckets((1, 16, 128)).bucket(17)
    128
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for size in self.sizes:
            check_int("a bucket size", size, minimum=1)
        if not self.sizes or sorted(set(self.sizes)) != list(self.sizes):
            raise ValueError(f"bucket sizes must grow, got {self.sizes}")

    @classmethod
    def ramp(cls, minimum: int, step: int, maximum: int) -> Self:
        """Doubles from `minimum` to `step`, then adds `step` up to `maximum`.

        Source: vllm-gaudi, docs/features/bucketing_mechanism.md, "linear".

        Raises:
          TypeError, ValueError: unless 1 <= minimum <= step <= maximum.

        >>> Buckets.ramp(16, 64, 256).sizes
        (16, 32, 64, 128, 192, 256)
        """
        check_int("minimum", minimum, minimum=1)
        check_int("step", step, minimum=minimum)
        check_int("maximum", maximum, minimum=step)
        doubled = (minimum << i for i in range(step.bit_length()))
        ramp = (size for size in doubled if size < step)
        return cls((*ramp, *range(step, maximum, step), maximum))

    def bucket(self, tokens: int) -> int:
        """The smallest size that holds so many tokens.

        Raises:
          ValueError: if none does.
        """
        for size in self.sizes:
            if tokens <= size:
                return size
        raise ValueError(
            f"a step must have at most {self.sizes[-1]} tokens, the largest bucket, "
            f"got {tokens}; split the prompt into chunks"
        )


class BucketedStep:
    """A step over tokens, compiled for every bucket before serving begins.

    Args:
      step: `step(state, batch)`, traced by jax.jit; any result.
      buckets: the sizes.
      padding: what to fill each array of a batch with: a pytree like it, of numbers. -1
        for positions, so that padding reads row 0.
      donate_state: whether a call may reuse the memory of `state`.

    >>> step = BucketedStep(lambda state, batch: batch["x"] * state, Buckets((4, 8)),
    ...     padding={"x": 0})
    >>> step.warm_up(np.float32(2), {"x": np.ones(1, np.float32)})
    >>> out = step(np.float32(2), {"x": np.ones(3, np.float32)})
    >>> trim(out, 3).tolist(), out.shape
    ([2.0, 2.0, 2.0], (4,))
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        buckets: Buckets,
        *,
        padding: Any,
        donate_state: bool = False,
    ) -> None:
        """Compiles nothing yet."""
        self.buckets = buckets
        self.padding = padding
        self._step = jax.jit(step, donate_argnums=(0,) if donate_state else ())
        self._programs: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, state: Any, batch: Any) -> None:
        """Compiles the step for every bucket; runs nothing.

        Args:
          state: as it will be in serving: types, shapes and placement.
          batch: numpy arrays of any number of tokens on the first axis; multimodal
            positions as [tokens, A], which the step transposes.

        Raises:
          ValueError: if arrays differ in tokens.
        """
        _tokens(batch)
        for size in self.buckets.sizes:
            few = jax.tree.map(lambda array, size=size: array[:size], batch)
            self._programs[size] = self._step.lower(
                state, self._pad(few, size)
            ).compile()

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs one step over padded tokens.

        Args:
          state: the first argument of the step.
          batch: a pytree of numpy arrays, tokens on the first axis of each.

        Returns:
          The step's result, padding included; cut it with `trim`.

        Raises:
          RuntimeError: before `warm_up`.
          ValueError: if there are more tokens than the largest bucket has.
        """
        if not self._programs:
            raise RuntimeError(
                "warm_up must run before the first step: nothing compiles"
            )
        size = self.buckets.bucket(_tokens(batch))
        return self._programs[size](state, self._pad(batch, size))

    def _pad(self, batch: Any, size: int) -> Any:
        """New arrays, which no one refills while a step reads them."""

        def pad(fill: Any, array: np.ndarray) -> np.ndarray:
            padded = np.full((size, *array.shape[1:]), fill, array.dtype)
            padded[: len(array)] = array
            return padded

        return jax.tree.map(pad, self.padding, batch)


def _tokens(batch: Any) -> int:
    counts = {len(array) for array in jax.tree.leaves(batch)}
    if len(counts) != 1:
        raise ValueError(
            f"all arrays of a batch must have the same tokens on their first axis, got "
            f"{sorted(counts)}"
        )
    return counts.pop()


def trim(outputs: Any, tokens: int) -> Any:
    """The first `tokens` rows of every array, as numpy.

    Cut on the host: on the device each new length would compile a slice.
    """
    return jax.tree.map(lambda array: np.asarray(array)[:tokens], outputs)
