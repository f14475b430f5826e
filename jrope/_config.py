"""RopeConfig: everything that decides a model's rotation, as one frozen value."""

import dataclasses
import functools
import sys
from numbers import Real
from typing import Literal

import numpy as np

from jrope._layout import LONGEST, RotaryLayout, check_bool, check_int, check_length
from jrope._show import show
from jrope.scalings import Default, Frequencies, Geometry, Scaling, check_number
from jrope.scalings._base import check_amplitude

AngleDtype = Literal["float64", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualChunk:
    """Dual chunk attention's sizes (Qwen2.5-1M): see `jrope.DualChunkTable`.

    Args:
      chunk_size: positions in a chunk.
      local_size: how many of them overlap the next chunk.

    Raises:
      TypeError, ValueError: if a size is no int, or a chunk is no longer than its
        overlap.

    >>> config = RopeConfig(head_dim=64, rope_theta=1e6, max_position_embeddings=4096,
    ...     dual_chunk=DualChunk(chunk_size=256, local_size=32))
    >>> config.dual_chunk.local_size
    32
    """

    chunk_size: int
    local_size: int

    def __post_init__(self) -> None:
        """Checks that a chunk is longer than its overlap."""
        # The table has four rows a position of a chunk, numbered by int32.
        check_int("chunk_size", self.chunk_size, minimum=1, maximum=LONGEST // 4)
        check_int("local_size", self.local_size, minimum=0)
        if self.local_size >= self.chunk_size:
            raise ValueError(
                f"local_size must be below chunk_size = {self.chunk_size}, got "
                f"{self.local_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fope:
    """Fourier position embedding's sizes: see `jrope.FopeTable`.

    Args:
      num_inv_freq: n, the leading frequencies kept; None for those that turn more than
        once within max_position_embeddings.
      separate_heads: whether each key head has coefficients of its own.

    Raises:
      TypeError, ValueError: if a value has the wrong type.

    >>> config = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=512,
    ...     fope=Fope(num_inv_freq=4))
    >>> config.fope.separate_heads
    True
    """

    num_inv_freq: int | None = None
    separate_heads: bool = True

    def __post_init__(self) -> None:
        """Checks the number of frequencies."""
        if self.num_inv_freq is not None:
            check_int("num_inv_freq", self.num_inv_freq, minimum=1)
        check_bool("fope_sep_head", self.separate_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Everything that decides a model's rotation.

    Hashable, and equal to another whose fields are equal. It holds no table, and none
    is shared: each layer and each `compute_cos_sin_cache` makes its own, so hold one
    layer for each distinct config. `config_from_hf` makes one from a config.json.

    Args:
      head_dim: features per head, H.
      rope_theta: base of the geometric series of frequencies.
      max_position_embeddings: rows of the table, P: one more than the largest position.
      scaling: one of `jrope.SCALINGS`.
      rotary_dim: features rotated, R; None for all, as is `head_dim`.
      rotary_offset: index of the first rotated feature.
      is_neox_style: pairs are (i, i + R/2) if True, (2i, 2i + 1) (GPT-J) if False.
      axis_of_frequency: for multimodal RoPE, the axis that drives each frequency.
      angle_dtype: "float64" gives exact angles, rounded once to the float32 table;
        "float32" repeats Hugging Face's procedure (float32 frequencies and product),
        whose cos is off by 2e-4 at position 4k and 7e-3 at 128k.
      inv_freq: a checkpoint's own frequencies [R/2], radians per position, in place of
        the scaling's.
      dual_chunk: the sizes of dual chunk attention, whose table has a kind of its own.
      fope: the sizes of Fourier position embedding, likewise.

    Raises:
      TypeError, ValueError: if a value has the wrong type or the sizes do not fit.

    >>> config = RopeConfig(head_dim=64, rope_theta=1e4, max_position_embeddings=8)
    >>> config.layout.rotary_dim
    64
    """

    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    scaling: Scaling = Default()
    rotary_dim: int | None = None
    rotary_offset: int = 0
    is_neox_style: bool = True
    axis_of_frequency: tuple[int, ...] | None = None
    angle_dtype: AngleDtype = "float64"
    inv_freq: tuple[float, ...] | None = None
    dual_chunk: DualChunk | None = None
    fope: Fope | None = None

    def __post_init__(self) -> None:
        """Checks every field, the layout's by making it."""
        if self.rotary_dim == self.head_dim:  # Equal configs compare equal.
            object.__setattr__(self, "rotary_dim", None)
        check_number("rope_theta", self.rope_theta)
        check_length("max_position_embeddings", self.max_position_embeddings)
        if not isinstance(self.scaling, Scaling):
            raise TypeError(
                f"scaling must be a jrope Scaling, got {show(self.scaling)}"
            )
        if self.angle_dtype not in ("float64", "float32"):
            raise ValueError(
                f"angle_dtype must be 'float64' or 'float32', got "
                f"{show(self.angle_dtype)}"
            )
        if not isinstance(self.dual_chunk, DualChunk | None):
            raise TypeError(
                f"dual_chunk must be a DualChunk, got {show(self.dual_chunk)}"
            )
        if not isinstance(self.fope, Fope | None):
            raise TypeError(f"fope must be a Fope, got {show(self.fope)}")
        self._check_inv_freq(self.layout.rotary_dim // 2)
        self._check_frequencies()

    def _check_inv_freq(self, count: int) -> None:
        if self.inv_freq is None:
            return
        if not isinstance(self.inv_freq, tuple):
            raise TypeError(
                f"inv_freq must be a tuple of floats (a config is hashable), got "
                f"{type(self.inv_freq).__name__}; use tuple(array.tolist())"
            )
        if len(self.inv_freq) != count:
            raise ValueError(
                f"inv_freq must have rotary_dim // 2 = {count} entries, got "
                f"{len(self.inv_freq)}"
            )
        for value in self.inv_freq:
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(
                    f"inv_freq must be a tuple of floats, got {show(value)} in it; use "
                    f"tuple(array.tolist())"
                )
        if not all(0 <= value <= sys.float_info.max for value in self.inv_freq):
            raise ValueError("inv_freq must be finite and not negative")

    def for_length(self, total_length: int) -> "RopeConfig":
        """The config of a request of this declared total length, fixed for its life.

        The same for every request, but for scalings that depend on the length
        (LongRoPE, dynamic NTK). Cached keys were turned by the choice, so make it part
        of a prefix cache's key; `jrope.stack_tables` serves several choices in one
        program.

        Args:
          total_length: prompt and all tokens to come, in positions.
        """
        check_length("total_length", total_length)
        pinned = self.scaling.pinned(self.max_position_embeddings)
        scaling = pinned.for_length(total_length)
        if self.inv_freq is not None and scaling != pinned:
            raise ValueError(
                "inv_freq must be None for frequencies that depend on the length, got "
                "a checkpoint's own, which are for one length"
            )
        return dataclasses.replace(self, scaling=scaling)

    def _check_frequencies(self) -> None:
        """Has the scaling check itself against the widths, and checks what it makes.

        For the longest request as well, which may have other frequencies: none should
        be refused while it is served.
        """
        self._check_made(self.scaling, self.frequencies)
        longest = self.scaling.for_length(self.max_position_embeddings)
        if longest != self.scaling:
            self._check_made(longest, longest.frequencies(self._geometry))

    def _check_made(self, scaling: Scaling, made: Frequencies) -> None:
        with np.errstate(over="ignore"):
            inv_freq = made.inv_freq.astype(self.angle_dtype)
        if not np.isfinite(inv_freq).all() or not (inv_freq >= 0).all():
            raise ValueError(
                f"inverse frequencies must be finite and not negative, got some that "
                f"are not from rope_theta = {show(self.rope_theta)} and {show(scaling)}"
            )
        for name in ("attention_factor", "softmax_scale_factor"):
            factor = float(getattr(made, name))
            check_amplitude(name, factor, f" from {show(scaling)}")

    @property
    def longest_request(self) -> int:
        """The longest request that this config is for, in positions: P, or less.

        Less where the scaling depends on the length: see `for_length`. Positions past
        it have rows of NaN, whatever `out_of_range` says of positions past P.
        """
        return self.scaling.longest_request(self.max_position_embeddings)

    @functools.cached_property
    def layout(self) -> RotaryLayout:
        """Where in a head the rotation acts."""
        return RotaryLayout(
            head_dim=self.head_dim,
            rotary_dim=self.head_dim if self.rotary_dim is None else self.rotary_dim,
            rotary_offset=self.rotary_offset,
            is_neox_style=self.is_neox_style,
            axis_of_frequency=self.axis_of_frequency,
        )

    @functools.cached_property
    def frequencies(self) -> Frequencies:
        """Inverse frequencies [R/2] and the factors that go with them."""
        made = self.scaling.frequencies(self._geometry)
        if self.inv_freq is None:
            return made
        return dataclasses.replace(
            made, inv_freq=np.asarray(self.inv_freq, np.longdouble)
        )

    @property
    def _geometry(self) -> Geometry:
        return Geometry(
            rope_theta=self.rope_theta,
            rotary_dim=self.layout.rotary_dim,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
        )
