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


def no_fp8() -> str | None:
    """Why the GPU that programs are compiled for has no 8-bit floats, or None."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None or float(capability) >= 8.9:
        return None
    return (
        f"float8_e4m3fn needs compute capability 8.9 (Ada, Hopper), this GPU has "
        f"{capability}"
    )
