"""Cos and sin against transformers' own rotary classes: `make peers`.

Needs the extra `peers` (transformers and a CPU torch), so it is left out by default.
"""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from jrope import config_from_hf
from jrope._tables import rows_at

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

GOLDEN = Path(__file__).parent / "golden"
MODELS = json.loads((GOLDEN / "model_configs.json").read_text())["models"]
ROWS = [
    pytest.param(model, expected["layer_type"], id=f"{model['model']}:{i}")
    for model in MODELS
    for i, expected in enumerate(model["expected"])
    if expected["when"] == "init"
]


def peer(model):
    """transformers' rotary module of a model, and its config."""
    name = model["model_type"]
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING.get(name)
    folder = name.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if config_class is None:
        configuration = importlib.import_module(
            f"transformers.models.{folder}.configuration_{folder}"
        )
        config_class = next(
            kind
            for kind in vars(configuration).values()
            if getattr(kind, "model_type", None) == name
        )
    config = config_class(**json.loads(json.dumps(model["config"])))
    return getattr(module, model["hf_class"])(config)


def cos_sin(rotary, positions, layer_type, config):
    """transformers' cos and sin [T, R/2] of these positions."""
    wanted = inspect.signature(rotary.forward).parameters
    ids = torch.tensor(positions)[None]
    if config.axis_of_frequency is not None:
        ids = ids[None].repeat(3, 1, 1)
    kwargs = {"layer_type": layer_type} if "layer_type" in wanted else {}
    made = rotary(torch.zeros(1, len(positions), 1), ids, **kwargs)
    if torch.is_tensor(made):  # DeepSeek-V2 keeps complex numbers.
        made = made.real, made.imag
    half = config.layout.rotary_dim // 2
    return [_half_width(array, half, config.is_neox_style) for array in made]


def _half_width(array, half, is_neox_style):
    array = array.float().numpy().reshape(-1, *array.shape[-2:])[0]
    if array.shape[-1] == half:
        return array
    neighbours = np.array_equal(array[..., 0::2], array[..., 1::2])
    return array[..., 0::2] if neighbours and not is_neox_style else array[..., :half]


def own_frequencies(rotary, layer_type):
    name = "inv_freq" if hasattr(rotary, "inv_freq") else f"{layer_type}_inv_freq"
    return getattr(rotary, name).double().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "layer_type"), ROWS)
def test_rows(model, layer_type):
    rotary = peer(model)
    config = config_from_hf(
        {**model["config"], "model_type": model["model_type"]}, layer_type=layer_type
    )
    assert config is not None
    last = config.max_position_embeddings - 1
    trained = config.scaling.trained_length(last + 1) or 64
    positions = [
        p for p in (0, 1, trained - 1, trained, trained + 1, last) if p <= last
    ]
    if config.scaling.rope_type == "longrope":
        positions = [0, 1, trained - 1]  # Past it transformers takes the long list.
    right = np.concatenate(cos_sin(rotary, positions, layer_type, config), axis=-1)
    amplitude = config.frequencies.attention_factor
    frequencies = own_frequencies(rotary, layer_type)

    theirs = dataclasses.replace(
        config,
        angle_dtype="float32",
        inv_freq=tuple(frequencies.tolist()),
    )
    made = rows_at(theirs, np.array(positions), amplitude)
    # A unit in the last place of cos and sin; with an attention factor, another for the
    # rounding of that product, here and there.
    ulp = np.spacing(np.maximum(np.abs(made), np.abs(right)))
    unit = np.spacing(np.abs(made / np.float32(amplitude)))
    limit = ulp if amplitude == 1 else amplitude * unit + ulp
    assert (np.abs(made - right) <= limit).all()

    ours = dataclasses.replace(config, angle_dtype="float32")
    made = rows_at(ours, np.array(positions), amplitude)
    angles = np.array(positions)[:, None] * np.tile(frequencies, 2)[None]
    # Their frequencies are float32 powers, off by up to 4 units in the last place, and
    # by more where float32 arithmetic scales them (Llama-3.2-3B 6.9, Phi 4.6).
    units = {"llama3": 7, "longrope": 5}.get(config.scaling.rope_type, 4)
    limit = amplitude * angles * units * 2.0**-24 + ulp
    assert (np.abs(made.astype(float) - right) <= limit).all()


def _holds(config, known, path=""):
    for key, value in known.items():
        if isinstance(value, dict):
            _holds(config[key], value, f"{path}{key}.")
        else:
            assert config[key] == value, f"{path}{key}"


CLASSES = json.loads((GOLDEN / "position_configs.json").read_text())
del CLASSES["about"]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_config_classes_hold_what_positions_read(name):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    _holds(transformers.CONFIG_MAPPING[name]().to_dict(), CLASSES[name])
