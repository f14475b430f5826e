"""vLLM's `get_rope` and its custom operations, over jrope's tables and rotation."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._gather import check_table, device_positions, saturated_sum
from jrope._hf import config_from_hf
from jrope._kinds import TableName
from jrope._layout import LONGEST, RotaryLayout
from jrope._operands import check_donated, check_no_shared_token
from jrope._ops import rotate
from jrope._rotate import lookup
from jrope._shell import on_all_axes
from jrope.nnx import RotaryEmbedding

# vLLM gives M-RoPE tables so many times the rows: a position that counts a video's time
# can exceed the number of tokens.
_MROPE_ROWS = 4


class ServingRotaryEmbedding(RotaryEmbedding):
    """`jrope.nnx.RotaryEmbedding` as serving engines call it: see `get_rope`.

    Positions on the host are checked against the table's end, those on the device read
    its last row past it: a NaN on a cache's shared page could reach other requests. A
    model with M-RoPE takes the positions of text as well, [T], one for all axes.

    Raises:
      ValueError: at a call, if a position on the host is past the table.

    >>> config = RopeConfig(head_dim=8, rope_theta=1e4, max_position_embeddings=16)
    >>> rope = ServingRotaryEmbedding(config, out_of_range="clip")
    >>> query, _ = rope(jnp.arange(3), jnp.ones((3, 16)), None)
    >>> query.shape
    (3, 16)
    """

    def rows(
        self, positions: ArrayLike
    ) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """This step's rows, for all layers: see `jrope.lookup`."""
        rows = self.config.longest_request
        inside = device_positions(positions, rows=rows)
        return super().rows(on_all_axes(inside, self.config, text_ndim=1))


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    dual_chunk_attention_config: Mapping[str, Any] | None = None,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    base: float | int | None = None,
    rotary_dim: int | None = None,
    partial_rotary_factor: float | None = None,
    max_model_len: int | None = None,
    table: TableName = "flat",
) -> ServingRotaryEmbedding:
    """The rotary embedding of a model, called as `rope(positions, query, key)`.

    The object is an nnx module: let the model hold one, and it reaches a jitted step as
    data. vLLM's own cache of objects is left out, since one shared by layers through a
    dictionary would become a constant of the program.

    Query and key are [T, N * H] or [T, N, H], positions [T] or, with M-RoPE, [3, T]
    too. The rotated query and key are returned, and nothing is written in place.

    Args:
      head_size: features per head.
      max_position: the model's max_position_embeddings. The table has at least as many
        rows as vLLM's: `max_position`, `max_model_len`, or the scaling's `factor` times
        its original length (`max_position` where it has none), whichever is the most;
        times four for M-RoPE.
      is_neox_style: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.
      rope_parameters: the rope dict of config.json, `rope_theta` in it or 10000; every
        key is used or refused by name.
      dtype: taken for the call's sake; tables are float32, heads keep their own type.
      dual_chunk_attention_config: must be None.
      rope_scaling: the rope dict, by the name of older versions.
      base: `rope_theta`, by the name of older versions.
      rotary_dim: leading features rotated, as older versions take it; None for all.
      partial_rotary_factor: the share of features rotated, where the dict has none.
      max_model_len: the longest request served, which vLLM takes from its own options;
        it chooses the factors of scalings that depend on it (LongRoPE, dynamic NTK).
        None for `max_position`.
      table: the table kind, "flat" or "two_level".

    Raises:
      TypeError, ValueError: if an argument is wrong or a key unknown.

    >>> rope = get_rope(64, 128, rope_parameters={"rope_theta": 1e6})
    >>> query, key = rope(jnp.arange(3), jnp.ones((3, 256)), jnp.ones((3, 64)))
    >>> query.shape, key.shape
    ((3, 256), (3, 64))
    """
    del dtype
    if not isinstance(is_neox_style, bool):
        raise TypeError(
            f"is_neox_style must be a bool, got {is_neox_style!r}; since vLLM 0.12 the "
            f"arguments are (head_size, max_position, is_neox_style, rope_parameters), "
            f"and the older rotary_dim and base go by name"
        )
    if dual_chunk_attention_config is not None:
        raise ValueError(
            "dual_chunk_attention_config must be None: queries have five forms there; "
            "use jrope.DualChunkTable"
        )
    if rope_parameters is not None and rope_scaling is not None:
        raise ValueError("rope_parameters and rope_scaling must not both be given")
    rope = dict(rope_parameters or rope_scaling or {})
    hf_config = {
        "head_dim": head_size,
        "max_position_embeddings": max_position,
        "rotary_dim": rope.pop("rope_dim", None) or rotary_dim,
        "partial_rotary_factor": partial_rotary_factor,
        "rope_theta": rope.get("rope_theta", 10000.0) if base is None else base,
        "rope_parameters": rope,
    }
    hf_config = {key: value for key, value in hf_config.items() if value is not None}
    longest = max_position if max_model_len is None else max_model_len
    config = _served(hf_config, is_neox_style, longest)
    return ServingRotaryEmbedding(config, out_of_range="clip", table=table)


def _served(
    hf_config: Mapping[str, Any], is_neox_style: bool, longest: int
) -> RopeConfig:
    """The config of requests up to `longest`, with at least the rows of vLLM's table.

    vLLM's number of rows differs by scaling, and for some is below the length served;
    the largest of its rules is never too few.
    """
    config = config_from_hf(hf_config, is_neox_style=is_neox_style)
    assert config is not None  # It names no model type without rotary embedding.
    length = config.max_position_embeddings
    factor = getattr(config.scaling, "factor", None) or 1.0
    trained = getattr(config.scaling, "original_max_position_embeddings", None)
    scaled = (trained or length) * factor
    if scaled > LONGEST:
        raise ValueError(
            f"factor times the trained length must fit int32 positions, got "
            f"{factor:.6g} times {trained or length}; is the factor another model's?"
        )
    rows = max(length, longest, math.ceil(scaled))
    if config.axis_of_frequency is not None:
        rows *= _MROPE_ROWS
    config = config_from_hf(
        hf_config,
        is_neox_style=is_neox_style,
        max_position_embeddings=min(rows, LONGEST),
    )
    assert config is not None  # As above.
    return config.for_length(longest)


def rotary_embedding(
    positions: ArrayLike,
    query: Float[Array, "... NH"],
    key: Float[Array, "... KH"] | None,
    head_size: int,
    cos_sin_cache: Float32[Array, "P R"],
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> tuple[Array, Array | None]:
    """Rotates and donates, where vLLM's operation of this name writes in place.

    Outside jit the query and key that are passed are gone afterwards, as their contents
    are in vLLM; inside jit they behave as any others. Keep what is returned.

    Args:
      positions: int32 [T] or [B, T]. Those on the host are checked against the table's
        end; on the device, one past it reads the last row. Negative ones are padding.
      query: [*B, T, N * H] or [*B, T, N, H].
      key: likewise, or None.
      head_size: features per head.
      cos_sin_cache: float32 [P, R], cos then sin, on the device.
      is_neox: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.
      rope_dim_offset: index of the first rotated feature.
      inverse: turn back, by the sine negated. As in vLLM, the square of an attention
        factor stays; `jrope.rotate(..., inverse=True)` takes it out.

    Returns:
      The rotated query and key.

    Raises:
      TypeError, ValueError: if the table is not float32, or shapes do not fit.

    >>> query, _ = rotary_embedding(jnp.array([1]), jnp.array([[3.0, 4.0]]), None, 2,
    ...     jnp.array([[1.0, 0.0], [0.0, 1.0]]), True)
    >>> query.tolist()
    [[-4.0, 3.0]]
    """
    layout = _layout(head_size, cos_sin_cache, is_neox, rope_dim_offset)
    inside = device_positions(positions, rows=cos_sin_cache.shape[0])
    cos, sin = lookup(cos_sin_cache, inside, layout=layout, out_of_range="clip")
    return _donating_rotate(query, key, cos, -sin if inverse else sin, layout)


def batched_rotary_embedding(
    positions: ArrayLike,
    query: Float[Array, "... NH"],
    key: Float[Array, "... KH"] | None,
    head_size: int,
    cos_sin_cache: Float32[Array, "P R"],
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: ArrayLike,
) -> tuple[Array, Array | None]:
    """`rotary_embedding` over several tables in one: a first row for every token.

    vLLM had it until 2025, for requests of different scaling in one batch.
    `jrope.stack_tables` makes such a table from configs, and keeps the tables apart,
    which these plain rows do not: a position past its own table reads the next one.

    Args:
      positions: int32 [T] or [B, T], counted in each token's own table.
      query: [*B, T, N * H] or [*B, T, N, H]; donated.
      key: likewise, or None.
      head_size: features per head.
      cos_sin_cache: float32 [rows of all tables, R].
      is_neox: pairs are (i, i + R/2) if True, (2i, 2i + 1) if False.
      rot_dim: R, which must be the table's.
      cos_sin_cache_offsets: int32, of the shape of positions: where a token's table
        starts.

    Returns:
      The rotated query and key.

    Raises:
      TypeError, ValueError: as `rotary_embedding`, and where `rot_dim` is another.

    >>> tables = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]])
    >>> query, _ = batched_rotary_embedding(jnp.array([1, 1]), jnp.ones((2, 2)), None,
    ...     2, tables, True, 2, jnp.array([0, 2]))
    >>> query.tolist()
    [[-1.0, 1.0], [-1.0, -1.0]]
    """
    layout = _layout(head_size, cos_sin_cache, is_neox, 0)
    if rot_dim != layout.rotary_dim:
        raise ValueError(
            f"rot_dim must be the table's R = {layout.rotary_dim}, got {rot_dim}"
        )
    rows = cos_sin_cache.shape[0]
    inside = device_positions(positions, rows=rows)
    starts = device_positions(
        cos_sin_cache_offsets, rows=rows, name="cos_sin_cache_offsets"
    )
    if starts.shape != inside.shape:
        raise ValueError(
            f"cos_sin_cache_offsets must have the shape of positions, {inside.shape}, "
            f"got {starts.shape}"
        )
    index = saturated_sum(starts, jnp.maximum(inside, jnp.int32(0)))
    cos, sin = lookup(cos_sin_cache, index, layout=layout, out_of_range="clip")
    return _donating_rotate(query, key, cos, sin, layout)


def _layout(
    head_size: int, cos_sin_cache: Array, is_neox: bool, offset: int
) -> RotaryLayout:
    check_table(cos_sin_cache)
    return RotaryLayout(
        head_dim=head_size,
        rotary_dim=cos_sin_cache.shape[1],
        rotary_offset=offset,
        is_neox_style=is_neox,
    )


def _donating_rotate(
    query: Array, key: Array | None, cos: Array, sin: Array, layout: RotaryLayout
) -> tuple[Array, Array | None]:
    check_donated(query, key)
    check_no_shared_token(query, cos)
    return _jitted_rotate(query, key, cos, sin, layout)


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=4)
def _jitted_rotate(
    query: Array, key: Array | None, cos: Array, sin: Array, layout: RotaryLayout
) -> tuple[Array, Array | None]:
    return rotate(query, key, cos, sin, layout=layout)
