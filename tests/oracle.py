"""Right answers, independent of jrope: float64 complex rotation and its error bound."""

import math

import ml_dtypes
import numpy as np

F32_EPS = 2.0**-24  # Half a unit in the last place of a float32 in [1, 2).


def inverse_frequencies(rope_type, theta, dim, rope):
    """Formulas written from their sources, one frequency at a time, by rope_type."""
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope_type == "default":
        return np.array(plain)
    if rope_type == "linear":
        return np.array([f / rope["factor"] for f in plain])
    if rope_type == "llama3":
        return np.array([_llama3(f, rope) for f in plain])
    raise KeyError(rope_type)


def _llama3(freq, rope):
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
