"""Random rotations of random heads, against complex products in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fuzzing import ROWS, program_cases, seeds
from hypothesis import strategies as st
from test_fuzz_rows import AMPLITUDE, config_of, exact_rows, read

from jrope import (
    RopeConfig,
    RotaryLayout,
    apply_rope,
    compute_cos_sin_cache,
    rerope,
    rotate,
)
from jrope._routes import routes_for

pytestmark = pytest.mark.fuzz

ROUTES = [None, *(route.name for route in routes_for(jax.default_backend()))]
SIZES = ((2, 2, 0), (6, 4, 1), (7, 2, 5), (16, 16, 0), (24, 8, 8), (80, 32, 0))
LONG = ((64, 64, 0), (128, 128, 0), (192, 64, 128))
# Of magnitudes: a rotation neither overflows nor becomes subnormal.
LARGEST = {"float16": 3, "bfloat16": 20, "float32": 20, "float64": 100}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled.

    Args:
      size: head_dim, rotary_dim, rotary_offset.
      leading: batch axes and tokens of the heads.
      shared: which of them the rows share.
      heads: of query and key; a key of 0 heads is None.
      dtypes: of query and key.
      held: how the heads reach the rotation.
    """

    size: tuple[int, int, int]
    is_neox_style: bool
    leading: tuple[int, ...]
    shared: int
    heads: tuple[int, int]
    dtypes: tuple[str, str]
    held: str
    is_flat: bool
    implementation: str | None

    @property
    def layout(self) -> RotaryLayout:
        head_dim, rotary_dim, offset = self.size
        return RotaryLayout(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rotary_offset=offset,
            is_neox_style=self.is_neox_style,
        )

    @property
    def style(self) -> dict[str, Any]:
        return {"is_neox_style": self.is_neox_style, "offset": self.size[2]}

    @property
    def row_leading(self) -> tuple[int, ...]:
        """Axes of the rows: of length 1 where a bit of `shared` says so."""
        axes = enumerate(self.leading)
        return tuple(1 if self.shared >> k & 1 else axis for k, axis in axes)

    @property
    def is_wide(self) -> bool:
        return "float64" in self.dtypes

    def operands(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Heads of all magnitudes, a few of them zero."""
        made = []
        for heads, dtype in zip(self.heads, self.dtypes, strict=True):
            shape = (*self.leading, heads, self.size[0])
            most = LARGEST[dtype]
            scale = 10.0 ** rng.uniform(-most, most, (*self.leading, heads, 1))
            x = rng.standard_normal(shape).clip(-4, 4) * scale
            made.append(
                np.where(rng.random(shape) < 0.02, 0, x).astype(jnp.dtype(dtype))
            )
        return made

    def run(self, rotation: Any) -> Any:
        """`rotation(query, key, *rows)`, the heads reaching it as `held` says."""

        def turned(query: Any, key: Any, *rows: Any) -> list[Any]:
            given = [query, key if self.heads[1] else None]
            if self.held == "moved inside":
                given = [None if x is None else jnp.moveaxis(x, 0, -1) for x in given]
            if self.is_flat:
                given = [None if x is None else flat(x) for x in given]
            return [out for out in rotation(*given, *rows) if out is not None]

        def call(query: np.ndarray, key: np.ndarray, *rows: Any) -> list[np.ndarray]:
            heads: list[Any] = [query, key]
            if self.held.startswith("moved"):
                heads = [jnp.asarray(np.moveaxis(x, -1, 0)) for x in heads]
            if self.held == "moved before":
                heads = [jnp.moveaxis(x, 0, -1) for x in heads]
            made = compiled(*map(jnp.asarray, heads), *rows)
            whole = [(*self.leading, n, self.size[0]) for n in self.heads]
            return [np.asarray(x).reshape(s) for x, s in zip(made, whole, strict=False)]

        compiled = turned if self.held == "eager" else jax.jit(turned)
        return call


def flat(x: Any) -> Any:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def programs(dtypes: list[str]) -> st.SearchStrategy[Program]:
    dtype = st.sampled_from(dtypes)
    return st.builds(
        Program,
        size=st.sampled_from(SIZES + LONG),
        is_neox_style=st.booleans(),
        leading=st.sampled_from([(3,), (1,), (2, 3), (1, 4), (2, 1, 3), (0,), (2, 0)]),
        shared=st.sampled_from([0, 0, 1, 2, 3, 5]),
        heads=st.sampled_from([(1, 1), (4, 1), (3, 2), (2, 0)]),
        dtypes=st.tuples(dtype, dtype) | dtype.map(lambda one: (one, one)),
        held=st.sampled_from(["plain", "eager", "moved before", "moved inside"]),
        is_flat=st.booleans(),
        implementation=st.sampled_from(ROUTES),
    ).filter(is_told_apart)


def is_told_apart(program: Program) -> bool:
    """One flattened head and shared rows are refused: tests/test_odd_uses.py."""
    shares = program.row_leading != program.leading
    return not (program.is_flat and shares and 1 in program.heads)


def both(size: np.ndarray, cos: Any, sin: Any, **style: Any) -> np.ndarray:
    """|x1 c| + |x2 s| and |x2 c| + |x1 s|."""
    turned = [
        oracle.rotate(np.abs(size), np.abs(cos), sign * np.abs(sin), **style)
        for sign in (1, -1)
    ]
    return np.maximum(*turned)


def check(
    program: Program, xs: list, outs: list, cos: Any, sin: Any, rows_error: float
) -> None:
    """Every feature within the bound of one rotation by rows that err themselves."""
    for x, out in zip(xs, outs, strict=False):
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        wide = np.asarray(x).astype(np.float64)
        unit = 2.0**-53 if out.dtype == np.float64 else oracle.F32_EPS
        exact = oracle.rotate(wide, cos, sin, **program.style)
        ones = np.where(np.isnan(cos), np.nan, AMPLITUDE)
        limit = 2 * unit * both(wide, cos, sin, **program.style)
        limit += rows_error * both(wide, ones, ones, **program.style)
        turns = rotated(program)
        limit += oracle.half_ulp(np.abs(exact) + limit, out.dtype)
        limit = np.where(turns, limit, 0)
        known = ~np.isnan(exact)
        np.testing.assert_array_equal(np.isnan(out.astype(np.float64)), ~known)
        error = np.abs(out.astype(np.float64) - exact)
        assert (error[known] <= limit[known]).all(), np.nanmax(error - limit)


def rotated(program: Program) -> np.ndarray:
    head_dim, rotary_dim, offset = program.size
    feature = np.arange(head_dim)
    return (feature >= offset) & (feature < offset + rotary_dim)


@program_cases(
    programs(["float32", "bfloat16", "float16", "float64"]), st.booleans(), seeds
)
def test_rotations_by_any_rows(program, inverse, seed):
    rng = np.random.default_rng(seed)

    def rotation(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        return rotate(
            query,
            key,
            cos,
            sin,
            layout=program.layout,
            inverse=inverse,
            implementation=program.implementation,
        )

    with jax.enable_x64(program.is_wide):
        call = program.run(rotation)
        for _ in range(ROWS):
            xs = program.operands(rng)
            angles = rng.uniform(0, 50, (*program.row_leading, program.size[1] // 2))
            rows = [np.float32(AMPLITUDE * f(angles)) for f in (np.cos, np.sin)]
            cos, sin = (np.asarray(row, np.float64) for row in rows)
            if inverse:
                energy = cos**2 + sin**2
                cos, sin = cos / energy, -sin / energy
            # The rows of an inverse are quotients of sums of squares.
            unit = 2.0**-53 if program.is_wide else oracle.F32_EPS
            error = 4 * unit if inverse else 2.0**-53
            check(program, xs, call(*xs, *map(jnp.asarray, rows)), cos, sin, error)


def config_for(program: Program, rows: int, axes: int) -> RopeConfig:
    head_dim, rotary_dim, offset = program.size
    half = rotary_dim // 2
    own = tuple(k % axes for k in range(half)) if axes else None
    return config_of(
        rows,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rotary_offset=offset,
        is_neox_style=program.is_neox_style,
        axis_of_frequency=own,
    )


def some_positions(rng: np.random.Generator, rows: int, shape: tuple) -> np.ndarray:
    special = [-(2**31), -1, 0, rows - 1, rows, 2**31 - 1]
    inside = rng.integers(0, rows, shape)
    chosen = np.where(rng.random(shape) < 0.25, rng.choice(special, shape), inside)
    return chosen.astype(np.int32)


@program_cases(
    programs(["float32", "bfloat16", "float16"]),
    st.sampled_from([2, 300, 4096]),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["nan", "clip"]),
    seeds,
)
def test_rotations_by_positions(program, rows, axes, policy, seed):
    rng = np.random.default_rng(seed)
    config = config_for(program, rows, axes)
    axes = config.layout.position_axes or 0
    table = jnp.asarray(compute_cos_sin_cache(config))

    def rotation(query: Any, key: Any, positions: Any, table: Any) -> Any:
        return apply_rope(
            positions,
            query,
            key,
            table,
            layout=config.layout,
            out_of_range=policy,
            implementation=program.implementation,
        )

    call = program.run(rotation)
    half = config.layout.rotary_dim // 2
    for _ in range(ROWS):
        xs = program.operands(rng)
        lead = program.row_leading
        positions = some_positions(rng, rows, (axes, *lead) if axes else lead)
        exact = exact_rows(config, read(positions, rows, policy))
        outs = call(*xs, jnp.asarray(positions), table)
        # The table's own rounding, of values of up to AMPLITUDE.
        cos, sin = exact[..., :half], exact[..., half:]
        check(program, xs, outs, cos, sin, oracle.F32_EPS)


@program_cases(
    programs(["float32", "bfloat16", "float16"]), st.sampled_from([2, 300, 4096]), seeds
)
def test_moves_of_rotated_keys(program, rows, seed):
    rng = np.random.default_rng(seed)
    config = config_for(program, rows, 0)
    table = jnp.asarray(compute_cos_sin_cache(config))

    def rotation(query: Any, key: Any, shifts: Any, table: Any) -> Any:
        return [
            None
            if x is None
            else rerope(
                x,
                shifts,
                table,
                layout=config.layout,
                implementation=program.implementation,
            )
            for x in (query, key)
        ]

    call = program.run(rotation)
    half = config.layout.rotary_dim // 2
    for _ in range(ROWS):
        xs = program.operands(rng)
        shifts = some_positions(rng, rows, program.row_leading)
        shifts = np.where(rng.random(shifts.shape) < 0.5, -(shifts + 1), shifts)
        distance = read(np.abs(np.asarray(shifts, np.int64)), rows, "nan")
        exact = exact_rows(config, distance) / AMPLITUDE
        cos, sin = exact[..., :half], np.sign(shifts)[..., None] * exact[..., half:]
        outs = call(*xs, jnp.asarray(shifts), table)
        # The table's rounding and that of its division by its own amplitude.
        check(program, xs, outs, cos, sin, 5 * oracle.F32_EPS)
