"""Gradients of every fused operation: through its kernel as through its definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_oracle import CONFIGS, NORMS
from test_fused import K, N, T, case, implementation, random, table_of
from test_fused_cache import FP8, cache_of

from jrope import fused, lookup
from jrope.fused._kernels import PLATFORMS, Kernels
from pallas_kernels import jax_too_old

__all__ = ["implementation"]

PACKED = {"query_heads": N, "key_heads": K}
# Operation, config, norm, further options. Rows stand for positions and a table.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qkv": ("qkv_rope", "neox", "none", PACKED),
    "qkv, partial, rows": ("qkv_rope", "gptj-partial", "none", PACKED),
    "qkv, packed": ("qkv_rope", "neox", "none", PACKED | {"packed": True}),
    "qkv, packed, norm": ("qkv_rope", "neox", "gemma", PACKED | {"packed": True}),
    "qkv, norm, rows": ("qkv_rope", "yarn-partial", "qwen3", PACKED),
    "qkv, norm last": ("qkv_rope", "gptj-partial", "llama4", PACKED),
    "norm": ("qk_norm_rope", "neox", "qwen3", {}),
    "norm, gated, rows": ("qk_norm_rope", "neox", "gemma", {"gated": True}),
    "norm last, gated": ("qk_norm_rope", "yarn-partial", "llama4", {"gated": True}),
    "norm, partial": ("qk_norm_rope", "gptj-partial", "gemma", {}),
}
REFUSING = ("rope_append_kv", "rerope_cache")


def arrays_of(name):
    """What is differentiated: heads, weights, and rows where those are given."""
    operation, config, norm, options = CASES[name]
    width = CONFIGS[config].head_dim
    arrays = {"qkv": random((T, (N + 2 * K) * width))}
    if operation == "qk_norm_rope":
        gate = 2 if "gated" in options else 1
        arrays = {"query": random((T, N, gate * width)), "key": random((T, K, width))}
    if norm != "none":
        arrays |= {"query_weight": random(width), "key_weight": random(width)}
    if name.endswith("rows"):
        positions = jnp.arange(T, dtype=jnp.int32) * 11
        layout = CONFIGS[config].layout
        rows = lookup(table_of(CONFIGS[config]), positions, layout=layout)
        arrays |= dict(zip(("cos", "sin"), rows, strict=True))
    return arrays


def gradients(name, implementation):
    """Of squares, so that the results themselves count as well."""
    operation, config, norm, options = CASES[name]
    layout, table = CONFIGS[config].layout, table_of(CONFIGS[config])
    options = options | {"layout": layout, "norm": NORMS[norm]}

    def loss(arrays):
        rows = [arrays.pop(row) for row in ("cos", "sin") if row in arrays]
        positions = None if rows else jnp.arange(T, dtype=jnp.int32) * 11
        outs = getattr(fused, operation)(
            positions,
            table=tuple(rows) if rows else table,
            implementation=implementation,
            **arrays,
            **options,
        )
        rng = np.random.default_rng(1)
        return sum(
            jnp.vdot(out * out, jnp.asarray(rng.standard_normal(out.shape), out.dtype))
            for out in jax.tree.leaves(outs)
        )

    return lambda arrays: jax.jit(jax.grad(lambda given: loss(dict(given))))(arrays)


@pytest.mark.skipif(jax_too_old() is not None, reason=str(jax_too_old()))
@pytest.mark.parametrize("name", CASES)
def test_through_the_kernel_as_through_the_definition(name, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "cpu", Kernels(interpret=True))
    arrays = arrays_of(name)
    got, want = (gradients(name, named)(arrays) for named in ("pallas", "xla"))
    assert got.keys() == arrays.keys()
    for of, gradient in got.items():
        size = float(jnp.abs(want[of]).max())
        assert size > 0.1
        np.testing.assert_allclose(
            gradient, want[of], rtol=0, atol=3e-6 * size, err_msg=of
        )


def test_every_operation_is_differentiated_or_refuses():
    held = {operation for operation, *_ in CASES.values()}
    assert {*held, *REFUSING, "QkNorm"} == set(fused.__all__)


def appended(fp8):
    """Its result as a function of the packed buffer and of the scales."""
    config, _, qkv, *_ = case("neox", "float32")
    dtype = FP8 if fp8 else "float32"
    caches = [cache_of(config, "NHD", dtype) for _ in range(2)]
    scales = {}
    if fp8 == "tensor":
        scales = {"key_scale": jnp.float32(2), "value_scale": jnp.float32(3)}

    def run(arrays, implementation):
        out, *_ = fused.rope_append_kv(
            jnp.arange(T),
            arrays["qkv"],
            table_of(config),
            jnp.arange(T),
            *caches,
            layout=config.layout,
            fp8=fp8,
            implementation=implementation,
            **PACKED,
            **{name: arrays[name] for name in scales},
        )
        return out

    return run, {"qkv": qkv, **scales}


def moved(fp8):
    """Its result as a function of the table, and of the largest magnitudes."""
    config = CONFIGS["neox"]
    cache = cache_of(config, "NHD", FP8 if fp8 else "float32")
    arrays = {"table": table_of(config)}
    if fp8:
        arrays["key_amax"] = jnp.ones((T, K), jnp.float32)

    def run(arrays, implementation):
        slots, options = jnp.arange(T), {"implementation": implementation}
        given = arrays | options
        outs = fused.rerope_cache(
            jnp.ones(T, jnp.int32),
            cache,
            given.pop("table"),
            slots,
            layout=config.layout,
            **given,
        )
        return outs[-1]

    return run, arrays


REFUSALS = [
    ("rope_append_kv", appended, None),
    ("rope_append_kv", appended, "tensor"),
    ("rope_append_kv", appended, "token_head"),
    ("rerope_cache", moved, None),
    ("rerope_cache", moved, "token_head"),
]


@pytest.mark.parametrize(("name", "make", "fp8"), REFUSALS)
def test_what_rewrites_a_cache_refuses_by_name(name, make, fp8, implementation):
    run, arrays = make(fp8)
    # The definition by name is plain JAX, which can be differentiated.
    named = None if implementation == "xla" else implementation
    message = f"{name} has no derivative: it rewrites a paged cache"
    for of in arrays:

        def loss(x, of=of):
            return run(arrays | {of: x}, named).astype(jnp.float32).sum()

        with pytest.raises(NotImplementedError, match=message):
            jax.grad(loss)(arrays[of])
