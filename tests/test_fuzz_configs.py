"""Random configs: finite frequencies, or an error that names the key."""

import copy
import math

import numpy as np
import oracle
import pytest
from fuzzing import REFUSED, WAYS, cases
from hypothesis import strategies as st

from jrope import (
    RotaryLayout,
    config_from_hf,
    permute_pairing,
)
from jrope.explain import explain, to_text
from jrope.scalings import SCALINGS, config_keys

pytestmark = pytest.mark.fuzz

factors = st.floats(1.0, 64.0)
lengths = st.integers(16, 2**20)
VALUES = {
    "alpha": st.floats(1.0, 1e4),
    "attention_factor": st.none() | st.floats(0.1, 4.0),
    "beta_fast": st.floats(2.0, 64.0),
    "beta_slow": st.floats(0.25, 2.0),
    "factor": factors,
    "high_freq_factor": st.floats(4.0, 8.0),
    "long_mscale": st.none() | st.floats(0.5, 2.0),
    "low_freq_factor": st.floats(0.5, 4.0),
    "max_trained_positions": st.none() | lengths,
    "mixed_b": st.none() | st.floats(0.1, 2.0),
    "mscale": st.none() | st.floats(0.1, 2.0),
    "mscale_all_dim": st.none() | st.floats(0.1, 2.0),
    "original_max_position_embeddings": lengths,
    "partial_rotary_factor": st.sampled_from([0.25, 0.5, 1.0]),
    "short_mscale": st.none() | st.floats(0.5, 2.0),
    "truncate": st.booleans(),
}


@st.composite
def configs(draw):
    """A valid config.json of any registered type."""
    rope_type = draw(st.sampled_from(sorted(SCALINGS)))
    half = draw(st.integers(2, 64))
    rope = {"rope_type": rope_type}
    for key in config_keys(SCALINGS[rope_type]):
        if key in ("short_factor", "long_factor"):
            rope[key] = draw(
                st.lists(st.floats(1.0, 64.0), min_size=half, max_size=half)
            )
        elif rope_type == "telechat3-yarn" and "mscale" in key:
            continue  # It has none.
        elif key in VALUES:
            rope[key] = draw(VALUES[key])
    return {
        "head_dim": 2 * half,
        "max_position_embeddings": draw(lengths),
        "rope_theta": draw(st.floats(100.0, 1e7)),
        "rope_scaling": rope,
    }


@cases(configs())
def test_valid_configs_give_finite_frequencies(hf_config):
    config = config_from_hf(hf_config)
    assert config is not None
    check_finite(config)
    inv_freq = config.frequencies.inv_freq.astype(np.float64)
    if config.scaling.rope_type == "proportional":
        turning = int(
            hf_config["rope_scaling"]["partial_rotary_factor"] * len(inv_freq)
        )
        assert (inv_freq[turning:] == 0).all()
        inv_freq = inv_freq[:turning]
    assert (inv_freq > 0).all()


def check_finite(config):
    """All that the config gives, and what `explain` says of it."""
    made = config.frequencies
    inv_freq = made.inv_freq.astype(np.float64)
    assert np.isfinite(inv_freq).all() and (inv_freq >= 0).all()
    for factor in (made.attention_factor, made.softmax_scale_factor):
        assert np.isfinite(np.float32(factor)) and np.float32(factor) > 0
    assert str(config.layout.rotary_dim) in to_text(explain(config))
    longest = config.for_length(config.max_position_embeddings).frequencies
    assert np.isfinite(longest.inv_freq.astype(np.float64)).all()


@cases(configs())
def test_valid_configs_turn_as_their_formulas_say(hf_config):
    config = config_from_hf(hf_config)
    assert config is not None
    rope = hf_config["rope_scaling"]
    inv_freq, factor = oracle.frequencies(rope["rope_type"], hf_config)
    made = config.frequencies
    np.testing.assert_allclose(made.inv_freq.astype(float), inv_freq, rtol=1e-12)
    np.testing.assert_allclose(made.attention_factor, factor, rtol=1e-12)


ALIASES = {"rope_type": "type", "rope_scaling": "rope_parameters"}
WRONG = ["x", [], {}, True, -1.0, 0, math.nan, math.inf]
# Numbers, but no model's.
HUGE = [2**31, 2**63, 1e38, 1e300, 10**400, 1e-300, 5e-324]


@st.composite
def mutations(draw):
    """A valid config with one key dropped, nulled, renamed or retyped, and its name."""
    good = draw(configs())
    bad = copy.deepcopy(good)
    inner = draw(st.booleans())
    place = bad["rope_scaling"] if inner else bad
    key = draw(st.sampled_from(sorted(place)))
    how = draw(st.sampled_from(["drop", "null", "rename", "alias", "retype"]))
    if how == "drop":
        del place[key]
    elif how == "null":
        place[key] = None
    elif how == "rename":
        place[key + "_"] = place.pop(key)
    elif how == "alias":
        place[ALIASES.get(key, key)] = place.pop(key)
    else:
        place[key] = draw(st.sampled_from(WRONG + HUGE))
    return good, bad, key, how


@cases(mutations())
def test_mutated_configs_are_read_alike_or_refused_by_name(mutation):
    good, bad, key, how = mutation
    try:
        made = config_from_hf(bad)
    except (ValueError, TypeError) as error:
        assert named(key, good, str(error)), f"{error!s} does not name {key!r}"
        return REFUSED
    assert made is not None
    check_finite(made)
    if how == "alias":
        assert made == config_from_hf(good)
    else:
        assert optional_or_valid(good, bad, key, how)
    return None


def named(key, good, message):
    """Whether an error speaks of the key, or of what its absence leaves to say."""
    consequences = {
        # Without its type, or with another, the dict's other keys are the unknown ones.
        "rope_type": ["unknown"],
        # Without it, plain RoPE; with a wrong one, an error of its own.
        "rope_scaling": ["rope_parameters", "rope_scaling"],
        # Its absence leaves head_dim to be derived.
        "head_dim": ["hidden_size", "rotary_dim", "_factor must have"],
        "long_factor": ["long_factor"],
    }
    words = [key, *consequences.get(key, [])]
    return any(word in message for word in words)


def optional_or_valid(good, bad, key, how):
    """Whether a mutation that was read is one that may be."""
    rope = good["rope_scaling"]
    if how == "rename":
        # At the top level an unknown key is not RoPE's; the renamed one must have been
        # optional there. In the rope dict every unknown key is refused.
        return key == "rope_scaling"
    if how in ("drop", "null"):
        is_required = config_keys(SCALINGS[rope["rope_type"]]).get(key, False)
        return not is_required
    value = bad["rope_scaling"][key] if key in rope else bad[key]
    # A retyped value that was read is one that the field may have.
    return value in ({}, [], True) or isinstance(value, int | float)


@pytest.mark.parametrize("rope_type", sorted(SCALINGS))
def test_every_type_is_drawn_with_all_its_keys(rope_type):
    lists = {"short_factor", "long_factor"}
    assert set(config_keys(SCALINGS[rope_type])) <= lists | set(VALUES)


@cases(
    st.integers(1, 12).flatmap(
        lambda half: st.tuples(st.just(2 * half), st.integers(0, 5), st.integers(0, 5))
    ),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 1, -1]),
    st.sampled_from(sorted(WAYS.keys() - {"list"})),
    st.integers(0, 2**32 - 1),
)
def test_weights_of_either_pairing_turn_alike(widths, heads, to_gptj, axis, way, seed):
    """Reordered weights, turned by the other pairing, are the turned ones reordered."""
    rotary_dim, offset, rest = widths
    head_dim = rotary_dim + offset + rest
    layout = RotaryLayout(
        head_dim=head_dim, rotary_dim=rotary_dim, rotary_offset=offset
    )
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((5, heads * head_dim))
    weights = WAYS[way](whole.T if axis == 0 else whole)
    names = ("neox", "gptj") if to_gptj else ("gptj", "neox")
    options = {"layout": layout, "from_": names[0], "to": names[1]}
    moved = permute_pairing(weights, axis=axis, **options)
    assert moved.dtype == weights.dtype and moved.shape == weights.shape
    moved = moved.T if axis == 0 else moved
    angles = rng.uniform(0, 9, (5, rotary_dim // 2))
    before, after = (
        oracle.rotate(
            x.reshape(5, heads, head_dim),
            np.cos(angles),
            np.sin(angles),
            is_neox_style=name == "neox",
            offset=offset,
        )
        for x, name in zip((whole, moved), names, strict=True)
    )
    turned = permute_pairing(before.reshape(5, -1), axis=1, **options)
    np.testing.assert_allclose(after.reshape(5, -1), turned, rtol=0, atol=1e-14)
    back = permute_pairing(moved, axis=1, layout=layout, from_=names[1], to=names[0])
    np.testing.assert_array_equal(back, whole)
