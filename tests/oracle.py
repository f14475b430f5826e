"""Right answers, independent of jrope: float64 complex rotation and its error bound."""

import math

import ml_dtypes
import numpy as np

F32_EPS = 2.0**-24  # Half a unit in the last place of a float32 in [1, 2).


def frequencies(rope_type, hf_config):
    """Frequencies and attention factor by rope_type, one frequency at a time.

    Written from the formulas' sources (papers, transformers, vLLM) in plain floats.
    """
    rope = hf_config.get("rope_scaling") or {}
    width = hf_config.get("head_dim") or hf_config["qk_rope_head_dim"]
    theta, longest = hf_config["rope_theta"], hf_config["max_position_embeddings"]
    return FORMULAS[rope_type](theta, width, longest, {**hf_config, **rope})


def _series(theta, width):
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def _default(theta, width, longest, rope):
    return _series(theta, width), 1.0


def _linear(theta, width, longest, rope):
    return [f / rope["factor"] for f in _series(theta, width)], 1.0


def _ntk(theta, width, longest, rope):
    factor, mixed_b = rope["factor"], rope.get("mixed_b")
    if mixed_b is None:
        scale = factor ** (2 / width)
        return [f / scale for f in _series(theta * factor, width)], 1.0
    a = math.log(factor) / (width / 2) ** mixed_b
    plain = enumerate(_series(theta, width))
    return [f / math.exp(a * (i + 1) ** mixed_b) for i, f in plain], 1.0


def _dynamic(theta, width, longest, rope):
    # At lengths up to the trained one the factor does nothing; alpha always does.
    return _series(theta * rope.get("alpha", 1.0) ** (width / (width - 2)), width), 1.0


def _yarn(theta, width, longest, rope, slope=0.1):
    original = rope.get("original_max_position_embeddings", longest)
    factor = rope.get("factor", longest / original)

    def index(turns):
        length = original / (2 * math.pi * turns)
        return width * math.log(length) / (2 * math.log(theta))

    low, high = index(rope.get("beta_fast", 32)), index(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    freqs = []
    for i, f in enumerate(_series(theta, width)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        freqs.append(f / factor * ramp + f * (1 - ramp))

    def mscale(weight):
        return 1.0 if factor <= 1 else slope * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return freqs, rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return freqs, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return freqs, mscale(1.0)


def _telechat(theta, width, longest, rope):
    ratio = longest / rope["original_max_position_embeddings"]
    return _yarn(theta, width, longest, {**rope, "factor": ratio}, slope=0.07)


def _llama3(theta, width, longest, rope):
    return [_llama3_one(f, rope) for f in _series(theta, width)], 1.0


def _llama3_one(freq, rope):
    # Llama 3.1's apply_scaling: by wavelength against the original context.
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / freq
    if wavelength < original / high:
        return freq
    if wavelength > original / low:
        return freq / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * freq / rope["factor"] + smooth * freq


def _longrope(theta, width, longest, rope):
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor", longest / original)
    plain = zip(_series(theta, width), rope["short_factor"], strict=True)
    freqs = [f / d for f, d in plain]
    for own in ("short_mscale", "attention_factor"):
        if rope.get(own) is not None:
            return freqs, rope[own]
    if factor <= 1:
        return freqs, 1.0
    return freqs, math.sqrt(1 + math.log(factor) / math.log(original))


def _proportional(theta, width, longest, rope):
    turning = int(rope.get("partial_rotary_factor", 1.0) * width // 2)
    plain = [f / rope.get("factor", 1.0) for f in _series(theta, width)]
    return [f if i < turning else 0.0 for i, f in enumerate(plain)], 1.0


FORMULAS = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "telechat3-yarn": _telechat,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}


def pairs(width, offset, is_neox_style):
    """Indices of the first and the second feature of every pair."""
    half = width // 2
    first = np.arange(half) if is_neox_style else 2 * np.arange(half)
    second = first + (half if is_neox_style else 1)
    return first + offset, second + offset


def rotate(x, cos, sin, *, is_neox_style, offset=0):
    """Complex rotation in float64: x [*B, T, N, H], rows [*B, T, R/2]."""
    out = np.array(x, np.float64)
    first, second = pairs(2 * cos.shape[-1], offset, is_neox_style)
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    z = (out[..., first] + 1j * out[..., second]) * turn[..., None, :]
    out[..., first], out[..., second] = z.real, z.imag
    return out


def bound(x, cos, sin, *, is_neox_style, offset=0, dtype):
    """The error that one rotation may have, for each feature.

    Half a unit in the last place of the output type at the result, plus the float32
    arithmetic's share, 2 * 2^-24 * (|x1 c| + |x2 s|). Features that pass have none.
    """
    x = np.array(x, np.float64)
    first, second = pairs(2 * cos.shape[-1], offset, is_neox_style)
    c = np.abs(np.asarray(cos, np.float64))[..., None, :]
    s = np.abs(np.asarray(sin, np.float64))[..., None, :]
    a, b = np.abs(x[..., first]), np.abs(x[..., second])
    exact = rotate(x, cos, sin, is_neox_style=is_neox_style, offset=offset)
    result = np.zeros_like(x)
    for where, magnitude in ((first, a * c + b * s), (second, b * c + a * s)):
        arithmetic = 2 * F32_EPS * magnitude
        result[..., where] = arithmetic + half_ulp(
            np.abs(exact[..., where]) + arithmetic, dtype
        )
    return result


def half_ulp(values, dtype):
    """Half the distance to the next value of `dtype`, at each value."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values), float(info.tiny))))
    return 0.5 * float(info.eps) * 2.0**exponent


def assert_within(actual, exact, tolerance):
    """Every element within its own tolerance."""
    error = np.abs(np.asarray(actual).astype(np.float64) - exact)
    worst = np.argmax(error - tolerance)
    assert np.all(error <= tolerance), (
        f"error {error.flat[worst]:.3e} over its bound {tolerance.flat[worst]:.3e} at "
        f"flat index {worst} of shape {error.shape}"
    )
