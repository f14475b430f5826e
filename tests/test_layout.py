"""RotaryLayout: what it accepts, what it refuses and how it says so."""

import dataclasses
from typing import Any

import pytest

from jrope import RotaryLayout


def test_layouts_are_values():
    one, two = (RotaryLayout(head_dim=64, rotary_dim=32) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != RotaryLayout(head_dim=64, rotary_dim=32, is_neox_style=False)


def test_widths_are_given_by_name():
    made: Any = RotaryLayout
    with pytest.raises(TypeError, match="positional argument"):
        made(64, 64)


def test_axes():
    plain = RotaryLayout(head_dim=8, rotary_dim=8)
    assert plain.position_axes is None
    with pytest.raises(ValueError, match="one-dimensional positions"):
        plain.axes_array()
    mapped = RotaryLayout(head_dim=8, rotary_dim=8, axis_of_frequency=(0, 0, 1, 2))
    assert mapped.position_axes == 3
    assert mapped.axes_array().dtype == "int8"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"rotary_dim": 31},
            ValueError,
            r"rotary_dim must be even.* got 31; is partial",
        ),
        ({"rotary_dim": 66}, ValueError, r"at most head_dim = 64, got 0 \+ 66"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim must be at least 2, got 0"),
        ({"rotary_dim": 32.0}, TypeError, "rotary_dim must be an int, got 32.0"),
        ({"rotary_dim": True}, TypeError, "rotary_dim must be an int, got True"),
        ({"head_dim": "64"}, TypeError, "head_dim must be an int, got '64'"),
        ({"rotary_offset": -2}, ValueError, "rotary_offset must be at least 0, got -2"),
        ({"rotary_offset": 34}, ValueError, r"at most head_dim = 64, got 34 \+ 32"),
        ({"is_neox_style": 1}, TypeError, "is_neox_style must be a bool, got 1"),
        ({"axis_of_frequency": [0] * 16}, TypeError, "must be a tuple of ints.* list"),
        ({"axis_of_frequency": (0,) * 15}, ValueError, "one axis for each of the 16"),
        ({"axis_of_frequency": (0,) * 17}, ValueError, "one axis .* got 17"),
        ({"axis_of_frequency": (-1,) * 16}, ValueError, "at least 0, got -1"),
        ({"axis_of_frequency": (0,) * 15 + (16,)}, ValueError, "at most 15, got 16"),
        ({"rotary_offset": 33}, ValueError, r"at most head_dim = 64, got 33 \+ 32"),
        ({"head_dim": 1}, ValueError, "head_dim must be at least 2, got 1"),
        ({"head_dim": 65537}, ValueError, "head_dim must be at most 65536, got 65537"),
    ],
)
def test_refusals(fields, error, message):
    with pytest.raises(error, match=message):
        RotaryLayout(**{"head_dim": 64, "rotary_dim": 32, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 2, "rotary_dim": 2},
        {"head_dim": 65536, "rotary_dim": 65536},
        {"head_dim": 65536, "rotary_dim": 2, "rotary_offset": 65534},
        {"head_dim": 8, "rotary_dim": 4, "axis_of_frequency": (0, 15)},
    ],
)
def test_the_last_values_taken(fields):
    made = RotaryLayout(**fields)
    assert {name: getattr(made, name) for name in fields} == fields
    assert made.is_neox_style is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.head_dim = 4  # type: ignore[misc]


def test_the_axes_are_one_more_than_the_last():
    for last in (0, 1, 15):
        axes = (last, 0)
        made = RotaryLayout(head_dim=4, rotary_dim=4, axis_of_frequency=axes)
        assert made.position_axes == last + 1
        assert made.axes_array().tolist() == [last, 0]
