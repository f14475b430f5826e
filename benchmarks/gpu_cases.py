"""Every kernel over the named workloads: what `gpu_inspect` and `bench_gpu` run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads import WORKLOADS, Workload
from jrope import RotaryLayout, fused, rotate

_BF16, _FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
_PAGE_SIZE = 16
_NORM = fused.QkNorm(epsilon=1e-6)

Operands = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel on a workload.

    Args:
      kernel: a key of `KERNELS`.
      workload: the model whose heads these are.
      tokens: T.
      rows: rows of the table.
      cache_tokens: slots of a cache.
    """

    kernel: str
    workload: Workload
    tokens: int = 4096
    rows: int = 8192
    cache_tokens: int = 65_536

    @property
    def layout(self) -> RotaryLayout:
        """Of the workload. Multimodal positions reach a kernel as rows."""
        return dataclasses.replace(self.workload.config.layout, axis_of_frequency=None)

    @property
    def kind(self) -> "Kernel":
        """What is run."""
        return KERNELS[self.kernel]

    @property
    def operands(self) -> Operands:
        """Names and types, in order."""
        return self.kind.operands(self)

    @property
    def donate(self) -> tuple[int, ...]:
        """Which may be overwritten."""
        return tuple(
            i for i, name in enumerate(self.operands) if name in self.kind.rewritten
        )

    @property
    def alias_bytes(self) -> int:
        """Bytes of those."""
        names = self.kind.rewritten
        return sum(
            x.size * x.dtype.itemsize for n, x in self.operands.items() if n in names
        )

    @property
    def ideal_bytes(self) -> int:
        """Bytes that must move for each token: each read once and written once."""
        return self.kind.ideal(self)

    @property
    def tables(self) -> Operands:
        """Operands of which a token takes a row."""
        names = ("table", *_CACHES)
        return {name: x for name, x in self.operands.items() if name in names}

    @property
    def first_alike(self) -> "Case":
        """The first case with the same program."""
        others = (dataclasses.replace(self, workload=w) for w in WORKLOADS.values())
        return next(other for other in others if other._program == self._program)

    @property
    def _program(self) -> Any:
        """What a program depends on; of heads only where one buffer holds them all."""
        operands = self.operands
        heads = (self.workload.query_heads, self.workload.key_heads)
        return self.layout, tuple(operands.items()), "qkv" in operands and heads

    def run(self, *operands: jax.Array, implementation: str) -> Any:
        """The operation."""
        return self.kind.run(self, implementation, *operands)

    # What the rows below are made of.

    def heads(self, *counts: int) -> int:
        """Bytes of so many heads of queries, keys and values, in 16 bits."""
        n, k = self.workload.query_heads, self.workload.key_heads
        heads = sum(c * m for c, m in zip(counts, (n, k, k), strict=True))
        return 2 * self.layout.head_dim * heads

    @property
    def row(self) -> int:
        """Bytes of a row, float32."""
        return 4 * self.layout.rotary_dim

    def array(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """[T, ...]."""
        return jax.ShapeDtypeStruct((self.tokens, *shape), dtype)

    def given(self) -> dict[str, Any]:
        """Options of the packed operations."""
        return {
            "layout": self.layout,
            "query_heads": self.workload.query_heads,
            "key_heads": self.workload.key_heads,
        }

    def packed(self) -> Operands:
        """Positions, a packed buffer and a table."""
        n, k = self.workload.query_heads, self.workload.key_heads
        width = (n + 2 * k) * self.layout.head_dim
        return {
            "positions": self.array(dtype=jnp.int32),
            "qkv": self.array(width, dtype=_BF16),
            "table": self._table(),
        }

    def apart(self) -> Operands:
        """A query and a key."""
        n, k = self.workload.query_heads, self.workload.key_heads
        return {
            "query": self.array(n, self.layout.head_dim, dtype=_BF16),
            "key": self.array(k, self.layout.head_dim, dtype=_BF16),
        }

    def weights(self) -> Operands:
        """Of two norms."""
        weight = jax.ShapeDtypeStruct((self.layout.head_dim,), _BF16)
        return {"query_weight": weight, "key_weight": weight}

    def cache(self, dtype: Any = _BF16) -> jax.ShapeDtypeStruct:
        """[pages, page_size, K, H]."""
        pages = self.cache_tokens // _PAGE_SIZE
        heads = (self.workload.key_heads, self.layout.head_dim)
        return jax.ShapeDtypeStruct((pages, _PAGE_SIZE, *heads), dtype)

    def paged(self, dtype: Any = _BF16) -> Operands:
        """A packed buffer, slots and two caches."""
        cache = self.cache(dtype)
        slots = self.array(dtype=jnp.int32)
        return {
            **self.packed(),
            "slots": slots,
            "key_cache": cache,
            "value_cache": cache,
        }

    def moved(self, dtype: Any = _BF16) -> Operands:
        """Shifts, a cache, a table and slots."""
        numbers = self.array(dtype=jnp.int32)
        return {
            "shifts": numbers,
            "key_cache": self.cache(dtype),
            "table": self._table(),
            "slots": numbers,
        }

    def _table(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.layout.rotary_dim), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operation with its options.

    Args:
      operands: of a case.
      run: of a case, an implementation and arrays.
      ideal: bytes that must move for a token.
      rewritten: operands that results take the place of.
    """

    operands: Callable[[Case], Operands]
    run: Callable[..., Any]
    ideal: Callable[[Case], int]
    rewritten: tuple[str, ...] = ()


def _rope(case: Case, implementation: str, *operands: jax.Array) -> Any:
    query, key, cos, sin = operands
    options = {"layout": case.layout, "implementation": implementation}
    return rotate(query, key, cos, sin, **options)


def _rope_operands(case: Case) -> Operands:
    row = case.array(case.layout.rotary_dim // 2)
    return {**case.apart(), "cos": row, "sin": row}


def _qkv(**options: Any) -> Callable[..., Any]:
    def run(case: Case, implementation: str, *operands: jax.Array) -> Any:
        named = dict(zip(case.operands, operands, strict=True))
        given = {**case.given(), **options, "implementation": implementation}
        return fused.qkv_rope(**named, **given)

    return run


def _qk_norm(case: Case, implementation: str, *operands: jax.Array) -> Any:
    named = dict(zip(case.operands, operands, strict=True))
    options = {"layout": case.layout, "norm": _NORM, "implementation": implementation}
    return fused.qk_norm_rope(**named, **options)


def _append(**options: Any) -> Callable[..., Any]:
    def run(case: Case, implementation: str, *operands: jax.Array) -> Any:
        named = dict(zip(case.operands, operands, strict=True))
        given = {**case.given(), **options, "implementation": implementation}
        return fused.rope_append_kv(**named, **given)

    return run


def _rerope(case: Case, implementation: str, *operands: jax.Array) -> Any:
    named = dict(zip(case.operands, operands, strict=True))
    options = {"layout": case.layout, "implementation": implementation}
    return fused.rerope_cache(**named, **options)


def _with_norm(operands: Callable[[Case], Operands]) -> Callable[[Case], Operands]:
    return lambda case: {**operands(case), **case.weights()}


def _scales(case: Case) -> Operands:
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    return {**case.paged(_FP8), "key_scale": scale, "value_scale": scale}


def _rotated(case: Case) -> int:
    """Bytes of what turns in queries and keys."""
    part = case.heads(1, 1, 0) * case.layout.rotary_dim
    return part // case.layout.head_dim


def _fp8_ideal(case: Case) -> int:
    written = case.heads(1, 0, 0) + case.heads(0, 1, 1) // 2
    return case.heads(1, 1, 1) + written + case.row + 8


_CACHES = ("key_cache", "value_cache")

KERNELS: dict[str, Kernel] = {
    "rope": Kernel(
        operands=_rope_operands,
        run=_rope,
        ideal=lambda c: 2 * c.heads(1, 1, 0) + c.row,
    ),
    "rope_in_place": Kernel(
        operands=_rope_operands,
        run=_rope,
        ideal=lambda c: 2 * _rotated(c) + c.row,
        rewritten=("query", "key"),
    ),
    "qkv_rope": Kernel(
        operands=Case.packed,
        run=_qkv(),
        ideal=lambda c: 2 * c.heads(1, 1, 1) + c.row + 4,
    ),
    "qkv_rope_packed": Kernel(
        operands=Case.packed,
        run=_qkv(packed=True),
        ideal=lambda c: 2 * _rotated(c) + c.row + 4,
        rewritten=("qkv",),
    ),
    "qkv_rope_norm": Kernel(
        operands=_with_norm(Case.packed),
        run=_qkv(norm=_NORM),
        ideal=lambda c: 2 * c.heads(1, 1, 1) + c.row + 4,
    ),
    "qk_norm_rope": Kernel(
        operands=lambda c: {
            "positions": c.packed()["positions"],
            **c.apart(),
            "table": c.packed()["table"],
            **c.weights(),
        },
        run=_qk_norm,
        ideal=lambda c: 2 * c.heads(1, 1, 0) + c.row + 4,
    ),
    "rope_append_kv": Kernel(
        operands=Case.paged,
        run=_append(),
        ideal=lambda c: 2 * c.heads(1, 1, 1) + c.row + 8,
        rewritten=_CACHES,
    ),
    "rope_append_kv_norm": Kernel(
        operands=_with_norm(Case.paged),
        run=_append(norm=_NORM, padded_query="unrotated"),
        ideal=lambda c: 2 * c.heads(1, 1, 1) + c.row + 8,
        rewritten=_CACHES,
    ),
    "rope_append_kv_fp8": Kernel(
        operands=_scales,
        run=_append(fp8="tensor"),
        ideal=lambda c: _fp8_ideal(c) + 8,
        rewritten=_CACHES,
    ),
    "rope_append_kv_amax": Kernel(
        operands=lambda c: c.paged(_FP8),
        run=_append(fp8="token_head"),
        ideal=lambda c: _fp8_ideal(c) + 8 * c.workload.key_heads,
        rewritten=_CACHES,
    ),
    "rerope_cache": Kernel(
        operands=Case.moved,
        run=_rerope,
        ideal=lambda c: (
            2 * c.heads(0, 1, 0) * c.layout.rotary_dim // c.layout.head_dim + c.row + 8
        ),
        rewritten=("key_cache",),
    ),
    "rerope_cache_fp8": Kernel(
        operands=lambda c: c.moved(_FP8),
        run=_rerope,
        ideal=lambda c: (
            c.heads(0, 1, 0) * c.layout.rotary_dim // c.layout.head_dim + c.row + 8
        ),
        rewritten=("key_cache",),
    ),
}


def cases(tokens: int = 4096) -> list[Case]:
    """Every kernel on every workload that it is for."""
    return [
        Case(kernel=kernel, workload=workload, tokens=tokens)
        for kernel in KERNELS
        for workload in WORKLOADS.values()
        # A full rotation moves the same bytes in place or not; the route makes fresh
        # results then.
        if kernel != "rope_in_place" or _is_partial(workload)
        if kernel != "rope" or not _is_partial(workload)
    ]


def _is_partial(workload: Workload) -> bool:
    layout = workload.config.layout
    return layout.rotary_dim != layout.head_dim
