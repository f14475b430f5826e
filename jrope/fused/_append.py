"""A packed qkv buffer to rotated queries, and keys and values in a paged cache."""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._gather import OutOfRange, check_array
from jrope._kinds import Table
from jrope._layout import RotaryLayout
from jrope.fused._kernels import Axes, whole_axes
from jrope.fused._norm import QkNorm
from jrope.fused._operation import run
from jrope.fused._pages import (
    FP8,
    CacheLayout,
    Pages,
    by_amax,
    check_slots,
    largest,
    quantised,
)
from jrope.fused._rows import Rows, RowSource, row_source
from jrope.fused._turned import check_qkv, kernel_declines, split_qkv, turned
from jrope.fused._weights import Weights, given_weights
from pallas_kernels import no_fp8

PaddedQuery = Literal["rotated", "unrotated"]
Fp8Scale = Literal["tensor", "token_head"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeAppendKv:
    """The operation over (qkv, slots, caches, scales..., weights..., rows).

    Scales are operands where `fp8` is "tensor".
    """

    source: RowSource
    query_heads: int
    key_heads: int
    norm: QkNorm | None
    weights: Weights
    pages: Pages
    padded_query: PaddedQuery
    fp8: Fp8Scale | None

    name = "rope_append_kv"
    refuses_gradients = "it rewrites a paged cache"
    token_operands = None

    def _split(self, operands: tuple[Array, ...]) -> Any:
        """(qkv, slots, caches), scales, weights, rows."""
        scales = 2 if self.fp8 == "tensor" else 0
        weights = 4 + scales
        rows = weights + self.weights.count
        return (
            operands[:4],
            operands[4:weights],
            operands[weights:rows],
            operands[rows:],
        )

    def define(self, *operands: Array) -> tuple[Array, ...]:
        """Split, turned, and written token by token."""
        (qkv, slots, *caches), scales, weights, rows = self._split(operands)
        layout = self.source.layout
        given, key, value = split_qkv(
            qkv, self.query_heads, self.key_heads, layout.head_dim
        )
        options: dict[str, Any] = {"layout": layout, "norm": self.norm}
        rows, weights = self.source.rows(*rows), self.weights.spread(list(weights))
        wide = self.fp8 is not None
        query, key = turned([given, key], weights, rows, wide=wide, **options)
        query = query.astype(given.dtype)
        if self.padded_query == "unrotated":
            query = jnp.where((slots < 0)[:, None, None], given, query)
        written, amaxes = [key, value], []
        if wide:
            written = [x.astype(jnp.float32) for x in written]
            written, amaxes = self._narrow(written, scales)
        caches = [
            self.pages.write(cache, slots, x)
            for cache, x in zip(caches, written, strict=True)
        ]
        return (query, *caches, *amaxes)

    def _narrow(
        self, wides: list[Array], scales: tuple[Array, ...]
    ) -> tuple[list[Array], list[Array]]:
        """Keys and values in 8 bits, and the largest magnitudes if they are scales."""
        if self.fp8 == "tensor":
            pairs = zip(wides, scales, strict=True)
            return [quantised(wide, scale) for wide, scale in pairs], []
        amaxes = [largest(wide) for wide in wides]
        return [
            quantised(wide, by_amax(amax)[..., None])
            for wide, amax in zip(wides, amaxes, strict=True)
        ], amaxes

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """One launch."""
        from pallas_kernels import rope_append_kv as run_kernel

        (qkv, slots, *caches), scales, weights, rows = self._split(operands)
        return run_kernel(
            qkv,
            slots,
            caches[0],
            caches[1],
            self.source.kernel_rows(*rows),
            place=self.source.place,
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            norms=self.weights.kernel_norms(self.norm, list(weights)),
            cache_layout=self.pages.layout,
            rotate_padding=self.padded_query == "rotated",
            scales=tuple(scales) if self.fp8 == "tensor" else None,
            amax=self.fp8 == "token_head",
            interpret=interpret,
        )

    def declines(self, *operands: Any) -> str | None:
        """Declines dtypes that models or the GPU do not have."""
        qkv = operands[0]
        return kernel_declines([qkv], qkv.shape[0]) or (no_fp8() if self.fp8 else None)

    def axes(self, *operands: Any) -> Axes:
        """Nothing may be split: every token may write anywhere."""
        amaxes = [2, 2] if self.fp8 == "token_head" else []
        return whole_axes([x.ndim for x in operands], [3, 4, 4, *amaxes])


def rope_append_kv(
    positions: ArrayLike | None,
    qkv: Float[Array, "T NKKH"],
    table: Float32[Array, "P R"] | Table | Rows,
    slots: ArrayLike,
    key_cache: Array,
    value_cache: Array,
    *,
    layout: RotaryLayout,
    query_heads: int,
    key_heads: int,
    cache_layout: CacheLayout = "NHD",
    norm: QkNorm | None = None,
    query_weight: Float[Array, " H"] | None = None,
    key_weight: Float[Array, " H"] | None = None,
    padded_query: PaddedQuery = "rotated",
    fp8: Fp8Scale | None = None,
    key_scale: Float32[Array, ""] | None = None,
    value_scale: Float32[Array, ""] | None = None,
    out_of_range: OutOfRange = "nan",
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Splits, rotates, and writes keys and values into a paged cache.

    On an NVIDIA GPU one launch in place of four to seven. Donate the caches: they are
    rewritten in place, or copied first.

    Args:
      positions: int32 [T], or [A, T] where the layout has an axis map; None with rows.
      qkv: [T, (N + 2 K) H].
      table: float32 [P, R] or a table kind; or the rows (cos, sin) of `jrope.lookup`.
      slots: int32 [T], page * page_size + place in the page. Distinct, but for -1,
        which is padding: nothing is written. Nor is it past the cache's end.
      key_cache: [pages, page_size, K, H] (NHD) or [pages, K, page_size, H] (HND).
      value_cache: likewise.
      layout: which features turn, in which pairs, by which axis.
      query_heads: N.
      key_heads: K.
      cache_layout: "NHD" or "HND".
      norm: also norm each head of queries and keys.
      query_weight: [H], of the queries' norm; None for none.
      key_weight: likewise.
      padded_query: the query of a padded token is "rotated", like any, or "unrotated":
        as it came, not normed either.
      fp8: for caches of float8_e4m3fn: "tensor" multiplies by the scales given,
        "token_head" by 448 / amax of each token and head. Values beyond 448 saturate.
      key_scale: float32 [], with "tensor".
      value_scale: likewise.
      out_of_range: what positions of P or more read.
      implementation: "xla", "pallas" or None for the best that takes the case.

    Returns:
      query [T, N, H], key_cache and value_cache; with "token_head" also the amax of
      keys and of values, float32 [T, K]. It has no derivative.

    Raises:
      TypeError, ValueError: if operands do not fit, or the named kernel declines.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> rows = jnp.zeros((1, 1)), jnp.ones((1, 1))  # a quarter turn
    >>> caches = jnp.zeros((2, 1, 4, 1, 2))  # [pages, page_size, K, H] each
    >>> query, keys, values = rope_append_kv(None, jnp.arange(6.0)[None], rows,
    ...     jnp.array([3]), *caches, layout=layout, query_heads=1, key_heads=1)
    >>> query.tolist(), keys[0, 3].tolist(), values[0, 3].tolist()
    ([[[-1.0, 0.0]]], [[-3.0, 2.0]], [[4.0, 5.0]])
    """
    check_qkv(qkv, query_heads, key_heads, layout)
    if qkv.ndim != 2:
        raise ValueError(f"qkv must be [T, (N + 2 K) H], got shape {qkv.shape}")
    scales = _check_scales(fp8, key_scale, value_scale)
    pages = Pages(layout=cache_layout)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, cache in caches.items():
        pages.check(name, cache, key_heads, layout.head_dim)
        _check_dtype(name, cache, FP8 if fp8 else qkv.dtype)
    if padded_query not in get_args(PaddedQuery):
        raise ValueError(
            f"padded_query must be one of {get_args(PaddedQuery)}, got {padded_query!r}"
        )
    source, rows = row_source(
        positions,
        table,
        layout=layout,
        tokens=qkv.shape[:1],
        is_shared=False,
        out_of_range=out_of_range,
    )
    weights, given = given_weights(norm, query_weight, key_weight, layout.head_dim)
    operation = RopeAppendKv(
        source=source,
        query_heads=query_heads,
        key_heads=key_heads,
        norm=norm,
        weights=weights,
        pages=pages,
        padded_query=padded_query,
        fp8=fp8,
    )
    operands = (
        qkv,
        check_slots(slots, qkv.shape[0], "qkv's tokens"),
        key_cache,
        value_cache,
        *scales,
        *given,
        *rows,
    )
    return run(operation, operands, implementation)


def _check_dtype(name: str, cache: Array, wanted: Any) -> None:
    if cache.dtype != wanted:
        raise TypeError(
            f"{name} must be {jnp.dtype(wanted)}, got {cache.dtype}; a cache of "
            f"float8_e4m3fn needs fp8='tensor' or 'token_head'"
        )


def _check_scales(
    fp8: str | None, key_scale: Array | None, value_scale: Array | None
) -> tuple[Array, ...]:
    if fp8 not in (None, *get_args(Fp8Scale)):
        raise ValueError(
            f"fp8 must be None or one of {get_args(Fp8Scale)}, got {fp8!r}"
        )
    scales = (key_scale, value_scale)
    if fp8 != "tensor":
        if any(scale is not None for scale in scales):
            raise ValueError("key_scale and value_scale must come with fp8='tensor'")
        return ()
    for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
        if scale is not None:
            check_array(name, scale)
        if scale is None or scale.shape != () or scale.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 [] with fp8='tensor'")
    return tuple(scale for scale in scales if scale is not None)
