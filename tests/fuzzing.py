"""How many random cases a property has, and arrays as callers really hold them.

A property on the host has CASES examples. One on the device would mostly compile: it
draws PROGRAMS shapes, and in each program ROWS rows, every one with positions and
values of its own; a case is one such row.

Memory does not grow with CASES. Hypothesis keeps every example of a run, some 20 KB
each, so as not to draw it twice, and JAX every program, some 1 MB each: a property runs
in rounds, each with a seed of its own, and what a round has kept goes with it.

A property says which cases were refused, and fails where too many were: refusals are
all alike, and hide that nothing else was looked at.
"""

import collections
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("JROPE_FUZZ_EXAMPLES", "1000"))
PROGRAMS = max(20, CASES // 250)
ROWS = -(-CASES // PROGRAMS)
# At most so many examples, or programs, a round.
ROUND = 1000
PROGRAM_ROUND = 100

Property = Callable[..., Any]
Decorator = Callable[[Property], Property]

# Loaded in conftest.py, for every test.
PROFILE = "jrope"
settings.register_profile(
    PROFILE,
    derandomize=True,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,  # "unchecked" is the same for all cases.
    ],
)


def cases(*strategies: st.SearchStrategy, count: int = CASES) -> Decorator:
    """`hypothesis.given` for a property on the host."""
    return in_rounds(strategies, count, ROUND, tuple(Phase))


def program_cases(*strategies: st.SearchStrategy) -> Decorator:
    """`hypothesis.given` for a property that runs ROWS rows in each example.

    Not shrunk, since every attempt would compile: the seed and the shape say enough.
    """
    return in_rounds(strategies, PROGRAMS, PROGRAM_ROUND, (Phase.generate,))


def in_rounds(
    strategies: tuple, count: int, most: int, phases: tuple[Phase, ...]
) -> Decorator:
    """`given`, until `count` examples have passed, at most `most` a round."""
    rounds = -(-count // most)
    limits = settings(
        settings.get_profile(PROFILE), max_examples=-(-count // rounds), phases=phases
    )

    def decorate(check: Property) -> Property:
        tally: collections.Counter[str] = collections.Counter()

        @functools.wraps(check)
        def counted(*args: Any, **kwargs: Any) -> None:
            refused = check(*args, **kwargs) is REFUSED
            tally["refused" if refused else "done"] += 1

        one_round = limits(given(*strategies)(counted))

        @functools.wraps(one_round)
        def run(*args: Any, **kwargs: Any) -> None:
            tally.clear()
            for number in range(rounds):
                seed(number)(one_round)(*args, **kwargs)
                if rounds > 1:
                    jax.clear_caches()
            # Hypothesis stops in silence where it finds no more that are new.
            assert tally.total() >= count, (
                f"{tally.total()} cases of {count} were drawn"
            )
            if count >= 100:  # The first are the smallest, of which many are refused.
                assert 4 * tally["done"] >= count, f"most cases were refused: {tally}"

        return run

    return decorate


# What a property returns where all that its case asked for was refused.
REFUSED = object()


def refused(errors: Any, message: str, call: Callable[[], Any]) -> object:
    """Checks that a call is refused, and says so of the case."""
    with pytest.raises(errors, match=message):
        call()
    return REFUSED


def mostly(
    likely: st.SearchStrategy, other: st.SearchStrategy, times: int = 4
) -> st.SearchStrategy:
    """`st.one_of`, which counts a strategy once however often it is given."""
    return st.integers(0, times).flatmap(lambda k: likely if k < times else other)


seeds = st.integers(0, 2**32 - 1)


def strided(values: np.ndarray) -> np.ndarray:
    """Every second element of an array twice as long."""
    wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    wide[..., 1::2] = values
    return wide[..., 1::2]


def backwards(values: np.ndarray) -> np.ndarray:
    return values[..., ::-1].copy()[..., ::-1]


def transposed(values: np.ndarray) -> np.ndarray:
    return np.asfortranarray(values)


def inner(values: np.ndarray) -> np.ndarray:
    """The middle of a larger array."""
    wide = np.pad(values, [(1, 2)] * values.ndim, constant_values=3)
    return wide[(slice(1, -2),) * values.ndim]


def unaligned(values: np.ndarray) -> np.ndarray:
    raw = np.zeros(values.nbytes + 1, np.uint8)[1:]
    held = raw.view(values.dtype).reshape(values.shape)
    held[...] = values
    return held


def swapped(values: np.ndarray) -> np.ndarray:
    """The other order of bytes."""
    return values.astype(values.dtype.newbyteorder())


def read_only(values: np.ndarray) -> np.ndarray:
    held = values.copy()
    held.flags.writeable = False
    return held


# Equal values, each held in another way.
WRITABLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": np.copy,
    "strided": strided,
    "backwards": backwards,
    "transposed": transposed,
    "inner": inner,
    "unaligned": unaligned,
}
WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    **WRITABLE,
    "swapped": swapped,
    "read_only": read_only,
    "list": np.ndarray.tolist,
}
ways = st.sampled_from(sorted(WAYS))


def whole_as(values: Any, dtype: str, way: str) -> Any:
    """Integers of that dtype, held that way."""
    return WAYS[way](np.asarray(values, dtype))
