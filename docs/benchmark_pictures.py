"""Pictures for the page of benchmarks, drawn from the files in benchmarks/results."""

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from notebooks.drawing import COLORS, use_style

Rows = Iterable[Mapping[str, Any]]


def rotation(cells: Rows) -> Figure:
    """Every peer's time over jrope's: a dot for each dtype, pairing and length."""
    cells = list(cells)
    # The nearest at the top.
    peers = sorted(
        {name for cell in cells for name in cell["peers"]},
        key=lambda name: (
            -min(cell["peers"][name] for cell in cells if name in cell["peers"])
        ),
    )
    figure, panels = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(8.5, 4))
    titles = {"call": "one call", "loop": "a step in a loop of one program"}
    for panel, (mode, title) in zip(panels, titles.items(), strict=True):
        panel.axvline(1, color="black", linewidth=1)
        panel.set(title=title, xscale="log", xlabel="time over jrope's")
        panel.set_xticks((0.5, 1, 2, 5, 10, 20), ("0.5", "1", "2", "5", "10", "20"))
        panel.minorticks_off()
        panel.set_xlim(0.45, 50)
        _dots(panel, [cell for cell in cells if cell["mode"] == mode], peers)
    panels[0].set_yticks(range(len(peers)), peers)
    _legend(panels[1])
    return figure


def _legend(panel: Axes) -> None:
    """One row above all panels, where it covers nothing."""
    handles, labels = panel.get_legend_handles_labels()
    panel.figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def _dots(panel: Axes, cells: Rows, peers: list[str]) -> None:
    for i, (version, mine) in enumerate(_by_version(cells).items()):
        points = [
            (ratio, peers.index(name) + (0.15 if i else -0.15))
            for cell in mine
            for name, ratio in cell["peers"].items()
        ]
        panel.scatter(
            *zip(*points, strict=True), s=14, alpha=0.7, color=COLORS[i], label=version
        )


def compilations(cells: Rows) -> Figure:
    """Programs compiled while a context grows through its lengths."""
    cells = list(cells)
    most = max(cell["lengths"] for cell in cells)
    versions = _by_version(cell for cell in cells if cell["lengths"] == most)
    figure, panel = plt.subplots(figsize=(7, 2.8))
    cases = list(
        dict.fromkeys(cell["case"] for mine in versions.values() for cell in mine)
    )
    cases.reverse()
    for i, (version, mine) in enumerate(versions.items()):
        places = [cases.index(cell["case"]) + (0.2 if i else -0.2) for cell in mine]
        counts = [cell["compiles"] for cell in mine]
        bars = panel.barh(places, counts, 0.38, color=COLORS[i], label=version)
        panel.bar_label(bars, padding=3)
    panel.set_yticks(range(len(cases)), cases)
    panel.set(xscale="log", xlabel=f"programs compiled over {most:,} context lengths")
    _legend(panel)
    return figure


def decode_step(cells: Rows) -> Figure:
    """What share of a step the host's positions and the rotation take."""
    mine = [cell for cell in cells if cell["rotate_share"] is not None]
    names = [
        f"requests: {cell['requests']}, {cell['positions']}, JAX {cell['jax']}"
        for cell in mine
    ][::-1]
    figure, panel = plt.subplots(figsize=(8, 4))
    shares = {"rotate_share": "rotation", "host_share": "positions, host to device"}
    for i, (key, label) in enumerate(shares.items()):
        values = [100 * cell[key] for cell in mine][::-1]
        places = [place + (0.2 if i else -0.2) for place in range(len(names))]
        panel.barh(places, values, 0.38, color=COLORS[i], label=label)
    panel.set_yticks(range(len(names)), names)
    panel.set(xlabel="% of a step of twelve attention layers")
    _legend(panel)
    return figure


# By the name of the file with results; benchmark_page.py says what each shows.
PICTURES: dict[str, Callable[[Rows], Figure]] = {
    "rope": rotation,
    "recompile": compilations,
    "decode_step": decode_step,
}


def draw(name: str, results: Mapping[str, Any]) -> str:
    """The picture of a file with results, as SVG."""
    use_style()
    figure = PICTURES[name](results["cells"])
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    plt.close(figure)
    return picture.getvalue()


def _by_version(cells: Rows) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault(f"JAX {cell['jax']}", []).append(cell)
    return found
