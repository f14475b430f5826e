"""Queries and keys normed and rotated, with or without an output gate between."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._gather import OutOfRange, check_array
from jrope._kinds import Table
from jrope._layout import RotaryLayout, check_bool, check_layout
from jrope.fused._kernels import Axes
from jrope.fused._norm import QkNorm, check_norm
from jrope.fused._operation import run
from jrope.fused._rows import Rows, RowSource, row_source
from jrope.fused._turned import check_floating, kernel_declines, turned
from jrope.fused._weights import Weights, given_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkNormRope:
    """The operation over (query, key, weights..., positions and table or rows)."""

    source: RowSource
    norm: QkNorm
    weights: Weights
    gated: bool

    name = "qk_norm_rope"
    refuses_gradients = None

    @property
    def token_operands(self) -> tuple[int, ...]:
        """Queries, keys, and positions or rows."""
        rows = 2 + self.weights.count
        return (0, 1, rows) if self.source.gathered else (0, 1, rows, rows + 1)

    def define(self, *operands: Array) -> tuple[Array, ...]:
        """Split from the gate, normed and turned."""
        query, key, *weights, first, second = operands
        gate = None
        if self.gated:
            query, gate = jnp.split(query, 2, axis=-1)
        query, key = turned(
            [query, key],
            self.weights.spread(weights),
            self.source.rows(first, second),
            layout=self.source.layout,
            norm=self.norm,
        )
        return (query, key) if gate is None else (query, key, gate)

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """One launch."""
        from pallas_kernels import qk_norm_rope as run_kernel

        query, key, *weights, first, second = operands
        return run_kernel(
            query,
            key,
            self.source.kernel_rows(first, second),
            place=self.source.place,
            norms=self.weights.kernel_norms(self.norm, weights),
            gated=self.gated,
            interpret=interpret,
        )

    def declines(self, *operands: Any) -> str | None:
        """Declines dtypes that models do not have."""
        query, key, *_ = operands
        return kernel_declines([query, key], math.prod(query.shape[:-2]))

    def axes(self, *operands: Any) -> Axes:
        """Tokens and heads may be split."""
        tokens = tuple(f"a{i}" for i in range(len(operands[0].shape) - 2))
        query, key = (*tokens, "n0", "h0"), (*tokens, "n1", "h1")
        # A gate is as wide as a head, half of what the query is.
        wide = (*tokens, "n0", "h2") if self.gated else query
        gate = (*tokens, "n0", "h3")
        return Axes(
            operands=(wide, key, *self.weights.axes, *self.source.axes(tokens)),
            results=(query, key, gate) if self.gated else (query, key),
            whole=(
                *(("h2", "h3") if self.gated else ()),
                *("h0", "h1", *self.weights.whole, *self.source.whole),
            ),
        )


def qk_norm_rope(
    positions: ArrayLike | None,
    query: Float[Array, "*B T N G"],
    key: Float[Array, "*B T K H"],
    table: Float32[Array, "P R"] | Table | Rows,
    *,
    layout: RotaryLayout,
    norm: QkNorm,
    query_weight: Float[Array, " H"] | None = None,
    key_weight: Float[Array, " H"] | None = None,
    gated: bool = False,
    out_of_range: OutOfRange = "nan",
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """RMS norm of each head and rotation, in the order that `norm` says.

    For a packed buffer see `qkv_rope`, which norms as well.

    Args:
      positions: int32 [*B, T], or [A, *B, T] where the layout has an axis map; axes of
        length 1 are shared. None with rows.
      query: [*B, T, N, H], or [*B, T, N, 2 H] with `gated`.
      key: [*B, T, K, H].
      table: float32 [P, R] or a table kind; or the rows (cos, sin) of `jrope.lookup`.
      layout: which features turn, in which pairs, by which axis.
      norm: how to norm.
      query_weight: [H]; None for none.
      key_weight: likewise.
      gated: the second half of each query head is an output gate (Qwen3-Next), which
        is cut off as it is.
      out_of_range: what positions of P or more read.
      implementation: "xla", "pallas" or None for the best that takes the case.

    Returns:
      query and key, and with `gated` the gate [*B, T, N, H].

    Raises:
      TypeError, ValueError: if operands do not fit, or the named kernel declines.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> rows = jnp.zeros((1, 1)), jnp.ones((1, 1))
    >>> heads = jnp.array([[[3.0, 3.0]]])
    >>> query, key = qk_norm_rope(None, heads, heads, rows, layout=layout,
    ...     norm=QkNorm(epsilon=0.0))
    >>> query.tolist()
    [[[-1.0, 1.0]]]
    """
    check_layout(layout)
    check_norm(norm)
    check_bool("gated", gated)
    _check_heads("query", query, layout.head_dim * (2 if gated else 1))
    _check_heads("key", key, layout.head_dim)
    tokens = query.shape[:-2]
    if key.shape[:-2] != tokens:
        raise ValueError(
            f"key must have the query's tokens, {tokens}, got shape {key.shape}"
        )
    source, rows = row_source(
        positions, table, layout=layout, tokens=tokens, out_of_range=out_of_range
    )
    weights, given = given_weights(norm, query_weight, key_weight, layout.head_dim)
    operation = QkNormRope(source=source, norm=norm, weights=weights, gated=gated)
    return run(operation, (query, key, *given, *rows), implementation)


def _check_heads(name: str, x: Array, width: int) -> None:
    check_array(name, x)
    check_floating(name, x)
    if x.ndim < 3 or x.shape[-1] != width:
        raise ValueError(
            f"{name} must be [*B, T, heads, {width}], got shape {x.shape}; a query "
            f"with an output gate is twice as wide and needs gated=True"
        )
