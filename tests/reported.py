"""Reported faults' inputs and right values, and how tests read them.

The values in golden/bug_cases were computed with transformers 5.24 and checked against
an independent float64 formula.
"""

import json
from pathlib import Path

import numpy as np

from jrope import RopeConfig, config_from_hf
from jrope.scalings import Yarn

FOLDER = Path(__file__).parent / "golden" / "bug_cases"
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512}


def case(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def read(config, **kwargs):
    made = config_from_hf(config, **kwargs)
    assert made is not None
    return made


def assert_frequencies(config, right):
    np.testing.assert_allclose(
        config.frequencies.inv_freq.astype(np.float64), right, rtol=3e-7
    )


def yarn_config(theta, **fields):
    scaling = Yarn(factor=32.0, original_max_position_embeddings=4096, **fields)
    return RopeConfig(
        head_dim=64, rope_theta=theta, max_position_embeddings=8, scaling=scaling
    )
