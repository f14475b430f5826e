"""A process in which the default backend is the stand-in named "hpu".

Tests here need a process of their own, since a plugin must come before JAX's backends:
`pytest -m hpu` starts it (tests/test_hpu.py).
"""

import os

import jax
import plugin
import pytest
from vendor import FusedRope

if os.environ.get("JROPE_STAND_IN") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    jax.config.update("jax_platforms", "hpu,cpu")
    STAND_IN = plugin.load()


@pytest.fixture(scope="session")
def stand_in() -> plugin.StandIn:
    return STAND_IN


@pytest.fixture(scope="session")
def hpu(stand_in) -> jax.Device:
    del stand_in
    return jax.devices("hpu")[0]


@pytest.fixture(scope="session")
def cpu() -> jax.Device:
    return jax.devices("cpu")[0]


@pytest.fixture(scope="session")
def fused(stand_in) -> FusedRope:
    """A vendor's kernel behind a target, registered after the plugin was loaded."""
    plugin.accept_targets(stand_in)
    kernel = FusedRope()
    jax.ffi.register_ffi_target("stand_in_fused", kernel.capsule(), platform="hpu")
    return kernel
