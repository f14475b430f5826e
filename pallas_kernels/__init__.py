"""Pallas kernels for NVIDIA GPUs: jax only, with no knowledge of jrope."""
