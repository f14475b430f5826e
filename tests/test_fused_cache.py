"""rope_append_kv and rerope_cache on every implementation, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_oracle import assert_close, turned, wide
from test_fused import (
    CONFIGS,
    NORMS,
    WEIGHTS,
    K,
    N,
    implementation,
    parts,
    random,
    table_of,
)

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, lookup
from jrope.fused import qkv_rope, rerope_cache, rope_append_kv
from pallas_kernels import no_fp8

__all__ = ["implementation"]

FP8 = jnp.float8_e4m3fn
PAGES, PAGE, T = 3, 4, 5
SLOTS = np.array([5, -1, 0, 11, 2], np.int32)
POSITIONS = np.array([40, 3, 0, 17, 63], np.int32)


def cache_of(config, cache_layout, dtype, heads=K):
    middle = (PAGE, heads) if cache_layout == "NHD" else (heads, PAGE)
    return random((PAGES, *middle, config.head_dim)).astype(dtype)


def by_slot(cache, cache_layout):
    """[slots, K, H]."""
    cache = np.asarray(cache)
    if cache_layout == "HND":
        cache = cache.swapaxes(1, 2)
    return cache.reshape(-1, *cache.shape[2:])


def case(name, cache_layout, dtype="bfloat16", cache_dtype=None):
    config = CONFIGS[name]
    qkv = random((T, (N + 2 * K) * config.head_dim), dtype)
    caches = [cache_of(config, cache_layout, cache_dtype or dtype) for _ in range(2)]
    return config, table_of(config), qkv, caches


def append(config, table, qkv, caches, cache_layout, **options):
    run = jax.jit(
        lambda qkv, table, caches: rope_append_kv(
            jnp.asarray(POSITIONS),
            qkv,
            table,
            jnp.asarray(SLOTS),
            *caches,
            layout=config.layout,
            query_heads=N,
            key_heads=K,
            cache_layout=cache_layout,
            **options,
        )
    )
    return run(qkv, table, caches)


@pytest.mark.parametrize(
    ("name", "norm", "cache_layout", "padded_query"),
    [
        ("neox", "none", "NHD", "rotated"),
        ("neox", "qwen3", "HND", "unrotated"),
        ("gptj-partial", "none", "HND", "unrotated"),
        ("yarn-partial", "llama4", "NHD", "rotated"),
        ("gptj-partial", "gemma", "NHD", "rotated"),
    ],
)
def test_queries_and_slots(name, norm, cache_layout, padded_query, implementation):
    config, table, qkv, caches = case(name, cache_layout)
    norm = NORMS[norm]
    weights = {}
    if norm is not None and norm.order == "norm_rotate":
        weights = {of: random(config.head_dim) for of in WEIGHTS}
    options = {"norm": norm, "padded_query": padded_query, **weights}
    query, *written = append(
        config,
        table,
        qkv,
        caches,
        cache_layout,
        implementation=implementation,
        **options,
    )
    rows = np.split(np.asarray(table)[POSITIONS], 2, axis=-1)
    exact = [
        turned(x, weights.get(of), rows, norm, config.layout)
        for x, of in zip(parts(qkv, config), WEIGHTS, strict=False)
    ]
    used = SLOTS >= 0
    turning = used if padded_query == "unrotated" else np.full(T, True)
    of_query, of_key = exact
    assert_close(query[turning], of_query[0][turning], of_query[1][turning], "bfloat16")
    given, _, value = parts(qkv, config)
    np.testing.assert_array_equal(wide(query[~turning]), wide(given[~turning]))
    key_slots, value_slots = (by_slot(cache, cache_layout) for cache in written)
    written_keys = key_slots[SLOTS[used]]
    assert_close(written_keys, of_key[0][used], of_key[1][used], "bfloat16")
    np.testing.assert_array_equal(wide(value_slots[SLOTS[used]]), wide(value[used]))
    # Other slots are untouched.
    others = np.setdiff1d(np.arange(PAGES * PAGE), SLOTS)
    for cache, slots in zip(caches, (key_slots, value_slots), strict=True):
        before = by_slot(cache, cache_layout)
        np.testing.assert_array_equal(wide(slots[others]), wide(before[others]))


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
def test_same_bits_as_the_unfused(cache_layout, implementation):
    config, table, qkv, caches = case("neox", cache_layout)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    positions = jnp.asarray(POSITIONS)
    apart = qkv_rope(positions, qkv, table, implementation=implementation, **options)
    query, *written = append(
        config, table, qkv, caches, cache_layout, implementation=implementation
    )
    np.testing.assert_array_equal(wide(query), wide(apart[0]))
    used = SLOTS >= 0
    for cache, x in zip(written, apart[1:], strict=True):
        slots = by_slot(cache, cache_layout)
        np.testing.assert_array_equal(wide(slots[SLOTS[used]]), wide(x[used]))


@pytest.mark.parametrize("slot", [PAGES * PAGE, 2**31 - 1, -7])
def test_slots_outside_the_cache_are_dropped(slot, implementation):
    config, table, qkv, caches = case("neox", "NHD")
    _, *written = rope_append_kv(
        jnp.asarray(POSITIONS[:1]),
        qkv[:1],
        table,
        jnp.asarray([slot], jnp.int32),
        *caches,
        layout=config.layout,
        query_heads=N,
        key_heads=K,
        implementation=implementation,
    )
    for before, after in zip(caches, written, strict=True):
        np.testing.assert_array_equal(wide(after), wide(before))


def assert_fp8(stored, exact, factor):
    """Within half a unit of float8_e4m3fn, subnormal below 2^-6, saturated at 448."""
    scaled = np.clip(exact * factor, -448, 448)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6))) - 3)
    assert (np.abs(wide(stored) - scaled) <= unit * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("name", ["neox", "gptj-partial"])
@pytest.mark.parametrize("fp8", ["tensor", "token_head"])
def test_fp8(fp8, name, implementation):
    config, table, qkv, caches = case(name, "NHD", cache_dtype=FP8)
    scales = {}
    if fp8 == "tensor":
        # The second saturates.
        scales = {"key_scale": jnp.float32(3.0), "value_scale": jnp.float32(400.0)}
    _, *written = append(
        config,
        table,
        qkv,
        caches,
        "NHD",
        fp8=fp8,
        implementation=implementation,
        **scales,
    )
    rows = np.split(np.asarray(table)[POSITIONS], 2, axis=-1)
    _, key, value = parts(qkv, config)
    exact_key, _ = turned(key, None, rows, None, config.layout)
    used = SLOTS >= 0
    factors = [3.0, 400.0]
    if fp8 == "token_head":
        exact = [exact_key, wide(value)]
        for got, want in zip(written[2:], exact, strict=True):
            np.testing.assert_allclose(got, np.abs(want).max(-1), rtol=1e-6)
        factors = [448 / wide(amax)[used][..., None] for amax in written[2:]]
    pairs = zip(written[:2], (exact_key, wide(value)), factors, strict=True)
    for cache, exact, factor in pairs:
        assert cache.dtype == FP8
        assert_fp8(by_slot(cache, "NHD")[SLOTS[used]], exact[used], factor)


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", CONFIGS)
def test_moved_keys_are_keys_of_the_other_position(name, cache_layout, implementation):
    """Also where the table carries an attention factor (yarn)."""
    config = CONFIGS[name]
    table = table_of(config)
    bare = random((T, K, config.head_dim))
    shifts = np.array([3, 1, -17, 0, -60], np.int32)
    old = np.array([40, 3, 17, 5, 63], np.int32)

    def rotated(positions):
        return apply_rope(positions, bare, None, table, layout=config.layout)[0]

    cache = cache_of(config, cache_layout, "float32")
    slots = by_slot(cache, cache_layout).copy()
    used = SLOTS >= 0
    slots[SLOTS[used]] = np.asarray(rotated(old))[used]
    nhd = slots.reshape(PAGES, PAGE, K, config.head_dim)
    cache = jnp.asarray(nhd if cache_layout == "NHD" else nhd.swapaxes(1, 2))
    (moved,) = rerope_cache(
        shifts,
        cache,
        table,
        jnp.asarray(SLOTS),
        layout=config.layout,
        cache_layout=cache_layout,
        implementation=implementation,
    )
    want = slots.copy()
    want[SLOTS[used]] = np.asarray(rotated(old + shifts))[used]
    got = by_slot(moved, cache_layout)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    others = np.setdiff1d(np.arange(PAGES * PAGE), SLOTS)
    np.testing.assert_array_equal(got[others], slots[others])


def test_shifts_past_the_table_give_nan(implementation):
    config = CONFIGS["neox"]
    cache = cache_of(config, "NHD", "float32")
    shifts = jnp.asarray([64, -64, -(2**31), 63], jnp.int32)
    slots = jnp.arange(4, dtype=jnp.int32)
    (moved,) = rerope_cache(
        shifts,
        cache,
        table_of(config),
        slots,
        layout=config.layout,
        implementation=implementation,
    )
    bad = np.isnan(by_slot(moved, "NHD")[:4]).all((1, 2))
    assert bad.tolist() == [True, True, True, False]


@pytest.mark.parametrize("with_amax", [False, True])
def test_moving_fp8_keys(with_amax, implementation):
    config = CONFIGS["neox"]
    table = table_of(config)
    cache = cache_of(config, "NHD", FP8)
    amax = jnp.asarray(np.abs(RNG.standard_normal((T, K))) + 1, jnp.float32)
    shifts = np.array([3, 1, -17, 0, -60], np.int32)
    moved, *new = rerope_cache(
        shifts,
        cache,
        table,
        jnp.asarray(SLOTS),
        layout=config.layout,
        key_amax=amax if with_amax else None,
        implementation=implementation,
    )
    used = SLOTS >= 0
    stored = wide(by_slot(cache, "NHD"))[SLOTS[used]]
    factor = wide(amax)[used][..., None] / 448 if with_amax else 1.0
    table = wide(table)[np.abs(shifts)]
    rows = table[:, :32], np.sign(shifts)[:, None] * table[:, 32:]
    rows = [row[used] for row in rows]
    exact, _ = turned(stored * factor, None, rows, None, config.layout)
    back = 1.0
    assert len(new) == with_amax
    for got in new:
        np.testing.assert_allclose(got[used], np.abs(exact).max(-1), rtol=1e-6)
        np.testing.assert_array_equal(got[~used], amax[~used])
        back = 448 / wide(got)[used][..., None]
    assert_fp8(by_slot(moved, "NHD")[SLOTS[used]], exact, back)


RNG = np.random.default_rng(1)


def test_gradients_and_vmap_are_refused_by_name(implementation):
    config, table, qkv, caches = case("neox", "NHD", "float32")
    options = {"implementation": implementation}
    if implementation == "xla":
        options = {}

    def loss(qkv):
        return append(config, table, qkv, caches, "NHD", **options)[0].sum()

    with pytest.raises(NotImplementedError, match="rope_append_kv has no derivative"):
        jax.grad(loss)(qkv)

    def moved(cache):
        shifts, slots = jnp.zeros(2, jnp.int32), jnp.arange(2, dtype=jnp.int32)
        given = {"layout": config.layout, **options}
        return rerope_cache(shifts, cache, table, slots, **given)

    with pytest.raises(NotImplementedError, match="rerope_cache has no derivative"):
        jax.grad(lambda cache: moved(cache)[0].sum())(caches[0])
    with pytest.raises(NotImplementedError, match="its tokens share a cache"):
        jax.vmap(moved)(caches[0][None])


def call(changes):
    config, table, qkv, caches = case("neox", "NHD")
    arguments = {"positions": POSITIONS, "qkv": qkv, "table": table, "slots": SLOTS}
    arguments |= {"key_cache": caches[0], "value_cache": caches[1]}
    arguments |= {"layout": config.layout, "query_heads": N, "key_heads": K}
    return rope_append_kv(**(arguments | changes(arguments)))


ERRORS = {
    "cache shape": (r"key_cache must be \[pages, page_size, K, H\] with K = 2",
                    lambda a: {"key_cache": a["key_cache"][:, :, :1]}),
    "cache layout": ("cache_layout must be one of", lambda a: {"cache_layout": "BHSD"}),
    "slots": (r"slots must be \[T\] with T = 5", lambda a: {"slots": SLOTS[:2]}),
    "twice": ("slots must be distinct", lambda a: {"slots": np.array([1, 1, 2, 3, 4])}),
    "leading": (r"qkv must be \[T, ", lambda a: {"qkv": a["qkv"][None]}),
    "padded": ("padded_query must be one of", lambda a: {"padded_query": "zero"}),
    "fp8": ("fp8 must be None or one of", lambda a: {"fp8": "row"}),
    "scale": ("key_scale and value_scale must come with fp8='tensor'",
              lambda a: {"key_scale": jnp.float32(1)}),
    "no pages": (r"key_cache must have at least one page, .* \(0, ",
                 lambda a: {"key_cache": a["key_cache"][:0]}),
    "no scale": (r"key_scale must be float32 \[\] with fp8='tensor'",
                 lambda a: {"fp8": "tensor", "key_cache": a["key_cache"].astype(FP8),
                            "value_cache": a["value_cache"].astype(FP8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_must_hold(name, unchecked):
    message, changes = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(changes)


def test_cache_dtypes_are_checked():
    with pytest.raises(TypeError, match="key_cache must be bfloat16, got float8"):
        call(lambda a: {"key_cache": a["key_cache"].astype(FP8)})


def test_rerope_cache_checks_its_operands(unchecked):
    config = CONFIGS["neox"]
    table, cache = table_of(config), cache_of(config, "NHD", "float32")
    shifts, slots = np.zeros(2, np.int32), np.arange(2)

    def run(shifts=shifts, table=table, cache=cache, **options):
        return rerope_cache(
            shifts, cache, table, slots, layout=config.layout, **options
        )

    with pytest.raises(ValueError, match=r"shifts must be \[S\], got shape \(1, 2\)"):
        run(shifts=shifts[None])
    with pytest.raises(ValueError, match="key_amax must come with a cache of float8"):
        run(key_amax=jnp.ones((2, K)))
    with pytest.raises(ValueError, match=r"must be \[P, R\] with R = 64"):
        run(table=table[:, :32])
    with pytest.raises(ValueError, match="key_cache must have at least one page"):
        run(cache=cache[:0])


def test_rows_and_a_table_give_the_same(implementation):
    config = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=64)
    _, table, qkv, caches = case("neox", "NHD")
    rows = lookup(table, jnp.asarray(POSITIONS), layout=config.layout)
    options = {"layout": config.layout, "query_heads": N, "key_heads": K}
    options |= {"implementation": implementation}
    slots = jnp.asarray(SLOTS)
    given = rope_append_kv(None, qkv, rows, slots, *caches, **options)
    looked = append(config, table, qkv, caches, "NHD", implementation=implementation)
    for one, other in zip(given, looked, strict=True):
        np.testing.assert_array_equal(wide(one), wide(other))
    assert compute_cos_sin_cache(config).shape == table.shape


@pytest.mark.parametrize(("capability", "declines"), [("8.0", True), ("9.0", False)])
def test_a_gpu_without_8_bit_floats_is_declined(capability, declines, monkeypatch):
    class Gpu:
        compute_capability = capability

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    reason = no_fp8()
    assert (reason is not None) == declines
    if reason is not None:
        assert reason.endswith("this GPU has 8.0")
