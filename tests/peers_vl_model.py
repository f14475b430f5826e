"""jrope's decoder with the weights of a transformers model, whole and in windows."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peers_vl import Reference

from jrope import RopeConfig, config_from_hf
from jrope.demo.engine import PagedMemory, PagePool
from jrope.demo.model import Decoder, NoMemory
from jrope.demo.spec import ModelSpec

PAGE = 16  # tokens

# What the files of transformers call the tensors that the decoder fetches.
OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def peer_name(name: str) -> str:
    """transformers' name of a tensor: "blk.2.attn_q.bias" and so on."""
    *block, tensor, kind = name.split(".")
    if not block:
        return f"model.language_model.{OUTER[tensor]}.{kind}"
    return f"model.language_model.layers.{block[1]}.{INNER[tensor]}.{kind}"


def model_spec(reference: Reference) -> ModelSpec:
    text = reference.config["text_config"]
    heads = text["num_attention_heads"]
    return ModelSpec(
        architecture="qwen2vl" if reference.family == "qwen2_vl" else "qwen3vl",
        layers=text["num_hidden_layers"],
        width=text["hidden_size"],
        heads=heads,
        key_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        norm_eps=text["rms_norm_eps"],
        context=text["max_position_embeddings"],
        theta=text["rope_parameters"]["rope_theta"],
        window=None,
        mrope_section=tuple(text["rope_parameters"]["mrope_section"]),
        deepstack_layers=len(reference.deepstack),
    )


def rope_config(reference: Reference) -> RopeConfig:
    config = config_from_hf(reference.config)
    assert config is not None
    return config


class Inputs(NamedTuple):
    """What the decoder takes of T tokens.

    Attributes:
      embeddings: [1, T, D].
      deepstack: the same, for each of the first layers.
      positions: index of each token [1, T]; negative for padding.
    """

    embeddings: np.ndarray
    deepstack: tuple[np.ndarray, ...]
    positions: np.ndarray


class Model:
    """The decoder, its rotation as the model's config.json says or another."""

    def __init__(self, reference: Reference, config: RopeConfig | None = None):
        self.reference = reference
        self.spec = model_spec(reference)
        decoder = Decoder(
            lambda name: reference.weights[peer_name(name)],
            self.spec,
            {"full_attention": config or rope_config(reference)},
        )
        graph, self.state = nnx.split(decoder)
        self._whole = jax.jit(functools.partial(whole_step, graph))
        self._paged = jax.jit(functools.partial(paged_step, graph))

    def whole(self, rope_positions: np.ndarray) -> np.ndarray:
        """Logits [n, V] of the first n tokens in one forward pass."""
        count = rope_positions.shape[1]
        inputs = self._inputs(0, count, count)
        return np.asarray(self._whole(self.state, inputs, rope_positions[:, None]))

    @property
    def pages(self) -> int:
        """Of a request, prompt and answer."""
        return -(-len(self.reference.logits) // PAGE)

    def pool(self) -> PagePool:
        """Room for two requests, empty."""
        shape = (2 * self.pages, PAGE, self.spec.key_heads, self.spec.head_dim)
        empty = (jnp.zeros(shape, jnp.float32),) * self.spec.layers
        return PagePool(empty, empty)

    def serve(
        self,
        pool: PagePool,
        table: list[int],
        fill: Callable[[np.ndarray, int, int], None],
        tokens: range,
    ) -> tuple[np.ndarray, PagePool]:
        """Logits of tokens in chunks of `tokens.step`, through the pages of `table`.

        Args:
          pool: keys and values of all that came before.
          table: pages of this request, `pages` of them.
          fill: writes the rotary positions of a window, as `PositionPlan.fill`.
          tokens: which ones.
        """
        made: list[np.ndarray] = []
        for start in tokens:
            stop = min(start + tokens.step, tokens.stop)
            rope_positions = np.full((3, tokens.step), -1, np.int32)
            fill(rope_positions, start, stop)
            logits, pool = self._paged(
                self.state,
                pool,
                np.array([table], np.int32),
                self._inputs(start, stop, tokens.step),
                rope_positions[:, None],
            )
            made.append(np.asarray(logits)[: stop - start])
        return np.concatenate(made), pool

    def _inputs(self, start: int, stop: int, width: int) -> Inputs:
        """Of a window, padded to a width."""
        positions = np.full((1, width), -1, np.int32)
        positions[0, : stop - start] = np.arange(start, stop)
        room = width - (stop - start)
        taken = self.reference.embeddings[start:stop]
        added = self.reference.deepstack[:, start:stop]
        return Inputs(
            np.pad(taken, ((0, room), (0, 0)))[None],
            tuple(np.pad(layer, ((0, room), (0, 0)))[None] for layer in added),
            positions,
        )


def whole_step(graph, state, inputs, rope_positions):
    embeddings, deepstack, positions = jax.tree.map(jnp.asarray, inputs)
    model = nnx.merge(graph, state)
    rotations = model.rotations(rope_positions)
    return model.logits(
        model(embeddings, positions, NoMemory(), rotations, deepstack)[0]
    )


def paged_step(graph, state, pool, table, inputs, rope_positions):
    embeddings, deepstack, positions = jax.tree.map(jnp.asarray, inputs)
    model = nnx.merge(graph, state)
    memory = PagedMemory(pool, table, positions)
    rotations = model.rotations(rope_positions)
    features = model(embeddings, positions, memory, rotations, deepstack)
    return model.logits(features[0]), memory.pool
