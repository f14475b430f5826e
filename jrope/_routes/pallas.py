"""The Pallas route: one launch for queries and keys on NVIDIA GPUs, when asked for.

It moves the bytes of a rotation once, as XLA's own fusions do, and inside a model XLA
must first cut queries and keys out of a merged product for it. So it serves only who
names it; `jrope.fused` holds the operations that gain by a kernel.
"""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array

from jrope._routes._route import Rotation
from pallas_kernels import jax_too_old

_DTYPES = ("bfloat16", "float16", "float32")
# What a kernel was compiled for and inspected; others would compile too, unseen.
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasRoute:
    """Runs the rotation in a Mosaic GPU kernel.

    Args:
      name: for `implementation=`.
      interpret: run it on a CPU, in Pallas' interpreter.
    """

    name: str = "pallas"
    interpret: bool = False

    def declines(self, rotation: Rotation) -> str | None:
        """Declines an old jax, other dtypes than the model's and unusual shapes."""
        if (reason := jax_too_old()) is not None:
            return reason
        if not isinstance(rotation.tokens, int) or rotation.tokens < 1:
            return f"the number of tokens must be known, got {rotation.tokens}"
        if len(rotation.xs) > 2:
            return f"it takes a query and a key, got {len(rotation.xs)} operands"
        leading = next(iter(rotation.xs)).shape[:-2]
        for x in rotation.xs:
            if x.dtype.name not in _DTYPES:
                return f"dtype must be one of {_DTYPES}, got {x.dtype.name}"
            if x.shape[-1] not in _HEAD_DIMS:
                return f"head_dim must be one of {_HEAD_DIMS}, got {x.shape[-1]}"
            if x.shape[:-2] != leading:
                return f"the key must have the query's tokens, {leading}, got {x.shape}"
        return None

    def run(
        self, rotation: Rotation, xs: tuple[Array, ...], cos: Array, sin: Array
    ) -> tuple[Array, ...]:
        """One launch; on a mesh, on each device over its own tokens and heads."""
        # Not at the top: it needs a jax that is not too old.
        from pallas_kernels import sharded

        turn = functools.partial(
            self._turn,
            is_neox_style=rotation.is_neox_style,
            rotary_offset=rotation.rotary_offset,
        )
        tokens = [f"a{i}" for i in range(cos.ndim - 1)]
        rows = [
            name if own == length else f"s{i}"
            for i, (name, own, length) in enumerate(
                zip(tokens, cos.shape, xs[0].shape, strict=False)
            )
        ]
        heads = [(*tokens, f"n{i}", f"h{i}") for i in range(len(xs))]
        return sharded(
            turn,
            (*xs, cos, sin),
            axes=[*heads, (*rows, "p"), (*rows, "p")],
            out_axes=heads,
            whole=("p", *(f"h{i}" for i in range(len(xs)))),
        )

    def _turn(self, *operands: Array, **options: Any) -> tuple[Array, ...]:
        from pallas_kernels import Place, interpreted, rewritable, rope

        def turn(*operands: Array) -> tuple[Array, ...]:
            *xs, cos, sin = operands
            width = 2 * cos.shape[-1]
            # A rewritten buffer needs no copy of the features that pass.
            in_place = all(
                x.shape[-1] != width
                and rewritable(
                    Place(head_dim=x.shape[-1], rotary_dim=width, **options),
                    x.shape[-2],
                    x.dtype.itemsize,
                    whole_heads=False,
                )
                for x in xs
            )
            return rope(
                xs, cos, sin, in_place=in_place, interpret=self.interpret, **options
            )

        return interpreted(turn, operands) if self.interpret else turn(*operands)


PALLAS = PallasRoute()
