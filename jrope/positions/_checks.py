"""What the fields of a spec must be."""

from typing import Any

from jrope._layout import LONGEST, check_int
from jrope._show import show
from jrope.positions._rule import NO_TOKEN

# Positions a second: a video of a second must stay within int32.
_FASTEST = 2.0**31


def check_token(name: str, value: object) -> None:
    """Raises unless `value` is a token's id, or NO_TOKEN."""
    check_int(name, value, minimum=NO_TOKEN, maximum=LONGEST)


def check_rate(name: str, value: Any) -> None:
    """Raises unless `value` is a number of positions, or of seconds, above 0."""
    check_number(name, value)
    if not 0 < value < _FASTEST:
        raise ValueError(
            f"{name} must be positive and less than 2**31, got {show(value)}"
        )


def check_number(name: str, value: object) -> None:
    """Raises unless `value` is a Python number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {show(value)}")


def check_seconds(name: str, value: Any) -> None:
    """Raises unless `value` is a time between frames, or None."""
    if value is not None:
        check_number(name, value)
        if not 0 <= value < _FASTEST:
            raise ValueError(f"{name} must be at least 0, got {show(value)}")


def check_canvas(name: str, value: object) -> None:
    """Raises unless `value` is a tuple of five tokens' ids, or None."""
    if value is None:
        return
    if not isinstance(value, tuple) or len(value) != 5:
        raise ValueError(
            f"{name} must be the ids of <image>, </image>, <slice>, </slice> and "
            f"newline, got {show(value)}"
        )
    for token in value:
        check_token(name, token)
