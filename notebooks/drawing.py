"""How the notebooks draw: one style, and pictures that are the same at every run."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "docs" / "pages" / "pictures"

# Told apart by people who see few colours: Okabe and Ito, "Color universal design".
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, GOLD, SKY = "#CC79A7", "#E69F00", "#56B4E9"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, GOLD, SKY)


def use_style() -> None:
    """Sets sizes, colours and fonts for all that follows."""
    plt.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLORS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 11,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "image.cmap": "viridis",
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            # Ids come from this and from what they name, not from a random number.
            "svg.hashsalt": "jrope",
        }
    )


def save(figure: Figure, name: str) -> None:
    """Saves a picture for the documentation.

    Args:
      figure: what was drawn.
      name: the file's, without its ending.
    """
    path = PICTURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    path.write_text(with_numbered_clips(path.read_text()))


def with_numbered_clips(svg: str) -> str:
    """A picture whose clip paths are named in the order in which they are used.

    Matplotlib names them after their place, to the last bit, which the solver of the
    layout does not repeat from run to run; what is written has six decimals.
    """
    names = dict.fromkeys(re.findall(r"url\(#(\w+)\)", svg))
    for number, name in enumerate(names):
        svg = svg.replace(f"url(#{name})", f"url(#clip{number})")
        svg = svg.replace(f'<clipPath id="{name}">', f'<clipPath id="clip{number}">')
    return svg
