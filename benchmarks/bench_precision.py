"""How far tables are from exact cosines, by mode and kind: `python -m ...`.

Errors of cos and sin at random positions up to each length, against 60-digit
arithmetic: the worst absolute one, and that in units of 2^-24, half the distance of
float32 values just below 1.
"""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np

from benchmarks.timing import stamp
from jrope import RopeConfig, TwoLevelTable, lookup
from jrope._tables import rows_at

LENGTHS = {"4k": 2**12, "32k": 2**15, "128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
SAMPLES = 400


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    rows = measure()
    if parser.parse_args().json:
        print(json.dumps({"stamp": dataclasses.asdict(stamp()), "rows": rows}))
        return
    print(
        "| positions up to | exact angles, flat | exact, two levels | float32 angles |"
    )
    print("|---|---|---|---|")
    for row in rows:
        errors = [row[key] for key in ("flat", "two_level", "float32")]
        cells = [f"{error:.1e} ({error * 2**24:.2g})" for error in errors]
        print(f"| {row['length']} | {' | '.join(cells)} |")


def measure() -> list[dict[str, Any]]:
    """The worst absolute error a length, by mode and kind."""
    rng = np.random.default_rng(0)
    rows = []
    for name, length in LENGTHS.items():
        config = RopeConfig(
            head_dim=128, rope_theta=1e6, max_position_embeddings=length
        )
        positions = rng.integers(length // 2, length, SAMPLES)
        exact = exact_rows(config, positions)
        single = dataclasses.replace(config, angle_dtype="float32")
        made = {
            "flat": rows_at(config, positions, 1.0),
            "two_level": two_level_rows(config, positions),
            "float32": rows_at(single, positions, 1.0),
        }
        errors = {key: float(np.abs(m - exact).max()) for key, m in made.items()}
        rows.append({"length": name, **errors})
    return rows


def exact_rows(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Cos then sin, float64, of angles in 60 digits."""
    half = config.layout.rotary_dim // 2
    with mpmath.workdps(60):
        theta = mpmath.mpf(config.rope_theta)
        freqs = [theta ** (-mpmath.mpf(i) / half) for i in range(half)]
        waves = [[mpmath.cos_sin(int(p) * f) for f in freqs] for p in positions]
    pairs = np.array(waves, np.float64)
    return np.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)


def two_level_rows(config: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Rows as a jitted step makes them."""
    array = jnp.asarray(TwoLevelTable.compute(config))
    table = TwoLevelTable.wrap(config, array)
    read = jax.jit(lambda t, p: lookup(t, p, layout=config.layout))
    return np.concatenate(read(table, positions.astype(np.int32)), axis=-1)


if __name__ == "__main__":
    main()
