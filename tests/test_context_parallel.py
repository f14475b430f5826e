"""Positions under context parallelism: every rank's, in the graph, for packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache
from jrope.context_parallel import context_parallel_order, context_parallel_positions
from jrope.positions_jax import positions_from_cu_seqlens, positions_from_segment_ids

SCHEMES = ["contiguous", "zigzag"]
TOTAL = 48


def tokens_of(rank, size, scheme):
    """Which tokens a rank holds, by hand."""
    if scheme == "contiguous":
        run = TOTAL // size
        return list(range(rank * run, (rank + 1) * run))
    run = TOTAL // (2 * size)
    far = 2 * size - 1 - rank
    return [*range(rank * run, (rank + 1) * run), *range(far * run, (far + 1) * run)]


def documents(rng, rows=3):
    """Packed rows with padding at the end: ids, cu_seqlens and positions, by loop."""
    ids, ends, wanted = [], [], []
    for _ in range(rows):
        lengths = rng.integers(1, 15, 4)
        ends.append([0, *np.cumsum(lengths).clip(max=TOTAL).tolist()])
        row_ids, row_positions = [0] * TOTAL, [-1] * TOTAL
        for document, (start, end) in enumerate(
            zip(ends[-1][:-1], ends[-1][1:], strict=True)
        ):
            for token in range(start, end):
                row_ids[token] = document + 1
                row_positions[token] = token - start
        ids.append(row_ids)
        wanted.append(row_positions)
    return np.array(ids, np.int32), np.array(ends, np.int32), np.array(wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_holds_its_tokens(scheme, size):
    traced = jax.jit(
        lambda rank: context_parallel_positions(TOTAL, rank, size, scheme=scheme)
    )
    order = context_parallel_order(TOTAL, size, scheme)
    assert sorted(order) == list(range(TOTAL))
    for rank, part in enumerate(np.split(order, size)):
        wanted = tokens_of(rank, size, scheme)
        assert traced(jnp.int32(rank)).tolist() == wanted == part.tolist()
        static = context_parallel_positions(TOTAL, rank, size, scheme=scheme)
        assert static.tolist() == wanted


# NVIDIA/Megatron-LM#5243
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_documents_restart_at_zero(scheme):
    rng = np.random.default_rng(0)
    for size in (1, 2, 4):
        ids, ends, wanted = documents(rng)
        np.testing.assert_array_equal(positions_from_segment_ids(ids), wanted)
        np.testing.assert_array_equal(
            positions_from_cu_seqlens(ends, size=TOTAL), wanted
        )
        for rank in range(size):
            mine = wanted[:, tokens_of(rank, size, scheme)]
            for packed in ({"segment_ids": ids}, {"cu_seqlens": ends}):
                made = context_parallel_positions(TOTAL, rank, size, scheme, **packed)
                np.testing.assert_array_equal(made, mine)
            one = context_parallel_positions(
                TOTAL, rank, size, scheme, cu_seqlens=ends[0]
            )
            np.testing.assert_array_equal(one, mine[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rotation_split_over_a_mesh_axis(scheme, check_vma):
    """Sharded by context, rotated in place, and put back: the bits of the whole."""
    config = RopeConfig(head_dim=32, rope_theta=1e4, max_position_embeddings=TOTAL)
    table = jnp.asarray(compute_cos_sin_cache(config))
    rng = np.random.default_rng(1)
    ids, _, wanted = documents(rng, rows=2)
    query = jnp.asarray(rng.standard_normal((2, TOTAL, 4, 32)), jnp.float32)
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)

    def local(query, ids, table):
        positions = context_parallel_positions(
            TOTAL,
            lax.axis_index("context"),
            lax.axis_size("context"),
            scheme=scheme,
            segment_ids=ids,
        )
        return apply_rope(positions, query, None, table, layout=config.layout)[0]

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data", "context"), P("data"), P()),
            out_specs=P("data", "context"),
            check_vma=check_vma,
        )
    )
    order = context_parallel_order(TOTAL, 4, scheme)
    out = np.empty(query.shape, np.float32)
    out[:, order] = step(query[:, order], ids, table)
    whole, _ = apply_rope(
        wanted.astype(np.int32), query, None, table, layout=config.layout
    )
    np.testing.assert_array_equal(out, whole)
    text = step.lower(query, ids, table).compile().as_text()
    assert text and not [name for name in COLLECTIVES if name in text]


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


@pytest.mark.parametrize(
    ("args", "packed", "error", "message"),
    [
        ((9, 0, 2), {}, ValueError, "multiple of 2 for scheme='contiguous'.* got 9"),
        ((10, 0, 2, "zigzag"), {}, ValueError, "multiple of 4 .* got 10; pad"),
        ((8, 0, 0), {}, ValueError, "size must be at least 1, got 0"),
        ((8, 0, -2), {}, ValueError, "size must be at least 1, got -2"),
        ((8, 0, 2.0), {}, TypeError, "size must be an int, got 2.0"),
        ((8, 0, True), {}, TypeError, "size must be an int, got True"),
        ((0, 0, 2**40), {}, ValueError, "size must be at most"),
        ((8.0, 0, 2), {}, TypeError, "total_length must be an int, got 8.0"),
        ((-8, 0, 2), {}, ValueError, "total_length must be at least 0, got -8"),
        ((2**31, 0, 2), {}, ValueError, "total_length must fit int32 positions"),
        ((2**33, 2**19, 2**20), {}, ValueError, "total_length must fit int32 positi"),
        ((8, 0, 2, "ring"), {}, ValueError, "scheme must be one of .* got 'ring'"),
        ((8, [0], 2), {}, ValueError, r"rank must be a scalar, got shape \(1,\)"),
        ((8, 0.5, 2), {}, TypeError, "rank must be integers, got float"),
        ((8, 2, 2), {}, ValueError, "rank must be from 0 to 1, got 2"),
        ((8, np.int32(-1), 2), {}, ValueError, "rank must be from 0 to 1, got -1"),
        (
            (8, 0, 2),
            {"segment_ids": [1] * 4},
            ValueError,
            r"of the whole sequence, got shape \(4,\); were they already split",
        ),
        (
            (8, 0, 2),
            {"segment_ids": [1] * 8, "cu_seqlens": [0, 8]},
            ValueError,
            "give one of them, got both",
        ),
        ((8, 0, 2), {"cu_seqlens": 8}, ValueError, r"documents \+ 1\], got shape \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(args, packed, error, message):
    with pytest.raises(error, match=message):
        context_parallel_positions(*args, **packed)
    if not packed and "rank" not in message:
        total, _, size, *scheme = args
        with pytest.raises(error, match=message):
            context_parallel_order(total, size, *scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_longest_sequence_keeps_its_last_position(scheme):
    size, total = 2**28, 2**31 - 2**30
    for rank in (size - 1, 0):
        made = context_parallel_positions(total, rank, size, scheme)
        assert made.min() >= 0
    last = size - 1 if scheme == "contiguous" else 0
    made = context_parallel_positions(total, last, size, scheme)
    assert made.max() == total - 1
