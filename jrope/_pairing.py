"""Reorders weights between the two pairings of features."""

from typing import Any, Literal, TypeVar, get_args

import numpy as np

from jrope._layout import RotaryLayout, check_layout
from jrope._show import show

Pairing = Literal["neox", "gptj"]


_Array = TypeVar("_Array")  # A NumPy or JAX array.


def permute_pairing(
    weights: _Array,
    *,
    layout: RotaryLayout,
    from_: Pairing,
    to: Pairing,
    axis: int = 0,
) -> _Array:
    """Query or key projections, biases or norms, for the other pairing.

    A model whose weights were trained for one pairing gives the same scores with the
    other, once the rows of its query and key projections are reordered (GGUF files of
    Llama models come reordered to "gptj").

    Args:
      weights: an array one axis of which is N * H: heads of H features each; N = 1 for
        norms that all heads share.
      layout: the heads' widths; its own pairing does not matter.
      from_: the pairing that the weights are for.
      to: the pairing that they shall be for.
      axis: the axis of heads: 0 for a PyTorch `weight`, the last for a Flax `kernel`.

    Returns:
      The reordered array, of the same kind.

    Raises:
      TypeError: if the layout is none.
      ValueError: if the axis does not hold whole heads, or a pairing is unknown.

    >>> layout = RotaryLayout(head_dim=4, rotary_dim=4)
    >>> permute_pairing(np.arange(4), layout=layout, from_="neox", to="gptj").tolist()
    [0, 2, 1, 3]
    """
    check_layout(layout)
    for name, pairing in (("from_", from_), ("to", to)):
        if pairing not in get_args(Pairing):
            raise ValueError(
                f"{name} must be one of {get_args(Pairing)}, got {show(pairing)}"
            )
    array: Any = weights
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"axis must be one of the array's {array.ndim}, got {axis} for shape "
            f"{array.shape}"
        )
    length = array.shape[axis]
    if length % layout.head_dim:
        raise ValueError(
            f"axis {axis} must hold whole heads of {layout.head_dim} features, got "
            f"length {length}; are the heads on another axis?"
        )
    heads = np.arange(length).reshape(-1, layout.head_dim)
    return array.take(heads[:, _order(layout, from_, to)].ravel(), axis=axis)


def _order(layout: RotaryLayout, from_: Pairing, to: Pairing) -> np.ndarray:
    """Which old feature stands at each new place of a head."""
    order = np.arange(layout.head_dim)
    if from_ == to:
        return order
    half = layout.rotary_dim // 2
    by_halves = np.arange(layout.rotary_dim).reshape(2, half)
    by_pairs = np.arange(layout.rotary_dim).reshape(half, 2)
    turned = (by_halves if from_ == "neox" else by_pairs).T.ravel()
    start = layout.rotary_offset
    order[start : start + layout.rotary_dim] = start + turned
    return order
