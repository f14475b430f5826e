"""Which position axis drives which frequency, in multimodal and two-dimensional RoPE.

One function an order. Adding one: write it, give its source, add its row to
`AXIS_ORDERS`; the config reader and the tests follow from that table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from jrope._layout import MAX_HEAD_DIM, check_int
from jrope._show import show

AxisMap = tuple[int, ...]
AxisOrder = Literal["chunked", "interleaved", "round_robin", "balanced", "ernie"]


def chunked_axes(section: Sequence[int]) -> AxisMap:
    """Axes in runs: the first `section[0]` frequencies to axis 0, and so on.

    Any number of axes: three for Qwen2-VL and GLM-4V, three or four for HunYuan-VL,
    whose section is called `xdrope_section`.

    Source: Qwen2-VL, `mrope_section`; vLLM's `XDRotaryEmbedding`.

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
    _check_axes("where mrope_interleaved is true", section, (3,))
    axes = tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
    counts = tuple(axes.count(axis) for axis in range(3))
    if counts != tuple(section):
        raise ValueError(
            f"mrope_section must have its largest entry first where mrope_interleaved "
            f"is true, got {show(tuple(section))}, which would become {counts}; GLM's "
            f"sections need the order 'round_robin'"
        )
    return axes


def round_robin_axes(section: Sequence[int]) -> AxisMap:
    """Axes in turn by the index; an axis that is used up gives way to the next.

    Source: SGLang's map for GLM-V, `mrope_interleaved_glm`.

    >>> round_robin_axes((1, 2, 3))
    (0, 1, 2, 1, 2, 2)
    """
    left, axes = list(section), []
    for i in range(sum(section)):
        turn = i % len(left)
        axis = next(
            a % len(left) for a in range(turn, 2 * len(left)) if left[a % len(left)]
        )
        left[axis] -= 1
        axes.append(axis)
    return tuple(axes)


def balanced_axes(section: Sequence[int]) -> AxisMap:
    """Never the same axis twice, if avoidable; of the others the furthest behind.

    Behind its own share, that is; a tie goes to the lower axis. With three axes the
    last frequency is set aside for axis 0 beforehand.

    Source: openPangu-VL, vLLM's `MRotaryEmbeddingInterleaved`.

    Raises:
      ValueError: if there are not two or three axes.

    >>> balanced_axes((2, 3, 3))
    (0, 1, 2, 1, 2, 1, 2, 0)
    """
    _check_axes("in openPangu's order", section, (2, 3))
    total, axes = list(section), []
    if len(total) == 3:
        total[0] -= 1
    placed = [0] * len(total)
    for _ in range(sum(total)):
        left = [axis for axis in range(len(total)) if placed[axis] < total[axis]]
        others = [axis for axis in left if axes[-1:] != [axis]] or left
        axis = min(others, key=lambda a: placed[a] / total[a])
        placed[axis] += 1
        axes.append(axis)
    return (*axes, 0) if len(total) == 3 else tuple(axes)


def ernie_axes(section: Sequence[int]) -> AxisMap:
    """Height and width in turn, then a run of time.

    The section's order is height, width, time; the axes are those of its positions:
    time 0, height 1, width 2.

    Source: ERNIE-4.5-VL, transformers' `Ernie4_5_VLMoeTextRotaryEmbedding`.

    Raises:
      ValueError: if there are not three entries, or height and width differ.

    >>> ernie_axes((2, 2, 1))
    (1, 2, 1, 2, 0)
    """
    _check_axes("in ERNIE's order", section, (3,))
    height, width, time = section
    if height != width:
        raise ValueError(
            f"mrope_section must have as many frequencies for height as for width in "
            f"ERNIE's order (height, width, time), got "
            f"{show(tuple(section))}; is it in another model's order?"
        )
    return (1, 2) * height + (0,) * time


AXIS_ORDERS: Mapping[AxisOrder, Callable[[Sequence[int]], AxisMap]] = {
    "chunked": chunked_axes,
    "interleaved": interleaved_axes,
    "round_robin": round_robin_axes,
    "balanced": balanced_axes,
    "ernie": ernie_axes,
}


def mrope_axes(
    section: Sequence[int], *, rotary_dim: int, order: AxisOrder = "chunked"
) -> AxisMap:
    """The `axis_of_frequency` of an `mrope_section`.

    Args:
      section: frequencies per axis; their sum is R/2.
      rotary_dim: R.
      order: "chunked" (Qwen2-VL, HunYuan-VL), "interleaved" (Qwen3-VL), "round_robin"
        (GLM-V), "balanced" (openPangu-VL) or "ernie".

    Raises:
      TypeError, ValueError: if the section is not one of R/2 frequencies, or not one
        that the order can lay out.

    >>> mrope_axes((2, 1, 1), rotary_dim=8, order="interleaved")
    (0, 1, 2, 0)
    """
    if not isinstance(order, str) or order not in AXIS_ORDERS:
        raise ValueError(
            f"order must be one of {get_args(AxisOrder)}, got {show(order)}"
        )
    check_int("rotary_dim", rotary_dim, minimum=2, maximum=MAX_HEAD_DIM)
    if not isinstance(section, list | tuple):
        raise TypeError(f"mrope_section must be a list of ints, got {show(section)}")
    for count in section:
        # An axis without a frequency would be missing from the layout's positions.
        check_int("every entry of mrope_section", count, minimum=1)
    if 2 * sum(section) != rotary_dim:
        raise ValueError(
            f"mrope_section must sum to rotary_dim // 2 = {rotary_dim // 2}, got "
            f"{show(tuple(section))} (sum {show(sum(section))}); is "
            f"rotary_dim={rotary_dim} the partial rotary dim?"
        )
    return AXIS_ORDERS[order](section)


def _check_axes(where: str, section: Sequence[int], allowed: tuple[int, ...]) -> None:
    if len(section) not in allowed:
        counts = " or ".join(map(str, allowed))
        raise ValueError(
            f"mrope_section must have {counts} entries {where}, got "
            f"{show(tuple(section))}"
        )
