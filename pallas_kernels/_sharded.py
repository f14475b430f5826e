"""A kernel on every device of a mesh, over that device's own part of the operands.

A kernel is opaque to XLA's partitioner, which would gather its operands from all
devices. Tokens and heads turn independently, and the rule says so.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
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

    # XLA hands over shardings as it found them, which need not keep to the rule.
    def partition(mesh, shapes, result_shapes):
        found = [*zip(out_axes, result_shapes, strict=True)]
        found += zip(axes, shapes[0], strict=True)
        specs = ((names, shape.sharding.spec) for names, shape in found)
        split = agreed(specs, axes=(*out_axes, *axes), whole=whole)
        placed = [
            NamedSharding(mesh, PartitionSpec(*(split[name] or None for name in names)))
            for names, _ in found
        ]
        results, given = placed[: len(out_axes)], placed[len(out_axes) :]
        return mesh, on_each, tuple(results), (tuple(given),)

    # The rule wants them in the order in which they appear.
    order = [name for names in (*axes, *out_axes) for name in names]
    call = custom_partitioning(on_each)
    call.def_partition(
        partition=partition,
        sharding_rule=f"{_written(axes)} -> {_written(out_axes)}",
        need_replication_factors=tuple(sorted(whole, key=order.index)),
    )
    return call(tuple(operands))


def agreed(
    specs: Iterable[tuple[Axes, Sequence[Any]]],
    *,
    axes: Sequence[Axes],
    whole: Sequence[str],
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that each named axis is split over, alike in every array.

    Args:
      specs: the names of each array's axes, and how it is split; the first that has an
        axis decides how that axis is split.
      axes: names of the axes of all arrays.
      whole: names of the axes that are not split.
    """
    split: dict[str, tuple[str, ...]] = dict.fromkeys(whole, ())
    for names, spec in specs:
        for name, entry in zip(names, (*spec, *[None] * len(names)), strict=False):
            if name in split:
                continue
            beside = {other for each in axes if name in each for other in each}
            taken = {mesh for other in beside for mesh in split.get(other, ())}
            wanted = entry if isinstance(entry, tuple) else (entry,)
            split[name] = tuple(mesh for mesh in wanted if mesh and mesh not in taken)
    return split


def _written(axes: Sequence[Axes]) -> str:
    return ", ".join(" ".join(names) for names in axes)
