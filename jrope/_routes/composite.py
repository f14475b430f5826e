"""The composite form: the rotation as one operation with a name, for any compiler.

`stablehlo.composite "jrope.apply_rope"` holds the definition as its decomposition. A
compiler that knows the name puts its own kernel there; one that does not inlines the
definition. So a platform that JAX has no rules for is served without a custom call, for
which there would be no way back at compile time. README.md has the contract.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jrope._rotate import rotate_one
from jrope._routes._route import Rotation

COMPOSITE_NAME = "jrope.apply_rope"
COMPOSITE_VERSION = 1  # One more at any change of operands, attributes or meaning.

# Habana's RotaryPosEmbeddingMode (gaudi-pytorch-bridge, RotaryPosEmbeddingHelper.py):
# BLOCKWISE pairs (i, i + R/2), PAIRWISE pairs (2i, 2i + 1).
BLOCKWISE, PAIRWISE = 0, 1
Mode = Literal[0, 1]


class Kernel(Protocol):
    """A rotation of whole features by rows as wide as they are.

    >>> x, row = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2))
    >>> definition(x, 0 * row, row, mode=BLOCKWISE).tolist()
    [[[[-1.0, 1.0]]]]
    """

    def __call__(
        self,
        x: Float[Array, "*B T N R"],
        cos: Float[Array, "*#B #T 1 R"],
        sin: Float[Array, "*#B #T 1 R"],
        *,
        mode: Mode,
    ) -> Float[Array, "*B T N R"]:
        """`x * cos + partner(x) * sin`, in x's shape and dtype.

        Args:
          x: rotated features only.
          cos: both features of a pair alike; leading axes of length 1 are shared.
          sin: likewise.
          mode: BLOCKWISE (0) for NeoX pairs, PAIRWISE (1) for GPT-J pairs.
        """
        ...


def _takes_all(rotation: Rotation) -> str | None:
    del rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullWidthRoute:
    """A route around a kernel that wants Habana's form: full-width rows, one operand.

    Features that pass are cut off and joined again as contiguous slices.

    Args:
      name: what a user writes as `implementation=`.
      kernel: runs on each of query and key.
      refuses: why the kernel does not take a case, or None where it does.
      narrow_rows: hand cos and sin over in x's dtype instead of float32. For engines
        that want all operands alike; rows lose the bits that 16-bit types lack.

    Raises:
      ValueError: while tracing, if the kernel returns another shape or dtype.

    >>> route = FullWidthRoute(name="mine", kernel=definition)
    >>> route.name, route.narrow_rows
    ('mine', False)
    """

    name: str
    kernel: Kernel
    refuses: Callable[[Rotation], str | None] = _takes_all
    narrow_rows: bool = False

    def declines(self, rotation: Rotation) -> str | None:
        """What `refuses` says."""
        return self.refuses(rotation)

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """The kernel, for each operand."""
        cos, sin = (_widen(row, rotation.is_neox_style) for row in (cos, sin))
        return tuple(self._turn(rotation, x, cos, sin) for x in xs)

    def _turn(self, rotation: Rotation, x: Array, cos: Array, sin: Array) -> Array:
        start, width = rotation.rotary_offset, cos.shape[-1]
        end = start + width
        cos, sin = (_placed_with(x, row) for row in (cos, sin))
        if self.narrow_rows:
            cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        mode = BLOCKWISE if rotation.is_neox_style else PAIRWISE
        turned = self.kernel(x[..., start:end], cos, sin, mode=mode)
        if (turned.shape, turned.dtype) != ((*x.shape[:-1], width), x.dtype):
            raise ValueError(
                f"the kernel of route {self.name!r} must return "
                f"{(*x.shape[:-1], width)} of {x.dtype}, as it was given, got "
                f"{turned.shape} of {turned.dtype}"
            )
        before = [x[..., :start]] if start else []
        after = [x[..., end:]] if end < x.shape[-1] else []
        parts = [*before, turned, *after]
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else turned


def _widen(row: Array, is_neox_style: bool) -> Array:
    """[*B, T, R/2] to [*B, T, 1, R], each value at both features of its pair."""
    axis = -2 if is_neox_style else -1
    twice = jnp.stack([row, row], axis)
    return twice.reshape(*row.shape[:-1], 2 * row.shape[-1])[..., None, :]


def _placed_with(x: Array, row: Array) -> Array:
    """A wide row, laid on a mesh with explicit axes as the tokens of x are.

    The result lies as x does, so it can be joined to the features that pass.
    """
    own, held = jax.typeof(x).sharding, jax.typeof(row).sharding
    if AxisType.Explicit not in own.mesh.axis_types:
        return row
    tokens = [
        None if size == 1 else axis
        for size, axis in zip(row.shape[:-2], own.spec, strict=False)
    ]
    spec = PartitionSpec(*tokens, None, None)
    if tuple(held.spec) == tuple(spec):
        return row
    return jax.sharding.reshard(row, NamedSharding(own.mesh, spec))


def definition(
    x: Float[Array, "*B T N R"],
    cos: Float[Array, "*#B #T 1 R"],
    sin: Float[Array, "*#B #T 1 R"],
    *,
    mode: Mode,
) -> Float[Array, "*B T N R"]:
    """The kernel that is the definition: float32 inside, one cast back.

    Args:
      x: [*B, T, N, R], rotated features only.
      cos: float32 [*B, T, 1, R], both features of a pair alike.
      sin: likewise.
      mode: BLOCKWISE (0) or PAIRWISE (1).

    >>> x = jnp.array([[[[3.0, 4.0]]]])
    >>> definition(x, jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)), mode=0).tolist()
    [[[[-4.0, 3.0]]]]
    """
    is_neox_style = mode == BLOCKWISE
    half = cos.shape[-1] // 2
    cos, sin = (
        row[..., 0, :half] if is_neox_style else row[..., 0, 0::2] for row in (cos, sin)
    )
    return rotate_one(x, cos, sin, is_neox_style=is_neox_style)


def _composite(x: Array, cos: Array, sin: Array, *, mode: Mode) -> Array:
    """The definition under a name; its `mode` becomes an int32 attribute."""

    def decomposition(x: Array, cos: Array, sin: Array, *, mode: np.int32) -> Array:
        return definition(x, cos, sin, mode=BLOCKWISE if mode == 0 else PAIRWISE)

    named = lax.composite(decomposition, COMPOSITE_NAME, version=COMPOSITE_VERSION)
    return named(x, cos, sin, mode=np.int32(mode))


# The oldest JAX, (major, minor), that was seen to lower a composite in a program with
# dimension variables; older ones hand them to its decomposition alone.
_SYMBOLIC_SINCE = (0, 12)


def _refuses(rotation: Rotation) -> str | None:
    if rotation.is_multi_platform:
        return (
            "in a program for several platforms JAX hands a composite the platform's "
            "index as an operand; export for one platform"
        )
    if rotation.is_symbolic and jax.__version_info__[:2] < _SYMBOLIC_SINCE:
        return (
            f"in a program with symbolic shapes JAX {jax.__version__} cannot lower a "
            f"composite, whose decomposition takes the dimensions as operands; export "
            f"with fixed shapes, or with JAX {'.'.join(map(str, _SYMBOLIC_SINCE))}"
        )
    return None


COMPOSITE = FullWidthRoute(name="composite", kernel=_composite, refuses=_refuses)

# Registered by whoever wants it, never chosen by itself: outside the error bound.
COMPOSITE_NARROW_ROWS = dataclasses.replace(
    COMPOSITE, name="composite_narrow_rows", narrow_rows=True
)
