"""A packed qkv buffer to rotated queries and keys, and values."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._gather import OutOfRange
from jrope._kinds import Table
from jrope._layout import RotaryLayout, check_bool
from jrope.fused._kernels import Axes
from jrope.fused._norm import QkNorm
from jrope.fused._operation import run
from jrope.fused._rows import Rows, RowSource, row_source
from jrope.fused._turned import (
    cannot_rewrite,
    check_qkv,
    kernel_declines,
    split_qkv,
    turned,
)
from jrope.fused._weights import Weights, given_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkvRope:
    """The operation over (qkv, weights..., positions and table or rows)."""

    source: RowSource
    query_heads: int
    key_heads: int
    norm: QkNorm | None
    weights: Weights
    packed: bool

    name = "qkv_rope"
    refuses_gradients = None

    @property
    def token_operands(self) -> tuple[int, ...]:
        """The packed buffer, and positions or rows."""
        rows = 1 + self.weights.count
        return (0, rows) if self.source.gathered else (0, rows, rows + 1)

    def define(self, *operands: Array) -> tuple[Array, ...]:
        """Split, turned, and packed again if asked."""
        qkv, *weights, first, second = operands
        layout = self.source.layout
        query, key, value = split_qkv(
            qkv, self.query_heads, self.key_heads, layout.head_dim
        )
        query, key = turned(
            [query, key],
            self.weights.spread(weights),
            self.source.rows(first, second),
            layout=layout,
            norm=self.norm,
        )
        if not self.packed:
            return query, key, value
        return (jnp.concatenate([query, key, value], axis=-2).reshape(qkv.shape),)

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """One launch."""
        from pallas_kernels import qkv_rope as run_kernel

        qkv, *weights, first, second = operands
        return run_kernel(
            qkv,
            self.source.kernel_rows(first, second),
            place=self.source.place,
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            norms=self.weights.kernel_norms(self.norm, weights),
            packed=self.packed,
            interpret=interpret,
        )

    def declines(self, *operands: Any) -> str | None:
        """Declines dtypes that models do not have, and heads too small to rewrite."""
        qkv = operands[0]
        return kernel_declines([qkv], math.prod(qkv.shape[:-1])) or (
            cannot_rewrite(
                self.source.place,
                (self.query_heads, self.key_heads),
                qkv.dtype.itemsize,
                whole_heads=self.norm is not None,
            )
            if self.packed
            else None
        )

    def axes(self, *operands: Any) -> Axes:
        """Tokens may be split; heads of three kinds share the last axis."""
        tokens = tuple(f"a{i}" for i in range(len(operands[0].shape) - 1))
        packed = (*tokens, "f")
        apart = tuple((*tokens, f"n{i}", f"h{i}") for i in range(3))
        names = () if self.packed else [name for axes in apart for name in axes[-2:]]
        return Axes(
            operands=(packed, *self.weights.axes, *self.source.axes(tokens)),
            results=(packed,) if self.packed else apart,
            whole=("f", *names, *self.weights.whole, *self.source.whole),
        )


def qkv_rope(
    positions: ArrayLike | None,
    qkv: Float[Array, "*B T NKKH"],
    table: Float32[Array, "P R"] | Table | Rows,
    *,
    layout: RotaryLayout,
    query_heads: int,
    key_heads: int,
    norm: QkNorm | None = None,
    query_weight: Float[Array, " H"] | None = None,
    key_weight: Float[Array, " H"] | None = None,
    packed: bool = False,
    out_of_range: OutOfRange = "nan",
    implementation: str | None = None,
) -> tuple[Array, Array, Array] | Array:
    """Splits a packed projection into queries, keys and values, and rotates.

    On an NVIDIA GPU one launch reads the buffer once. Separate queries and keys must
    first be cut out of it, which moves all their bytes once more.

    Args:
      positions: int32 [*B, T], or [A, *B, T] where the layout has an axis map; axes of
        length 1 are shared. None with rows.
      qkv: [*B, T, (N + 2 K) H]: the queries' heads, the keys', the values'.
      table: float32 [P, R] or a table kind; or the rows (cos, sin) of `jrope.lookup`.
      layout: which features turn, in which pairs, by which axis.
      query_heads: N.
      key_heads: K.
      norm: also norm each head of queries and keys.
      query_weight: [H], of the queries' norm; None for none.
      key_weight: likewise.
      packed: return one buffer like `qkv`, rewritten in place where it may be.
      out_of_range: what positions of P or more read.
      implementation: "xla", "pallas" or None for the best that takes the case.

    Returns:
      query [*B, T, N, H], key and value [*B, T, K, H]; or the packed buffer.

    Raises:
      TypeError, ValueError: if operands do not fit, or the named kernel declines.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> rows = jnp.zeros((1, 1)), jnp.ones((1, 1))
    >>> query, key, value = qkv_rope(None, jnp.arange(6.0)[None], rows, layout=layout,
    ...     query_heads=1, key_heads=1)
    >>> query.tolist(), key.tolist(), value.tolist()
    ([[[-1.0, 0.0]]], [[[-3.0, 2.0]]], [[[4.0, 5.0]]])
    """
    check_qkv(qkv, query_heads, key_heads, layout)
    check_bool("packed", packed)
    source, rows = row_source(
        positions,
        table,
        layout=layout,
        tokens=qkv.shape[:-1],
        out_of_range=out_of_range,
    )
    weights, given = given_weights(norm, query_weight, key_weight, layout.head_dim)
    operation = QkvRope(
        source=source,
        query_heads=query_heads,
        key_heads=key_heads,
        norm=norm,
        weights=weights,
        packed=packed,
    )
    outs = run(operation, (qkv, *given, *rows), implementation)
    return outs[0] if packed else (outs[0], outs[1], outs[2])
