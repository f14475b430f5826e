"""The weights of two norms as operands, some of which may be absent."""

import dataclasses
from typing import Any

from jaxtyping import Array

from jrope.fused._norm import QkNorm, check_norm, check_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Which of the two norms have a weight."""

    query: bool
    key: bool

    @property
    def count(self) -> int:
        """How many operands they are."""
        return self.query + self.key

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Names of their axes, for `Axes`."""
        return tuple((name,) for name in self.whole)

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of those that must be whole."""
        return tuple(f"w{i}" for i in range(self.count))

    def spread(self, given: list[Array]) -> list[Array | None]:
        """The operands in their places, None where there is none."""
        left = iter(given)
        return [next(left) if has else None for has in (self.query, self.key)]

    def kernel_norms(self, norm: QkNorm | None, given: list[Array]) -> Any:
        """The norms of queries and of keys, as kernels take them."""
        if norm is None:
            return None, None
        from pallas_kernels import Norm

        query, key = (
            Norm(
                epsilon=norm.epsilon,
                unit_offset=norm.unit_offset,
                first=norm.order == "norm_rotate",
                rounded=norm.rounded,
                weight=weight,
            )
            for weight in self.spread(given)
        )
        return query, key


def given_weights(
    norm: QkNorm | None,
    query_weight: Array | None,
    key_weight: Array | None,
    head_dim: int,
) -> tuple[Weights, list[Array]]:
    """Checks norm and weights and gives those weights that there are.

    Raises:
      TypeError: if the norm is none, or a weight no array.
      ValueError: if a weight has another shape, or no norm to belong to.
    """
    if norm is not None:
        check_norm(norm)
    named = {"query_weight": query_weight, "key_weight": key_weight}
    for name, weight in named.items():
        check_weight(name, weight, head_dim)
        if weight is not None and norm is None:
            raise ValueError(f"{name} must come with norm=QkNorm(...), got norm=None")
    given = [weight for weight in named.values() if weight is not None]
    return Weights(query=query_weight is not None, key=key_weight is not None), given
