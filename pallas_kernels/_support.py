"""Whether this jax can run the kernels: imports nothing of Mosaic GPU."""

import jax

# Before 0.11.2 a Mosaic GPU kernel does not rewrite a buffer in place, or cannot be
# interpreted when it does. The Triton backend, older, is being removed.
OLDEST_JAX = (0, 11, 2)


def jax_too_old() -> str | None:
    """Why this jax cannot run the kernels, or None where it can."""
    if jax.__version_info__[:3] >= OLDEST_JAX:
        return None
    oldest = ".".join(map(str, OLDEST_JAX))
    return f"Mosaic GPU kernels need jax >= {oldest}, this is {jax.__version__}"
