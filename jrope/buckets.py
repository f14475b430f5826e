"""Serving in buckets: tokens padded to a few sizes, all compiled before the first.

For engines whose programs depend on shapes and are slow to compile (vllm-gaudi's
bucketing). After `warm_up` nothing can compile: a step runs programs that are compiled
already, and has no way to make another.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jrope._layout import check_int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that numbers of tokens are padded to.

    Args:
      sizes: growing, a tuple.

    Raises:
      TypeError, ValueError: if they are not whole, positive and growing.

    >>> Buckets((1, 16, 128)).bucket(17)
    128
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if not isinstance(self.sizes, tuple):
            raise TypeError(
                f"bucket sizes must be a tuple of ints (buckets are hashable), got "
                f"{type(self.sizes).__name__}"
            )
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
          TypeError, ValueError: if none does, or that is no number of tokens.
        """
        check_int("tokens", tokens, minimum=0)
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
      padding: what to fill each array of a batch with: a pytree like it, of numbers
        that its dtype holds exactly. -1 for positions, so that padding reads row 0.
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
        self._leaves: tuple[_Leaf, ...] = ()
        self._programs: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, state: Any, batch: Any) -> None:
        """Compiles the step for every bucket; runs nothing.

        All or nothing: where it raises, programs of an earlier call stay as they were.

        Args:
          state: as it will be in serving: types, shapes and placement.
          batch: numpy arrays of any number of tokens on the first axis; multimodal
            positions as [tokens, A], which the step transposes.

        Raises:
          TypeError: if JAX would narrow a dtype.
          ValueError: if arrays differ in tokens, or padding does not fit them.
        """
        self._tokens(batch)
        _check_state(state)
        leaves = tuple(
            _Leaf.like(_name(path), array, fill)
            for (path, array), fill in zip(
                jax.tree.leaves_with_path(batch),
                jax.tree.leaves(self.padding),
                strict=True,
            )
        )
        programs = {}
        for size in self.buckets.sizes:
            shapes = [leaf.shape_of(size) for leaf in leaves]
            few = jax.tree.unflatten(jax.tree.structure(batch), shapes)
            programs[size] = self._step.lower(state, few).compile()
        self._leaves, self._programs = leaves, programs

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs one step over padded tokens.

        Args:
          state: the first argument of the step.
          batch: a pytree of numpy arrays, tokens on the first axis of each.

        Returns:
          The step's result, padding included; cut it with `trim`.

        Raises:
          RuntimeError: before `warm_up`.
          TypeError, ValueError: if arrays or the state are not as they were in
            `warm_up`, or there are more tokens than the largest bucket has.
        """
        if not self._programs:
            raise RuntimeError(
                "warm_up must run before the first step: nothing compiles"
            )
        size = self.buckets.bucket(self._tokens(batch))
        _check_state(state)
        arrays, structure = jax.tree.flatten(batch)
        padded = [
            leaf.pad(array, size)
            for leaf, array in zip(self._leaves, arrays, strict=True)
        ]
        return self._programs[size](state, jax.tree.unflatten(structure, padded))

    def _tokens(self, batch: Any) -> int:
        """Tokens of a batch that has the padding's structure, of arrays on the host."""
        held, given = jax.tree.structure(self.padding), jax.tree.structure(batch)
        if held != given:
            raise ValueError(
                f"a batch must have the structure of padding, {held}, got {given}; is "
                f"a key missing, or a list given for an array?"
            )
        arrays = jax.tree.leaves(batch)
        if not all(isinstance(array, np.ndarray) and array.ndim for array in arrays):
            raise _not_of_tokens(batch)
        counts = {len(array) for array in arrays}
        if len(counts) != 1:
            raise ValueError(
                f"all arrays of a batch must have the same tokens on their first axis, "
                f"got {sorted(counts)}"
            )
        return counts.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leaf:
    """What an array of every batch is, as compiled, and what it is padded with.

    Args:
      name: its path in the batch.
      shape: without tokens.
      dtype: as JAX keeps it.
      fill: a scalar of that dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fill: np.ndarray

    @classmethod
    def like(cls, name: str, array: np.ndarray, fill: Any) -> Self:
        """The leaf of a first array, whose dtype must be one of JAX's."""
        _check_kept(name, array.dtype)
        return cls(
            name=name,
            shape=array.shape[1:],
            dtype=array.dtype,
            fill=_exact(name, fill, array.dtype),
        )

    def shape_of(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *self.shape), self.dtype)

    def pad(self, array: np.ndarray, size: int) -> np.ndarray:
        """A new array, which no one refills while a step reads it."""
        if array.dtype != self.dtype:
            raise TypeError(
                f"{self.name} must be {self.dtype}, as it was compiled, got "
                f"{array.dtype}; check its range and cast it on the host"
            )
        if array.shape[1:] != self.shape:
            raise ValueError(
                f"{self.name} must be {('tokens', *self.shape)}, as it was compiled, "
                f"got shape {array.shape}; is tokens not the first axis?"
            )
        padded = np.full((size, *self.shape), self.fill, self.dtype)
        padded[: len(array)] = array
        return padded


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def _not_of_tokens(batch: Any) -> TypeError:
    path, leaf = next(
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(batch)
        if not isinstance(leaf, np.ndarray) or not leaf.ndim
    )
    return TypeError(
        f"{_name(path)} must be a numpy array with tokens on its first axis, got "
        f"{type(leaf).__name__} of shape {np.shape(leaf)}; batches are padded on the "
        f"host, before the device sees them"
    )


_OF_NUMPY = (np.ndarray, np.generic)  # A tuple: a union costs each leaf of a step more.


def _check_state(state: Any) -> None:
    """Raises if a call would narrow a numpy array of the state, which JAX does."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, _OF_NUMPY):
            _check_kept("an array of the state", leaf.dtype)


def _check_kept(name: str, dtype: np.dtype) -> None:
    if not _is_number(dtype):
        raise TypeError(f"{name} must be of numbers, got {dtype}; is it text?")
    kept = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))
    if kept != dtype:
        raise TypeError(
            f"{name} must have a dtype that JAX keeps, got {dtype}, which it would "
            f"cast to {kept} unchecked; check its range and cast it on the host"
        )


def _is_number(dtype: np.dtype) -> bool:
    """Whether of numbers or truth values, those of ml_dtypes included."""
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _exact(name: str, fill: Any, dtype: np.dtype) -> np.ndarray:
    """The fill in the array's dtype, or an error if it is not the same number there."""
    given = np.asarray(fill)
    # A complex number is none of a real dtype, even without an imaginary part.
    fits = given.dtype.kind != "c" or dtype.kind == "c"
    if _is_number(given.dtype) and fits and not given.ndim:
        with np.errstate(invalid="ignore", over="ignore"):
            kept = given.astype(dtype)
        exact, near = _as_python(given), _as_python(kept)
        if exact == near or (exact != exact and near != near):  # NaN is NaN.
            return kept
    raise ValueError(
        f"the padding of {name} must be a number that {dtype} holds exactly, got "
        f"{fill!r}; is it meant for another array?"
    )


def _as_python(number: np.ndarray) -> Any:
    """Of a type that compares exactly; those of ml_dtypes have none of their own."""
    return number.item() if number.dtype.kind in "biufc" else float(number)


def trim(outputs: Any, tokens: int) -> Any:
    """The first `tokens` rows of every array, as numpy.

    Cut on the host: on the device each new length would compile a slice.

    Args:
      outputs: a pytree of arrays [tokens, ...].
      tokens: how many rows to keep.

    Raises:
      TypeError, ValueError: if an array has fewer, or that is no number of tokens.

    >>> trim({"query": np.ones((4, 2))}, 3)["query"].shape
    (3, 2)
    """
    check_int("tokens", tokens, minimum=0)

    def cut(path: Any, array: Any) -> np.ndarray:
        rows = np.asarray(array)
        if not rows.ndim or len(rows) < tokens:
            raise ValueError(
                f"outputs{jax.tree_util.keystr(path)} must have {tokens} tokens or "
                f"more on its first axis, got shape {rows.shape}; is it no output of "
                f"tokens?"
            )
        return rows[:tokens]

    return jax.tree_util.tree_map_with_path(cut, outputs)
