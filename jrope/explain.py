"""What a config.json means for its rotary embedding: numbers, warnings, a picture.

`python -m jrope explain CONFIG.json [--layer-type T] [--plot out.svg] [--json]`.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrope._config import RopeConfig
from jrope._hf import config_from_hf, read
from jrope._hf_layers import (
    counts_layers,
    layers_from_hf,
    query_temperatures_from_hf,
)
from jrope._hf_mrope import axis_names
from jrope._tables import FINE_ROWS
from jrope.scalings._base import geometric_inv_freq

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one RopeConfig means; every field is plain data.

    Args:
      layers: which layers it is for, for people.
      rope_type: the scaling's name.
      scaling: the scaling's fields that are set.
      head_dim: H.
      rotary_dim: R.
      rotary_offset: index of the first rotated feature.
      pairing: for people.
      rope_theta: the base.
      rows: P, rows of the table.
      trained_length: context length of pre-training, in positions, where it is known.
      wavelengths: positions per turn of each pair; inf for pairs that do not turn.
      divided_by: how much slower each pair turns than without scaling.
      attention_factor: multiplies cos and sin.
      softmax_scale_factor: multiplies the attention's softmax scale.
      position_axes: axes of multimodal positions, None for one-dimensional ones.
      axis_of_frequency: the axis that drives each pair, None likewise.
      axis_names: what each axis is (t, h, w), None where that is not known.
      flat_table_bytes: memory of the flat table.
      two_level_table_bytes: memory of the two-level one.
      warnings: what experience asks to look at.

    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=4096)
    >>> explain(config).warnings
    []
    """

    layers: str
    rope_type: str
    scaling: dict[str, Any]
    head_dim: int
    rotary_dim: int
    rotary_offset: int
    pairing: str
    rope_theta: float
    rows: int
    trained_length: int | None
    wavelengths: list[float]
    divided_by: list[float]
    attention_factor: float
    softmax_scale_factor: float
    position_axes: int | None
    axis_of_frequency: list[int] | None
    axis_names: list[str] | None
    flat_table_bytes: int
    two_level_table_bytes: int
    warnings: list[str]


def explain(
    config: RopeConfig,
    *,
    layers: str = "all layers",
    names: Sequence[str] | None = None,
) -> Explanation:
    """What a config means.

    Args:
      config: of some layers of a model.
      layers: which, for people.
      names: of the axes of its positions, where they are known.

    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=4096)
    >>> [round(length) for length in explain(config).wavelengths]
    [6, 628]
    """
    made = config.frequencies
    inv_freq = made.inv_freq.astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        wavelengths = 2 * np.pi / inv_freq
        # No config of its own: that would refuse a base which only its scaling mends.
        plain = geometric_inv_freq(config.rope_theta, config.layout.rotary_dim)
        divided_by = plain.astype(np.float64) / inv_freq
    axes = config.axis_of_frequency
    rows, width = config.max_position_embeddings, config.layout.rotary_dim
    two_level_rows = -(-rows // FINE_ROWS) + FINE_ROWS
    return Explanation(
        layers=layers,
        rope_type=config.scaling.rope_type,
        scaling=_set_fields(config),
        head_dim=config.head_dim,
        rotary_dim=width,
        rotary_offset=config.rotary_offset,
        pairing="(i, i + R/2)" if config.is_neox_style else "(2i, 2i + 1)",
        rope_theta=config.rope_theta,
        rows=rows,
        trained_length=config.scaling.trained_length(rows),
        wavelengths=wavelengths.tolist(),
        divided_by=divided_by.tolist(),
        attention_factor=float(made.attention_factor),
        softmax_scale_factor=float(made.softmax_scale_factor),
        position_axes=config.layout.position_axes,
        axis_of_frequency=None if axes is None else list(axes),
        axis_names=None if names is None else list(names),
        flat_table_bytes=rows * width * _FLOAT32,
        two_level_table_bytes=two_level_rows * width * _FLOAT32,
        warnings=config.scaling.warnings(rows),
    )


def explain_hf(
    hf_config: object,
    *,
    layer_type: str | None = None,
    max_position_embeddings: int | None = None,
    is_neox_style: bool | None = None,
) -> list[Explanation]:
    """What a config.json means, for each of its distinct rotary embeddings.

    Scalings that depend on the length of a request are explained for the shortest and
    for the longest.

    Args:
      hf_config: as `config_from_hf` takes it.
      layer_type: these layers alone.
      max_position_embeddings: rows of the table, in place of the config's own length.
      is_neox_style: the pairing, in place of the model type's.

    Returns:
      One explanation a distinct config; none if no layer has rotary embedding.

    Raises:
      ValueError, TypeError: what is refused, and why.

    >>> config = {"head_dim": 4, "rope_theta": 1e4, "max_position_embeddings": 4096}
    >>> [each.rope_type for each in explain_hf(config)]
    ['default']
    """
    given = {
        "max_position_embeddings": max_position_embeddings,
        "is_neox_style": is_neox_style,
    }
    if layer_type is not None or not counts_layers(hf_config):
        config = config_from_hf(hf_config, layer_type=layer_type, **given)
        found = {config: layer_type or "all layers"}
    else:
        per_layer = layers_from_hf(hf_config, **given)
        found = {config: _which(per_layer, config) for config in per_layer}
    keys, _ = read(hf_config, True)
    return [
        explanation
        for config, layers in found.items()
        if config is not None
        for explanation in _by_length(
            config, layers, axis_names(keys, config.layout.position_axes or 1)
        )
    ]


def _by_length(
    config: RopeConfig, layers: str, names: Sequence[str] | None
) -> list[Explanation]:
    """One explanation, or two where short and long requests differ."""
    rows = config.max_position_embeddings
    short, long = config.for_length(1), config.for_length(rows)
    if short == long or short.longest_request >= rows:
        return [explain(config, layers=layers, names=names)]
    limit = short.longest_request
    return [
        explain(kind, layers=f"{layers}; {which}", names=names)
        for kind, which in (
            (short, f"requests of up to {limit} positions"),
            (long, f"a request of {rows} positions"),
        )
    ]


def _which(per_layer: list[RopeConfig | None], config: RopeConfig | None) -> str:
    mine = [i for i, other in enumerate(per_layer) if other == config]
    if len(mine) == len(per_layer):
        return f"all {len(mine)} layers"
    shown = ", ".join(map(str, mine[:8])) + (", ..." if len(mine) > 8 else "")
    return f"{len(mine)} of {len(per_layer)} layers: {shown}"


def _set_fields(config: RopeConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config.scaling)
    return {key: value for key, value in values.items() if value is not None}


def to_text(explanation: Explanation) -> str:
    """An explanation, for people.

    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=4096)
    >>> print(to_text(explain(config)).splitlines()[1])
      type              default
    """
    e = explanation
    megabytes = [size / 2**20 for size in (e.flat_table_bytes, e.two_level_table_bytes)]
    lines = [
        f"{e.layers}",
        f"  type              {e.rope_type}{_fields_text(e.scaling)}",
        f"  head              {e.head_dim} features, {e.rotary_dim} rotate from "
        f"{e.rotary_offset} on, in pairs {e.pairing}",
        f"  base              {e.rope_theta:.10g}",
        f"  positions         {e.rows} rows"
        + (f", trained on {e.trained_length}" if e.trained_length else "")
        + _axes_text(e),
        f"  attention factor  {e.attention_factor:.6g} on cos and sin",
        f"  softmax factor    {e.softmax_scale_factor:.6g} on the softmax scale",
        f"  table             {megabytes[0]:.1f} MiB flat, {megabytes[1]:.1f} MiB in "
        f"two levels, float32",
        f"  scaling touches   {_touched(e.divided_by)}",
        f"  longer than table {_slow(e)}",
        "  pair        wavelength   divided by"
        + ("   axis" if e.axis_of_frequency else ""),
        *_pair_lines(e),
        *(f"  warning: {warning}" for warning in e.warnings),
    ]
    return "\n".join(lines)


def _fields_text(scaling: dict[str, Any]) -> str:
    shown = {
        key: f"{len(value)} numbers" if isinstance(value, tuple) else value
        for key, value in scaling.items()
    }
    return "".join(
        f"\n                      {key} = {value}" for key, value in shown.items()
    )


def _axes_text(e: Explanation) -> str:
    """How many axes there are, how many pairs each drives, and what it is."""
    axes, names = e.axis_of_frequency, e.axis_names
    if axes is None:
        return ""
    counts = [str(axes.count(axis)) for axis in range(max(axes) + 1)]
    if names is not None:
        counts = [f"{n} ({name})" for n, name in zip(counts, names, strict=True)]
    return f", {len(counts)} axes of {', '.join(counts)} pairs"


def _touched(divided_by: list[float]) -> str:
    touched = [i for i, d in enumerate(divided_by) if abs(d - 1) > 1e-9]
    if not touched:
        return "no pair"
    return f"{len(touched)} of {len(divided_by)} pairs, {touched[0]} to {touched[-1]}"


def _slow(e: Explanation) -> str:
    """Wavelengths longer than the table."""
    slow = sum(length > e.rows for length in e.wavelengths)
    return f"{slow} of {len(e.wavelengths)} wavelengths"


def _pair_lines(e: Explanation) -> list[str]:
    """About ten pairs, evenly spread, the first and the last among them."""
    shown = np.unique(np.linspace(0, len(e.wavelengths) - 1, 10).round().astype(int))
    axes: Sequence[object] | None = e.axis_of_frequency
    if e.axis_of_frequency is not None and e.axis_names is not None:
        axes = [e.axis_names[axis] for axis in e.axis_of_frequency]
    return [
        f"  {i:4d}   {e.wavelengths[i]:16.1f}   {e.divided_by[i]:10.4g}"
        + (f"   {axes[i]!s:>4}" if axes else "")
        for i in shown
    ]


def plot(explanations: list[Explanation], path: Path) -> None:
    """Draws wavelengths before and after scaling.

    Args:
      explanations: each becomes a panel.
      path: the picture; its ending says the format.

    Raises:
      ModuleNotFoundError: if matplotlib is not installed (the extra `bench`).

    >>> import tempfile
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=4096)
    >>> path = Path(tempfile.mkdtemp()) / "wavelengths.svg"
    >>> plot([explain(config)], path)
    >>> path.stat().st_size > 0
    True
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(explanations), 3.6), layout="constrained")
    panels = figure.subplots(1, len(explanations), squeeze=False)[0]
    for axes, e in zip(panels, explanations, strict=True):
        after = np.array(e.wavelengths)
        if _touched(e.divided_by) != "no pair":
            before = after / np.array(e.divided_by)
            axes.semilogy(before, "--", label="without scaling")
        axes.semilogy(after, label=e.rope_type)
        axes.axhline(e.rows, color="0.5", lw=0.8)
        axes.text(0, e.rows, f" table: {e.rows}", va="bottom", color="0.4")
        if e.trained_length and e.trained_length != e.rows:
            axes.axhline(e.trained_length, color="0.5", lw=0.8, ls=":")
            text = f" trained: {e.trained_length}"
            axes.text(0, e.trained_length, text, va="bottom", color="0.4")
        axes.set(title=e.layers, xlabel="pair", ylabel="wavelength (positions)")
        axes.legend(loc="lower right")
    figure.savefig(path)


def to_json(explanations: list[Explanation], temperatures: list[Any]) -> str:
    """Explanations as one JSON object; wavelengths without end are null.

    Args:
      explanations: of a model's distinct configs.
      temperatures: fields of each layer's query temperature, or None.

    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=4096)
    >>> json.loads(to_json([explain(config)], []))["rope"][0]["rows"]
    4096
    """
    plain = [dataclasses.asdict(explanation) for explanation in explanations]
    for entry in plain:
        for key in ("wavelengths", "divided_by"):
            entry[key] = [v if np.isfinite(v) else None for v in entry[key]]
    return json.dumps({"rope": plain, "query_temperatures": temperatures})


def run(
    path: Path, *, picture: Path | None = None, as_json: bool = False, **given: Any
) -> str:
    """The command: what to print.

    Args:
      path: the config.json.
      picture: where to draw.
      as_json: for programs.
      **given: what `explain_hf` takes besides.

    Raises:
      ValueError, TypeError: what is refused, and why.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "config.json"
    >>> keys = {"head_dim": 4, "rope_theta": 1e4, "max_position_embeddings": 4096}
    >>> _ = path.write_text(json.dumps(keys))
    >>> run(path).splitlines()[0]
    'all layers'
    """
    explanations = explain_hf(path, **given)
    if picture is not None and explanations:
        plot(explanations, picture)
    if as_json:
        return to_json(explanations, _temperatures(path))
    if not explanations:
        return "these layers have no rotary embedding"
    return "\n\n".join(to_text(explanation) for explanation in explanations)


def _temperatures(path: Path) -> list[dict[str, Any] | None]:
    if not counts_layers(path):
        return []
    found = query_temperatures_from_hf(path)
    return [None if t is None else dataclasses.asdict(t) for t in found]
