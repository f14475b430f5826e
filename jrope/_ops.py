"""The doors of the device half: checks, then one bind of the primitive."""

import functools
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, device_positions
from jrope._kinds import TABLE_KINDS, Table, TableName, as_table, check_adds_up
from jrope._layout import RotaryLayout, check_layout
from jrope._names import named
from jrope._operands import as_heads, check_heads, check_rows, check_same_tokens
from jrope._primitive import bind_rope
from jrope._products import squared_size
from jrope._rotate import lookup
from jrope._routes import route_names


@overload
def rotate(
    query: Array,
    key: Array,
    cos: Array,
    sin: Array,
    *,
    layout: RotaryLayout,
    inverse: bool = ...,
    implementation: str | None = ...,
) -> tuple[Array, Array]: ...
@overload
def rotate(
    query: Array,
    key: None,
    cos: Array,
    sin: Array,
    *,
    layout: RotaryLayout,
    inverse: bool = ...,
    implementation: str | None = ...,
) -> tuple[Array, None]: ...
def rotate(
    query: Float[Array, "... NH"],
    key: Float[Array, "... KH"] | None,
    cos: Float32[Array, "... half"],
    sin: Float32[Array, "... half"],
    *,
    layout: RotaryLayout,
    inverse: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """Rotates queries and keys by this step's rows, in one call for both.

    Computed in float32 (float64 for float64 heads) and cast back once. Differentiable
    in forward and reverse mode, batchable and shardable over every axis but the
    features. Policies of `jax.checkpoint` know the results by the names "rope_query"
    and "rope_key".

    Args:
      query: [*B, T, N, H], or with flattened heads [*B, T, N * H].
      key: [*B, T, K, H] or [*B, T, K * H]; None where there is none.
      cos: [*B, T, R/2] from `lookup`; any of *B and T may be 1, and is then shared: one
        row turns the whole batch, or every token.
      sin: likewise.
      layout: which features turn, and in which pairs.
      inverse: undo the rotation instead, attention factor included. This is the
        inverse, not the transpose: they differ where the attention factor is not 1.
      implementation: the name of a route (docs/pages/platforms.md), or None: the best.

    Returns:
      The rotated query and key, with their own shapes and dtypes.

    Raises:
      TypeError: if a dtype is wrong.
      ValueError: if shapes do not fit, or the named route is not one or declines.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> query, key = rotate(jnp.array([[[3.0, 4.0]]]), None, jnp.array([[0.0]]),
    ...     jnp.array([[1.0]]), layout=layout)
    >>> query.tolist()
    [[[-4.0, 3.0]]]
    """
    given = {"query": query} if key is None else {"query": query, "key": key}
    outs = _rotate_named(given, cos, sin, layout, inverse, implementation)
    return outs[0], None if key is None else outs[1]


def _rotate_named(
    given: dict[str, Array],
    cos: Array,
    sin: Array,
    layout: RotaryLayout,
    inverse: bool,
    implementation: str | None,
) -> list[Array]:
    """`rotate` of operands by the names that errors and policies know them by."""
    check_layout(layout)
    check_rows(cos, sin, layout)
    check_implementation(implementation)
    for name, x in given.items():
        check_heads(name, x)
    first = next(iter(given))
    heads = [as_heads(name, x, cos, layout, name == first) for name, x in given.items()]
    for name, x in zip(given, heads, strict=True):
        check_same_tokens(name, x, heads[0].shape[:-2])
    if inverse:
        wide = any(x.dtype == jnp.float64 for x in heads)
        cos, sin = _inverse_rows(cos, sin, jnp.float64 if wide else jnp.float32)
    turned = bind_rope(
        heads,
        cos,
        sin,
        is_neox_style=layout.is_neox_style,
        rotary_offset=layout.rotary_offset,
        implementation=implementation,
    )
    return [
        named(out.reshape(x.shape), f"rope_{name}")
        for out, (name, x) in zip(turned, given.items(), strict=True)
    ]


@overload
def apply_rope(
    positions: ArrayLike,
    query: Array,
    key: Array,
    table: Array | Table,
    *,
    layout: RotaryLayout,
    inverse: bool = ...,
    row_offset: ArrayLike | None = ...,
    out_of_range: OutOfRange = ...,
    implementation: str | None = ...,
) -> tuple[Array, Array]: ...
@overload
def apply_rope(
    positions: ArrayLike,
    query: Array,
    key: None,
    table: Array | Table,
    *,
    layout: RotaryLayout,
    inverse: bool = ...,
    row_offset: ArrayLike | None = ...,
    out_of_range: OutOfRange = ...,
    implementation: str | None = ...,
) -> tuple[Array, None]: ...
def apply_rope(
    positions: ArrayLike,
    query: Float[Array, "... NH"],
    key: Float[Array, "... KH"] | None,
    table: Float32[Array, "P R"] | Table,
    *,
    layout: RotaryLayout,
    inverse: bool = False,
    row_offset: ArrayLike | None = None,
    out_of_range: OutOfRange = "nan",
    implementation: str | None = None,
) -> tuple[Array, Array | None]:
    """`lookup` and `rotate` in one call, for whoever has one layer.

    With several layers, look the rows up once per step and rotate with them in each.

    Args:
      positions: int32 [*B, T], or [A, *B, T] where the layout has an axis map. Any of
        *B and T may be 1, and is then shared: one position turns the whole batch, or
        every token.
      query: [*B, T, N, H] or [*B, T, N * H].
      key: [*B, T, K, H] or [*B, T, K * H], or None.
      table: float32 [P, R] from `compute_cos_sin_cache`, or one of the table kinds.
        Pass it to a jitted function as an argument: closed over, it becomes a constant
        of the program.
      layout: which features turn, in which pairs, by which axis.
      inverse: undo the rotation instead.
      row_offset: for a `StackedTable`, where each token's own table starts.
      out_of_range: what positions of P or more read: NaN, or the last row ("clip").
      implementation: the name of a route (docs/pages/platforms.md), or None: the best.

    Returns:
      The rotated query and key.

    Raises:
      TypeError, ValueError: as `lookup` and `rotate` do.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> table = jnp.array([[1.0, 0.0], [0.0, 1.0]])  # position 1: a quarter turn
    >>> query, _ = apply_rope(jnp.arange(2), jnp.ones((2, 1, 2)), None, table,
    ...     layout=layout)
    >>> query.tolist()
    [[[1.0, 1.0]], [[-1.0, 1.0]]]
    """
    cos, sin = lookup(
        table,
        positions,
        layout=layout,
        row_offset=row_offset,
        out_of_range=out_of_range,
    )
    return rotate(
        query,
        key,
        cos,
        sin,
        layout=layout,
        inverse=inverse,
        implementation=implementation,
    )


def rerope(
    key: Float[Array, "... KH"],
    shifts: ArrayLike,
    table: Float32[Array, "P R"] | Table,
    *,
    layout: RotaryLayout,
    implementation: str | None = None,
) -> Array:
    """Moves keys that are already rotated to other positions, by signed shifts.

    For cached keys when a prompt slides, a prefix moves or tokens are evicted. The
    attention factor that the keys carry is kept and not applied again.

    Args:
      key: [*B, T, K, H] or [*B, T, K * H], rotated by this table's frequencies.
      shifts: int32 [*B, T], new position minus old one, each of magnitude below P.
      table: the table that rotated them, a flat or a two-level one: turns by the other
        kinds do not add up.
      layout: likewise.
      implementation: the name of a route (docs/pages/platforms.md), or None.

    Returns:
      The keys at their new positions. A shift of P or more gives NaN.

    Raises:
      TypeError, ValueError: as `lookup` and `rotate` do, and for other kinds of table.

    >>> layout = RotaryLayout(head_dim=2, rotary_dim=2)
    >>> table = jnp.array([[1.0, 0.0], [0.0, 1.0]])  # position 1: a quarter turn
    >>> heads = jnp.array([[[1.0, 2.0]]])
    >>> at_1, _ = apply_rope(jnp.array([1]), heads, None, table, layout=layout)
    >>> rerope(at_1, jnp.array([-1]), table, layout=layout).tolist()
    [[[1.0, 2.0]]]
    """
    kind = as_table(table)
    signed = check_shifts(shifts, kind, layout=layout)
    cos, sin = shift_rows(signed, kind, layout=layout)
    return _rotate_named({"key": key}, cos, sin, layout, False, implementation)[0]


def check_shifts(shifts: ArrayLike, kind: Table, *, layout: RotaryLayout) -> Array:
    """Signed shifts as int32, checked against the table where they lie on the host."""
    check_layout(layout)
    check_adds_up(kind)
    if layout.position_axes is not None:
        raise ValueError("rerope moves along one axis; this layout has several")
    signed = device_positions(shifts, name="shifts")
    if not isinstance(shifts, jax.Array):
        host, rows = np.asarray(shifts, np.int64), kind.max_position_embeddings
        far = host[np.abs(host) >= rows]
        if far.size:
            raise ValueError(
                f"shifts must be of magnitude below the table's {rows} rows, got "
                f"{far[0]}; a shift is the new position minus the old one"
            )
    return signed


def shift_rows(
    signed: Array, kind: Table, *, layout: RotaryLayout
) -> tuple[Array, Array]:
    """Rows of amplitude 1 that rotate by signed numbers of positions."""
    # -2^31 has no positive counterpart.
    distance = jnp.abs(jnp.maximum(signed, jnp.int32(-(2**31) + 1)))
    cos, sin = lookup(kind, distance, layout=layout)
    return _unit_rows(cos, sin, signed)


@jax.jit
def _unit_rows(cos: Array, sin: Array, signed: Array) -> tuple[Array, Array]:
    """Rows of amplitude 1, turning back where the shift is negative."""
    cos, sin = lax.optimization_barrier((cos, sin))  # As in `_inverse_rows`.
    amplitude = jnp.sqrt(squared_size(cos, sin))
    direction = jnp.where(signed < 0, jnp.float32(-1), jnp.float32(1))[..., None]
    return lax.optimization_barrier((cos / amplitude, direction * sin / amplitude))


def device_table(
    config: RopeConfig, kind: TableName = "flat"
) -> Float32[Array, "rows R"]:
    """The array of a config's table, on the default device.

    While a function is being traced (a model initialised under jit), the program calls
    back to the host for it, so that it never becomes a constant of the program.
    """
    if not isinstance(config, RopeConfig):
        raise TypeError(
            f"config must be a RopeConfig, got {type(config).__name__}; config_from_hf "
            f"makes one of a config.json, and from_hf the layer"
        )
    if kind not in TABLE_KINDS:
        raise ValueError(f"table must be one of {sorted(TABLE_KINDS)}, got {kind!r}")
    compute, rows = TABLE_KINDS[kind].compute, TABLE_KINDS[kind].array_rows(config)
    if not isinstance(jnp.zeros(()), Tracer):
        return jnp.asarray(compute(config))
    shape = jax.ShapeDtypeStruct((rows, config.layout.rotary_dim), jnp.float32)
    return jax.pure_callback(lambda: compute(config), shape)


@functools.partial(jax.jit, static_argnums=2)
def _inverse_rows(cos: Array, sin: Array, dtype: type) -> tuple[Array, Array]:
    """Rows that undo these: the sine negated, both divided by cos^2 + sin^2.

    Divided by the larger of the two first, whose square could leave the type's range.
    The barriers keep this arithmetic a program of its own, with the same bits in every
    other, and keep XLA from multiplying the two divisors.
    """
    c, s = lax.optimization_barrier((cos.astype(dtype), sin.astype(dtype)))
    size = jnp.maximum(jnp.abs(c), jnp.abs(s))
    c, s, size = lax.optimization_barrier((c / size, s / size, size))
    energy = squared_size(c, s) * size
    return lax.optimization_barrier((c / energy, -s / energy))


def check_implementation(implementation: str | None) -> None:
    """Raises unless it is None or the name of a route of some platform."""
    if implementation is not None and implementation not in route_names():
        raise ValueError(
            f"implementation must be None or one of {route_names()}, got "
            f"{implementation!r}"
        )
