"""Fused operations: rotation with what stands next to it, in one launch on a GPU.

Each has a definition in plain JAX beside its kernel: the definition of right, what runs
where there is no kernel, and what is differentiated.
"""

from jrope.fused._append import rope_append_kv
from jrope.fused._norm import QkNorm
from jrope.fused._qk_norm import qk_norm_rope
from jrope.fused._qkv import qkv_rope
from jrope.fused._rerope import rerope_cache

__all__ = ["QkNorm", "qk_norm_rope", "qkv_rope", "rerope_cache", "rope_append_kv"]
