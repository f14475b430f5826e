"""The language model: flax.nnx modules around jrope's rotary layers.

Covers Llama (SmolLM2), Gemma 3 and the text decoders of Qwen2-VL and Qwen3-VL. Letters
in shapes: B sequences, T tokens of this step, S tokens that can be attended to, N query
heads, K key heads, H features per head, D features of a token, F features inside a
feed-forward, V vocabulary, A axes of rotary positions.

Tensors are fetched by their names in GGUF files, matrices as [out, in]. Every model has

    token_embd.weight [V, D], also the output head     output_norm.weight [D]

and in layer i, with the prefix `blk.{i}.`:

    attn_q.weight [N * H, D]    attn_output.weight [D, N * H]    ffn_gate.weight [F, D]
    attn_k.weight [K * H, D]    attn_norm.weight [D]             ffn_up.weight [F, D]
    attn_v.weight [K * H, D]    ffn_norm.weight [D]              ffn_down.weight [D, F]

Qwen2-VL adds attn_q.bias [N * H], attn_k.bias and attn_v.bias [K * H]; Qwen3-VL and
Gemma 3 attn_q_norm.weight and attn_k_norm.weight [H]; Gemma 3 alone
post_attention_norm.weight and post_ffw_norm.weight [D].
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
    """A matrix product, with or without bias."""

    def __init__(self, fetch: Fetch, name: str, *, has_bias: bool = False) -> None:
        """Takes the kernel from the file, which has it transposed."""
        self.kernel = nnx.Param(jnp.asarray(fetch(f"{name}.weight").T.copy()))
        if has_bias:
            self.bias = nnx.Param(jnp.asarray(fetch(f"{name}.bias")))
        self.has_bias = has_bias

    def __call__(self, x: Float[Array, "B T i"]) -> Float[Array, "B T o"]:
        """The product."""
        product = x @ self.kernel[...]
        return product + self.bias[...][None, None] if self.has_bias else product


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
        self.query = Linear(fetch, f"{name}_q", has_bias=spec.has_qkv_bias)
        self.key = Linear(fetch, f"{name}_k", has_bias=spec.has_qkv_bias)
        self.value = Linear(fetch, f"{name}_v", has_bias=spec.has_qkv_bias)
        self.output = Linear(fetch, f"{name}_output")
        if spec.has_query_key_norm:
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
        if spec.has_query_key_norm:
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
    """A gated linear unit: SiLU, but approximate GELU for Gemma."""

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

    def rotations(self, positions: Int[Array, "*A B T"]) -> dict[LayerType, Rotate]:
        """Looks this step's rows up, once a table, for all layers.

        Args:
          positions: of the tokens, [A, B, T] for M-RoPE and [B, T] else; negative ones
            are padding.
        """
        rotations: dict[LayerType, Rotate] = {}
        for kind in self.spec.layer_types:
            rope: jrope.nnx.RotaryEmbedding = self.rotary[kind]
            rotations[kind] = _with_rows(rope, *rope.rows(positions))
        return rotations

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer takes for tokens.

        A picture's features take the places of its own tokens' afterwards.
        """
        x = self.embedding[...][tokens]
        return x * math.sqrt(self.spec.width) if self.spec.is_gemma else x

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        memory: Memory,
        rotations: Mapping[LayerType, Rotate],
        deepstack: Sequence[Float[Array, "B T D"]] = (),
    ) -> Float[Array, "B T D"]:
        """Features of every token after the last layer.

        Args:
          x: embeddings, pictures' features merged in: see `embed`.
          positions: index of each token in its sequence, which decides what it sees;
            negative for padding.
          memory: keys and values of earlier tokens.
          rotations: of each layer type: see `rotations`.
          deepstack: added to the features after the first layers, one array a layer,
            zero where there is no picture (Qwen3-VL).

        Raises:
          ValueError: if `deepstack` is neither empty nor one array for each of the
            layers that the spec says.
        """
        if deepstack and len(deepstack) != self.spec.deepstack_layers:
            raise ValueError(
                f"deepstack must have one array for each of deepstack_layers = "
                f"{self.spec.deepstack_layers}, got {len(deepstack)}"
            )
        for layer, block in enumerate(self.blocks):
            x = block(x, rotations[self.spec.layer_type(layer)], memory, positions)
            if layer < len(deepstack):
                x = x + deepstack[layer]
        return self.norm(x)

    def logits(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Scores of the next token; the embedding serves twice, in every model."""
        return jnp.einsum("bd,vd->bv", x, self.embedding[...])


def _with_rows(
    rope: jrope.nnx.RotaryEmbedding, cos: jax.Array, sin: jax.Array
) -> Rotate:
    return lambda query, key: rope.rotate(query, key, cos, sin)
