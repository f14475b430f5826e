"""Weights reordered between pairings give the same scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jrope import RopeConfig, apply_rope, compute_cos_sin_cache, permute_pairing
from jrope._pairing import Pairing

CONFIG = RopeConfig(
    head_dim=8,
    rotary_dim=6,
    rotary_offset=1,
    rope_theta=1e4,
    max_position_embeddings=16,
)
RNG = np.random.default_rng(0)


# rasbt/LLMs-from-scratch#751
def test_scores_are_those_of_the_other_pairing():
    table = jnp.asarray(compute_cos_sin_cache(CONFIG))
    x = RNG.standard_normal((5, 12))
    query, key = RNG.standard_normal((2, 3 * 8, 12))  # PyTorch's layout: [out, in].
    scores = []
    pairings: tuple[Pairing, Pairing] = ("neox", "gptj")
    for pairing in pairings:
        is_neox_style = pairing == "neox"
        layout = dataclasses.replace(CONFIG.layout, is_neox_style=is_neox_style)
        heads = [
            jnp.asarray(
                x @ permute_pairing(w, layout=layout, from_="neox", to=pairing).T,
                jnp.float32,
            )
            for w in (query, key)
        ]
        q, k = apply_rope(np.arange(5), heads[0], heads[1], table, layout=layout)
        scores.append(np.einsum("tnh,snh->nts", q.reshape(5, 3, 8), k.reshape(5, 3, 8)))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)


# ggml-org/llama.cpp#3018
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_there_and_back(axis):
    layout = CONFIG.layout
    weights = RNG.standard_normal((16, 24, 8))
    there = permute_pairing(weights, layout=layout, from_="neox", to="gptj", axis=axis)
    assert not np.array_equal(there, weights)
    back = permute_pairing(there, layout=layout, from_="gptj", to="neox", axis=axis)
    np.testing.assert_array_equal(back, weights)
    same = permute_pairing(weights, layout=layout, from_="gptj", to="gptj", axis=axis)
    np.testing.assert_array_equal(same, weights)


def test_jax_arrays_stay_jax_arrays():
    bias = jnp.arange(8.0)
    moved = permute_pairing(bias, layout=CONFIG.layout, from_="neox", to="gptj")
    assert isinstance(moved, jnp.ndarray)
    np.testing.assert_array_equal(moved, [0, 1, 4, 2, 5, 3, 6, 7])


def test_an_axis_that_the_array_does_not_have():
    for axis in (1, -2):
        with pytest.raises(
            ValueError, match=f"one of the array's 1, got {axis} for sh"
        ):
            permute_pairing(
                np.ones(8), layout=CONFIG.layout, from_="neox", to="gptj", axis=axis
            )


def test_refusals():
    kwargs = {"layout": CONFIG.layout, "from_": "neox", "to": "gptj"}
    with pytest.raises(ValueError, match="whole heads of 8 features, got length 12"):
        permute_pairing(np.zeros(12), **kwargs)
    with pytest.raises(ValueError, match=r"to must be one of \('neox', 'gptj'\), got"):
        permute_pairing(np.zeros(8), **{**kwargs, "to": "half"})
