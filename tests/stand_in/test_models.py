"""Whole models on the stand-in: training, decoding, serving in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from programs import assert_static

from jrope import RopeConfig
from jrope.buckets import BucketedStep, Buckets, trim
from jrope.demo.engine import Engine
from jrope.demo.model import Decoder
from jrope.demo.spec import ModelSpec
from jrope.hpu import HpuRotaryEmbedding
from jrope.nnx import RotaryCache, RotaryEmbedding

pytestmark = pytest.mark.hpu
RNG = np.random.default_rng(0)
# JAX has a list of platforms on which it donates; others warn.
no_donation = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


class Layer(nnx.Module):
    """Attention of one layer, with Habana's calling form."""

    def __init__(self, rngs):
        self.rope = HpuRotaryEmbedding(16, 16, 128)
        self.qkv = nnx.Linear(32, 3 * 32, rngs=rngs)
        self.out = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x, positions):
        query, key, value = jnp.split(self.qkv(x), 3, axis=-1)
        query, key = self.rope(positions, query, key)
        heads = [a.reshape(*a.shape[:2], 2, 16) for a in (query, key, value)]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.reshape(x.shape))


def train(device, steps=3):
    """Losses of a few steps with momentum, on one device."""
    with jax.default_device(device):
        model = Layer(nnx.Rngs(0))
        graph, params, tables = nnx.split(model, nnx.Param, RotaryCache)
        optimizer = optax.sgd(0.1, momentum=0.9)
        x = np.random.default_rng(1).standard_normal((2, 12, 32)).astype(np.float32)
        target = np.random.default_rng(2).standard_normal((2, 12, 8))
        data = x, target.astype(np.float32), np.arange(40, 52, dtype=np.int32)[None]
        params, tables, data = jax.device_put((params, tables, data), device)

        @jax.jit
        def step(params, state, tables, data):
            x, target, positions = data

            def loss(params):
                made = nnx.merge(graph, params, tables)(x, positions)
                return jnp.mean((made - target) ** 2)

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        state, losses = optimizer.init(params), []
        for _ in range(steps):
            params, state, value = step(params, state, tables, data)
            assert value.devices() == {device}
            losses.append(float(value))
    return losses


def test_a_training_step_has_the_loss_of_the_processor(hpu, cpu):
    on_hpu, on_cpu = train(hpu), train(cpu)
    np.testing.assert_allclose(on_hpu, on_cpu, rtol=1e-5)
    assert on_hpu[-1] < on_hpu[0]


SPEC = ModelSpec(
    architecture="gemma3",
    layers=6,  # The sixth attends to everything, with the other base.
    width=32,
    heads=4,
    key_heads=1,
    head_dim=16,
    norm_eps=1e-6,
    context=64,
    theta=1e6,
    window=16,
)


def fetch(name):
    """Tiny random weights by a tensor's name, as a file would have them."""
    seed = sum(name.encode())
    inner, outer = SPEC.heads * SPEC.head_dim, SPEC.key_heads * SPEC.head_dim
    shapes = {
        "token_embd": (50, 32),
        "attn_q": (inner, 32),
        "attn_k": (outer, 32),
        "attn_v": (outer, 32),
        "attn_output": (32, inner),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
        "attn_q_norm": (16,),
        "attn_k_norm": (16,),
    }
    shape = shapes.get(name.removesuffix(".weight").split(".")[-1], (32,))
    # A small embedding, or the tied head would only say the token that it was given.
    size = 0.02 if len(shape) == 2 and shape[0] == 50 else 0.25
    values = size * np.random.default_rng(seed).standard_normal(shape)
    return (values + (len(shape) == 1)).astype(np.float32)


def decode(device, tokens=20):
    """Greedy ids and sampled logits of the demo's engine: a prompt, then decoding."""
    with jax.default_device(device):
        model = Decoder(fetch, SPEC, SPEC.rope_configs())
        engine = Engine(model, slots=1, chunk=8, pages=8, page_size=8, context=64)
        engine.compile("prefill")
        engine.compile("decode")
        batch = engine.empty_batch((1, 8))
        batch.tokens[:], batch.table[:] = [1, 2, 3, 4, 5, 6, 7, 8], np.arange(8)
        batch.positions[:] = batch.rope_positions[:] = np.arange(8)
        results = [engine.run(batch)]
        for position in range(8, 8 + tokens):
            batch = engine.empty_batch((1, 1))
            batch.tokens[:] = results[-1].tokens
            batch.table[:] = np.arange(8)
            batch.positions[:] = batch.rope_positions[:] = position
            results.append(engine.run(batch))
        assert engine.programs == 2
    return (
        [int(result.tokens[0]) for result in results],
        np.stack([result.sample for result in results]),
    )


@no_donation
def test_the_demos_model_decodes_as_on_the_processor(stand_in, hpu, cpu):
    ran = stand_in.executions
    ids, logits = decode(hpu)
    assert stand_in.executions > ran + 20
    ran = stand_in.executions
    ids_of_cpu, logits_of_cpu = decode(cpu)
    assert stand_in.executions == ran
    assert ids == ids_of_cpu and len(set(ids)) > 1
    np.testing.assert_allclose(logits, logits_of_cpu, rtol=0, atol=1e-4)


def test_a_thousand_steps_with_context_compile_one_program(stand_in, hpu):
    rows = 4096
    graph, state = nnx.split(HpuRotaryEmbedding(64, 64, rows))
    table = np.asarray(state["rope"]["cos_sin_cache"][...])
    step = jax.jit(lambda state, *given: nnx.merge(graph, state)(*given))
    query = RNG.standard_normal((8, 1, 4 * 64)).astype(np.float32)
    key = RNG.standard_normal((8, 1, 64)).astype(np.float32)
    lengths = RNG.integers(0, rows - 1000, 8).astype(np.int32)
    lengths[0] = rows - 1001  # This one ends at the last row.
    before = len(stand_in.programs)
    jax.block_until_ready(step(state, lengths[:, None].copy(), query, key))
    (text,) = stand_in.texts_since(before)
    assert_static(text)
    warm, ran = len(stand_in.programs), stand_in.executions
    turned, _ = step(state, lengths[:, None].copy(), query, key)
    for _ in range(1000):
        lengths += 1
        turned, _ = step(state, lengths[:, None].copy(), query, key)
    jax.block_until_ready(turned)
    assert len(stand_in.programs) == warm
    assert stand_in.executions == ran + 1001
    assert lengths.max() == rows - 1
    found = table[lengths[:, None]]
    exact = oracle.rotate(
        query.reshape(8, 1, 4, 64), found[..., :32], found[..., 32:], is_neox_style=True
    )
    np.testing.assert_allclose(turned, exact.reshape(query.shape), rtol=0, atol=2e-6)


def test_chunked_prefill_in_buckets_compiles_nothing_after_the_warm_up(stand_in, hpu):
    graph, state = nnx.split(HpuRotaryEmbedding(16, 16, 1024))
    whole = RNG.standard_normal((700, 4 * 16)).astype(np.float32)

    def step(state, batch):
        return nnx.merge(graph, state)(
            batch["positions"], batch["query"], batch["query"][:, :16]
        )

    bucketed = BucketedStep(
        step, Buckets.ramp(16, 64, 256), padding={"positions": -1, "query": 0}
    )
    first = {"positions": np.zeros(1, np.int32), "query": whole[:1]}
    before = len(stand_in.programs)
    bucketed.warm_up(state, first)
    assert len(stand_in.programs) == before + len(bucketed.buckets.sizes)
    warm, done, turned = len(stand_in.programs), 0, []
    for tokens in (1, 17, 200, 3, 256, 64, 100, 59):
        end = done + tokens
        batch = {
            "positions": np.arange(done, end, dtype=np.int32),  # The context counts.
            "query": whole[done:end],
        }
        turned.append(trim(bucketed(state, batch)[0], tokens))
        done = end
    assert done == 700 and len(stand_in.programs) == warm
    rows = np.asarray(state["rope"]["cos_sin_cache"][...])[:700]
    exact = oracle.rotate(
        whole.reshape(700, 4, 16), rows[:, :8], rows[:, 8:], is_neox_style=True
    )
    np.testing.assert_allclose(
        np.concatenate(turned), exact.reshape(700, 64), rtol=0, atol=2e-6
    )


def test_a_flax_layer_whose_rows_are_loud_also_runs(hpu):
    config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    rope = RotaryEmbedding(config)
    far = jnp.asarray([3, 16], jnp.int32)
    out, _ = rope(far, jnp.ones((2, 1, 8)), jnp.ones((2, 1, 8)))
    assert out.devices() == {hpu}
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()
