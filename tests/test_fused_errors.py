"""jrope.fused: what is refused, and how it is said."""

import jax.numpy as jnp
import pytest
from fused_oracle import CONFIGS, NORMS
from test_fused import K, N, T, case, table_of

from jrope.fused import QkNorm, qk_norm_rope, qkv_rope
from jrope.fused._kernels import PLATFORMS, Kernels
from pallas_kernels import jax_too_old

ERRORS = {
    "positions with rows": (
        TypeError,
        "positions must be None where the rows",
        lambda a: a | {"table": (a["table"][:T, :32], a["table"][:T, 32:])},
    ),
    "no positions": (
        TypeError,
        "without positions the table must be the rows",
        lambda a: a | {"positions": None},
    ),
    "wide rows": (
        ValueError,
        r"cos must be float32 .* R/2 = 32, got float32 \(5, 64\)",
        lambda a: a | {"positions": None, "table": (a["table"][:T],) * 2},
    ),
    "other tokens": (
        ValueError,
        r"positions must have the axes of the tokens, \(5,\)",
        lambda a: a | {"positions": a["positions"][:2]},
    ),
    "heads": (
        ValueError,
        r"qkv must be \[\*B, T, \(N \+ 2 K\) H\] with N = 4",
        lambda a: a | {"query_heads": 4},
    ),
    "no heads": (
        ValueError,
        "query_heads and key_heads must be at least 1, got 3 and 0",
        lambda a: a | {"key_heads": 0},
    ),
    "integers": (
        TypeError,
        "qkv must be floats, got int32",
        lambda a: a | {"qkv": a["qkv"].astype(jnp.int32)},
    ),
    "weight alone": (
        ValueError,
        "query_weight must come with norm=QkNorm",
        lambda a: a | {"query_weight": jnp.ones(64)},
    ),
    "weight over all heads": (
        ValueError,
        r"key_weight must be floats \[H\] with H = 64, got float32 \(128,\)",
        lambda a: a | {"key_weight": jnp.ones(128), "norm": NORMS["qwen3"]},
    ),
    "implementation": (
        ValueError,
        "implementation must be None, 'xla' or 'pallas', got 'triton'",
        lambda a: a | {"implementation": "triton"},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_must_hold(name, unchecked):
    config, positions, qkv, *_ = case("neox", "float32")
    arguments = {"positions": positions, "qkv": qkv, "table": table_of(config)}
    arguments |= {"layout": config.layout, "query_heads": N, "key_heads": K}
    kind, message, change = ERRORS[name]
    with pytest.raises(kind, match=message):
        qkv_rope(**change(arguments))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"epsilon": 1}, TypeError, "epsilon must be a float, got 1"),
        ({"epsilon": -1.0}, ValueError, "epsilon must be 0 or more, got -1.0"),
        ({"epsilon": 0.1, "order": "x"}, ValueError, "order must be 'norm_rotate' or"),
    ],
)
def test_norms_check_their_options(options, kind, message):
    with pytest.raises(kind, match=message):
        QkNorm(**options)


def test_heads_of_qk_norm_rope_are_checked(unchecked):
    config = CONFIGS["neox"]
    table, norm = table_of(config), NORMS["qwen3"]
    positions = jnp.zeros(T, jnp.int32)
    options = {"layout": config.layout, "norm": norm}
    heads = jnp.ones((T, 2, 64))
    for query, message in (
        (heads, "query must be .* heads, 128.* needs gated=True"),
        (heads[0], "query must be"),
    ):
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(positions, query, heads, table, gated=True, **options)
    with pytest.raises(ValueError, match="key must have the query's tokens"):
        qk_norm_rope(positions, heads, heads[:2], table, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_kernel_declines_float64_with_a_reason(name, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "cpu", Kernels(interpret=True))
    config, positions, qkv, *_ = case(name, "float32")
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    table = table_of(config)
    reason = jax_too_old() or "dtype must be one of .* got float8_e5m2"
    odd = qkv.astype(jnp.float8_e5m2)
    with pytest.raises(ValueError, match=f"declines jrope.fused.qkv_rope: .*{reason}"):
        qkv_rope(positions, odd, table, implementation="pallas", **options)
