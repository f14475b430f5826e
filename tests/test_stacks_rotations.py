"""Adapters beside the rotations of MaxText, tpu-inference and EasyDeL: `make stacks`.

Their attention needs more than their packages install; see test_stacks.py.
"""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_cases import (
    AXES,
    BATCH,
    FLAT,
    LINEAR,
    LLAMA3,
    MROPE,
    YARN,
    assert_turned,
    config,
    grid,
    heads,
    mrope_waves,
    waves,
)
from stacks_real import (
    NEAR,
    WRONG,
    assert_near,
    located,
    real,
    real_file,
    settings_of_the_stacks,
    worst,
)

from jrope import RopeConfig, mrope_axes
from jrope.adapters import easydel, maxtext, tpu_inference

__all__ = ["settings_of_the_stacks"]
pytestmark = [pytest.mark.stacks, pytest.mark.filterwarnings("ignore")]


# MaxText


@pytest.fixture
def embeddings():
    return real("maxtext.layers.embeddings")


def of_maxtext(kind, **options):
    defaults = {"min_timescale": 1, "max_timescale": 500_000, "mesh": None}
    return kind(
        **(defaults | {"embedding_dims": 32, "fprop_dtype": jnp.float32} | options)
    )


def test_maxtext_default_and_linear(embeddings):
    q, _ = heads(2, 4)
    for rope in (None, LINEAR):
        factor = (rope or {}).get("factor", 1.0)
        peer = of_maxtext(embeddings.RotaryEmbedding, rope_linear_scaling_factor=factor)
        ours = maxtext.RotaryEmbedding(config(rope), fprop_dtype=jnp.float32)
        assert_near(ours(q, jnp.asarray(NEAR)), peer(q, jnp.asarray(NEAR)))


def test_maxtext_part_of_a_head(embeddings):
    q, _ = heads(2, 4)
    peer = of_maxtext(embeddings.PartialRotaryEmbedding, partial_rotary_factor=0.5)
    half = RopeConfig(
        head_dim=32, rotary_dim=16, rope_theta=5e5, max_position_embeddings=64
    )
    ours = maxtext.RotaryEmbedding(half, fprop_dtype=jnp.float32)
    assert_near(ours(q, jnp.asarray(NEAR)), peer(q, jnp.asarray(NEAR)))


def test_maxtext_llama_has_one_factor(embeddings):
    q, _ = heads(2, 4)
    peer = of_maxtext(embeddings.LLaMARotaryEmbedding)
    llama31 = LLAMA3 | {"factor": 8.0}
    for rope, right in ((llama31, True), (LLAMA3, False)):
        ours = maxtext.RotaryEmbedding(
            config(rope, is_neox_style=False), fprop_dtype=jnp.float32
        )
        out = ours(q, jnp.asarray(BATCH))
        assert_turned(out, q, *waves(BATCH, rope=rope), is_neox_style=False)
        # Llama 3.2's factor is 32; MaxText's class has 8 in its code.
        error = worst(out, peer(q, jnp.asarray(BATCH)))
        assert error < 0.05 if right else error > 0.5


def test_maxtext_yarn(embeddings):
    q, _ = heads(2, 4)
    peer = embeddings.YarnRotaryEmbedding(
        embedding_dims=32,
        mesh=None,
        max_position_embeddings=131072,
        original_max_position_embeddings=32768,
        beta_fast=32,
        beta_slow=1,
        rope_theta=500_000,
        rope_factor=4.0,
        fprop_dtype=jnp.float32,
        interleave=False,
        truncate=True,
        attention_scaling=True,
    )
    ours = maxtext.RotaryEmbedding(config(YARN), fprop_dtype=jnp.float32)
    assert_near(ours(q, jnp.asarray(NEAR)), peer(q, jnp.asarray(NEAR)), 1e-5)


def test_maxtext_of_several_axes(embeddings):
    q, _ = heads(2, 4)
    peer = embeddings.Qwen3OmniMoeThinkerTextRotaryEmbedding(
        1, 500_000, 32, fprop_dtype=jnp.float32, mrope_section=(8, 4, 4)
    )
    ours = maxtext.RotaryEmbedding(MROPE, fprop_dtype=jnp.float32)
    positions = jnp.asarray(np.moveaxis(grid(2, 4) % 8, 0, -1))
    assert_near(ours(q, positions), peer(q, positions))


# tpu-inference


@pytest.fixture
def interface():
    return real_file("tpu_inference.layers.jax.rope_interface").apply_rope


@pytest.mark.parametrize("ordering", ["split", "interleaved"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_tpu_inference_rotation(interface, ordering, share):
    for x in heads(8, head_dim=48):
        given = (x, jnp.arange(8), 32, 500_000, None, ordering)
        assert_near(
            tpu_inference.apply_rope(*given, rope_proportion=share),
            interface(*given, rope_proportion=share),
        )


def test_tpu_inference_scalings(interface):
    """Every type but proportional is smoothed as Llama 3's there."""
    q, _ = heads(8)
    for rope, right in ((LLAMA3, True), (YARN, False), (LINEAR, False)):
        given = dict(rope)
        given["scale_factor"] = given.pop("factor")
        call = (q, jnp.asarray(FLAT), 32, 500_000, given)
        ours, peer = tpu_inference.apply_rope(*call), interface(*call)
        assert_turned(ours, q, *waves(FLAT, rope=rope))
        error = worst(ours, peer)
        assert error < 0.05 if right else error > WRONG


@pytest.mark.parametrize("interleaved", [False, True])
def test_tpu_inference_of_several_axes(interface, interleaved):
    """The interleaved order is not there; the chunked one is right."""
    q, _ = heads(8)
    rope = {"rope_type": "default", "mrope_section": [8, 4, 4]}
    rope |= {"mrope_interleaved": interleaved}
    call = (q, jnp.asarray(grid(8)), 32, 500_000, rope)
    peer = interface(*call)
    error = worst(tpu_inference.apply_rope(*call), peer)
    assert error > WRONG if interleaved else error < 1e-3
    rope["mrope_interleaved"] = False
    assert worst(tpu_inference.apply_rope(*call), peer) < 1e-3


def test_tpu_inference_of_given_rows(interface):
    q, _ = heads(8)
    rows = jnp.asarray(np.stack(waves(FLAT[:4]), -1).astype(np.float32))
    for ordering in ("split", "interleaved"):
        call = (q, rows, 32, 10000, None, ordering)
        assert_near(tpu_inference.apply_rope(*call), interface(*call))


# EasyDeL


@pytest.fixture
def easydel_get_rope(monkeypatch):
    """Its rotary package; of the rest of EasyDeL that needs two names."""
    root = located("easydel", "easydel")

    def stand_in(name, **names):
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    stand_in("easydel", __path__=[str(root)])
    stand_in("easydel.layers", __path__=[str(root / "layers")])
    stand_in("easydel.layers.norms", lowfloats=(jnp.bfloat16,))
    stand_in("easydel.utils", ejit=jax.jit)
    yield importlib.import_module("easydel.layers.rotary").get_rope
    for name in [name for name in sys.modules if name.startswith("easydel.")]:
        del sys.modules[name]


def by_easydel(get_rope, rope, positions, **options):
    """Its rotated queries and ours, called by the names that its attention uses."""
    q, k = heads(2, 4)
    theirs = get_rope(
        head_size=32,
        rotary_dim=32,
        max_position=131072,
        base=500_000,
        rope_scaling=rope,
        dtype=jnp.float32,
    )
    ours = easydel.RotaryEmbedding(options.get("config") or config(rope))
    given = {"query": q, "key": k, "positions": jnp.asarray(positions)}
    return ours(**given, frequencies=None)[0], theirs(**given, frequencies=None)[0], q


@pytest.mark.parametrize("rope", [None, LINEAR, YARN], ids=str)
def test_easydel_rotation(easydel_get_rope, rope):
    ours, theirs, _ = by_easydel(easydel_get_rope, rope, NEAR)
    assert_near(ours, theirs, 1e-5)


def test_easydel_llama3_ends_at_the_original_length(easydel_get_rope):
    places = np.array([[0, 5, 8190, 8191], [8192, 8193, 60_000, 131_071]], np.int32)
    ours, theirs, q = by_easydel(easydel_get_rope, LLAMA3, places)
    assert_turned(ours, q, *waves(places, rope=LLAMA3))
    assert worst(theirs[0], ours[0]) < 0.02  # Its angles are float32.
    for token in range(4):
        assert worst(theirs[1, token], ours[1, token]) > 0.5
    # Each of the second row is turned as the last row of its table says.
    _, last, _ = by_easydel(easydel_get_rope, LLAMA3, np.minimum(places, 8191))
    np.testing.assert_array_equal(theirs, last)


@pytest.mark.parametrize("order", ["interleaved", "chunked"])
def test_easydel_of_several_axes(easydel_get_rope, order):
    """Its chunked order cuts the repeated angles, which is no rotation."""
    rope = {"rope_type": "mrope", "mrope_section": [8, 4, 4]}
    rope |= {"mrope_interleaved": order == "interleaved"}
    axes = {"chunked": [0] * 8 + [1] * 4 + [2] * 4, "interleaved": AXES}[order]
    several = RopeConfig(
        head_dim=32,
        rope_theta=5e5,
        max_position_embeddings=131072,
        axis_of_frequency=mrope_axes([8, 4, 4], rotary_dim=32, order=order),
    )
    ours, theirs, q = by_easydel(easydel_get_rope, rope, grid(2, 4), config=several)
    assert_turned(ours, q, *mrope_waves(grid(2, 4), axes))
    if order == "interleaved":
        assert worst(ours, theirs) < 1e-3
    else:
        lengths = [jnp.linalg.norm(x, axis=-1) for x in (q, ours, theirs)]
        assert worst(lengths[1], lengths[0]) < 1e-4 < 0.5 < worst(*lengths[::2])
