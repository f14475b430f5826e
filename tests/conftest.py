"""Strict settings for every test: nothing promoted, warned about or unchecked."""

import jax
import jaxtyping
import pytest
from fuzzing import PROFILE
from hypothesis import settings

# Before any module of jrope is imported: its array annotations are checked in tests
# only. Modules are named one by one, since the hook breaks numba-compiled ones.
jaxtyping.install_import_hook(
    [
        "jrope._ops",
        "jrope._query_temperature",
        "jrope.fused._append",
        "jrope.fused._qk_norm",
        "jrope.fused._qkv",
        "jrope.fused._rerope",
        "jrope._rotate",
        "jrope._phases",
        "jrope._shell",
        "jrope.adapters",
        "jrope.flashinfer",
        "jrope.hpu",
        "jrope.linen",
        "jrope.nnx",
        "jrope.vllm._rope",
    ],
    "beartype.beartype",
)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def fresh_trace_counter():
    """Each test counts its own traces."""
    import chex

    chex.clear_trace_counter()


@pytest.fixture
def unchecked():
    """Turns jaxtyping off, to see what jrope's own checks say."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compilations():
    """A list that grows by one entry a program that XLA compiles."""
    durations: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event.endswith("backend_compile_duration"):
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def own_routes(monkeypatch):
    """Routes and aliases that a test registers are gone after it."""
    from jrope import routes
    from jrope._routes import ROUTES
    from jrope._routes._platforms import ALIASES

    monkeypatch.delenv(routes.ENVIRONMENT_VARIABLE, raising=False)
    held, names = dict(ROUTES), dict(ALIASES)
    yield
    ROUTES.clear()
    ROUTES.update(held)
    ALIASES.clear()
    ALIASES.update(names)
    jax.clear_caches()
