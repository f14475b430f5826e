"""Where in a head the rotation acts, and which position drives which frequency."""

import dataclasses
from typing import cast

import numpy as np

from jrope._show import show

# Beyond any model: a number that is wrong rather than large.
MAX_HEAD_DIM = 65536
# Positions that int32 can number.
LONGEST = 2**31 - 1


def check_int(
    name: str, value: object, *, minimum: int, maximum: int | None = None
) -> None:
    """Raises unless `value` is an int between the bounds.

    Neither bool nor NumPy's integers are one: the latter overflow in silence.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {show(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {show(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {show(value)}")


def check_bool(name: str, value: object) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {show(value)}")


def check_length(name: str, value: object, *, minimum: int = 1) -> None:
    """Raises unless `value` is a count of positions that int32 can number.

    A longer one would leave what floats can hold wherever it is divided.
    """
    check_int(name, value, minimum=minimum)
    if cast(int, value) > LONGEST:
        raise ValueError(f"{name} must fit int32 positions, got {show(value)}")


def check_layout(layout: object) -> None:
    """Raises unless `layout` is a RotaryLayout."""
    if not isinstance(layout, RotaryLayout):
        raise TypeError(
            f"layout must be a RotaryLayout, got {type(layout).__name__}; of a "
            f"RopeConfig it is config.layout"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryLayout:
    """Pairing and placement of a rotation within a head.

    Hashable, so it can be a static argument of a jitted function.

    Args:
      head_dim: features per head, H.
      rotary_dim: features rotated, R: even, at most H.
      rotary_offset: index of the first rotated feature.
      is_neox_style: pairs are (i, i + R/2) if True, (2i, 2i + 1) (GPT-J) if False;
        both counted from `rotary_offset`.
      axis_of_frequency: for multimodal RoPE, which row of `positions [A, *B, T]` drives
        each of the R/2 frequencies; None for one-dimensional positions.

    Raises:
      TypeError, ValueError: if a width is not an integer, or they do not fit together.

    >>> axes = (0, 1) * 16
    >>> layout = RotaryLayout(head_dim=128, rotary_dim=64, axis_of_frequency=axes)
    >>> layout.position_axes, layout.axes_array()[:4].tolist()
    (2, [0, 1, 0, 1])
    """

    head_dim: int
    rotary_dim: int
    rotary_offset: int = 0
    is_neox_style: bool = True
    axis_of_frequency: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks that the widths fit into the head."""
        check_int("head_dim", self.head_dim, minimum=2, maximum=MAX_HEAD_DIM)
        check_int("rotary_dim", self.rotary_dim, minimum=2)
        check_int("rotary_offset", self.rotary_offset, minimum=0)
        check_bool("is_neox_style", self.is_neox_style)
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim must be even, since features turn in pairs, got "
                f"{self.rotary_dim}; is partial_rotary_factor * head_dim odd?"
            )
        if self.rotary_offset + self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_offset + rotary_dim must be at most head_dim = "
                f"{self.head_dim}, got {show(self.rotary_offset)} + "
                f"{show(self.rotary_dim)}"
            )
        if self.axis_of_frequency is not None:
            self._check_axes(self.axis_of_frequency)

    def _check_axes(self, axes: tuple[int, ...]) -> None:
        if not isinstance(axes, tuple):
            raise TypeError(
                f"axis_of_frequency must be a tuple of ints (a layout is hashable), "
                f"got {type(axes).__name__}"
            )
        if len(axes) != self.rotary_dim // 2:
            raise ValueError(
                f"axis_of_frequency must name one axis for each of the "
                f"{self.rotary_dim // 2} frequencies of rotary_dim = "
                f"{self.rotary_dim}, got {len(axes)}"
            )
        for axis in axes:
            check_int("an entry of axis_of_frequency", axis, minimum=0, maximum=15)

    @property
    def position_axes(self) -> int | None:
        """The A of `positions [A, *B, T]`, or None for `positions [*B, T]`."""
        return (
            None if self.axis_of_frequency is None else max(self.axis_of_frequency) + 1
        )

    def axes_array(self) -> np.ndarray:
        """`axis_of_frequency` as int8 [R/2].

        Raises:
          ValueError: if positions are one-dimensional in this layout.
        """
        if self.axis_of_frequency is None:
            raise ValueError("this layout has one-dimensional positions, no axis map")
        return np.asarray(self.axis_of_frequency, np.int8)
