"""Which position axis drives which frequency, in multimodal RoPE."""

from collections.abc import Callable, Sequence

from jrope._layout import check_int

AxisMap = tuple[int, ...]


def chunked_axes(section: Sequence[int]) -> AxisMap:
    """Axes in runs: the first `section[0]` frequencies to axis 0, and so on.

    Source: Qwen2-VL, `mrope_section`.

    >>> chunked_axes((1, 2, 1))
    (0, 1, 1, 2)
    """
    return tuple(axis for axis, count in enumerate(section) for _ in range(count))


def interleaved_axes(section: Sequence[int]) -> AxisMap:
    """Axes in turn, frequency by frequency, as long as an axis has some left.

    Frequency i belongs to axis 1 if i % 3 == 1 and i < 3 * section[1], to axis 2 if
    i % 3 == 2 and i < 3 * section[2], else to axis 0.

    Source: Qwen3-VL, `mrope_interleaved`.

    Raises:
      ValueError: if there are not three axes, or the first has fewer frequencies than
        another: the rule then gives other counts than the section's.

    >>> interleaved_axes((2, 1, 1))
    (0, 1, 2, 0)
    """
    if len(section) != 3:
        raise ValueError(
            f"mrope_section must have 3 entries where mrope_interleaved is true, got "
            f"{tuple(section)}"
        )
    axes = tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
    counts = tuple(axes.count(axis) for axis in range(3))
    if counts != tuple(section):
        raise ValueError(
            f"mrope_section must have its largest entry first where mrope_interleaved "
            f"is true, got {tuple(section)}, which would become {counts}"
        )
    return axes


def mrope_axes(
    section: Sequence[int], *, rotary_dim: int, interleaved: bool = False
) -> AxisMap:
    """The `axis_of_frequency` of an `mrope_section`.

    Args:
      section: frequencies per axis; their sum is R/2.
      rotary_dim: R.
      interleaved: axes in turn (Qwen3-VL), not in runs (Qwen2-VL).

    Raises:
      TypeError, ValueError: if the section is not one of R/2 frequencies.
    """
    check_int("rotary_dim", rotary_dim, minimum=2)
    for count in section:
        check_int("every entry of mrope_section", count, minimum=0)
    if sum(section) != rotary_dim // 2:
        raise ValueError(
            f"mrope_section must sum to rotary_dim // 2 = {rotary_dim // 2}, got "
            f"{tuple(section)} (sum {sum(section)}); is rotary_dim={rotary_dim} the "
            f"partial rotary dim?"
        )
    order: Callable[[Sequence[int]], AxisMap] = (
        interleaved_axes if interleaved else chunked_axes
    )
    return order(section)
