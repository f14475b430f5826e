"""Every key that a reader asks for, with a value that none holds: refused by name.

The keys are those that the readers themselves ask of a config, so that a new one is
tried as well.
"""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jrope import (
    DualChunk,
    config_from_hf,
    layers_from_hf,
    query_temperatures_from_hf,
    vision_config_from_hf,
)

PLAIN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LANGUAGE = {
    "plain": PLAIN,
    "yarn": {**PLAIN, "rope_scaling": YARN},
    "mrope": {**PLAIN, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "llama4": {**PLAIN, "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0]},
    "gemma3": {**PLAIN, "model_type": "gemma3_text", "sliding_window_pattern": 2},
}
VISION = {
    "qwen2_vl": {"model_type": "qwen2_vl", "embed_dim": 64, "num_heads": 4},
    "pixtral": {"model_type": "pixtral", "head_dim": 16, "patch_size": 14},
    "llama4": {
        "model_type": "llama4_vision_model",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "patch_size": 14,
    },
}
LAYERS = (layers_from_hf, query_temperatures_from_hf)
READERS = [
    *((config_from_hf, config) for config in ("plain", "yarn", "mrope", "llama4")),
    *((read, config) for read in LAYERS for config in LANGUAGE),
    *((vision_config_from_hf, config) for config in VISION),
]
# Of models whose readers fill defaults in first, and so ask a copy.
BY_TYPE = {
    *("attn_scale", "floor_scale", "attn_temperature_tuning", "layer_types"),
    *("no_rope_layers", "no_rope_layer_interval", "rope_local_base_freq"),
}
NAMES = [f"{read.__name__}-{config}" for read, config in READERS]


class Asked(dict):
    """A config that remembers what was asked of it."""

    def __init__(self, given: dict) -> None:
        super().__init__(given)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


def variants(read: Any, name: str, value: Any) -> Iterator[tuple[str, dict]]:
    """The config with `value` at every key that is read, in it and its rope dict."""
    config = (VISION if read is vision_config_from_hf else LANGUAGE)[name]
    asked = Asked(config)
    read(asked)
    assert asked.keys_asked
    for key in sorted({*asked.keys_asked, *config, *BY_TYPE}):
        yield key, {**config, key: value}
    rope = config.get("rope_scaling", {})
    for key in rope:
        yield key, {**config, "rope_scaling": {**rope, key: value}}


ARRAYS = [np.array([0, 1]), np.array([1.5, 2.0]), [np.array([0, 1])] * 4]


@pytest.mark.parametrize("value", ARRAYS, ids=["whole", "real", "in a list"])
@pytest.mark.parametrize("case", READERS, ids=NAMES)
def test_arrays_as_values_of_any_key(case, value):
    """NumPy's own "truth value of an array" names no key."""
    read, name = case
    for key, config in variants(read, name, value):
        try:
            read(config)
        except (TypeError, ValueError) as error:
            assert "ambiguous" not in str(error), (key, error)
            assert "elementwise" not in str(error), (key, error)


@pytest.mark.parametrize("value", [2**31, 2**40, 10**400], ids=["31", "40", "long"])
@pytest.mark.parametrize("case", READERS, ids=NAMES)
def test_numbers_of_any_key_are_checked_before_anything_is_made(case, value):
    read, name = case
    for key, config in variants(read, name, value):
        tracemalloc.start()
        try:
            read(config)
        except (TypeError, ValueError) as error:
            assert len(str(error)) < 600, key
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 2**21, key


@pytest.mark.parametrize("width", [2**31, 2**40])
def test_widths_of_a_vision_encoder(width):
    for name, key in (("qwen2_vl", "embed_dim"), ("pixtral", "head_dim")):
        with pytest.raises(ValueError, match="head_dim must be at most 65536"):
            vision_config_from_hf({**VISION[name], key: width})


def test_flags_of_layers_that_are_an_array():
    for flags in (np.array([1, 1, 1, 0]), [np.array([0, 1])] * 4):
        with pytest.raises(TypeError, match="no_rope_layers must be a list of 0 and 1"):
            layers_from_hf({**LANGUAGE["llama4"], "no_rope_layers": flags})


@pytest.mark.parametrize("size", [2**29, 2**31, 2**40, 10**400])
def test_chunks_whose_rows_int32_cannot_number(size):
    with pytest.raises(ValueError, match="chunk_size must be at most 536870911"):
        DualChunk(chunk_size=size, local_size=1)
    assert DualChunk(chunk_size=2**29 - 1, local_size=1).local_size == 1
