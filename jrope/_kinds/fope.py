"""Fourier position embedding: rows mixed by learned coefficients."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jrope._config import RopeConfig
from jrope._gather import OutOfRange, gather_rows
from jrope._kinds._base import no_offset, pytree
from jrope._tables import (
    compute_cos_sin_cache,
)


@pytree("cos_sin_cache", "cos_coefficients", "sin_coefficients")
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FopeTable:
    """Fourier position embedding: each key head mixes the waves in its own way.

    Rows are [*B, T, K, R] (one set of rows a key head), so heads go to `rotate`
    grouped: `rotate(table.group(query), table.group(key), cos, sin, ...)`. Frequencies
    that were dropped pass through: cos 1, sin 0. This is no rotation and has no
    inverse; gradients reach the coefficients.

    Source: Hua et al. 2024, arXiv:2412.17739; vLLM's `FourierRotaryEmbedding`.

    Args:
      cos_sin_cache: float32 [P, 2n] of the n frequencies that are kept.
      cos_coefficients: float32 [K, n, n] from the checkpoint; K = 1 for all heads.
      sin_coefficients: likewise.
      rotary_dim: R.

    >>> from jrope import Fope, lookup
    >>> config = RopeConfig(head_dim=4, rope_theta=1e4, max_position_embeddings=8,
    ...     fope=Fope(num_inv_freq=1))
    >>> unmixed = jnp.ones((2, 1, 1))  # two key heads
    >>> table = FopeTable.from_config(config, unmixed, unmixed)
    >>> cos, sin = lookup(table, jnp.arange(3), layout=config.layout)
    >>> cos.shape
    (3, 2, 2)
    """

    cos_sin_cache: Float32[Array, "P waves"]
    cos_coefficients: Float[Array, "K n n"]
    sin_coefficients: Float[Array, "K n n"]
    rotary_dim: int

    has_waves: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False

    @classmethod
    def from_config(
        cls,
        config: RopeConfig,
        cos_coefficients: Float[Array, "K n n"],
        sin_coefficients: Float[Array, "K n n"],
    ) -> Self:
        """The table of a config and a checkpoint's coefficients.

        Args:
          config: with `fope`; its frequencies are the waves.
          cos_coefficients: [K, n, n].
          sin_coefficients: [K, n, n].

        Raises:
          TypeError: if the coefficients are no floats.
          ValueError: if the config has no `fope`, or the coefficients are not those of
            its n frequencies.
        """
        if config.fope is None:
            raise ValueError("the config must have fope for a FoPE table")
        num_inv_freq = config.fope.num_inv_freq
        inv_freq = config.frequencies.inv_freq
        if num_inv_freq is None:
            turning = inv_freq > 2 * np.pi / config.max_position_embeddings
            num_inv_freq = int(np.count_nonzero(turning))
        if num_inv_freq > len(inv_freq):
            raise ValueError(
                f"num_inv_freq must be at most rotary_dim // 2 = {len(inv_freq)}, got "
                f"{num_inv_freq}"
            )
        if cos_coefficients.shape != sin_coefficients.shape:
            raise ValueError(
                f"FoPE's coefficients must have equal shapes, got "
                f"{cos_coefficients.shape} and {sin_coefficients.shape}"
            )
        wanted = (num_inv_freq, num_inv_freq)
        for coefficients in (cos_coefficients, sin_coefficients):
            shape = coefficients.shape
            if len(shape) != 3 or shape[1:] != wanted or not shape[0]:
                raise ValueError(
                    f"FoPE's coefficients must be [K, n, n] with K at least 1 and n = "
                    f"{num_inv_freq} kept frequencies, got shape {shape}"
                )
            if not jnp.issubdtype(coefficients.dtype, jnp.floating):
                raise TypeError(
                    f"FoPE's coefficients must be floats, got {coefficients.dtype}"
                )
        heads = cos_coefficients.shape[0]
        if heads != 1 and not config.fope.separate_heads:
            raise ValueError(
                f"FoPE's coefficients must be of one head where fope_sep_head is "
                f"false, got K = {heads}"
            )
        table = compute_cos_sin_cache(dataclasses.replace(config, fope=None))
        half = len(inv_freq)
        waves = np.concatenate(
            [table[:, :num_inv_freq], table[:, half : half + num_inv_freq]], axis=1
        )
        return cls(
            cos_sin_cache=jnp.asarray(waves),
            cos_coefficients=cos_coefficients,
            sin_coefficients=sin_coefficients,
            rotary_dim=2 * half,
        )

    @property
    def max_position_embeddings(self) -> int:
        """P."""
        return self.cos_sin_cache.shape[0]

    def group(self, heads: Float[Array, "*B T N H"]) -> Float[Array, "*B T K G H"]:
        """Heads by the key head whose rows turn them."""
        groups = self.cos_coefficients.shape[0]
        *leading, count, width = heads.shape
        if count % groups:
            raise ValueError(
                f"heads must be a multiple of FoPE's {groups} key heads, got {count}"
            )
        return heads.reshape(*leading, groups, count // groups, width)

    def rows(
        self, indices: Array, row_offset: Array | None, out_of_range: OutOfRange
    ) -> Array:
        """One gather, then the waves mixed, in float32."""
        no_offset(row_offset)
        waves = gather_rows(self.cos_sin_cache, indices, out_of_range)
        kept, half = waves.shape[-1] // 2, self.rotary_dim // 2
        pad = [(0, 0)] * (waves.ndim) + [(0, half - kept)]
        cos = _mix(waves[..., :kept], self.cos_coefficients)
        sin = _mix(waves[..., kept:], self.sin_coefficients)
        return jnp.concatenate(
            [jnp.pad(cos, pad, constant_values=1), jnp.pad(sin, pad)], axis=-1
        )


def _mix(waves: Array, coefficients: Array) -> Array:
    """[..., n] by [K, n, n] to [..., K, n]."""
    return jnp.einsum(
        "...n,knm->...km",
        waves,
        coefficients.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
