"""Whatever a caller brings, as the arrays that kernels take."""

import operator
from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jrope.positions._errors import PositionError
from jrope.positions._rule import MOST_TOKENS, NO_TOKEN
from jrope.positions._spec import TYPED_PADS, PositionSpec

NO_GRIDS = np.empty((0, 3), np.int32)
NO_SECONDS = np.empty(0, np.float32)
NO_LENGTHS = np.empty(0, np.int32)


def as_int32(name: str, values: Any) -> np.ndarray:
    """Integers as a C-contiguous, aligned int32 array, without a copy where possible.

    Raises:
      PositionError: input, for floats, booleans, ragged lists or numbers past int32;
        too_long, before anything is copied.
    """
    array = _as_array(name, values)
    if array.size == 0:
        return np.zeros(array.shape, np.int32)
    if array.dtype.kind not in "iu":
        raise PositionError(
            "input", expected=f"{name} as integers", got=f"dtype {array.dtype}"
        )
    limits = np.iinfo(np.int32)
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        low, high = array.min(), array.max()
        if low < limits.min or high > limits.max:
            raise PositionError(
                "input", expected=f"{name} within int32", got=f"{low} to {high}"
            )
    return np.require(array, np.int32, ["C", "A"])


def _as_array(name: str, values: Any) -> np.ndarray:
    """Whatever came as an array of not too many entries, its dtype not yet looked at.

    Raises:
      PositionError: input, too_long.
    """
    if isinstance(values, Sized) and getattr(values, "ndim", 1):
        check_tokens(name, len(values))
    try:
        array = np.asarray(values)
    except ValueError as reason:
        raise PositionError(
            "input", expected=f"{name} as one array", got="a ragged list"
        ) from reason
    check_tokens(name, array.size)
    return array


def check_tokens(name: str, count: int) -> None:
    """Raises if there are more of something than a prompt has tokens.

    Raises:
      PositionError: too_long.
    """
    if count > MOST_TOKENS:
        raise PositionError(
            "too_long", expected=f"{name} of at most {MOST_TOKENS}", got=count
        )


def as_size(name: str, value: Any, *, least: int, most: int = MOST_TOKENS) -> int:
    """A whole number within limits, as an int.

    Raises:
      TypeError: it is no integer; bool is none.
      ValueError: it is out of its limits.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    size = operator.index(value)
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
    if size > most:
        raise ValueError(f"{name} must be at most {most}, got {size}")
    return size


def as_vector(name: str, values: Any) -> np.ndarray:
    """int32 [n]; a first axis of one row is dropped, as tokenizers return it."""
    array = as_int32(name, values)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise PositionError(
            "input",
            expected=f"{name} of one request, shape [n]",
            got=f"shape {list(array.shape)}",
            hint="plan each row of a batch by itself, without its padding",
        )
    return array


def as_grids(name: str, values: Any, width: int = 3) -> np.ndarray:
    """int32 [n, width]; None and empty lists are no grids."""
    if values is None:
        return np.empty((0, width), np.int32)
    array = as_int32(name, values)
    if array.size == 0:
        return np.empty((0, width), np.int32)
    if array.ndim != 2 or array.shape[1] != width:
        raise PositionError(
            "input",
            expected=f"{name} of shape [n, {width}]",
            got=f"shape {list(array.shape)}",
        )
    return array


def as_seconds(values: Any) -> np.ndarray:
    """float32 [n]; None is no seconds."""
    if values is None:
        return NO_SECONDS
    array = _as_array("second_per_grid_ts", values)
    if array.dtype.kind not in "iuf" or array.ndim != 1:
        raise PositionError(
            "input",
            expected="second_per_grid_ts as numbers, shape [n]",
            got=f"dtype {array.dtype}, shape {list(array.shape)}",
        )
    with np.errstate(over="ignore"):
        return np.require(array, np.float32, ["C", "A"])


def check_spec(spec: Any) -> None:
    """Raises unless a spec is one.

    Raises:
      TypeError: it is not, but perhaps its family's name.
    """
    if not isinstance(spec, PositionSpec):
        hint = f"; is jrope.positions.spec({spec!r}) meant?" * isinstance(spec, str)
        raise TypeError(f"spec must be a PositionSpec, got {type(spec).__name__}{hint}")


def check_kinds(spec: PositionSpec, kinds: np.ndarray) -> None:
    """Refuses kinds of media that the family does not have.

    Raises:
      PositionError: input.
    """
    pads = (spec.image_token_id, spec.video_token_id, spec.audio_token_id)
    known = {0, *(kind for kind, pad in enumerate(pads, 1) if pad != NO_TOKEN)}
    odd = set(np.unique(kinds).tolist()) - known
    if odd:
        raise PositionError(
            "input",
            expected=f"kinds {sorted(known)} for {spec.family}",
            got=sorted(odd),
            hint="0 is text, 1 image, 2 video, 3 audio",
        )


def types_as_ids(
    spec: PositionSpec, ids: np.ndarray, token_types: ArrayLike
) -> np.ndarray:
    """Ids with `TYPED_PADS` where the types say that a token is a medium's.

    Raises:
      PositionError: input, if types and ids differ in length or a type is unknown.
    """
    types = as_vector("token_types", token_types)
    if types.shape != ids.shape:
        raise PositionError(
            "input", expected=f"{ids.size} token_types", got=f"{types.size}"
        )
    check_kinds(spec, types)
    typed = np.maximum(ids, -1)
    for kind, pad in enumerate(TYPED_PADS, start=1):
        typed[types == kind] = pad
    return typed
