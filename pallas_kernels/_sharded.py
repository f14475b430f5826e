"""A kernel on every device of a mesh, over that device's own part of the operands.

A kernel is opaque to XLA's partitioner, which would gather its operands from all
devices. Tokens and heads turn independently, and the rule says so.
"""

from collections.abc import Callable, Sequence

from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array

# Names of an operand's axes, such as ("a0", "n0", "h0"): a letter, then digits.
Axes = Sequence[str]


def sharded(
    run: Callable[..., tuple[Array, ...]],
    operands: Sequence[Array],
    *,
    axes: Sequence[Axes],
    out_axes: Sequence[Axes],
    whole: Sequence[str],
) -> tuple[Array, ...]:
    """Calls `run(*operands)` on each device's part of the operands.

    Args:
      run: takes and gives parts of any size along the axes that may be split.
      operands: arrays.
      axes: names of each operand's axes; axes of one name are split alike.
      out_axes: names of each result's axes.
      whole: names of the axes that no device may have a part of.
    """

    # One parameter: custom_partitioning cannot name those of *operands.
    def on_each(parts):
        return tuple(run(*parts))

    def partition(mesh, shapes, result_shapes):
        given = tuple(shape.sharding for shape in shapes[0])
        wanted = tuple(shape.sharding for shape in result_shapes)
        return mesh, on_each, wanted, (given,)

    # The rule wants them in the order in which they appear.
    order = [name for names in (*axes, *out_axes) for name in names]
    call = custom_partitioning(on_each)
    call.def_partition(
        partition=partition,
        sharding_rule=f"{_written(axes)} -> {_written(out_axes)}",
        need_replication_factors=tuple(sorted(whole, key=order.index)),
    )
    return call(tuple(operands))


def _written(axes: Sequence[Axes]) -> str:
    return ", ".join(" ".join(names) for names in axes)
