"""Names of the rotation's results, for the policies of `jax.checkpoint`.

A primitive of our own around `checkpoint_name`, which has no transpose: it names the
value in derivatives, where policies look, and is the identity elsewhere.
"""

from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_named_p = Primitive("jrope_named")


def named(x: Array, name: str) -> Array:
    """`x`, which policies such as `save_only_these_names` know by `name`."""
    return _named_p.bind(x, name=name)


@_named_p.def_impl
def _impl(x: Array, *, name: str) -> Array:
    del name
    return x


@_named_p.def_abstract_eval
def _abstract_eval(x: Any, *, name: str) -> Any:
    del name
    return x


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, name: str) -> list[Any]:
    del ctx, name
    return [x]


def _jvp(primals: Any, tangents: Any, *, name: str) -> tuple[Any, Any]:
    return checkpoint_name(primals[0], name), tangents[0]


def _transpose(cotangent: Any, x: Any, *, name: str) -> list[Any]:
    del x, name
    return [cotangent]


mlir.register_lowering(_named_p, _lower)
ad.primitive_jvps[_named_p] = _jvp
ad.primitive_transposes[_named_p] = _transpose
batching.defvectorized(_named_p)
