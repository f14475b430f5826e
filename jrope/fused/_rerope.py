"""Cached keys moved to other positions, in place."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jrope._gather import check_array
from jrope._kinds import FlatTable, Table, as_table
from jrope._layout import RotaryLayout, check_layout
from jrope._operands import HEAD_DTYPES
from jrope._ops import check_shifts, shift_rows
from jrope._primitive import bind_rope
from jrope.fused._kernels import Axes
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
from jrope.fused._rows import RowSource
from jrope.fused._turned import cannot_rewrite, kernel_declines
from pallas_kernels import no_fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReropeCache:
    """The operation over (key_cache, slots, amax..., shifts and table or rows)."""

    layout: RotaryLayout
    pages: Pages
    gathered: bool
    has_amax: bool

    name = "rerope_cache"
    refuses_gradients = "it rewrites a paged cache"
    token_operands = None

    @property
    def _place(self) -> Any:
        return RowSource(layout=self.layout, gathered=self.gathered).place

    def define(self, *operands: Array) -> tuple[Array, ...]:
        """Read, turned in float32, written."""
        cache, slots, *amaxes, first, second = operands
        cos, sin = (first, second)
        if self.gathered:
            cos, sin = shift_rows(
                first, FlatTable(cos_sin_cache=second), layout=self.layout
            )
        wide = self.pages.read(cache, slots).astype(jnp.float32)
        if amaxes:
            wide = wide / by_amax(amaxes[0])[..., None]
        (moved,) = bind_rope(
            [wide],
            cos,
            sin,
            is_neox_style=self.layout.is_neox_style,
            rotary_offset=self.layout.rotary_offset,
            implementation="xla",
        )
        if cache.dtype != FP8:
            return (self.pages.write(cache, slots, moved.astype(cache.dtype)),)
        if not amaxes:
            # One scale for all cancels: the stored numbers turn like the keys.
            stored = quantised(moved, jnp.float32(1))
            return (self.pages.write(cache, slots, stored),)
        amax = jnp.where((slots >= 0)[:, None], largest(moved), amaxes[0])
        stored = quantised(moved, by_amax(amax)[..., None])
        return self.pages.write(cache, slots, stored), amax

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """One launch."""
        from pallas_kernels import GivenRows, ShiftRows
        from pallas_kernels import rerope_cache as run_kernel

        cache, slots, *amaxes, first, second = operands
        if self.gathered:
            rows: Any = ShiftRows(shifts=first, table=second)
        else:
            rows = GivenRows(cos=first, sin=second)
        return run_kernel(
            cache,
            slots,
            rows,
            place=self._place,
            cache_layout=self.pages.layout,
            amax=amaxes[0] if amaxes else None,
            interpret=interpret,
        )

    def declines(self, *operands: Any) -> str | None:
        """Declines dtypes that caches or the GPU do not have, and small heads."""
        cache, slots = operands[:2]
        is_fp8 = cache.dtype == FP8
        reason = kernel_declines([] if is_fp8 else [cache], slots.shape[0])
        return (reason or (no_fp8() if is_fp8 else None)) or cannot_rewrite(
            self._place,
            (self.pages.heads(cache),),
            cache.dtype.itemsize,
            whole_heads=self.has_amax,
        )

    def axes(self, *operands: Any) -> Axes:
        """Heads may be split; every token may lie anywhere."""
        nhd = self.pages.layout == "NHD"
        cache = ("g", "b", "k", "h") if nhd else ("g", "k", "b", "h")
        amax = (("s", "k"),) if self.has_amax else ()
        rows = (("s",), ("p", "r")) if self.gathered else (("s", "r"), ("s", "r"))
        return Axes(
            operands=(cache, ("s",), *amax, *rows),
            results=(cache, *amax),
            whole=("g", "b", "h", "s", "r", *(("p",) if self.gathered else ())),
        )


def rerope_cache(
    shifts: ArrayLike,
    key_cache: Array,
    table: Float32[Array, "P R"] | Table,
    slots: ArrayLike,
    *,
    layout: RotaryLayout,
    cache_layout: CacheLayout = "NHD",
    key_amax: Float32[Array, "S K"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Moves cached keys to other positions, by signed shifts, in their slots.

    For prompts that slide, prefixes that move and tokens that are evicted. A key
    rotated at p and moved by d is the key rotated at p + d, for every scaling: the
    attention factor that it carries stays and is not applied again.

    Args:
      shifts: int32 [S], new position minus old one, each of magnitude below P.
      key_cache: [pages, page_size, K, H] (NHD) or [pages, K, page_size, H] (HND), in
        floats of 16, 32 or 64 bits, those of 64 turned in float32, or float8_e4m3fn.
      table: the table that rotated the keys, a flat or a two-level one.
      slots: int32 [S], which keys. Distinct, but for -1, which is skipped.
      layout: which features turn, and in which pairs.
      cache_layout: "NHD" or "HND".
      key_amax: float32 [S, K], of keys that `rope_append_kv` wrote with
        fp8="token_head". With one scale for all none is needed: it cancels.
      implementation: "xla", "pallas" or None for the best that takes the case.

    Returns:
      key_cache, and with `key_amax` the new largest magnitudes. It has no derivative.

    Raises:
      TypeError, ValueError: if operands do not fit, or the named kernel declines.

    >>> from jrope import RopeConfig, compute_cos_sin_cache
    >>> config = RopeConfig(head_dim=2, rope_theta=1e4, max_position_embeddings=8)
    >>> table = jnp.asarray(compute_cos_sin_cache(config))
    >>> cache = jnp.ones((1, 4, 1, 2))  # [pages, page_size, K, H]
    >>> (moved,) = rerope_cache(jnp.array([1, 2]), cache, table, jnp.array([0, -1]),
    ...     layout=config.layout)
    >>> moved[0, :2, 0].round(4).tolist()
    [[-0.3012000024318695, 1.3817999362945557], [1.0, 1.0]]
    """
    check_layout(layout)
    pages = Pages(layout=cache_layout)
    pages.check("key_cache", key_cache, None, layout.head_dim)
    if key_cache.dtype not in (*HEAD_DTYPES, FP8):
        raise TypeError(
            f"key_cache must be one of {[str(dtype) for dtype in HEAD_DTYPES]} or "
            f"{FP8}, got {key_cache.dtype}; keys of other types are not turned in place"
        )
    kind = as_table(table)
    signed = check_shifts(shifts, kind, layout=layout)
    if signed.ndim != 1:
        raise ValueError(f"shifts must be [S], got shape {signed.shape}")
    where = check_slots(slots, signed.shape[0], "shifts")
    amaxes = _check_amax(key_amax, key_cache, (*signed.shape, pages.heads(key_cache)))
    gathered = type(kind) is FlatTable
    if gathered and kind.cos_sin_cache.shape[1] != layout.rotary_dim:
        raise ValueError(
            f"the cos/sin table must be [P, R] with R = {layout.rotary_dim}, got shape "
            f"{kind.cos_sin_cache.shape}; was it built for another config?"
        )
    rows = (
        (signed, kind.cos_sin_cache)
        if gathered
        else shift_rows(signed, kind, layout=layout)
    )
    operation = ReropeCache(
        layout=layout, pages=pages, gathered=gathered, has_amax=bool(amaxes)
    )
    return run(operation, (key_cache, where, *amaxes, *rows), implementation)


def _check_amax(
    amax: Array | None, cache: Array, shape: tuple[int, ...]
) -> tuple[Array, ...]:
    if amax is None:
        return ()
    check_array("key_amax", amax)
    if cache.dtype != FP8:
        raise ValueError(
            f"key_amax must come with a cache of float8_e4m3fn, got {cache.dtype}"
        )
    if amax.shape != shape or amax.dtype != jnp.float32:
        raise ValueError(
            f"key_amax must be float32 [S, K] = {shape}, got {amax.dtype} {amax.shape}"
        )
    return (amax,)
