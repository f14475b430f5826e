"""YaRN and the variants of it that differ in their factors alone."""

import dataclasses
import math
from typing import ClassVar, Self

import numpy as np

from jrope._layout import LONGEST, check_bool, check_length
from jrope._show import show
from jrope.scalings._base import (
    TWO_PI,
    Frequencies,
    Geometry,
    Scaling,
    check_number,
    check_optional_amplitude,
    check_optional_number,
)


def yarn_mscale(factor: float, weight: float = 1.0, *, slope: float = 0.1) -> float:
    """YaRN's amplitude for a context `factor` times longer: `slope * weight * ln + 1`.

    >>> round(yarn_mscale(4.0), 5)
    1.13863
    """
    return 1.0 if factor <= 1 else slope * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """Frequencies interpolated where they turn seldom, kept where they turn often.

    A frequency that turns at least `beta_fast` times within the original context is
    kept, one that turns at most `beta_slow` times is divided by `factor`, and between
    the two a ramp over the frequency's index blends them. Both ends of the ramp are
    rounded outward to whole indices unless `truncate` is False.

    The attention factor is `attention_factor` itself where that is given; the ratio of
    the amplitudes for `mscale` and `mscale_all_dim` where both are given and not 0; and
    `0.1 ln(factor) + 1` otherwise.

    Source: Peng et al. 2023, arXiv:2309.00071; Hugging Face's
    `_compute_yarn_parameters`.

    Args:
      factor: how many times longer the context becomes; None for the ratio of the
        config's max_position_embeddings to the original length.
      original_max_position_embeddings: context length of pre-training, in positions;
        None for the config's max_position_embeddings.
      beta_fast: turns from which on a frequency is kept.
      beta_slow: turns up to which a frequency is divided by `factor`.
      attention_factor: the final amplitude of cos and sin.
      mscale: weight of the amplitude.
      mscale_all_dim: weight of the amplitude that is divided out again.
      truncate: whether the ramp begins and ends at whole indices.

    Raises:
      TypeError, ValueError: if a number is none, or the ramp's ends are swapped.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=128, rope_theta=1e6,
    ...     max_position_embeddings=131072,
    ...     scaling=Yarn(factor=4.0, original_max_position_embeddings=32768))
    >>> plain = RopeConfig(head_dim=128, rope_theta=1e6, max_position_embeddings=131072)
    >>> slower = plain.frequencies.inv_freq / config.frequencies.inv_freq
    >>> slower[[0, 30, 63]].astype(float).round(3).tolist()
    [1.0, 1.447, 4.0]
    """

    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    rope_type = "yarn"
    meaningless_keys = {
        "finetuned": "Yarn-Llama-2-7b-128k",
        "max_position_embeddings": "Ministral-3-8B",
    }
    examples = {
        "Qwen2.5-7B-Instruct": {
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        "gpt-oss-20b": {
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    }
    _slope: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        """Checks the numbers and the order of the ramp's ends."""
        check_optional_number("yarn scaling's factor", self.factor)
        for name in ("beta_fast", "beta_slow"):
            check_number(name, getattr(self, name))
        check_optional_amplitude("attention_factor", self.attention_factor)
        for name in ("mscale", "mscale_all_dim"):
            check_optional_number(name, getattr(self, name), above=-math.ulp(0.0))
        if self.original_max_position_embeddings is not None:
            name = "original_max_position_embeddings"
            check_length(name, self.original_max_position_embeddings)
        check_bool("truncate", self.truncate)
        if self.factor is None and self.original_max_position_embeddings is None:
            raise ValueError(
                f"rope_type {self.rope_type!r} must have the key 'factor' or "
                f"'original_max_position_embeddings'"
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast must be at least beta_slow, got {self.beta_fast} < "
                f"{self.beta_slow}; are they swapped?"
            )

    def pinned(self, max_position_embeddings: int) -> Self:
        """The original length, or the factor, where the config does not name it."""
        factor, original = self._lengths(max_position_embeddings)
        return dataclasses.replace(
            self, factor=factor, original_max_position_embeddings=original
        )

    def _lengths(self, max_position_embeddings: int) -> tuple[float, int]:
        """Factor and original length, each derived from the other where absent."""
        original = self.original_max_position_embeddings or max_position_embeddings
        return self.factor or max_position_embeddings / original, original

    def trained_length(self, max_position_embeddings: int) -> int:
        """The original length."""
        return self._lengths(max_position_embeddings)[1]

    def warnings(self, max_position_embeddings: int) -> list[str]:
        """Whether the lengths fit together."""
        rows = max_position_embeddings
        factor, original = self._lengths(rows)
        found = []
        if factor == 1:
            found.append(
                "the factor is 1, so this scaling changes no frequency: is 'factor' "
                "missing in a config whose max_position_embeddings is the original "
                "length?"
            )
        if factor * original > rows:
            longest = math.floor(min(factor * original, LONGEST))
            found.append(
                f"the scaling reaches {longest} positions, the table has {rows}: to "
                f"serve longer contexts, give max_position_embeddings={longest}"
            )
        return found

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """The ramp between the kept and the divided series."""
        factor, original = self._lengths(geometry.max_position_embeddings)
        if geometry.rope_theta == 1:
            raise ValueError("rope_theta must not be 1 under yarn: its ramp is over ln")
        kept = geometry.series()
        low, high = (
            _index_of_turns(turns, geometry, original)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, geometry.rotary_dim - 1)
        if low == high:
            high += 0.001  # YaRN's own guard of a ramp without width.
        index = np.arange(len(kept), dtype=np.longdouble)
        divided = np.clip((index - low) / (high - low), 0.0, 1.0)
        return Frequencies(
            inv_freq=kept / factor * divided + kept * (1 - divided),
            attention_factor=self._amplitude(factor),
        )

    def _amplitude(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(factor, self.mscale) / yarn_mscale(
                factor, self.mscale_all_dim
            )
        return yarn_mscale(factor, slope=self._slope)


def _index_of_turns(
    turns: float, geometry: Geometry, original: int
) -> np.longdouble | float:
    """The (real) index of the frequency with so many turns in the original context."""
    wavelength = original / (turns * TWO_PI)
    theta = np.log(np.longdouble(geometry.rope_theta))
    return geometry.rotary_dim * np.log(wavelength) / (2 * theta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekYarn(Yarn):
    """YaRN as DeepSeek's attention uses it: with a factor on the softmax scale as well.

    That factor, `(0.1 * mscale_all_dim * ln(factor) + 1) ** 2`, belongs to the
    attention and never to the table. DeepSeek's config.json says "yarn"; the reader
    tells by the model type.

    Source: DeepSeek-V3's `modeling_deepseek.py`; vLLM's
    `DeepseekScalingRotaryEmbedding`.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=163840,
    ...     scaling=DeepseekYarn(factor=40.0, original_max_position_embeddings=4096,
    ...         mscale=1.0, mscale_all_dim=1.0))
    >>> made = config.frequencies
    >>> made.attention_factor, round(made.softmax_scale_factor, 4)
    (1.0, 1.8739)
    """

    rope_type = "deepseek_yarn"
    aliases = ("deepseek_llama_scaling",)
    examples = {
        "DeepSeek-V3": {
            "model_type": "deepseek_v3",
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 163840,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    }

    def frequencies(self, geometry: Geometry) -> Frequencies:
        """YaRN's frequencies, and the factor of the softmax scale."""
        made = super().frequencies(geometry)
        factor, _ = self._lengths(geometry.max_position_embeddings)
        mscale = yarn_mscale(factor, self.mscale_all_dim or 0.0)
        return dataclasses.replace(made, softmax_scale_factor=mscale * mscale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telechat(Yarn):
    """TeleChat3's YaRN: the factor is the lengths' ratio, and the amplitude smaller.

    The amplitude's slope is 0.07 in place of 0.1, and the reader takes the ratio of the
    config's max_position_embeddings to the original length as the factor, whatever the
    config says of it.

    Source: vLLM's `TeleChat3YarnRotaryEmbedding`.

    Raises:
      ValueError: if there are weights of the amplitude, which its source does not take.

    >>> from jrope import RopeConfig
    >>> config = RopeConfig(head_dim=128, rope_theta=1e6,
    ...     max_position_embeddings=131072,
    ...     scaling=Telechat(factor=4.0, original_max_position_embeddings=32768))
    >>> round(config.frequencies.attention_factor, 4)
    1.097
    """

    rope_type = "telechat3-yarn"
    examples = {
        "TeleChat3-36B": {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "telechat3-yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    }
    _slope = 0.07

    def __post_init__(self) -> None:
        """Checks that there are no weights, which its source does not take."""
        super().__post_init__()
        for name in ("mscale", "mscale_all_dim"):
            if (weight := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} must be None under telechat3-yarn, whose amplitude has "
                    f"one slope and no weights, got {show(weight)}; is it plain yarn?"
                )

    def pinned(self, max_position_embeddings: int) -> Self:
        """The lengths' ratio as the factor."""
        original = self.original_max_position_embeddings or max_position_embeddings
        ratio = max_position_embeddings / original
        return dataclasses.replace(
            self, factor=ratio, original_max_position_embeddings=original
        )
