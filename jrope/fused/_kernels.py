"""Which platforms have kernels, and when one serves."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxtyping import Array

from pallas_kernels import jax_too_old


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """How a kernel may be split over a mesh.

    Args:
      operands: names of each operand's axes; axes of one name are split alike.
      results: names of each result's axes.
      whole: names of the axes of which no device may have a part.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: tuple[str, ...]


def whole_axes(operands: Sequence[int], results: Sequence[int]) -> Axes:
    """For a kernel that cannot be split, given the ranks of all arrays."""
    names = [
        tuple(f"{letter}{i * 8 + j}" for j in range(rank))
        for letter, ranks in (("a", operands), ("z", results))
        for i, rank in enumerate(ranks)
    ]
    return Axes(
        operands=tuple(names[: len(operands)]),
        results=tuple(names[len(operands) :]),
        whole=tuple(name for axes in names for name in axes),
    )


class Kernel(Protocol):
    """The half of an operation that this module needs."""

    @property
    def name(self) -> str:
        """As users call it."""
        ...

    def kernel(self, *operands: Array, interpret: bool) -> tuple[Array, ...]:
        """One launch."""
        ...

    def declines(self, *operands: Any) -> str | None:
        """Why not, or None."""
        ...

    def axes(self, *operands: Any) -> Axes:
        """How it may be split."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """A platform that has kernels.

    Args:
      interpret: whether they run in Pallas' interpreter, on a CPU.
    """

    interpret: bool = False


# By the name that the PJRT client reports.
PLATFORMS: dict[str, Kernels] = {"cuda": Kernels()}


def choose_kernel(
    platform: str,
    operation: Kernel,
    operands: Sequence[Any],
    *,
    named: str | None,
    axis_context: Any,
) -> Callable[..., tuple[Array, ...]] | None:
    """The kernel that serves, or None where the definition does.

    A kernel that nobody named serves on single devices, also inside `shard_map`. Where
    XLA itself partitions the program it can partition the definition as well, while a
    kernel needs some axes whole.

    Raises:
      ValueError: if the kernel was named and cannot serve.
    """
    kernels = PLATFORMS.get(platform)
    if kernels is None:
        if named is None:
            return None
        raise ValueError(
            f"implementation must be 'xla' on platform {platform!r}, got {named!r}"
        )
    reason = jax_too_old() or operation.declines(*operands)
    if reason is not None and named is not None:
        raise ValueError(
            f"implementation={named!r} declines jrope.fused.{operation.name}: {reason}"
        )
    run = functools.partial(_launch, operation, kernels.interpret)
    if named is None:
        return run if reason is None and _is_one_device(axis_context) else None
    return functools.partial(_on_mesh, run, operation.axes(*operands))


def _launch(operation: Kernel, interpret: bool, *operands: Array) -> tuple[Array, ...]:
    if not interpret:
        return operation.kernel(*operands, interpret=False)
    from pallas_kernels import interpreted

    return interpreted(functools.partial(operation.kernel, interpret=True), operands)


def _on_mesh(
    run: Callable[..., tuple[Array, ...]], axes: Axes, *operands: Array
) -> tuple[Array, ...]:
    from pallas_kernels import sharded

    return sharded(
        run, operands, axes=axes.operands, out_axes=axes.results, whole=axes.whole
    )


def _is_one_device(axis_context: Any) -> bool:
    """Whether the program's operands are all of the operands."""
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:
        return set(manual) == set(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", None) == 1
