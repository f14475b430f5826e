"""How other JAX projects write the rotation, written again from their published code.

Each keeps what its project keeps between calls (a table, or nothing: then cosines are
computed in every call), computes in the types that it computes in, and is called as it
is called there: one tensor at a time or both, with a batch axis or without. Frequencies
are plain ones in all. Where a project knows one pairing only, the other is left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

# (rows, R, theta) -> what is kept between calls.
Keep = Callable[[int, int, float], tuple[np.ndarray, ...]]


class Turn(Protocol):
    """A rotation of x [T, N, H] at positions [T]."""

    def __call__(
        self,
        x: Array,
        kept: tuple[Array, ...],
        positions: Array,
        theta: float,
        is_neox_style: bool,
    ) -> Array:
        """Rotates x."""
        ...


def _nothing(rows: int, width: int, theta: float) -> tuple[np.ndarray, ...]:
    del rows, width, theta
    return ()


def _waves(rows: int, width: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [P, R/2], float32, of float32 angles."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    inv_freq = (1.0 / theta**exponents).astype(np.float32)
    angles = np.arange(rows, dtype=np.float32)[:, None] * inv_freq
    return np.cos(angles), np.sin(angles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One project's rotation.

    Args:
      source: the file it follows, and its version.
      turn: the rotation of one tensor; queries and keys are turned one after the other.
      keep: what there is between calls.
      pairings: the values of `is_neox_style` that the project has.
      coarse: the dtypes of x in which it rounds cosines to bfloat16.
    """

    source: str
    turn: Turn
    keep: Keep = _nothing
    pairings: tuple[bool, ...] = (True, False)
    coarse: tuple[str, ...] = ()

    def error(self, dtype: str) -> float:
        """The largest error to expect, over |a| + |b| of a pair, at positions < 16384.

        float32 angles there are off by up to 4e-3; a bfloat16 cosine and two products
        by 2^-8 each. A wrong rotation is off by 1.
        """
        rounds = 4 if dtype in self.coarse else 1
        return 5e-3 + (rounds * 2.0**-8 if dtype in (*self.coarse, "bfloat16") else 0)


def _inverse(width: int, theta: float) -> Array:
    """Frequencies as most projects compute them, inside the program."""
    return 1.0 / theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)


def _join(first: Array, second: Array, is_neox_style: bool) -> Array:
    if is_neox_style:
        return jnp.concatenate([first, second], axis=-1)
    joined = jnp.stack([first, second], axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)


def _part(x: Array, is_neox_style: bool) -> tuple[Array, Array]:
    if is_neox_style:
        first, second = jnp.split(x, 2, axis=-1)
        return first, second
    return x[..., ::2], x[..., 1::2]


def _turned(
    x: Array, cos: Array, sin: Array, is_neox_style: bool
) -> tuple[Array, Array]:
    first, second = _part(x, is_neox_style)
    return first * cos - second * sin, second * cos + first * sin


def _maxtext(x, kept, positions, theta, is_neox_style):
    """Both halves' cosines joined first; pairs side by side are two shifted copies."""
    x, width = x[None], x.shape[-1]
    at = positions[None, :, None, None]
    if is_neox_style:
        angles = at / theta ** (2 * jnp.arange(width // 2) / width)
        sin, cos = (f(angles).astype(x.dtype) for f in (jnp.sin, jnp.cos))
        sin, cos = (jnp.concatenate([wave, wave], axis=-1) for wave in (sin, cos))
        first, second = jnp.split(x, 2, axis=-1)
        out = x * cos + jnp.concatenate([-second, first], axis=-1) * sin
        return out.astype(x.dtype)[0]
    angles = at / theta ** jnp.repeat(2 * jnp.arange(width // 2) / width, 2)
    from_right = jnp.concatenate([x[..., 1:], x[..., :1]], axis=-1)
    from_left = jnp.concatenate([x[..., -1:], x[..., :-1]], axis=-1)
    is_odd = jnp.tile(jnp.arange(width) % 2 == 1, (*x.shape[:-1], 1))
    partner = lax.select(is_odd, from_left, from_right)
    sign = jnp.tile(jnp.array([-1, 1]), width // 2)
    out = x * jnp.cos(angles) + partner * jnp.sin(angles) * sign
    return out.astype(x.dtype)[0]


def _tpu_inference(x, kept, positions, theta, is_neox_style):
    """Cosines in every call, flat tokens, one tensor at a time."""
    angles = positions[:, None].astype(jnp.float32) * _inverse(x.shape[-1], theta)
    angles = angles[:, None]
    if not is_neox_style:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        turned = first * cos - second * sin, second * cos + first * sin
        return _join(*turned, False).astype(x.dtype)
    turned = _turned(x, jnp.cos(angles), jnp.sin(angles), True)
    return _join(*turned, True).astype(x.dtype)


def _sglang_jax(x, kept, positions, theta, is_neox_style):
    """Cosines in every call, rounded to x's type, which the products are in as well."""
    exponents = np.arange(0, x.shape[-1], 2, dtype=np.float32) / x.shape[-1]
    inv_freq = jnp.asarray(1.0 / theta**exponents, jnp.float32)
    angles = jnp.einsum("n,d->nd", positions.astype(jnp.float32), inv_freq)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    return _join(*_turned(x, cos, sin, is_neox_style), is_neox_style)


def _easydel_table(rows, width, theta):
    return (np.concatenate(_waves(rows, width, theta), -1).astype(jnp.bfloat16),)


def _easydel(x, kept, positions, theta, is_neox_style):
    """A bfloat16 table as an argument, gathered for each tensor; [B, S, N, H]."""
    cos, sin = jnp.split(kept[0][positions[None]], 2, axis=-1)
    cos, sin = (row[:, :, None].astype(x.dtype) for row in (cos, sin))
    return _join(*_turned(x[None], cos, sin, is_neox_style), is_neox_style)[0]


def _gemma(x, kept, positions, theta, is_neox_style):
    """Cosines in every call, from wave lengths; [B, L, N, H]."""
    width = x.shape[-1]
    length = theta ** ((2.0 / width) * jnp.arange(width // 2, dtype=jnp.float32))
    angles = positions[None, :, None, None] / length
    turned = _turned(x[None], jnp.cos(angles), jnp.sin(angles), True)
    return _join(*turned, True).astype(x.dtype)[0]


def _keras_hub(x, kept, positions, theta, is_neox_style):
    """Cosines in every call, in x's type; the turned halves stacked, not joined."""
    x = x[None]
    at = positions.astype(jnp.float32)
    angles = jnp.einsum("i,j->ij", at, _inverse(x.shape[-1], theta))
    angles = jnp.stack([angles, angles], axis=-2).reshape(len(positions), -1)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    partner = jnp.stack([-second, first], axis=-2).reshape(x.shape)
    return (x * cos + partner * sin)[0]


def _flax_table(rows, width, theta):
    """Sines, then cosines, of half a head each."""
    cos, sin = _waves(rows, width, theta)
    return (np.concatenate([sin, cos], axis=-1),)


def _hf_flax(x, kept, positions, theta, is_neox_style):
    """A float32 table gathered by position ids, spread over whole heads; BTNH."""
    x = x[None]
    sin, cos = jnp.split(jnp.take(kept[0], positions[None], axis=0), 2, axis=-1)
    sin, cos = sin[:, :, None], cos[:, :, None]
    first, second = _part(x, is_neox_style)
    if is_neox_style:
        sin, cos = (jnp.concatenate([wave, wave], axis=-1) for wave in (sin, cos))
        partner = jnp.concatenate([-second, first], axis=-1)
    else:
        sin, cos = (jnp.repeat(wave, 2, axis=3) for wave in (sin, cos))
        partner = jnp.stack([-second, first], axis=-1).reshape(x.shape)
    return (x * cos + partner * sin).astype(x.dtype)[0]


def _equinox(x, kept, positions, theta, is_neox_style):
    """One head at a time, by vmap, over a cached table.

    equinox itself has no positions and takes the first T rows; a decode step would be
    another piece of work then, so rows are gathered here.
    """
    cos, sin = (jnp.tile(wave[positions], (1, 2)) for wave in kept)

    def head(x: Array) -> Array:
        half = x.shape[-1] // 2
        partner = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return (x * cos + partner * sin).astype(x.dtype)

    return jax.vmap(head, in_axes=1, out_axes=1)(x)


def _complex(x, kept, positions, theta, is_neox_style):
    """Pairs as complex numbers times a gathered table of unit ones."""
    first, second = _part(x.astype(jnp.float32), is_neox_style)
    turned = lax.complex(first, second) * kept[0][positions][:, None]
    return _join(turned.real, turned.imag, is_neox_style).astype(x.dtype)


def _complex_table(rows, width, theta):
    cos, sin = _waves(rows, width, theta)
    return (cos + 1j * sin,)


def _split_concat(x, kept, positions, theta, is_neox_style):
    """The usual way: a gathered float32 table of half the width, halves joined."""
    cos, sin = (wave[positions][:, None] for wave in kept)
    turned = _turned(x.astype(jnp.float32), cos, sin, is_neox_style)
    return _join(*turned, is_neox_style).astype(x.dtype)


_BF16 = ("bfloat16",)
_NEOX = (True,)

PEERS: dict[str, Peer] = {
    "MaxText": Peer(
        source="maxtext 0.2.5, layers/embeddings.py, RotaryEmbedding and (GPT-J) "
        "LLaMARotaryEmbedding",
        turn=_maxtext,
        coarse=_BF16,
    ),
    "tpu-inference": Peer(
        source="tpu-inference 0.32.0, layers/jax/rope_interface.py, apply_rope",
        turn=_tpu_inference,
    ),
    "sglang-jax": Peer(
        source="sglang-jax 0.0.2, srt/layers/embeddings.py, RotaryEmbedding",
        turn=_sglang_jax,
        coarse=_BF16,
    ),
    "EasyDeL": Peer(
        source="easydel 0.3.0, layers/rotary, apply_basic_rope",
        turn=_easydel,
        keep=_easydel_table,
        coarse=("float32", "bfloat16"),
    ),
    "gemma": Peer(
        source="gemma 4.0.1, gm/math/_positional_embeddings.py, apply_rope",
        turn=_gemma,
        pairings=_NEOX,
    ),
    "keras-hub": Peer(
        source="keras-hub 0.32.0, layers/modeling/rotary_embedding.py",
        turn=_keras_hub,
        pairings=_NEOX,
        coarse=_BF16,
    ),
    "HF Flax": Peer(
        source="transformers 4.46.3, modeling_flax_llama.py and modeling_flax_gptj.py",
        turn=_hf_flax,
        keep=_flax_table,
    ),
    "equinox": Peer(
        source="equinox 0.13.8, nn/_embedding.py, RotaryPositionalEmbedding",
        turn=_equinox,
        keep=_waves,
        pairings=_NEOX,
    ),
    "split/concat": Peer(source="the textbook form", turn=_split_concat, keep=_waves),
    "complex": Peer(
        source="the form of Meta's first Llama", turn=_complex, keep=_complex_table
    ),
}
