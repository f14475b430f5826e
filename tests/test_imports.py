"""What an import loads, and what jrope exports."""

import importlib.util
import subprocess
import sys

import pytest

import jrope


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )


def test_the_fused_operations_load_at_their_first_use():
    done = run("import jrope; jrope.fused.qkv_rope, jrope.fused.QkNorm")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["jrope", "jrope.positions", "jrope._hf"])
def test_the_host_half_never_loads_jax(module):
    done = run(
        f"import sys, {module}; sys.exit(bool({{'jax', 'flax'}} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr


def test_the_kernels_load_without_jrope():
    done = run("import sys, pallas_kernels; sys.exit('jrope' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    for name in jrope.__all__:
        assert getattr(jrope, name) is not None
    assert set(jrope.__all__) <= set(dir(jrope))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jrope' has no attribute 'rope'"):
        _ = jrope.rope


def test_kernels_are_functions_whatever_was_imported_before():
    for name in ("rope", "qkv_rope", "qk_norm_rope", "rerope_cache", "rope_append_kv"):
        assert importlib.util.find_spec(f"pallas_kernels.{name}") is None
