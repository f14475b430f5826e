"""tpu-inference's calling forms: `apply_rope`, and the modules of DeepSeek and GPT-OSS.

Models import the name, so each model's module is where to put this one:
`tpu_inference.models.jax.llama3.apply_rope = jrope.adapters.tpu_inference.apply_rope`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jrope._config import RopeConfig
from jrope._gather import check_array
from jrope.adapters._common import Rows, config_of, rows_of, turn


def apply_rope(
    inputs: Float[Array, "T N Hpad"],
    positions: ArrayLike,
    head_dim: int,
    rope_theta: float | int = 10000,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_input_ordering: Literal["split", "interleaved"] = "split",
    *,
    rope_proportion: float | int = 1.0,
) -> Array:
    """Rotates queries or keys whose heads may be padded.

    Args:
      inputs: [T, N, Hpad]; features past `head_dim` come back as zeros.
      positions: int32 [T], or [3, T] with `mrope_section`; for vision encoders
        their cosines and sines instead, [S, H/2, 2], which repeat if T is a multiple of
        S.
      head_dim: H, the features rotated.
      rope_theta: base of the geometric series.
      rope_scaling: the rope dict of config.json, with `scale_factor` for `factor` as
        tpu-inference's own reader leaves it. Every key is used or refused by name.
      rope_input_ordering: "split" for pairs (i, i + H/2), "interleaved" for
        (2i, 2i + 1).
      rope_proportion: the share of pairs that turn, over the whole head.

    Returns:
      The rotated inputs, in their shape and dtype.

    Raises:
      TypeError, ValueError: if shapes do not fit or a key is unknown.

    >>> out = apply_rope(jnp.ones((3, 2, 16)), jnp.arange(3), head_dim=8)
    >>> out.shape, float(out[..., 8:].max())
    ((3, 2, 16), 0.0)
    """
    check_array("inputs", inputs)
    if rope_input_ordering not in ("split", "interleaved"):
        raise ValueError(
            f"rope_input_ordering must be 'split' or 'interleaved', got "
            f"{rope_input_ordering!r}"
        )
    scaling = _rope_dict(rope_scaling, rope_proportion)
    config = config_of(
        head_dim,
        rope_theta,
        scaling,
        is_neox_style=rope_input_ordering == "split",
    )
    if getattr(positions, "ndim", 1) == 3:
        rows = _given_rows(positions, inputs.shape[0])
    else:
        rows = rows_of(positions, config, text_ndim=1)
    turned = turn(inputs[..., :head_dim], rows, config)
    padding = inputs.shape[-1] - head_dim
    return jnp.pad(turned, [(0, 0), (0, 0), (0, padding)]) if padding else turned


class RotaryEmbedding(nnx.Module):
    """The modules' forms: DeepSeek's `rope.apply_rope(positions, x)`, GPT-OSS's call.

    Args:
      config: what to rotate, and how, in place of their constructors' arguments.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> RotaryEmbedding(config).apply_rope(jnp.arange(3), jnp.ones((3, 2, 8))).shape
    (3, 2, 8)
    """

    def __init__(self, config: RopeConfig):
        """Holds no array."""
        self.config = config

    def initialize_cache(self) -> None:
        """Does nothing: there is no cache to fill."""

    def apply_rope(self, positions: ArrayLike, x_TNH: Float[Array, "T N H"]) -> Array:
        """Rotates one tensor."""
        return turn(x_TNH, rows_of(positions, self.config, text_ndim=1), self.config)

    def __call__(
        self,
        query_TNH: Float[Array, "T N H"],
        key_TNH: Float[Array, "T K H"],
        positions: ArrayLike,
    ) -> tuple[Array, Array]:
        """Rotates queries and keys."""
        rows = rows_of(positions, self.config, text_ndim=1)
        return turn(query_TNH, rows, self.config), turn(key_TNH, rows, self.config)


def _rope_dict(
    rope_scaling: Mapping[str, Any] | None, rope_proportion: float
) -> dict[str, Any]:
    """The rope dict in Hugging Face's keys."""
    rope = dict(rope_scaling or {})
    if "scale_factor" in rope:
        rope["factor"] = rope.pop("scale_factor")
    if rope_proportion == 1:
        return rope
    kind = rope.setdefault("rope_type", "proportional")
    if kind != "proportional":
        raise ValueError(
            f"rope_proportion must be 1 with rope_type {kind!r}, got {rope_proportion}"
        )
    return rope | {"partial_rotary_factor": rope_proportion}


def _given_rows(rows: Any, tokens: int) -> Rows:
    """Cosines and sines handed over in place of positions, repeated for all images."""
    check_array("positions", rows)
    patches = rows.shape[0]
    images = tokens // patches if patches else 0
    if rows.shape[-1] != 2 or images * patches != tokens:
        raise ValueError(
            f"positions that are cosines and sines must be [S, H/2, 2] with S a "
            f"divisor of T = {tokens}, got shape {rows.shape}"
        )
    wide = jnp.tile(rows.astype(jnp.float32), (images, 1, 1))
    return wide[..., 0], wide[..., 1]
