"""Positions of one rank's tokens where a mesh axis splits the sequence.

Computed in the graph from the rank: one program serves every rank, and no table of
positions is built on the host. Shapes are static.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int32

from jrope._gather import device_positions
from jrope._layout import LONGEST, check_int, check_length
from jrope.positions_jax import positions_from_cu_seqlens, positions_from_segment_ids

Scheme = Literal["contiguous", "zigzag"]


def context_parallel_positions(
    total_length: int,
    rank: ArrayLike,
    size: int,
    scheme: Scheme = "contiguous",
    segment_ids: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
) -> Int32[Array, "..."]:
    """Positions of the tokens that one rank of a context-parallel group holds.

    With packed documents, positions restart at 0 in each. A document may span ranks, so
    its beginning may lie elsewhere: segment ids and cu_seqlens are those of the whole
    sequence, in its own order, the same on every rank of the group.

    Args:
      total_length: tokens of the whole sequence, a multiple of `size`, and of `2 *
        size` for "zigzag".
      rank: the rank, int32; in `shard_map` it is `jax.lax.axis_index(axis)`.
      size: ranks that share the sequence; `jax.lax.axis_size(axis)`.
      scheme: "contiguous", a rank holds one run of tokens; or "zigzag", the sequence is
        cut into `2 * size` runs and rank r holds runs r and `2 * size - 1 - r`, which
        balances causal attention.
      segment_ids: int32 [*B, total_length], as `positions_from_segment_ids` takes them.
      cu_seqlens: int32 [*B, documents + 1], as `positions_from_cu_seqlens` takes them.

    Returns:
      int32 [total_length // size], or [*B, total_length // size] for packed documents;
      -1 for padding.

    Raises:
      TypeError: if a size, the rank or the ids are not integers.
      ValueError: if the length does not split, shapes do not fit, or a rank on the host
        is none of the group.

    >>> context_parallel_positions(8, 1, 2).tolist()
    [4, 5, 6, 7]
    >>> context_parallel_positions(8, 1, 2, "zigzag").tolist()
    [2, 3, 4, 5]
    >>> context_parallel_positions(8, 1, 2, cu_seqlens=[0, 3, 7]).tolist()
    [1, 2, 3, -1]
    """
    _check_split(total_length, size, scheme)
    own = device_positions(rank, name="rank")
    if own.ndim:
        raise ValueError(f"rank must be a scalar, got shape {own.shape}")
    if not isinstance(rank, jax.Array) and not 0 <= int(np.asarray(rank)) < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(
            "segment_ids and cu_seqlens say the same: give one of them, got both"
        )
    tokens = _tokens_of(own, total_length, size, scheme)
    if segment_ids is not None:
        whole = positions_from_segment_ids(segment_ids)
    elif cu_seqlens is not None:
        whole = positions_from_cu_seqlens(cu_seqlens, size=total_length)
    else:
        return tokens
    if whole.shape[-1] != total_length:
        raise ValueError(
            f"segment_ids must be [*B, total_length] = [..., {total_length}], those of "
            f"the whole sequence, got shape {whole.shape}; were they already split?"
        )
    return jnp.take(whole, tokens, axis=-1, mode="clip")


def context_parallel_order(
    total_length: int, size: int, scheme: Scheme = "contiguous"
) -> np.ndarray:
    """The order in which tokens are laid out so that each rank gets its own.

    Arrays whose token axis is taken in this order, on the host, and then split in
    `size` equal parts over the mesh axis, lie as `context_parallel_positions` says.

    Args:
      total_length: tokens of the whole sequence.
      size: ranks that share it.
      scheme: as there.

    Returns:
      int32 [total_length], on the host.

    Raises:
      TypeError: if a size is no int.
      ValueError: if the length does not split.

    >>> context_parallel_order(8, 2, "zigzag").tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    _check_split(total_length, size, scheme)
    if scheme == "contiguous":
        return np.arange(total_length, dtype=np.int32)
    runs = np.arange(total_length, dtype=np.int32).reshape(2 * size, -1)
    ranks = np.arange(size)
    return np.stack([runs[ranks], runs[2 * size - 1 - ranks]], axis=1).reshape(-1)


def _check_split(total_length: int, size: int, scheme: str) -> None:
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme must be one of {get_args(Scheme)}, got {scheme!r}")
    check_int("size", size, minimum=1, maximum=LONGEST // 2)
    check_length("total_length", total_length, minimum=0)
    runs = size if scheme == "contiguous" else 2 * size
    if total_length % runs:
        raise ValueError(
            f"total_length must be a multiple of {runs} for scheme={scheme!r} over "
            f"{size} ranks, got {total_length}; pad the sequence, with segment id 0"
        )


def _tokens_of(rank: Array, total_length: int, size: int, scheme: str) -> Array:
    """Which tokens of the sequence the rank holds, in the order in which it does."""
    if scheme == "contiguous":
        run = total_length // size
        return rank * jnp.int32(run) + jnp.arange(run, dtype=jnp.int32)
    run = total_length // (2 * size)
    inside = jnp.arange(run, dtype=jnp.int32)
    first = rank * jnp.int32(run) + inside
    second = (jnp.int32(2 * size - 1) - rank) * jnp.int32(run) + inside
    return jnp.concatenate([first, second])
