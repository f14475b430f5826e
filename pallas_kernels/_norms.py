"""The norms of queries and of keys as operands of a kernel."""

import dataclasses
from typing import Any

from jaxtyping import Array

from pallas_kernels._finish import Norm
from pallas_kernels._heads import Place

Norms = tuple[Norm | None, Norm | None]


def weight_operands(norms: Norms, place: Place) -> list[Array]:
    """The weights that there are, indexed as heads are."""
    return [
        place.view(norm.weight)
        for norm in norms
        if norm is not None and norm.weight is not None
    ]


def in_kernel(norms: Norms, refs: tuple[Any, ...]) -> Norms:
    """The norms with references in place of their weights."""
    left = iter(refs)
    query, key = (
        norm
        if norm is None or norm.weight is None
        else dataclasses.replace(norm, weight=next(left))
        for norm in norms
    )
    return query, key
