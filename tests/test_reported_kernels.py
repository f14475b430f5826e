"""Faults that users reported elsewhere: kernels, shapes, programs.

Each test names its public thread; inputs and right values are in golden/bug_cases.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from reported import case

from jrope import RopeConfig, RotaryLayout, apply_rope, compute_cos_sin_cache, rotate
from jrope._routes import routes_for
from pallas_kernels import jax_too_old

ROUTES = [route.name for route in routes_for("cpu")]
KERNEL = pytest.param(
    "the kernel, interpreted",
    marks=pytest.mark.skipif(jax_too_old() is not None, reason="no Mosaic GPU here"),
)


def run(route, query, key, cos, sin, layout):
    """Both turned by a route of the CPU, or by the GPU's kernel in an interpreter."""
    if route in ROUTES:
        return rotate(query, key, cos, sin, layout=layout, implementation=route)
    from pallas_kernels import rope

    style = {
        "is_neox_style": layout.is_neox_style,
        "rotary_offset": layout.rotary_offset,
    }
    return rope([query, key], cos, sin, interpret=True, **style)


def assert_turned(route, heads, head_dim, tokens, rotary_dim=None):
    width = rotary_dim or head_dim
    layout = RotaryLayout(head_dim=head_dim, rotary_dim=width)
    rng = np.random.default_rng(head_dim + tokens)
    query, key = (
        jnp.asarray(rng.standard_normal((tokens, count, head_dim)), jnp.float32)
        for count in heads
    )
    angles = rng.uniform(0, 50, (tokens, width // 2))
    cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    turned = run(route, query, key, cos, sin, layout)
    for made, x in zip(turned, (query, key), strict=True):
        args = {"is_neox_style": True}
        right = oracle.rotate(x, cos, sin, **args)
        oracle.assert_within(
            made, right, oracle.bound(x, cos, sin, dtype="float32", **args)
        )
        np.testing.assert_array_equal(made[..., width:], x[..., width:])
        assert tokens < 2 or not np.array_equal(made, x)


# linkedin/Liger-Kernel#342
@pytest.mark.parametrize("route", [*ROUTES, KERNEL])
@pytest.mark.parametrize("heads", case("C58_C60")["num_heads_cases"])
def test_one_head_is_turned_like_many(route, heads):
    assert_turned(route, heads, head_dim=128, tokens=3)


# ByteDance-Seed/Triton-distributed#200, triton-lang/triton#8898, ROCm/aiter#3858
@pytest.mark.parametrize("route", [*ROUTES, KERNEL])
@pytest.mark.parametrize(
    ("head_dim", "tokens"),
    list(
        zip(
            case("C58_C60")["head_dims"],
            [*reversed(case("C58_C60")["seq_lens"]), 1],
            strict=True,
        )
    ),
)
def test_sizes_that_are_no_powers_of_two(route, head_dim, tokens):
    assert_turned(route, (3, 1), head_dim, tokens)


# linkedin/Liger-Kernel#1451
@pytest.mark.parametrize("route", [*ROUTES, KERNEL])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 32), (80, 20), (64, 16)])
def test_a_kernel_turns_a_part_of_a_head(route, head_dim, rotary_dim):
    assert_turned(route, (2, 1), head_dim, 5, rotary_dim)


# linkedin/Liger-Kernel#1387, PaddlePaddle/PaddleFormers#3044
def test_views_of_other_strides_are_read_as_what_they_are():
    layout = RotaryLayout(head_dim=8, rotary_dim=8)
    rng = np.random.default_rng(0)
    held = rng.standard_normal((2, 3, 8, 5)).astype(np.float32)  # [B, N, H, T]
    view = held.transpose(0, 3, 1, 2)
    assert not view.flags.c_contiguous
    angles = rng.uniform(0, 50, (2, 5, 4))
    rows = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    right, _ = rotate(jnp.array(np.ascontiguousarray(view)), None, *rows, layout=layout)
    for query in (
        jnp.asarray(view),
        jnp.transpose(jnp.asarray(held), (0, 3, 1, 2)),
        jnp.asarray(held[:, :, :, ::-1])[..., ::-1].transpose(0, 3, 1, 2),
    ):
        made, _ = rotate(query, None, *rows, layout=layout)
        assert made.shape == (2, 5, 3, 8)
        np.testing.assert_array_equal(made, right)


CONFIG = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=128)
OFFSETS = {
    "int": int,
    "np.int64": np.int64,
    "np.int32": np.int32,
    "jax int32": jnp.int32,
}


# jax-ml/jax#3163, #4274, pyro-ppl/numpyro#463
@pytest.mark.parametrize("kind", [*OFFSETS, "carried by a loop"])
def test_decoding_compiles_once_whatever_counts_the_tokens(kind):
    table = jnp.asarray(compute_cos_sin_cache(CONFIG))
    query = jnp.ones((1, 1, 8), jnp.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(offset, query, table):
        positions = offset + jnp.arange(1, dtype=jnp.int32)
        return apply_rope(positions, query, None, table, layout=CONFIG.layout)[0]

    angles = np.arange(64)[:, None] * 1e4 ** (-np.arange(4) / 4)
    right = oracle.rotate(
        np.ones((64, 1, 8)), np.cos(angles), np.sin(angles), is_neox_style=True
    )
    if kind in OFFSETS:
        made = [step(OFFSETS[kind](i), query, table) for i in range(64)]
    else:
        _, made = lax.scan(
            lambda offset, _: (offset + 1, step(offset, query, table)),
            jnp.int32(0),
            length=64,
        )
    np.testing.assert_allclose(np.concatenate(list(made)), right, rtol=0, atol=1e-6)


# patrick-kidger/equinox#568, huggingface/candle#3612
def test_the_gradient_is_the_rotation_back_by_known_numbers():
    golden = case("C61_C73_C74")
    table = jnp.asarray(compute_cos_sin_cache(CONFIG))
    cotangent = np.array(golden["upstream_grad"], np.float32)[:, None]

    def loss(query):
        out, _ = apply_rope(
            np.array(golden["positions"]), query, None, table, layout=CONFIG.layout
        )
        return jnp.vdot(out, cotangent)

    query = jnp.ones((2, 1, 8), jnp.float32)
    gradient = np.asarray(jax.grad(loss)(query))[:, 0]
    np.testing.assert_allclose(gradient, golden["dq"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        np.linalg.norm(gradient, axis=-1), np.linalg.norm(cotangent[:, 0], axis=-1)
    )
