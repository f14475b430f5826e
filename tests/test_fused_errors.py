"""jrope.fused: what is refused, and how it is said."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fused_oracle import CONFIGS, NORMS
from test_fused import K, N, T, case, table_of

from jrope.fused import (
    QkNorm,
    qk_norm_rope,
    qkv_rope,
    rerope_cache,
    rope_append_kv,
)
from jrope.fused._kernels import PLATFORMS, Kernels
from jrope.fused._pages import FP8
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
        "qkv must be floats of 16, 32 or 64 bits, got int32",
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
        ({"epsilon": 0.1, "rounded": 1}, TypeError, "rounded must be a bool"),
        ({"epsilon": 0.1, "unit_offset": 0.5}, TypeError, "unit_offset must be a bool"),
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
    reason = jax_too_old() or "dtype must be one of .* got float64"
    declined = pytest.raises(ValueError, match=f"declines .*.qkv_rope: .*{reason}")
    with jax.enable_x64(True), declined:
        odd = qkv.astype("float64")
        qkv_rope(positions, odd, table, implementation="pallas", **options)


ROWS = jnp.ones((T, 32)), jnp.zeros((T, 32))
# Of the likeliest slips: lists, Python numbers, values that are another option's.
WRONG = {
    "query_weight": (TypeError, "query_weight must be a jax.Array, got list", [1.0]),
    "key_weight": (TypeError, "key_weight must be a jax.Array, got float", 1.0),
    "norm": (TypeError, "norm must be a QkNorm, got float; .*QkNorm.epsilon", 1e-6),
    "layout": (TypeError, "layout must be a RotaryLayout, got NoneType", None),
    "implementation": (ValueError, "implementation must be None, .* got True", True),
    "out_of_range": (ValueError, "out_of_range must be one of .* got None", None),
    "query_heads": (TypeError, "query_heads must be an int, and static, got 2.0", 2.0),
    "key_heads": (TypeError, "key_heads must be an int, and static, got '2'", "2"),
    "packed": (TypeError, "packed must be a bool, got 'no'", "no"),
    "gated": (TypeError, "gated must be a bool, got 1", 1),
    "cache_layout": (ValueError, "cache_layout must be one of .* got 0", 0),
    "padded_query": (ValueError, "padded_query must be one of .* got None", None),
    "fp8": (ValueError, "fp8 must be None or one of .* got True", True),
    "key_scale": (TypeError, "key_scale must be a jax.Array, got float", 1.0),
    "value_scale": (TypeError, "value_scale must be a jax.Array, got float", 1.0),
    "key_amax": (TypeError, "key_amax must be a jax.Array, got list", [[1.0]]),
    "qkv": (TypeError, "qkv must be a jax.Array, got list", [1.0]),
    "query": (TypeError, "query must be a jax.Array, got list", [1.0]),
    "key": (TypeError, "key must be a jax.Array, got NoneType", None),
    "key_cache": (TypeError, "key_cache must be a jax.Array, got NoneType", None),
    "value_cache": (TypeError, "value_cache must be a jax.Array, got NoneTy", None),
    "slots": (TypeError, "slots must be integers, got float64", [0.5]),
    "shifts": (TypeError, "shifts must be integers, got float32", jnp.ones(T)),
    "positions": (TypeError, "positions must be integers, got float64", [0.5]),
    "table": (TypeError, "the cos/sin table must be a jax.Array, got list", [1.0]),
    "rows": (TypeError, "cos must be a jax.Array, got list", ([1.0], [0.0])),
}


def arguments_of(function) -> dict[str, Any]:
    """What a fused operation takes, in its smallest form."""
    config, positions, qkv, *_ = case("neox", "float32")
    places = jnp.arange(T)
    caches = jnp.ones((2, T, K, 64), FP8)
    made = {
        "positions": positions,
        "qkv": qkv,
        "query": jnp.ones((T, N, 64)),
        "key": jnp.ones((T, K, 64)),
        "table": table_of(config),
        "layout": config.layout,
        "query_heads": N,
        "key_heads": K,
        "norm": NORMS["qwen3"],
        "slots": places,
        "shifts": places,
        "key_cache": caches,
        "value_cache": caches,
        "fp8": "tensor",
        "key_scale": jnp.float32(1),
        "value_scale": jnp.float32(1),
        "query_weight": None,
        "key_weight": None,
        "packed": False,
        "gated": False,
        "implementation": None,
        "out_of_range": "nan",
        "cache_layout": "NHD",
        "padded_query": "rotated",
        "key_amax": None,
    }
    names = inspect.signature(inspect.unwrap(function)).parameters
    return {name: made[name] for name in names}


OPERATIONS = (qk_norm_rope, qkv_rope, rerope_cache, rope_append_kv)


@pytest.mark.parametrize("function", OPERATIONS, ids=lambda f: f.__name__)
def test_every_argument_is_checked_before_it_is_used(function, unchecked):
    given = arguments_of(function)
    function(**given)
    tried = set(given)
    if "positions" in given:
        tried.add("rows")
    for name in tried:
        kind, message, value = WRONG[name]
        wrong = {name: value}
        if name == "rows":
            wrong = {"positions": None, "table": value}
        with pytest.raises(kind, match=message):
            function(**given | wrong)


def test_a_norm_that_is_required_is_no_none(unchecked):
    given = arguments_of(qk_norm_rope)
    given["norm"] = None
    with pytest.raises(TypeError, match="norm must be a QkNorm, got NoneType"):
        qk_norm_rope(**given)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float8_e5m2"])
def test_types_that_no_operation_turns_are_refused(dtype, unchecked):
    given = arguments_of(rerope_cache)
    given["key_cache"] = given["key_cache"].astype(dtype)
    with pytest.raises(TypeError, match=f"key_cache must be one of .* got {dtype}"):
        rerope_cache(**given)
    for function in (qkv_rope, rope_append_kv, qk_norm_rope):
        given = arguments_of(function)
        for name in {"qkv", "query", "key"} & set(given):
            wrong = {name: given[name].astype(dtype)}
            with pytest.raises(
                TypeError, match=f"{name} must be floats .* got {dtype}"
            ):
                function(**given | wrong)


def test_one_position_is_not_for_many_cached_tokens(unchecked):
    given = arguments_of(rope_append_kv)
    cos, sin = (row[:1] for row in ROWS)
    for wrong in (
        {"positions": given["positions"][:1]},
        {"positions": None, "table": (cos, sin)},
    ):
        with pytest.raises(ValueError, match=r"axes of the tokens, \(5,\), got \(1,\)"):
            rope_append_kv(**given | wrong)
