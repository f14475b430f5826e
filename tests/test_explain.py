"""`python -m jrope explain`: what people and programs read."""

import json
import re
import sys

import pytest

from jrope.__main__ import main
from jrope.scalings import SCALINGS

EXAMPLES = [
    pytest.param(config, id=f"{rope_type}:{model}")
    for rope_type, scaling in SCALINGS.items()
    for model, config in scaling.examples.items()
]


def explain(tmp_path, capsys, config, *options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    status = main(["explain", str(path), *options])
    return status, capsys.readouterr()


@pytest.mark.parametrize("config", EXAMPLES)
def test_every_example_is_explained(tmp_path, capsys, config):
    status, text = explain(tmp_path, capsys, config)
    assert (status, text.err) == (0, "")
    for word in ("attention factor", "softmax factor", "MiB flat", "wavelength"):
        assert word in text.out
    status, text = explain(tmp_path, capsys, config, "--json")
    for rope in json.loads(text.out)["rope"]:
        assert len(rope["wavelengths"]) == rope["rotary_dim"] // 2


def test_layers_that_differ_are_told_apart(tmp_path, capsys):
    gemma = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    _, text = explain(tmp_path, capsys, gemma)
    assert "5 of 6 layers: 0, 1, 2, 3, 4" in text.out
    assert "1 of 6 layers: 5" in text.out
    assert "128 of 128 pairs" in text.out
    _, text = explain(tmp_path, capsys, gemma, "--layer-type", "sliding_attention")
    assert "no pair" in text.out and "linear" not in text.out


@pytest.mark.parametrize(
    ("rope", "warning"),
    [
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "reaches 256 positions, the table has 128: .*=256",
        ),
        ({"type": "dynamic", "factor": 2.0}, "base_rule='by_length' is chosen"),
        ({"type": "linear", "factor": 2.0}, "does not say the length of pre-training"),
        (
            {"type": "yarn", "original_max_position_embeddings": 128},
            "the factor is 1, so this scaling changes no frequency: is 'factor' mis",
        ),
    ],
)
def test_warnings_of_experience(tmp_path, capsys, rope, warning):
    config = {
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 1e4,
        "rope_scaling": rope,
    }
    _, text = explain(tmp_path, capsys, config)
    assert re.search(warning, text.out, re.DOTALL)


def test_short_and_long_requests(tmp_path, capsys):
    config = {
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    }
    _, text = explain(tmp_path, capsys, config)
    short, long = text.out.split("\n\n")
    assert "requests of up to 32 positions" in short and "chosen = short" in short
    assert "a request of 128 positions" in long and "chosen = long" in long


def test_options_for_unknown_models(tmp_path, capsys):
    config = {
        "model_type": "nosuch",
        "head_dim": 8,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    }
    status, text = explain(tmp_path, capsys, config)
    assert status == 1 and "does not say the pairing" in text.err
    options = ("--pairing", "gptj", "--max-position-embeddings", "64")
    status, text = explain(tmp_path, capsys, config, *options)
    assert status == 0 and "(2i, 2i + 1)" in text.out and "64 rows" in text.out


def test_refused_configs(tmp_path, capsys):
    status, text = explain(tmp_path, capsys, {"head_dim": 8})
    assert status == 1 and "refused: config.json must have" in text.err
    (tmp_path / "config.json").write_text("{")
    assert main(["explain", str(tmp_path / "config.json")]) == 1
    assert "config.json must be JSON" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "nowhere.json")]) == 1


def test_layers_without_rope(tmp_path, capsys):
    config = {
        "head_dim": 8,
        "max_position_embeddings": 8,
        "rope_parameters": {"a": {"rope_theta": 1e4}, "b": None},
    }
    _, text = explain(tmp_path, capsys, config, "--layer-type", "b")
    assert "these layers have no rotary embedding" in text.out


def test_query_temperatures_for_programs(tmp_path, capsys):
    config = {
        "model_type": "llama4_text",
        "head_dim": 8,
        "max_position_embeddings": 8,
        "rope_theta": 5e5,
        "num_hidden_layers": 4,
    }
    _, text = explain(tmp_path, capsys, config, "--json")
    temperatures = json.loads(text.out)["query_temperatures"]
    assert temperatures == [None] * 3 + [{"scale": 0.1, "length": 8192, "shift": 1}]


def test_picture(tmp_path, capsys):
    config = SCALINGS["llama3"].examples["Llama-3.1-8B"]
    picture = tmp_path / "out.svg"
    assert explain(tmp_path, capsys, dict(config), "--plot", str(picture))[0] == 0
    assert picture.read_text().count("<svg") == 1


def test_a_picture_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    config = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64}
    status, text = explain(tmp_path, capsys, config, "--plot", "out.svg")
    assert status == 1
    assert "--plot needs matplotlib: pip install matplotlib" in text.err


def test_axes_of_a_multimodal_model(tmp_path, capsys):
    config = {
        "model_type": "qwen3_vl_text",
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    status, text = explain(tmp_path, capsys, config)
    assert status == 0
    assert "trained on 64, 3 axes of 2 (t), 1 (h), 1 (w) pairs" in text.out
    lines = [line.split() for line in text.out.splitlines()]
    first = next(i for i, line in enumerate(lines) if line[:1] == ["pair"])
    assert [line[-1] for line in lines[first + 1 : first + 5]] == [*"thwt"]
    _, text = explain(tmp_path, capsys, config, "--json")
    assert json.loads(text.out)["rope"][0]["axis_names"] == [*"thw"]


@pytest.mark.parametrize(
    ("model_type", "rope", "shown"),
    [
        (
            "hunyuan_vl",
            {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [1, 1, 1, 1]},
            ["4 axes of 1 (p), 1 (w), 1 (h), 1 (t) pairs", "pwht"],
        ),
        (
            "hunyuan_vl",
            {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [1, 1, 2]},
            ["3 axes of 1 (w), 1 (h), 2 (t) pairs", "whtt"],
        ),
        # Two axes are not the same in every model.
        (
            None,
            {"rope_type": "default", "mrope_section": [2, 2]},
            ["2 axes of 2, 2 pairs", "0011"],
        ),
    ],
)
def test_axes_are_named_where_they_are_known(tmp_path, capsys, model_type, rope, shown):
    config = {
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rope_scaling": rope,
    }
    if model_type is not None:
        config["model_type"] = model_type
    status, text = explain(tmp_path, capsys, config)
    assert status == 0, text.err
    assert shown[0] in text.out
    lines = [line.split() for line in text.out.splitlines()]
    first = next(i for i, line in enumerate(lines) if line[:1] == ["pair"])
    assert [line[-1] for line in lines[first + 1 : first + 5]] == [*shown[1]]
