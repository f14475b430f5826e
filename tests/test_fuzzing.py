"""A property has its number of cases, in rounds that differ and fail when one does."""

import pytest
from fuzzing import REFUSED, in_rounds
from hypothesis import Phase
from hypothesis import strategies as st

PHASES = (Phase.generate,)
wide = st.integers(0, 2**32 - 1)


def test_a_property_has_all_its_cases_in_rounds_that_differ():
    drawn = []
    in_rounds((wide,), 90, 30, PHASES)(lambda value: drawn.append(value))()
    rounds = [drawn[start : start + 30] for start in (0, 30, 60)]
    assert len(drawn) == 90
    # Each begins with 0 and a few others, which are small.
    assert len({*rounds[0]} | {*rounds[1]} | {*rounds[2]}) > 60


def test_a_property_draws_the_same_cases_each_time():
    drawn = []
    check = in_rounds((wide,), 40, 20, PHASES)(lambda value: drawn.append(value))
    check()
    check()
    assert drawn[:40] == drawn[40:]


def test_a_property_fails_in_whichever_round_a_case_does():
    drawn = []

    def check(value):
        drawn.append(value)
        assert len(drawn) < 25, "the 25th case"

    with pytest.raises(AssertionError, match="the 25th case"):
        in_rounds((wide,), 40, 20, PHASES)(check)()


def test_a_property_with_too_few_cases_to_draw_fails():
    with pytest.raises(AssertionError, match="2 cases of 40 were drawn"):
        in_rounds((st.booleans(),), 40, 40, PHASES)(lambda value: None)()


def test_a_property_whose_cases_are_mostly_refused_fails():
    def check(value):
        return REFUSED if value % 8 else None

    with pytest.raises(AssertionError, match="most cases were refused"):
        in_rounds((wide,), 160, 80, PHASES)(check)()
