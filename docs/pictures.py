"""Draws the documentation's pictures: `python docs/pictures.py`."""

from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache

matplotlib.use("svg")
# After the backend is chosen.
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Circle  # noqa: E402

PICTURES = Path(__file__).parent / "pages" / "pictures"
POSITIONS = 13


def main() -> None:
    """Draws every picture."""
    plt.rcParams.update(
        {"svg.hashsalt": "jrope", "font.size": 9, "svg.fonttype": "path"}
    )
    figure = plt.figure(figsize=(9, 3.1), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(2, 1.1))
    draw_turns(figure.add_subfigure(grid[0]))
    draw_scores(figure.add_subfigure(grid[1]))
    figure.savefig(PICTURES / "rotation.svg", metadata={"Date": None})


def draw_turns(figure) -> None:
    """One query at growing positions: each pair of features turns at its own pace."""
    config = RopeConfig(head_dim=8, rope_theta=100.0, max_position_embeddings=POSITIONS)
    query = jnp.tile(jnp.asarray([1.0] * 4 + [0.0] * 4), (POSITIONS, 1, 1))
    turned, _ = rotated(config, query, query)
    figure.suptitle(
        "one query at positions 0 (dark) to 12 (light): each pair has its own speed"
    )
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, POSITIONS))
    for pair, axes in enumerate(figure.subplots(1, 4)):
        axes.add_patch(Circle((0, 0), 1, fill=False, color="0.8"))
        for position, color in enumerate(colors):
            tip = turned[position, 0, pair], turned[position, 0, pair + 4]
            axes.annotate(
                "", tip, (0, 0), arrowprops={"arrowstyle": "->", "color": color}
            )
        axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
        axes.set_title(f"features {pair} and {pair + 4}\n{speed(config, pair)}")
        axes.axis("off")


def draw_scores(figure) -> None:
    """Query and key at all pairs of positions: the score knows the distance alone."""
    config = RopeConfig(head_dim=32, rope_theta=100.0, max_position_embeddings=48)
    rng = np.random.default_rng(1)
    same = jnp.asarray(np.tile(rng.standard_normal(32), (48, 1, 1)), jnp.float32)
    query, key = rotated(config, same, same)
    axes = figure.subplots()
    scores = np.asarray(query[:, 0] @ key[:, 0].T)
    axes.imshow(scores, cmap="viridis", origin="lower", interpolation="nearest")
    axes.set(xlabel="key's position", ylabel="query's position")
    axes.set_title("their score knows\nthe distance alone")


def rotated(config: RopeConfig, query, key):
    """The rows' own positions, applied."""
    table = jnp.asarray(compute_cos_sin_cache(config))
    positions = jnp.arange(config.max_position_embeddings)
    return apply_rope(positions, query, key, table, layout=config.layout)


def speed(config: RopeConfig, pair: int) -> str:
    """A pair's angle a position, for its title."""
    return f"{np.degrees(config.frequencies.inv_freq[pair]):.1f}° a position"


if __name__ == "__main__":
    main()
