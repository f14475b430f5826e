"""What adapters share: a config from a stack's arguments, and one tensor turned."""

import functools
from collections.abc import Mapping
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._hf import config_from_hf
from jrope._operands import check_no_shared_token
from jrope._ops import rotate
from jrope._phases import phase_positions, phase_rows
from jrope._shell import on_all_axes

# Rows are computed, so a config's length only bounds what it is asked for.
_LENGTH = 2**31 - 1

Rows = tuple[Float32[Array, "*B T half"], Float32[Array, "*B T half"]]


def rows_of(positions: ArrayLike, config: RopeConfig, *, text_ndim: int) -> Rows:
    """Rows of a stack's positions; see `on_all_axes`."""
    indices = phase_positions(positions, config)
    return phase_rows(on_all_axes(indices, config, text_ndim=text_ndim), config)


def turn(x: Float[Array, "*B T N H"], rows: Rows, config: RopeConfig) -> Array:
    """One tensor, as stacks rotate queries and keys apart."""
    check_no_shared_token(x, rows[0])
    turned, _ = rotate(x, None, *rows, layout=config.layout)
    return turned


def config_of(
    head_dim: int,
    rope_theta: float | int,
    rope_scaling: Mapping[str, Any] | None,
    *,
    is_neox_style: bool = True,
    rotary_dim: int | None = None,
) -> RopeConfig:
    """The config of a head, a base and a rope dict, without the model's length.

    Raises:
      ValueError: if a key is unknown, or the scaling depends on the model's length.
    """
    items = tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in (rope_scaling or {}).items()
    )
    return _config_of(head_dim, float(rope_theta), items, is_neox_style, rotary_dim)


@functools.lru_cache(maxsize=256)
def _config_of(
    head_dim: int,
    rope_theta: float | int,
    items: tuple[tuple[str, Any], ...],
    is_neox_style: bool,
    rotary_dim: int | None,
) -> RopeConfig:
    hf_config = {
        "head_dim": head_dim,
        "rope_theta": rope_theta,
        "rope_scaling": dict(items),
    }
    if rotary_dim is not None:
        hf_config["rotary_dim"] = rotary_dim
    long, short = (
        config_from_hf(
            {**hf_config, "max_position_embeddings": length},
            is_neox_style=is_neox_style,
        )
        for length in (_LENGTH, _LENGTH // 2)
    )
    assert long is not None and short is not None  # They name no model type.
    if long.scaling != short.scaling or long.longest_request < _LENGTH:
        raise ValueError(
            f"rope_scaling must not depend on the model's length, which this call does "
            f"not give, got {dict(items)}; name original_max_position_embeddings, or "
            f"use jrope.nnx.RotaryEmbedding with config_from_hf(...).for_length(...)"
        )
    return long
