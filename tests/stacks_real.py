"""What the tests in other stacks' code share: finding it, running it, comparing."""

import importlib
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

NEAR = np.arange(8, dtype=np.int32).reshape(2, 4)
# What float32 angles and one more rounding of cos and sin cost at positions below 8.
NEAR_ERROR = 2e-6
# An error that no rounding makes: the rotation is another one.
WRONG = 1.0


@pytest.fixture(autouse=True)
def settings_of_the_stacks():
    """They rely on promotions, which jrope's own tests refuse."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


PACKAGES = {
    "easydel": "easydel",
    "equinox": "equinox",
    "gemma": "gemma",
    "maxtext": "maxtext",
    "sgl_jax": "sglang-jax",
    "tpu_inference": "tpu-inference",
    "tunix": "google-tunix",
}


def real(name):
    """A module of a stack; skipped only where its package is not installed."""
    located(name, "")
    return importlib.import_module(name)


def real_file(name):
    """The same, where the package does not import as a whole."""
    file = located(name, name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("stack_module", str(file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def located(name, path):
    package = PACKAGES[name.split(".")[0]]
    try:
        return importlib.metadata.distribution(package).locate_file(path)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


def assert_near(out, peer, tolerance=NEAR_ERROR):
    assert out.shape == peer.shape and out.dtype == peer.dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), peer.astype(jnp.float32), rtol=0, atol=tolerance
    )


def worst(out, other):
    return float(np.abs(np.asarray(out, np.float64) - np.asarray(other)).max())
