"""Lookup and rotation in plain JAX: the definition that every route must match."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._layout import RotaryLayout

OutOfRange = Literal["nan", "clip"]

_INT32_MAX = 2**31 - 1


def lookup(
    table: Float32[Array, "P R"],
    positions: ArrayLike,
    *,
    layout: RotaryLayout,
    out_of_range: OutOfRange = "nan",
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """This step's rows of the table: one gather of static shape, for all layers.

    A negative position is padding and reads row 0. A position of P or more gives NaN,
    or the last row with `out_of_range="clip"`. Multimodal positions are finished here:
    each frequency takes the row of its own axis.

    Args:
      table: `compute_cos_sin_cache(config)`; always float32.
      positions: int32 [*B, T], absolute, counted from 0; [A, *B, T] where the layout
        has an `axis_of_frequency`. Other integer types are checked and converted if
        they are on the host, narrower ones everywhere.
      layout: says R and the axis map.
      out_of_range: what positions past the table read.

    Returns:
      cos and sin, float32 [*B, T, R/2] each, times the attention factor.

    Raises:
      TypeError: if the table is not float32 or positions are not integers.
      ValueError: if shapes or host positions do not fit.

    >>> table = jnp.asarray([[1.0, 0.0], [0.5, 0.75]])
    >>> cos, sin = lookup(table, jnp.array([1, -1]), layout=RotaryLayout(head_dim=2,
    ...     rotary_dim=2))
    >>> cos.tolist(), sin.tolist()
    ([[0.5], [1.0]], [[0.75], [0.0]])
    """
    _check_table(table, layout)
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(
            f"out_of_range must be one of {get_args(OutOfRange)}, got {out_of_range!r}"
        )
    indices = device_positions(positions)
    axes = layout.position_axes
    if axes is None:
        if indices.ndim < 1:
            raise ValueError(
                "positions must be [*B, T], got a scalar; use position[None]"
            )
        rows = _gather(table, indices, out_of_range)
    else:
        if indices.ndim < 2 or indices.shape[0] != axes:
            raise ValueError(
                f"positions must be [A, *B, T] with A = {axes}, since the layout "
                f"has an axis_of_frequency, got shape {indices.shape}"
            )
        rows = _gather(table, indices[0], out_of_range)
        of_feature = np.tile(layout.axes_array(), 2)
        for axis in range(1, axes):
            other = _gather(table, indices[axis], out_of_range)
            mask = (of_feature == axis).reshape((1,) * (rows.ndim - 1) + (-1,))
            rows = jnp.where(mask, other, rows)
    half = layout.rotary_dim // 2
    return rows[..., :half], rows[..., half:]


def check_array(name: str, value: object) -> None:
    """Raises unless `value` is a jax.Array (tracers included)."""
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"{name} must be a jax.Array, got {type(value).__name__}; move it to the "
            f"device once, outside jit, with jnp.asarray"
        )


def _check_table(table: Array, layout: RotaryLayout) -> None:
    check_array("the cos/sin table", table)
    if table.dtype != jnp.float32:
        raise TypeError(
            f"the cos/sin table must be float32, got {table.dtype}; was the whole "
            f"model cast to {table.dtype}? Leave the table out of the cast, or "
            f"rebuild it (jrope.nnx.fill_tables, jrope.linen.rope_variables)"
        )
    if table.ndim != 2 or table.shape[1] != layout.rotary_dim:
        raise ValueError(
            f"the cos/sin table must be [P, R] with R = rotary_dim = "
            f"{layout.rotary_dim}, got shape {table.shape}; was it stacked by vmap or "
            f"built for another config?"
        )


def device_positions(positions: ArrayLike) -> Array:
    """Positions as int32, or an error; nothing is wrapped around or truncated."""
    if isinstance(positions, jax.Array):
        if positions.dtype in (jnp.int32, jnp.int16, jnp.int8, jnp.uint16, jnp.uint8):
            return positions.astype(jnp.int32)
        raise TypeError(
            f"positions on the device must be int32, got {positions.dtype}; check "
            f"their range on the host and cast them with positions.astype(jnp.int32)"
        )
    host = np.asarray(positions)
    if host.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got {host.dtype}")
    if host.size and int(host.max()) > _INT32_MAX:
        raise ValueError(
            f"positions must fit int32, got {host.max()}; was a padding id cast to an "
            f"unsigned type?"
        )
    if host.size and int(host.min()) < -_INT32_MAX - 1:
        raise ValueError(f"positions must fit int32, got {host.min()}")
    return jnp.asarray(host.astype(np.int32))


def _gather(table: Array, positions: Array, out_of_range: OutOfRange) -> Array:
    """Rows [*B, T, R]; negative indices are padding, never wrap-around."""
    rows = table.at[jnp.maximum(positions, jnp.int32(0))]
    if out_of_range == "clip":
        return rows.get(
            mode="clip",
            wrap_negative_indices=False,
            out_sharding=_rows_sharding(positions),
        )
    return rows.get(
        mode="fill",
        fill_value=jnp.nan,
        wrap_negative_indices=False,
        out_sharding=_rows_sharding(positions),
    )


def _rows_sharding(positions: Array) -> NamedSharding | None:
    """How rows lie on a mesh with explicit axes: as the positions do. Else None."""
    sharding = jax.typeof(positions).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))


def rotate_one(
    x: Float[Array, "*B T N H"],
    cos: Float[Array, "*#B #T half"],
    sin: Float[Array, "*#B #T half"],
    *,
    is_neox_style: bool,
    rotary_offset: int = 0,
) -> Float[Array, "*B T N H"]:
    """Rotates each pair of features by its token's angle.

    The definition of right: differentiable, for any platform, never the fastest.
    Features outside `[rotary_offset, rotary_offset + 2 * half)` pass through. Computed
    in float32 (float64 for float64), returned in `x.dtype`.

    Args:
      x: queries or keys.
      cos: cosine of each token's angles, times the attention factor; half = R/2. Axes
        of length 1 are shared.
      sin: the sine, likewise.
      is_neox_style: pairs are (i, i + half) if True, (2i, 2i + 1) if False.
      rotary_offset: index of the first rotated feature.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2.

    >>> rotate_one(jnp.array([[[3.0, 4.0]]]), jnp.array([[0.0]]), jnp.array([[1.0]]),
    ...     is_neox_style=True).tolist()
    [[[-4.0, 3.0]]]
    """
    half = cos.shape[-1]
    end = rotary_offset + 2 * half
    rotated = _rotate_all(x[..., rotary_offset:end], cos, sin, is_neox_style)
    if 2 * half == x.shape[-1]:
        return rotated
    parts = (x[..., :rotary_offset], rotated, x[..., end:])
    return jnp.concatenate([part for part in parts if part.shape[-1]], axis=-1)


def _rotate_all(x: Array, cos: Array, sin: Array, is_neox_style: bool) -> Array:
    half = cos.shape[-1]
    first, second = (
        (x[..., :half], x[..., half:])
        if is_neox_style
        else (x[..., 0::2], x[..., 1::2])
    )
    out_first, out_second = turn_pairs(first, second, cos, sin)
    if is_neox_style:
        return jnp.concatenate([out_first, out_second], axis=-1)
    return jnp.stack([out_first, out_second], axis=-1).reshape(x.shape)


def turn_pairs(
    first: Float[Array, "*B T N half"],
    second: Float[Array, "*B T N half"],
    cos: Float[Array, "*#B #T half"],
    sin: Float[Array, "*#B #T half"],
) -> tuple[Float[Array, "*B T N half"], Float[Array, "*B T N half"]]:
    """The arithmetic, once for every formulation: one cast up, one cast back."""
    compute = compute_dtype(first.dtype)
    c, s = (row[..., None, :].astype(compute) for row in (cos, sin))
    a, b = first.astype(compute), second.astype(compute)
    return (a * c - b * s).astype(first.dtype), (b * c + a * s).astype(first.dtype)


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The type that a rotation of `dtype` computes in: float32, or float64 for it."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
