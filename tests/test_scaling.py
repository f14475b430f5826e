"""Every scaling of the registry: its formula, its examples, its refusals."""

import math

import numpy as np
import oracle
import pytest

from jrope import compute_cos_sin_cache, config_from_hf
from jrope.scalings import SCALINGS, Linear, Llama3

EXAMPLES = [
    pytest.param(rope_type, config, id=f"{rope_type}:{model}")
    for rope_type, scaling in SCALINGS.items()
    for model, config in scaling.examples.items()
]


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_every_scaling_has_examples_and_its_own_name(rope_type):
    assert SCALINGS[rope_type].examples
    assert SCALINGS[rope_type].rope_type == rope_type


@pytest.mark.parametrize(("rope_type", "hf_config"), EXAMPLES)
def test_frequencies_are_the_formula(rope_type, hf_config):
    config = config_from_hf(hf_config)
    assert config is not None
    assert type(config.scaling) is SCALINGS[rope_type]
    expected, factor = oracle.frequencies(rope_type, hf_config)
    made = config.frequencies
    np.testing.assert_allclose(
        made.inv_freq.astype(np.float64), expected, rtol=1e-14, atol=0
    )
    assert made.attention_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize(("rope_type", "hf_config"), EXAMPLES)
def test_rows_have_the_attention_factor_as_amplitude(rope_type, hf_config):
    del rope_type
    config = config_from_hf(hf_config, max_position_embeddings=2048)
    assert config is not None
    table = compute_cos_sin_cache(config).astype(np.float64)
    half = table.shape[1] // 2
    factor = config.frequencies.attention_factor
    energy = table[:, :half] ** 2 + table[:, half:] ** 2
    np.testing.assert_allclose(energy, factor**2, rtol=4 * oracle.F32_EPS)
    np.testing.assert_array_equal(table[0, :half], np.float32(factor))
    np.testing.assert_array_equal(table[0, half:], 0.0)


def test_llama3_with_equal_bands_has_a_step():
    config = config_from_hf(
        {
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rope_theta": 1e4,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        }
    )
    assert config is not None
    # 32 / 2 pi = 5.09 turns at the first frequency, 0.509 at the second.
    np.testing.assert_allclose(
        config.frequencies.inv_freq, [1.0, 0.05, 0.005, 0.0005], rtol=1e-14
    )


@pytest.mark.parametrize(
    ("factor", "error", "message"),
    [
        ("8", TypeError, "factor must be a number, got '8'"),
        (None, TypeError, "factor must be a number, got None"),
        (True, TypeError, "factor must be a number, got True"),
        (0, ValueError, "factor must be finite and above 0, got 0"),
        (math.inf, ValueError, "factor must be finite and above 0, got inf"),
        (math.nan, ValueError, "factor must be finite and above 0, got nan"),
    ],
)
def test_linear_refuses(factor, error, message):
    with pytest.raises(error, match=message):
        Linear(factor=factor)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"low_freq_factor": 8.0}, ValueError, "4.0 < 8.0; are they swapped"),
        ({"low_freq_factor": 0.0}, ValueError, "low_freq_factor must be finite and ab"),
        ({"high_freq_factor": "4"}, TypeError, "high_freq_factor must be a number"),
        ({"factor": -1.0}, ValueError, "factor must be finite and above 0, got -1.0"),
        (
            {"original_max_position_embeddings": 0},
            ValueError,
            "original_max_position_embeddings must be at least 1, got 0",
        ),
    ],
)
def test_llama3_refuses(fields, error, message):
    good = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    Llama3(**good)
    with pytest.raises(error, match=message):
        Llama3(**{**good, **fields})
