"""The XLA route: plain JAX, for every platform and every case."""

import dataclasses
import math
from typing import cast

import jax
from jaxtyping import Array

from jrope._routes._forms import FORMS
from jrope._routes._route import Rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A row of the table of choices: the form for the cases that it covers.

    Args:
      form: a key of `FORMS`.
      since: first JAX version, (major, minor), that this was measured on.
      dtypes: names of the operand's dtypes; None covers all.
      is_neox_style: the pairing; None covers both.
      partial: whether some features pass; None covers both.
      alike: whether there are several operands, all of one shape; None covers both.
      max_size: the most features in the rotation's largest operand; None is no bound.
    """

    form: str
    since: tuple[int, int] = (0, 0)
    dtypes: tuple[str, ...] | None = None
    is_neox_style: bool | None = None
    partial: bool | None = None
    alike: bool | None = None
    max_size: int | None = None

    def covers(self, rotation: Rotation, x: jax.ShapeDtypeStruct | Array) -> bool:
        """Whether the rotation of `x` is one of the cases, on this JAX."""
        partial = 2 * rotation.rows.shape[-1] != x.shape[-1]
        alike = len(rotation.xs) > 1 and len({x.shape for x in rotation.xs}) == 1
        return (
            jax.__version_info__[:2] >= self.since
            and (self.dtypes is None or x.dtype.name in self.dtypes)
            and self.is_neox_style in (None, rotation.is_neox_style)
            and self.partial in (None, partial)
            and self.alike in (None, alike)
            and (self.max_size is None or self._is_small(rotation))
        )

    def _is_small(self, rotation: Rotation) -> bool:
        """Whether it is within the bound; symbolic sizes never are."""
        sizes = [math.prod(operand.shape) for operand in rotation.xs]
        known = all(isinstance(size, int) for size in sizes)
        return known and max(sizes) <= cast(int, self.max_size)


# One token of 32 heads of 128 features. 16 of them, or 256 of a small model: a step
# costs its dispatch and loop overheads, not its bytes; at 64 the forms for many win. A
# thousand, whose temporaries in 16 bits still lie in a cache.
_ONE, _FEW, _SOME = 2**12, 2**16, 2**22
_16_BITS = ("bfloat16", "float16")

# The first row that covers a case decides; a JAX newer than all rows uses the newest.
# Source for the CPU: `python -m benchmarks.bench_forms` on each minor version, and
# `bench_rope` for `stack_held`. Past `_SOME`, a form whose temporaries are as large as
# its operand is not eligible; before JAX 0.12 neither is swap_update, which
# XLA:CPU miscompiles there. Source for CUDA, where nothing was measured:
# `benchmarks/gpu_forms.py`, the same on JAX 0.11 and 0.12.
CHOICES: dict[str, tuple[Choice, ...]] = {
    "cpu": (
        # JAX 0.12: concatenates fuse inside loops.
        Choice(since=(0, 12), is_neox_style=True, max_size=_FEW, form="concat_held"),
        Choice(
            since=(0, 12),
            is_neox_style=True,
            partial=False,
            dtypes=_16_BITS,
            max_size=_SOME,
            form="concat_held",
        ),
        Choice(since=(0, 12), partial=True, max_size=_FEW, form="swap_update"),
        Choice(since=(0, 12), partial=True, dtypes=_16_BITS, form="swap_update"),
        # In bits: at 8,192 tokens up to a tenth faster, at fewer within the noise.
        Choice(since=(0, 12), partial=False, form="swap_bits"),
        Choice(since=(0, 12), form="swap"),
        # JAX 0.11: of the joins only the stack fuses inside loops.
        Choice(since=(0, 11), partial=True, max_size=_FEW, form="concat_held"),
        Choice(since=(0, 11), partial=True, form="swap"),
        Choice(since=(0, 11), is_neox_style=True, max_size=_FEW, form="stack"),
        Choice(since=(0, 11), is_neox_style=True, dtypes=_16_BITS, form="stack"),
        Choice(since=(0, 11), form="swap"),
        # JAX 0.10: no join fuses inside loops, and bfloat16 moves slowly.
        Choice(partial=True, dtypes=_16_BITS, form="swap_bits"),
        Choice(partial=False, is_neox_style=True, max_size=_FEW, form="stack_held"),
        # At 16 tokens swap_bits is ahead with these pairs.
        Choice(dtypes=_16_BITS, max_size=_ONE, form="stack_held"),
        Choice(dtypes=_16_BITS, is_neox_style=True, form="stack_bits"),
        Choice(dtypes=_16_BITS, form="swap_bits"),
        Choice(form="swap"),
    ),
    "cuda": (
        # Few tokens: one launch for queries and keys of one shape, not two.
        Choice(partial=True, alike=True, max_size=_FEW, form="stack"),
        Choice(is_neox_style=True, alike=True, max_size=_FEW, form="select"),
        # Many: no other moves fewer bytes, and its accesses are the widest.
        Choice(form="concat"),
    ),
}


def choose_form(rotation: Rotation, x: jax.ShapeDtypeStruct | Array) -> str:
    """The key in `FORMS` of the form that rotates `x`.

    A platform without choices, which nobody measured, gets the definition.
    """
    choices = CHOICES.get(rotation.platform, ())
    return next((row.form for row in choices if row.covers(rotation, x)), "concat")


@dataclasses.dataclass(frozen=True)
class XlaRoute:
    """Runs the rotation as plain JAX, written as the platform's compiler likes it."""

    name: str = "xla"

    def declines(self, rotation: Rotation) -> str | None:
        """Never declines."""
        del rotation
        return None

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """The chosen form, for each operand."""
        return tuple(
            FORMS[choose_form(rotation, x)](
                x,
                cos,
                sin,
                is_neox_style=rotation.is_neox_style,
                rotary_offset=rotation.rotary_offset,
            )
            for x in xs
        )


XLA = XlaRoute()
