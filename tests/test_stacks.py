"""Adapters in the real code of other stacks: `make stacks`.

Needs the extra `stacks` and tests/stacks.txt, so it is left out by default; what is not
installed is skipped. Where a stack's own rotation is wrong, the test shows it, and ours
equal to transformers' formula (tests/oracle.py). bonsai has no package;
test_adapters.py has its calling form.
"""

import functools
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from adapter_cases import BATCH, FLAT, LLAMA3, assert_turned, config, heads, waves
from flax import nnx
from stacks_real import NEAR, WRONG, assert_near, real, settings_of_the_stacks, worst

from jrope import RopeConfig
from jrope.adapters import equinox, gemma, sglang_jax, tunix

__all__ = ["settings_of_the_stacks"]
pytestmark = [pytest.mark.stacks, pytest.mark.filterwarnings("ignore")]


# The documentation's own lines, and gemma


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("migration.md", "gemma.gm.math._positional_embeddings"),
        ("tour.md", "gemma.gm.math._positional_embeddings"),
        ("migration.md", "tunix.models.llama3.model"),
    ],
)
def test_the_swaps_of_the_documentation(page, module):
    real(module)
    page = Path(__file__).parents[1] / "docs" / "pages" / page
    swaps = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (swap,) = (swap for swap in swaps if module.split(".")[0] in swap)
    check = f"""
import jax.numpy as jnp
from {module} import apply_rope
options = {{"base_frequency": 10}} if "gemma" in {module!r} else {{"head_dim": 8}}
assert apply_rope(jnp.ones((1, 2, 1, 8)), jnp.arange(2)[None], **options).shape
assert getattr(apply_rope, "func", apply_rope).__module__.startswith("jrope.")
"""
    subprocess.run([sys.executable, "-c", swap + check], check=True)


@pytest.fixture
def gemma_attention(monkeypatch):
    """gemma's Attention; of kauldron it uses one layer, the identity."""
    modules = real("gemma.gm.nn._modules")
    identity = types.SimpleNamespace(Identity=lambda: lambda x: x)
    monkeypatch.setattr(modules, "kd", types.SimpleNamespace(nn=identity))
    return modules.Attention(
        num_heads=4,
        num_kv_heads=2,
        features=32,
        head_dim=16,
        attn_type=modules.AttentionType.GLOBAL,
        query_pre_attn_scalar=0.25,
        rope_base_frequency=1_000_000,
        rope_scale_factor=8.0,
    )


def test_gemma_attention(gemma_attention, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 4, 32))
    given = (x, jnp.asarray(NEAR), None, jnp.ones((2, 4, 4), bool))
    variables = gemma_attention.init(jax.random.key(1), *given)
    _, peer = gemma_attention.apply(variables, *given)
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return gemma.apply_rope(*args, **kwargs)

    embeddings = importlib.import_module("gemma.gm.math._positional_embeddings")
    monkeypatch.setattr(embeddings, "apply_rope", counted)
    _, ours = gemma_attention.apply(variables, *given)
    assert calls == [{"base_frequency": 1_000_000, "scale_factor": 8.0}] * 2
    assert_near(ours, peer, 1e-5)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_gemma_rotation(share):
    peer = real("gemma.gm.math._positional_embeddings").apply_rope
    options = {"base_frequency": 10_000, "scale_factor": 2.0, "rope_proportion": share}
    q, _ = heads(2, 4)
    assert_near(
        gemma.apply_rope(q, jnp.asarray(NEAR), **options),
        peer(q, jnp.asarray(NEAR), **options),
    )
    # Its angles are float32: far from 0 its error is thousands of ours.
    far, ours = (
        rotate(q, jnp.asarray(BATCH), **options) for rotate in (peer, gemma.apply_rope)
    )
    rope = {"rope_type": "proportional", "partial_rotary_factor": share}
    assert_turned(ours, q, *waves(BATCH / 2.0, 1e4, rope))
    assert worst(far, ours) > 1e-3


# tunix


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_tunix_rotation(model):
    peer = real(f"tunix.models.{model}.model").apply_rope
    q, _ = heads(2, 4)
    for theta in (10_000, 1_000_000):
        given = (q, jnp.asarray(NEAR), 32, theta)
        assert_near(tunix.apply_rope(*given), peer(*given))


def test_tunix_llama_attention(monkeypatch):
    model = real("tunix.models.llama3.model")
    sizes = model.ModelConfig.llama3p2_1b()
    changes = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    for name, value in changes.items():
        object.__setattr__(sizes, name, value)
    attention = model.Attention(sizes, rngs=nnx.Rngs(0))
    x = 100 * jax.random.normal(jax.random.key(0), (2, 4, 32))
    seen = []

    def recorded(inputs, positions, head_dim, rope_theta=1_000_000, *, rotate):
        out = rotate(inputs, positions, head_dim, rope_theta)
        seen.append((inputs, out))
        return out

    def run(rotate):
        seen.clear()
        monkeypatch.setattr(
            model, "apply_rope", functools.partial(recorded, rotate=rotate)
        )
        attention(x, jnp.asarray(BATCH), None, None)
        return seen[0]

    # The model's base is 500000 and its scaling Llama 3's; the attention hands over
    # neither, and rotates by a million.
    assert sizes.rope_theta == 500_000
    q, peer = run(model.apply_rope)
    right = waves(BATCH, 5e5, LLAMA3)
    assert worst(peer, oracle.rotate(q, *right, is_neox_style=True)) > WRONG

    def as_the_model(inputs, positions, head_dim, _):
        return tunix.apply_rope(
            inputs, positions, head_dim, 500_000, rope_scaling=LLAMA3
        )

    q, ours = run(as_the_model)
    assert_turned(ours, q, *right)


# sglang-jax


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_sglang_jax_rotation(is_neox_style, share):
    peer = real("sgl_jax.srt.layers.embeddings").get_rope
    given = (32, 32, 8192, 500_000, is_neox_style, None, jnp.float32, share)
    q, k = heads(8)
    for ours, theirs in zip(
        sglang_jax.get_rope(*given)(jnp.arange(8), q, k),
        peer(*given)(jnp.arange(8), q, k),
        strict=True,
    ):
        assert_near(ours, theirs)


def test_sglang_jax_attention(monkeypatch):
    """Its Llama attention with either get_rope, up to the paged attention kernel."""
    llama = real("sgl_jax.srt.models.llama")
    x = jax.random.normal(jax.random.key(0), (8, 64))

    def run():
        attention = llama.LlamaAttention(
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=500_000,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
        seen = []

        def kernel(q, k, v, **_):
            seen.extend((q, k))
            return q.reshape(8, -1), None

        object.__setattr__(attention, "attn", kernel)
        out, _ = attention(jnp.arange(8), x, None, None)
        return attention.rotary_emb, [*seen, out]

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), auto, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        _, theirs = run()
        monkeypatch.setattr(llama, "get_rope", sglang_jax.get_rope)
        rotary, ours = run()
    assert isinstance(rotary, sglang_jax.RotaryEmbedding)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, 1e-5)


def test_sglang_jax_leaves_out_llama3():
    peer = real("sgl_jax.srt.layers.embeddings").get_rope
    given = (32, 32, 131072, 500_000, True, LLAMA3, jnp.float32)
    q, k = heads(8)
    ours, _ = sglang_jax.get_rope(*given)(jnp.asarray(FLAT), q, k)
    theirs, _ = peer(*given)(jnp.asarray(FLAT), q, k)
    assert_turned(ours, q, *waves(FLAT, rope=LLAMA3))
    assert worst(theirs, ours) > WRONG
    assert worst(theirs, oracle.rotate(q, *waves(FLAT), is_neox_style=True)) < 0.05


# equinox


def test_equinox_attention():
    eqx = real("equinox")
    attention = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    theirs = eqx.nn.RotaryPositionalEmbedding(16, theta=5e5)
    small = RopeConfig(head_dim=16, rope_theta=5e5, max_position_embeddings=131072)
    ours = equinox.RotaryPositionalEmbedding(small)
    x = jax.random.normal(jax.random.key(1), (8, 64))

    @eqx.filter_jit
    def attend(rope, x):
        turn = jax.vmap(rope, in_axes=1, out_axes=1)

        def process(query, key, value):
            return turn(query), turn(key), value

        return attention(x, x, x, process_heads=process)

    assert_near(attend(ours, x), attend(theirs, x), 1e-5)


def test_equinox_forgets_the_second_base():
    eqx = real("equinox")
    q, _ = heads(8)
    for theta, right in ((1e4, True), (1e6, False)):
        ours = equinox.RotaryPositionalEmbedding(config(theta=theta))
        theirs = eqx.nn.RotaryPositionalEmbedding(32, theta=theta)
        out, peer = (jax.vmap(rope, 1, 1)(q) for rope in (ours, theirs))
        assert_turned(out, q, *waves(np.arange(8), theta))
        error = worst(out, peer)
        assert error < 1e-4 if right else error > WRONG
