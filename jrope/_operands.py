"""What a rotation's operands must be: rows, and heads by their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType
from jaxtyping import Array

from jrope._gather import check_array
from jrope._layout import RotaryLayout

HEAD_DTYPES = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))


def check_rows(cos: Array, sin: Array, layout: RotaryLayout) -> None:
    """Raises unless these are rows that the layout turns by."""
    for name, row in (("cos", cos), ("sin", sin)):
        check_array(name, row)
        if row.dtype != jnp.float32:
            raise TypeError(
                f"{name} must be float32, got {row.dtype}; rows are not cast to the "
                f"model's dtype, the rotation casts its result"
            )
    half = layout.rotary_dim // 2
    if cos.shape != sin.shape or cos.ndim < 2 or cos.shape[-1] != half:
        raise ValueError(
            f"cos and sin must both be [*B, T, R/2] with R/2 = {half}, got shapes "
            f"{cos.shape} and {sin.shape}"
        )


def check_heads(name: str, x: Array) -> None:
    """Raises unless `x` is an array of a type that rotates."""
    check_array(name, x)
    if x.dtype not in HEAD_DTYPES:
        raise TypeError(
            f"{name} must be one of {[str(dtype) for dtype in HEAD_DTYPES]}, got "
            f"{x.dtype}; the order of arguments is positions, query, key"
        )


def check_donated(query: object, key: object) -> None:
    """Raises for one array that is to be donated twice; inside jit none is donated."""
    if query is key and not isinstance(query, Tracer | None):
        raise ValueError(
            "query and key must be two arrays to be donated, got one twice; donate a "
            "copy, or use the form that keeps what it is given"
        )


def check_no_shared_token(x: Array, cos: Array) -> None:
    """Raises if one position stands for several tokens of `x`.

    `rotate` shares rows over any axis of length 1. Calling forms with a position for
    each token do not: there it is a position that was meant for one token.
    """
    heads, rows = np.shape(x), np.shape(cos)
    axis = len(rows) - 2
    if len(heads) > axis >= 0 and rows[axis] == 1 != heads[axis]:
        raise ValueError(
            f"there must be a position for each of the {heads[axis]} tokens, got 1; is "
            f"it the position of the first one alone?"
        )


def check_same_tokens(name: str, x: Array, tokens: tuple[int, ...]) -> None:
    """Raises unless heads [*B, T, N, H] are of the first operand's batch and tokens."""
    if x.shape[:-2] != tokens:
        raise ValueError(
            f"{name} must have the query's leading axes [*B, T], which are {tokens}, "
            f"got {x.shape[:-2]} of [*B, T, K, H] = {x.shape}; does it lack an axis? "
            f"Are heads taken for tokens?"
        )


def as_heads(
    name: str, x: Array, cos: Array, layout: RotaryLayout, is_first: bool
) -> Array:
    """`x` as [*B, T, N, H]: flattened heads are told by their rank."""
    leading = cos.shape[:-1]
    if x.ndim == cos.ndim:
        if x.shape[-1] % layout.head_dim:
            raise ValueError(
                f"{name} with flattened heads must be [*B, T, N * H] with H = "
                f"{layout.head_dim}, got shape {x.shape}; heads that are not flattened "
                f"have one axis more than positions, whose shape is {leading}"
            )
        heads = x.shape[-1] // layout.head_dim
        if is_first and heads == 1 and leading != x.shape[:-1]:
            raise ValueError(
                f"{name} must be [*B, T, N, H] or, flattened, have the leading axes of "
                f"positions, which are {leading}, got shape {x.shape}: with one head "
                f"and a shared axis the two cannot be told apart"
            )
        x = x.reshape(*x.shape[:-1], heads, layout.head_dim)
    if x.ndim != cos.ndim + 1:
        raise ValueError(
            f"{name} must be [*B, T, N, H] for positions [*B, T], which are {leading}, "
            f"got shape {x.shape}; positions that a batch shares need an axis of "
            f"length 1: positions[None]"
        )
    if x.shape[-1] != layout.head_dim:
        raise ValueError(
            f"{name} must be [*B, T, N, H] with H = {layout.head_dim}, got shape "
            f"{x.shape}"
        )
    if any(row not in (1, own) for row, own in zip(leading, x.shape, strict=False)):
        raise ValueError(
            f"{name} must be [*B, T, N, H] for positions [*B, T], which are {leading} "
            f"(1 is shared), got shape {x.shape}; are heads and tokens swapped?"
        )
    _check_features_whole(name, x)
    return x


def _check_features_whole(name: str, x: Array) -> None:
    """Raises if a mesh with explicit axes splits the features of a head."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or sharding.spec[-1] is None:
        return
    if AxisType.Explicit in sharding.mesh.axis_types:
        raise ValueError(
            f"{name}'s features must not be split over a mesh, got sharding "
            f"{sharding.spec}; shard heads or tokens, whose pairs stay together"
        )
