"""A table is data, not a parameter: a primitive that refuses its derivative."""

from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_table_p = Primitive("jrope_table")


def no_gradient(table: Array) -> Array:
    """The table itself; asking for its derivative is an error.

    A primitive, since a tangent may reach the table after it was traced: in the
    derivative of a jitted function, or of a scan.
    """
    return _table_p.bind(table)


@_table_p.def_impl
def _impl(table: Array) -> Array:
    return jnp.asarray(table)  # nn.scan hands constants over as host arrays.


@_table_p.def_abstract_eval
def _abstract_eval(table: Any) -> Any:
    return table


def _lower(ctx: mlir.LoweringRuleContext, table: Any) -> list[Any]:
    del ctx
    return [table]


def _refuse(primals: Any, tangents: Any) -> NoReturn:
    """Runs only where the table's tangent is not known to be zero."""
    del primals, tangents
    raise TypeError(
        "the cos/sin table must not be differentiated: it is data, not a parameter, "
        "and has no gradient; was the whole model or all its variables passed to "
        "jax.grad? Differentiate the parameters (nnx.grad does) and leave RotaryCache, "
        "in linen the collection rope_cache, out. Where the table has to be an "
        "argument of what is differentiated (jax.export with vjp_order), pass it "
        "through jax.lax.stop_gradient"
    )


mlir.register_lowering(_table_p, _lower)
ad.primitive_jvps[_table_p] = _refuse
batching.defvectorized(_table_p)
