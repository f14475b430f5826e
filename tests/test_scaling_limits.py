"""Scalings at their limits: the last value taken, the first refused, what follows."""

import dataclasses
import math

import numpy as np
import oracle
import pytest

from jrope import RopeConfig, config_from_hf
from jrope.scalings import (
    Axial,
    DeepseekYarn,
    Default,
    Dynamic,
    Geometry,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Scaling,
    Telechat,
    Yarn,
)

TINY = math.ulp(0.0)
# Factors multiply float32 numbers, which a subnormal one would rob of bits.
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
LLAMA3 = Llama3(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = Yarn(factor=4.0, original_max_position_embeddings=1024)
LONG = LongRope(
    short_factor=(1.0, 1.5),
    long_factor=(2.0, 8.0),
    original_max_position_embeddings=1024,
)
DYNAMIC = Dynamic(factor=2.0, max_trained_positions=1024)


def geometry(*, rotary_dim=4, head_dim=None, rope_theta=1e4, rows=4096):
    return Geometry(
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
        head_dim=head_dim or rotary_dim,
        max_position_embeddings=rows,
    )


@pytest.mark.parametrize(
    ("scaling", "field", "taken", "refused", "message"),
    [
        (Linear(factor=2.0), "factor", TINY, 0.0, "finite and above 0"),
        (Linear(factor=2.0), "factor", 10**300, 10**400, "finite and above 0"),
        (LLAMA3, "factor", TINY, 0, "factor must be finite and above 0"),
        (LLAMA3, "low_freq_factor", 4.0, 4.0000001, "are they swapped"),
        (LLAMA3, "high_freq_factor", 1.0, 0.9999999, "are they swapped"),
        (LLAMA3, "original_max_position_embeddings", 1, 0, "at least 1, got 0"),
        (YARN, "factor", TINY, 0.0, "yarn scaling's factor must be finite"),
        (YARN, "original_max_position_embeddings", 1, 0, "at least 1, got 0"),
        (YARN, "attention_factor", LEAST, 0.0, "attention_factor must be finite"),
        (YARN, "attention_factor", LEAST, 0.99 * LEAST, "be a positive float32"),
        (YARN, "attention_factor", MOST, 1.01 * MOST, "be a positive float32"),
        (YARN, "mscale", 0.0, -TINY, "mscale must be finite and above -"),
        (YARN, "mscale_all_dim", 0.0, -TINY, "mscale_all_dim must be finite"),
        (YARN, "beta_fast", 1.0, 0.9999999, "are they swapped"),
        (YARN, "beta_slow", 32.0, 32.0000001, "are they swapped"),
        (YARN, "beta_slow", TINY, 0.0, "beta_slow must be finite and above 0"),
        (LONG, "original_max_position_embeddings", 2, 1, "at least 2, got 1"),
        (LONG, "short_factor", (1.0,) * 32768, (1.0,) * 32769, "at most 32768 ent"),
        (LONG, "long_factor", (1.0, TINY), (1.0, 0.0), r"long_factor\[1\] must be fin"),
        (LONG, "factor", TINY, 0.0, "factor must be finite and above 0"),
        (LONG, "short_mscale", LEAST, 0.0, "short_mscale must be finite and above 0"),
        (LONG, "short_mscale", LEAST, 0.99 * LEAST, "be a positive float32"),
        (LONG, "short_mscale", MOST, 1.01 * MOST, "be a positive float32"),
        (LONG, "long_mscale", LEAST, 0.0, "long_mscale must be finite and above 0"),
        (LONG, "long_mscale", LEAST, 0.99 * LEAST, "be a positive float32"),
        (LONG, "long_mscale", MOST, 1.01 * MOST, "be a positive float32"),
        (LONG, "chosen", "long", "any", "chosen must be 'short' or 'long', got 'any'"),
        (DYNAMIC, "factor", 1, 0.9999999, "must be at least 1, got 0.9999999"),
        (DYNAMIC, "alpha", TINY, 0.0, "alpha must be finite and above 0"),
        (DYNAMIC, "max_trained_positions", 1, 0, "at least 1, got 0"),
        (DYNAMIC, "sequence_length", 1, 0, "sequence_length must be at least 1"),
        (DYNAMIC, "base_rule", "constant", "any", "base_rule must be one of"),
        (DYNAMIC, "factor", 1.0, None, "the key 'factor' or 'alpha'"),
        (Proportional(), "partial_rotary_factor", 1.0, 1.0000001, "at most 1, got"),
        (Proportional(), "partial_rotary_factor", TINY, 0.0, "above 0, got 0"),
        (Proportional(), "factor", TINY, 0.0, "scaling's factor must be finite"),
        (Ntk(factor=2.0), "factor", TINY, 0.0, "ntk scaling's factor must be finite"),
        (Ntk(factor=2.0), "mixed_b", TINY, 0.0, "mixed_b must be finite and above"),
        (Axial(), "order", "dealt", "any", "order must be one of"),
    ],
)
def test_the_last_value_taken_and_the_first_refused(
    scaling, field, taken, refused, message
):
    made = dataclasses.replace(scaling, **{field: taken})
    assert getattr(made, field) == taken
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(scaling, **{field: refused})


def test_yarn_needs_one_of_two_lengths_and_a_bool():
    assert Yarn(factor=2.0).original_max_position_embeddings is None
    assert Yarn(original_max_position_embeddings=8).factor is None
    with pytest.raises(ValueError, match="'yarn' must have the key 'factor' or"):
        Yarn()
    with pytest.raises(TypeError, match="truncate must be a bool, got 1"):
        Yarn(factor=2.0, truncate=1)  # type: ignore[arg-type]


def test_telechat_takes_no_weights():
    for name in ("mscale", "mscale_all_dim"):
        with pytest.raises(ValueError, match=f"{name} must be None under telechat3"):
            dataclasses.replace(Telechat(factor=2.0), **{name: 1.0})


def test_lists_of_numbers_are_tuples():
    for name in ("short_factor", "long_factor"):
        with pytest.raises(TypeError, match=f"{name} must be a tuple of numbers"):
            dataclasses.replace(LONG, **{name: [1.0, 1.0]})
        with pytest.raises(TypeError, match=rf"{name}\[0\] must be a number"):
            dataclasses.replace(LONG, **{name: (True, 1.0)})


@pytest.mark.parametrize(
    ("scaling", "taken", "refused", "message"),
    [
        (LONG, 4, 2, "short_factor must have rotary_dim // 2 = 1 entries, got 2"),
        (LONG, 4, 6, "short_factor must have rotary_dim // 2 = 3 entries, got 2"),
        (DYNAMIC, 4, 2, "rotary_dim must be above 2"),
        (Axial(), 4, 2, "a multiple of 4"),
        (Axial(), 8, 6, "a multiple of 4"),
    ],
)
def test_widths_that_fit_and_do_not(scaling, taken, refused, message):
    made = scaling.frequencies(geometry(rotary_dim=taken))
    assert made.inv_freq.shape == (taken // 2,)
    with pytest.raises(ValueError, match=message):
        scaling.frequencies(geometry(rotary_dim=refused))


def test_proportional_spans_the_whole_head():
    for rotary_dim in (4, 12):
        with pytest.raises(ValueError, match="rotary_dim must be head_dim = 8"):
            Proportional().frequencies(geometry(rotary_dim=rotary_dim, head_dim=8))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.49, 0.5, 0.75, 0.99, 1.0])
def test_how_many_frequencies_turn(share):
    scaling = Proportional(partial_rotary_factor=share, factor=4.0)
    made = scaling.frequencies(geometry(rotary_dim=16)).inv_freq
    turning = int(share * 16 // 2)
    expected = [1e4 ** (-i / 8) / 4 if i < turning else 0.0 for i in range(8)]
    np.testing.assert_allclose(made.astype(float), expected, rtol=1e-14, atol=0)


# Up to the trained length nothing is enlarged, so the amplitude is 1.
@pytest.mark.parametrize("factor", [0.25, 0.999, 1.0, 1.001, 1.5, 2.0, 3.0])
def test_amplitudes_about_a_factor_of_one(factor):
    log = math.log(max(factor, 1.0))
    long = dataclasses.replace(LONG, factor=factor).frequencies(geometry())
    assert long.attention_factor == pytest.approx(
        math.sqrt(1 + log / math.log(1024)), rel=1e-15
    )
    for kind, slope in ((Yarn, 0.1), (Telechat, 0.07)):
        scaling = kind(factor=factor, original_max_position_embeddings=1024)
        made = scaling.frequencies(geometry())
        assert made.attention_factor == pytest.approx(1 + slope * log, rel=1e-15)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "amplitude", "softmax"),
    [
        (None, None, 1 + 0.1 * math.log(4), 1.0),
        (2.0, None, 1 + 0.1 * math.log(4), 1.0),
        (None, 2.0, 1 + 0.1 * math.log(4), (1 + 0.2 * math.log(4)) ** 2),
        (0.0, 2.0, 1 + 0.1 * math.log(4), (1 + 0.2 * math.log(4)) ** 2),
        (2.0, 0.0, 1 + 0.1 * math.log(4), 1.0),
        (
            3.0,
            2.0,
            (1 + 0.3 * math.log(4)) / (1 + 0.2 * math.log(4)),
            (1 + 0.2 * math.log(4)) ** 2,
        ),
    ],
)
def test_weights_of_the_amplitude(mscale, all_dim, amplitude, softmax):
    lengths = {"factor": 4.0, "original_max_position_embeddings": 1024}
    weights = {"mscale": mscale, "mscale_all_dim": all_dim}
    made = DeepseekYarn(**lengths, **weights).frequencies(geometry())
    assert made.attention_factor == pytest.approx(amplitude, rel=1e-15)
    assert made.softmax_scale_factor == pytest.approx(softmax, rel=1e-15)
    given = Yarn(**lengths, **weights, attention_factor=1.25).frequencies(geometry())
    assert (given.attention_factor, given.softmax_scale_factor) == (1.25, 1.0)


def test_longrope_takes_the_amplitude_that_is_nearest():
    own = dataclasses.replace(LONG, attention_factor=3.0, short_mscale=1.5)
    assert own.frequencies(geometry()).attention_factor == 1.5
    assert own.for_length(2000).frequencies(geometry()).attention_factor == 3.0
    both = dataclasses.replace(own, long_mscale=1.75)
    assert both.for_length(2000).frequencies(geometry()).attention_factor == 1.75
    derived = LONG.frequencies(geometry(rows=4096)).attention_factor
    assert derived == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


def test_what_a_config_leaves_to_its_own_length_is_pinned():
    assert DYNAMIC.pinned(4096) is DYNAMIC
    assert Dynamic(factor=2.0).pinned(4096).max_trained_positions == 4096
    assert Dynamic(alpha=2.0).pinned(4096).max_trained_positions is None
    assert LONG.pinned(4096).factor == 4.0
    named = dataclasses.replace(LONG, factor=2.0)
    assert named.pinned(4096) is named
    lengths = Yarn(original_max_position_embeddings=1024).pinned(4096)
    assert (lengths.factor, lengths.original_max_position_embeddings) == (4.0, 1024)
    lengths = Yarn(factor=2.0).pinned(4096)
    assert (lengths.factor, lengths.original_max_position_embeddings) == (2.0, 4096)
    ratio = Telechat(factor=9.0, original_max_position_embeddings=1024).pinned(4096)
    assert (ratio.factor, ratio.original_max_position_embeddings) == (4.0, 1024)
    same = Telechat(factor=9.0).pinned(4096)
    assert (same.factor, same.original_max_position_embeddings) == (1.0, 4096)
    assert Linear(factor=2.0).pinned(4096) == Linear(factor=2.0)


def test_requests_at_the_trained_length_and_past_it():
    assert LONG.for_length(1024).chosen == "short"
    assert LONG.for_length(1025).chosen == "long"
    assert [LONG.for_length(n).longest_request(4096) for n in (9, 2000)] == [1024, 4096]
    assert LONG.longest_request(512) == 512
    assert [DYNAMIC.for_length(n).longest_request(4096) for n in (9, 1024)] == [
        1024
    ] * 2
    assert [DYNAMIC.for_length(n).longest_request(4096) for n in (2000, 5000)] == [
        2000,
        4096,
    ]
    assert DYNAMIC.longest_request(4096) == 1024
    constant = dataclasses.replace(DYNAMIC, base_rule="constant")
    alpha = dataclasses.replace(DYNAMIC, alpha=2.0)
    for scaling in (constant, alpha, Linear(factor=2.0), YARN):
        assert scaling.for_length(2000) is scaling
        assert scaling.longest_request(4096) == 4096


@pytest.mark.parametrize("length", [9, 1024, 1025, 2000, 4096])
@pytest.mark.parametrize("rule", ["by_length", "constant", "alpha"])
def test_the_base_of_dynamic_scaling(length, rule):
    scaling = dataclasses.replace(DYNAMIC, factor=3.0)
    enlarged = 3.0 * max(length, 1024) / 1024 - 2.0
    if rule == "constant":
        scaling = dataclasses.replace(scaling, base_rule="constant")
        enlarged = 3.0 * 3.0 - 2.0
    if rule == "alpha":
        scaling, enlarged = dataclasses.replace(scaling, alpha=5.0), 5.0
    made = scaling.for_length(length).frequencies(geometry(rotary_dim=8)).inv_freq
    base = 1e4 * enlarged ** (8 / 6)
    expected = [base ** (-i / 4) for i in range(4)]
    np.testing.assert_allclose(made.astype(float), expected, rtol=1e-14)


@pytest.mark.parametrize("betas", [(32, 1), (1e6, 1e5), (1e-3, 1e-4), (8, 8), (1e6, 1)])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("theta", [10.0, 1e4, 1e6])
def test_ramps_of_yarn_that_leave_the_series(betas, truncate, theta):
    hf_config = {
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": betas[0],
            "beta_slow": betas[1],
            "truncate": truncate,
            "original_max_position_embeddings": 1024,
        },
    }
    config = config_from_hf(hf_config)
    assert config is not None
    expected, _ = oracle.frequencies("yarn", hf_config)
    got = config.frequencies.inv_freq.astype(float)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_base_of_one_has_no_ramp():
    with pytest.raises(ValueError, match="rope_theta must not be 1 under yarn"):
        YARN.frequencies(geometry(rope_theta=1))


def test_what_yarn_warns_of():
    def warned(factor, rows):
        scaling = Yarn(factor=factor, original_max_position_embeddings=1000)
        return scaling.warnings(rows)

    assert warned(4.0, 4000) == []
    assert [line[:44] for line in warned(1.0, 1000)] == [
        "the factor is 1, so this scaling changes no "
    ]
    (long,) = warned(4.0, 3999)
    assert "reaches 4000 positions, the table has 3999" in long
    assert "max_position_embeddings=4000" in long
    assert "reaches 2500 positions" in warned(2.5009, 1000)[0]
    assert len(warned(1.0, 999)) == 2


def test_who_knows_the_trained_length():
    assert Default().trained_length(64) == 64 and Default().warnings(64) == []
    assert LLAMA3.trained_length(64) == 8192 and LLAMA3.warnings(64) == []
    assert Linear(factor=2.0).trained_length(64) is None
    assert len(Linear(factor=2.0).warnings(64)) == 1
    assert YARN.trained_length(64) == 1024
    assert Yarn(factor=2.0).trained_length(64) == 64
    assert DYNAMIC.trained_length(64) == 1024
    assert Dynamic(factor=2.0).trained_length(64) == 64
    assert len(DYNAMIC.warnings(64)) == 1 and Dynamic(alpha=2.0).warnings(64) == []


def test_a_scaling_without_a_formula_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Scaling()  # type: ignore[abstract]


def test_scalings_are_values():
    doubled = [kind(factor=2.0) for kind in (Linear, Ntk, DeepseekYarn, Telechat)]
    plain = [Axial(), Default(), Proportional()]
    for scaling in (LLAMA3, YARN, LONG, DYNAMIC, *doubled, *plain):
        assert hash(dataclasses.replace(scaling)) == hash(scaling)
        with pytest.raises(dataclasses.FrozenInstanceError):
            scaling.rope_type = "other"  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Linear(2.0)  # type: ignore[misc]
    made = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=8).frequencies
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.attention_factor = 2.0  # type: ignore[misc]
