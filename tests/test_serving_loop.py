"""A decode loop of 1,000 steps over contexts of all lengths is one program."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import nnx

from jrope import RopeConfig
from jrope.nnx import RotaryEmbedding

P = 4096
SLOTS = 8


# jax-ml/jax#3163
def test_a_thousand_steps_trace_and_compile_once(compilations):
    config = RopeConfig(head_dim=64, rope_theta=5e5, max_position_embeddings=P)
    graph, state = nnx.split(RotaryEmbedding(config))
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((SLOTS, 1, 4, 64)), jnp.float32)
    key = jnp.asarray(rng.standard_normal((SLOTS, 1, 1, 64)), jnp.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, positions, query, key):
        return nnx.merge(graph, state)(positions, query, key)

    lengths = rng.integers(0, P - 1000, SLOTS).astype(np.int32)
    lengths[0] = P - 1000  # This one ends at P - 1.
    positions = lengths[:, None].copy()
    turned, _ = jax.block_until_ready(step(state, positions, query, key))
    warm = len(compilations)
    table = np.asarray(state["cos_sin_cache"][...])
    for _ in range(1000):
        positions = lengths[:, None].copy()
        turned, _ = step(state, positions, query, key)
        lengths += 1
    assert len(compilations) == warm
    rows = table[positions]
    exact = oracle.rotate(
        np.asarray(query), rows[..., :32], rows[..., 32:], is_neox_style=True
    )
    np.testing.assert_allclose(turned, exact, rtol=0, atol=2e-6)
    assert int(positions.max()) == P - 1
