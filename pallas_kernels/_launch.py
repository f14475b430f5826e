"""One launch: a block of 128 threads a token, no shared memory, no barriers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from pallas_kernels._mosaic import plgpu
from pallas_kernels._support import jax_too_old


def launch(
    body: Callable[..., None],
    operands: Sequence[Any],
    *,
    tokens: int,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    name: str,
    interpret: bool,
) -> tuple[Array, ...]:
    """Runs `body(token, *operand_refs, *out_refs)` for every token.

    Args:
      body: of one block of threads.
      operands: arrays, and references from `jax.new_ref` to what is rewritten.
      tokens: how many blocks.
      out_type: fresh results.
      name: of the kernel, in profiles and dumps.
      interpret: run it on the CPU, slowly, and raise on races between blocks.
    """
    if (reason := jax_too_old()) is not None:
        raise NotImplementedError(reason)

    def block(*refs: Any) -> None:
        body(jax.lax.axis_index("token"), *refs)

    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)
    run = plgpu.kernel(
        block,
        out_type=tuple(out_type),
        grid=(tokens,),
        grid_names=("token",),
        kernel_name=name,
        # Threads never wait for each other: see `Spread` for why none has to.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        **options,
    )
    return tuple(run(*operands))


def rewritten(run: Callable[..., Any], *arrays: Array) -> Any:
    """Calls `run` on references to the arrays; returns (its result, the arrays after).

    XLA rewrites the buffers themselves where nothing else needs them, and copies them
    first where something does.
    """
    refs = [jax.new_ref(array) for array in arrays]
    result = run(*refs)
    return result, [jax.freeze(ref) for ref in refs]
