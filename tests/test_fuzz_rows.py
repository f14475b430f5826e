"""Random positions into tables: lookup against cos and sin in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fuzzing import ROWS, WAYS, cases, program_cases, refused, seeds, ways
from hypothesis import strategies as st

from jrope import (
    RopeConfig,
    TwoLevelTable,
    compute_cos_sin_cache,
    lookup,
    stack_tables,
)
from jrope.scalings import Yarn

pytestmark = pytest.mark.fuzz

LARGEST = 2**31 - 1
AMPLITUDE = 1.25


YARN = Yarn(factor=4.0, original_max_position_embeddings=64, attention_factor=AMPLITUDE)


def config_of(rows: int, **fields: Any) -> RopeConfig:
    common = {"head_dim": 8, "rope_theta": 1e4, "scaling": YARN}
    return RopeConfig(max_position_embeddings=rows, **{**common, **fields})


def exact_rows(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """[*B, T, R] of positions in the table, by formulas that are not jrope's."""
    facts = {
        "head_dim": config.layout.rotary_dim,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_scaling": dataclasses.asdict(config.scaling),
    }
    inv_freq, amplitude = oracle.frequencies("yarn", facts)
    own = np.asarray(positions, np.float64)[..., None]
    if config.axis_of_frequency is not None:
        own = np.moveaxis(own[..., 0][list(config.axis_of_frequency)], 0, -1)
    angles = own * np.asarray(inv_freq)
    return amplitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


def read(positions: np.ndarray, rows: int, policy: str) -> np.ndarray:
    """The positions that are read instead; NaN where rows are NaN."""
    known = np.maximum(np.asarray(positions, np.float64), 0)
    return np.where(known < rows, known, rows - 1 if policy == "clip" else np.nan)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled: a table's kind and length, leading axes and a policy."""

    kind: str
    rows: int
    axes: tuple[int, ...] | None
    leading: tuple[int, ...]
    dtype: str
    policy: str

    def table(self) -> tuple[RopeConfig, Any]:
        config = config_of(self.rows, axis_of_frequency=self.axes)
        if self.kind == "two_level":
            return config, TwoLevelTable.from_config(config)
        return config, jnp.asarray(compute_cos_sin_cache(config))


programs = st.builds(
    Program,
    kind=st.sampled_from(["flat", "two_level"]),
    rows=st.sampled_from([2, 3, 1000, 1024, 1025, 5000]),
    axes=st.sampled_from([None, None, (0, 1, 2, 0), (1, 1, 0, 3)]),
    leading=st.sampled_from([(), (3,), (2, 1), (1, 0)]),
    dtype=st.sampled_from(["int32", "int32", "int16", "uint8", "float32"]),
    policy=st.sampled_from(["nan", "clip"]),
)


def positions_of(rng: np.random.Generator, program: Program, tokens: int) -> np.ndarray:
    """Rows and what lies around them, as far as the dtype goes."""
    rows = program.rows
    special = [-(2**31), -7, -1, 0, 1, rows - 1, rows, rows + 1, LARGEST - 1, LARGEST]
    axes = () if program.axes is None else (max(program.axes) + 1,)
    shape = (ROWS, *axes, *program.leading, tokens)
    inside = rng.integers(0, rows, shape)
    found = np.where(rng.random(shape) < 0.4, rng.choice(special, shape), inside)
    if program.dtype == "float32":
        between = inside + rng.choice([0.0, 0.5, 0.25, 1 - 2.0**-10], shape)
        return np.where(rng.random(shape) < 0.5, between, found).astype(np.float32)
    info = np.iinfo(program.dtype)
    return np.clip(found, info.min, info.max).astype(program.dtype)


# The row's own rounding, or those of both levels and their product; for fractions
# three more (tests/test_fractional.py).
def limit_of(program: Program) -> float:
    two = 1.25 * 2.0**-23 * 2 if program.kind == "two_level" else 2.0**-24 * AMPLITUDE
    return two + (3 * oracle.F32_EPS * AMPLITUDE if program.dtype == "float32" else 0)


@program_cases(programs, seeds)
def test_positions_on_the_device(program, seed):
    rng = np.random.default_rng(seed)
    config, table = program.table()
    positions = positions_of(rng, program, tokens=4)

    @jax.jit
    def run(table: Any, positions: jax.Array) -> jax.Array:
        rows = lookup(
            table,
            positions,
            layout=config.layout,
            out_of_range=program.policy,  # type: ignore[arg-type]
        )
        return jnp.concatenate(rows, axis=-1)

    for one in positions:
        made = np.asarray(run(table, jnp.asarray(one)), np.float64)
        right = exact_rows(config, read(one, program.rows, program.policy))
        np.testing.assert_array_equal(np.isnan(made), np.isnan(right))
        error = np.abs(made - right)
        assert np.nanmax(error, initial=0) <= limit_of(program), one
    assert run._cache_size() == 1  # type: ignore[attr-defined]


@program_cases(
    st.lists(st.sampled_from([1, 2, 30, 64, 500]), min_size=1, max_size=4),
    st.sampled_from(["nan", "clip"]),
    seeds,
)
def test_each_token_reads_its_own_of_several_tables(lengths, policy, seed):
    rng = np.random.default_rng(seed)
    configs = [config_of(n, rope_theta=10.0 ** (3 + k)) for k, n in enumerate(lengths)]
    table, ends = stack_tables(configs), np.cumsum([0, *lengths])
    # The last entry begins no table.
    offsets = np.array([*ends[:-1], ends[-1], -1, LARGEST])

    @jax.jit
    def run(table: Any, positions: jax.Array, offset: jax.Array) -> jax.Array:
        rows = lookup(
            table,
            positions,
            layout=configs[0].layout,
            row_offset=offset,
            out_of_range=policy,
        )
        return jnp.concatenate(rows, axis=-1)

    for _ in range(ROWS):
        which = rng.integers(0, len(offsets), 5)
        near = rng.choice([-(2**31), -1, 0, 1, *lengths, LARGEST], 5)
        positions = (near - rng.integers(0, 2, 5).clip(max=near + 2**31)).clip(-(2**31))
        made = run(table, jnp.asarray(positions, "int32"), jnp.int32(offsets[which]))
        for k, choice in enumerate(which):
            right = np.full(8, np.nan)
            if choice < len(lengths):
                own = read(positions[k], lengths[choice], policy)
                right = exact_rows(configs[choice], own)
            np.testing.assert_allclose(made[k], right, rtol=0, atol=2.0**-24 * 1.25)


HOST = config_of(40)
HOST_TABLE = jnp.asarray(compute_cos_sin_cache(HOST))
KINDS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "float16", "float32", "float64", "complex64", "object"),
)
numbers = st.integers(-3, 43) | st.sampled_from(
    [-(2**31), -(2**31) - 1, LARGEST, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)]
)


@pytest.mark.usefixtures("unchecked")
@cases(
    st.lists(numbers, min_size=3, max_size=3),
    st.sampled_from(KINDS),
    ways,
    st.sampled_from(["nan", "clip"]),
)
def test_positions_on_the_host(values, dtype, way, policy):
    """Integers are read or refused by name, floats only as float32, others never."""
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        values = [min(max(value, int(info.min)), int(info.max)) for value in values]
    if dtype == "object":
        way = "plain"  # References lie where they must.
    with np.errstate(over="ignore"):
        given = WAYS[way](np.asarray(values).astype(dtype))

    def run() -> np.ndarray:
        found = lookup(HOST_TABLE, given, layout=HOST.layout, out_of_range=policy)  # type: ignore[arg-type]
        return np.concatenate(found, axis=-1)

    kind = np.asarray(given).dtype
    if kind.kind not in "iu" and kind != np.float32:
        return refused(TypeError, f"positions must be integers, got {kind}", run)
    held = np.asarray(given).tolist()
    if kind.kind in "iu" and not all(-(2**31) <= value <= LARGEST for value in held):
        return refused(ValueError, "positions must fit int32", run)
    if policy == "nan" and max(held) >= 40:
        return refused(ValueError, "must be below the table's 40 rows", run)
    right = exact_rows(HOST, read(np.array(held), 40, policy))
    np.testing.assert_allclose(run(), right, rtol=0, atol=4 * oracle.F32_EPS * 1.25)
    return None
