"""Position builders on the host (numpy and numba; importing this never loads jax)."""
