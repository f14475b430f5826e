"""The language model: flax.nnx modules around jrope's rotary layers.

Covers what the two checkpoints need: Llama (SmolLM2) and Gemma 3. Letters in shapes:
B sequences, T tokens of this step, S tokens that can be attended to, N query heads,
K key heads, H features per head, D features of a token, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

import jrope.nnx
from jrope import RopeConfig
from jrope.demo.spec import LayerType, ModelSpec

Fetch = Callable[[str], np.ndarray]
# (query [B, T, N, H], key [B, T, K, H]) -> the same, rotated
Rotate = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Memory(Protocol):
    """Where keys and values of earlier tokens are kept."""

    def exchange(
        self, layer: int, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Keeps this step's [B, T, K, H]; returns all that can be seen, [B, S, K, H].

        Row s along S belongs to the token at position s.
        """
        ...


class NoMemory:
    """All tokens are in this very step, so nothing needs to be kept."""

    def exchange(
        self, layer: int, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what it is given."""
        return key, value


class Linear(nnx.Module):
    """A matrix product without bias."""

    def __init__(self, fetch: Fetch, name: str) -> None:
        """Takes the kernel from the file, which has it transposed."""
        self.kernel = nnx.Param(jnp.asarray(fetch(f"{name}.weight").T.copy()))

    def __call__(self, x: Float[Array, "B T i"]) -> Float[Array, "B T o"]:
        """The product."""
        return x @ self.kernel[...]


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square; any number of leading axes."""

    def __init__(self, fetch: Fetch, name: str, eps: float) -> None:
        """Takes the scale from the file."""
        self.scale = nnx.Param(jnp.asarray(fetch(f"{name}.weight")))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """The scaled quotient."""
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * scale


class Attention(nnx.Module):
    """Grouped-query attention; the rotation and the memory come as arguments."""

    def __init__(self, fetch: Fetch, spec: ModelSpec, layer: int) -> None:
        """Takes the weights of layer `layer` from the file."""
        name = f"blk.{layer}.attn"
        self.query, self.key = Linear(fetch, f"{name}_q"), Linear(fetch, f"{name}_k")
        self.value = Linear(fetch, f"{name}_v")
        self.output = Linear(fetch, f"{name}_output")
        if spec.is_gemma:
            self.query_norm = RMSNorm(fetch, f"{name}_q_norm", spec.norm_eps)
            self.key_norm = RMSNorm(fetch, f"{name}_k_norm", spec.norm_eps)
        self.spec = spec
        self.layer = layer

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotate: Rotate,
        memory: Memory,
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """What each token gathers from those it sees."""
        spec, (batch, length, _) = self.spec, x.shape
        query = self.query(x).reshape(batch, length, spec.heads, spec.head_dim)
        key = self.key(x).reshape(batch, length, spec.key_heads, spec.head_dim)
        value = self.value(x).reshape(key.shape)
        if spec.is_gemma:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, key)
        key, value = memory.exchange(self.layer, key, value)
        window = spec.window if self.is_sliding else None
        seen = visible(positions, key.shape[1], window)
        return self.output(attend(query, key, value, seen).reshape(batch, length, -1))

    @property
    def is_sliding(self) -> bool:
        """Whether this layer sees only the last `window` tokens."""
        return self.spec.layer_type(self.layer) == "sliding_attention"


def visible(
    positions: Int[Array, "B T"], length: int, window: int | None
) -> Bool[Array, "B T S"]:
    """Which of positions 0 to `length` - 1 each token may attend to."""
    now = jnp.maximum(positions, 0)[..., None]  # padding sees the first token: no NaN
    then = jnp.arange(length, dtype=jnp.int32)[None, None]
    seen = then <= now
    return seen if window is None else seen & (then > now - window)


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    seen: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention; N / K query heads share a key head."""
    batch, length, heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), value)
    return mixed.reshape(batch, length, heads, head_dim)


class FeedForward(nnx.Module):
    """A gated linear unit: SiLU for Llama, approximate GELU for Gemma."""

    def __init__(self, fetch: Fetch, spec: ModelSpec, layer: int) -> None:
        """Takes the weights of layer `layer` from the file."""
        self.gate = Linear(fetch, f"blk.{layer}.ffn_gate")
        self.up = Linear(fetch, f"blk.{layer}.ffn_up")
        self.down = Linear(fetch, f"blk.{layer}.ffn_down")
        self.is_gemma = spec.is_gemma

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What each token makes of itself."""
        gate = self.gate(x)
        gate = (
            jax.nn.gelu(gate, approximate=True) if self.is_gemma else jax.nn.silu(gate)
        )
        return self.down(gate * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward, each added to what came in."""

    def __init__(self, fetch: Fetch, spec: ModelSpec, layer: int) -> None:
        """Takes the weights of layer `layer` from the file."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm(fetch, f"blk.{layer}.{name}", spec.norm_eps)

        self.attention = Attention(fetch, spec, layer)
        self.attention_norm = norm("attn_norm")
        self.feed_forward = FeedForward(fetch, spec, layer)
        self.feed_forward_norm = norm("ffn_norm")
        if spec.is_gemma:  # Gemma also normalises what each half gives
            self.attention_post_norm = norm("post_attention_norm")
            self.feed_forward_post_norm = norm("post_ffw_norm")
        self.is_gemma = spec.is_gemma

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotate: Rotate,
        memory: Memory,
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The tokens' features after this layer."""
        mixed = self.attention(self.attention_norm(x), rotate, memory, positions)
        x = x + (self.attention_post_norm(mixed) if self.is_gemma else mixed)
        made = self.feed_forward(self.feed_forward_norm(x))
        return x + (self.feed_forward_post_norm(made) if self.is_gemma else made)


class Decoder(nnx.Module):
    """The whole model; it holds one jrope layer per distinct rotation.

    Args:
      fetch: gives a tensor of the file by its name, float32.
      spec: the sizes.
      rope_configs: the rotation of each layer type, `spec.rope_configs()` when right.
    """

    def __init__(
        self,
        fetch: Fetch,
        spec: ModelSpec,
        rope_configs: Mapping[LayerType, RopeConfig],
    ) -> None:
        """Takes all weights from the file and builds the rotary tables."""
        self.embedding = nnx.Param(jnp.asarray(fetch("token_embd.weight")))
        self.norm = RMSNorm(fetch, "output_norm", spec.norm_eps)
        self.blocks = nnx.List([Block(fetch, spec, i) for i in range(spec.layers)])
        self.rotary = nnx.Dict(
            {kind: jrope.nnx.RotaryEmbedding(c) for kind, c in rope_configs.items()}
        )
        self.spec = spec

    def rotations(self, positions: Int[Array, "B T"]) -> dict[LayerType, Rotate]:
        """Looks this step's rows up, once a table, for all layers.

        Args:
          positions: of the tokens; negative ones are padding.
        """
        rotations: dict[LayerType, Rotate] = {}
        for kind in self.spec.layer_types:
            rope: jrope.nnx.RotaryEmbedding = self.rotary[kind]
            rotations[kind] = _with_rows(rope, *rope.rows(positions))
        return rotations

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        memory: Memory,
        rotations: Mapping[LayerType, Rotate],
    ) -> Float[Array, "B T D"]:
        """Features of every token after the last layer."""
        x = self.embedding[...][tokens]
        if self.spec.is_gemma:
            x = x * math.sqrt(self.spec.width)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotations[self.spec.layer_type(layer)], memory, positions)
        return self.norm(x)

    def logits(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Scores of the next token; the embedding serves twice, in both models."""
        return jnp.einsum("bd,vd->bv", x, self.embedding[...])


def _with_rows(
    rope: jrope.nnx.RotaryEmbedding, cos: jax.Array, sin: jax.Array
) -> Rotate:
    return lambda query, key: rope.rotate(query, key, cos, sin)
