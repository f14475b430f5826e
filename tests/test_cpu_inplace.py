"""The route cpu_inplace: bits, memory, threads, and what it declines."""

import concurrent.futures
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jrope import RotaryLayout, rotate
from jrope._primitive import bind_rope
from jrope._routes import Rotation, choose_route
from jrope._routes.cpu_inplace import CPU_INPLACE
from jrope._routes.xla import XLA

NAME = "cpu_inplace"
DTYPES = ("float32", "bfloat16", "float16")
RNG = np.random.default_rng(0)


def rows_of(leading, half, dtype="float32"):
    # Amplitude 1.25 is an attention factor.
    angles = RNG.uniform(0, 50, (*leading, half))
    return [jnp.asarray(1.25 * f(angles), dtype) for f in (np.cos, np.sin)]


def heads_of(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def bind(xs, rows, implementation=NAME, *, neox=True, offset=0):
    return bind_rope(
        xs,
        *rows,
        is_neox_style=neox,
        rotary_offset=offset,
        implementation=implementation,
    )


def same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


PLACES = ((128, 128, 0), (96, 32, 5), (14, 8, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("place", PLACES)
def test_the_bits_are_those_of_xla(dtype, neox, place):
    width, rotary_dim, offset = place
    for leading, row_leading in (
        ((1,), (1,)),
        ((33,), (33,)),
        ((2, 5), (1, 5)),
        ((2, 3, 4), (2, 1, 4)),
        ((0,), (0,)),
    ):
        xs = [heads_of((*leading, heads, width), dtype) for heads in (3, 1)]
        rows = rows_of(row_leading, rotary_dim // 2)
        got, want = (
            bind(xs, rows, route, neox=neox, offset=offset) for route in (NAME, "xla")
        )
        same_bits(got, want)


def test_float64_and_operands_of_several_dtypes():
    with jax.enable_x64(True):
        for dtypes in itertools.product(("float64", "bfloat16"), repeat=2):
            xs = [heads_of((5, 3, 8), dtype) for dtype in dtypes]
            for row_dtype in ("float32", "float64"):
                rows = rows_of((5,), 4, row_dtype)
                same_bits(bind(xs, rows), bind(xs, rows, "xla"))


def address(array):
    return array.unsafe_buffer_pointer()


def test_donated_operands_are_turned_where_they_lie():
    query, key = heads_of((64, 8, 128)), heads_of((64, 2, 128))
    rows = rows_of((64,), 64)
    want = bind([query, key], rows, "xla")
    run = jax.jit(lambda query, key, rows: bind([query, key], rows), donate_argnums=0)
    compiled = run.lower(query, key, rows).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == query.nbytes
    assert memory.temp_size_in_bytes < 1024
    places, before = [address(x) for x in (query, key)], np.asarray(key).copy()
    got = run(query, key, rows)
    same_bits(got, want)
    assert query.is_deleted() and address(got[0]) == places[0]
    # What was not donated is copied first.
    assert address(got[1]) != places[1]
    np.testing.assert_array_equal(key, before)


def test_heads_inside_a_program_need_no_other_memory():
    x, (cos, sin) = heads_of((256, 8, 128)), rows_of((256,), 64)

    def program(x):
        return lax.fori_loop(0, 3, lambda _, x: bind([x], (cos, sin))[0], x)

    compiled = jax.jit(program, donate_argnums=0).lower(x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1024
    want = x
    for _ in range(3):
        (want,) = bind([want], (cos, sin), "xla")
    same_bits([program(x)], [want])


def test_heads_that_are_used_again_keep_their_values():
    x, rows = heads_of((9, 4, 8)), rows_of((9,), 4)
    other = rows_of((9,), 4)

    @jax.jit
    def program(x):
        made = x * 2
        turned, again = bind([made, made], rows)
        (twice,) = bind([turned], other)
        return made, turned, again, twice, made + twice

    made = x * 2
    (turned,) = bind([made], rows, "xla")
    (twice,) = bind([turned], other, "xla")
    same_bits(program(x), [made, turned, turned, twice, made + twice])


def test_views_and_other_layouts_are_turned_alone():
    whole, rows = heads_of((2, 6, 5, 16)), rows_of((6,), 4)

    def program(whole, implementation):
        heads = whole[1, :, 1:4, 3:11]
        (turned,) = bind([heads], rows, implementation)
        moved = jnp.swapaxes(whole, 1, 2)[..., :8]
        (across,) = bind([jnp.swapaxes(moved, 1, 2)], rows_wide, implementation)
        return turned, jnp.swapaxes(across, 1, 2), whole

    rows_wide = [row[None] for row in rows]
    run = jax.jit(program, static_argnums=1)
    same_bits(run(whole, NAME), run(whole, "xla"))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_the_same_in_every_program(neox, dtype):
    x, (cos, sin) = heads_of((3, 5, 4, 8), dtype), rows_of((3, 5), 3)

    def one(x, cos, sin):
        return bind([x], (cos, sin), neox=neox, offset=1)[0]

    @jax.jit
    def program(x, cos, sin):
        out, pull = jax.vjp(lambda x: one(x, cos, sin), x)
        _, scanned = lax.scan(lambda _, given: (0, one(*given)), 0, (x, cos, sin))
        mapped = jax.vmap(one, (2, None, None), 2)(x[:, :, :, None], cos, sin)
        back = jax.vmap(jax.grad(lambda *a: jnp.vdot(one(*a), a[0])))(x, cos, sin)
        return (out, scanned, mapped[:, :, :, 0]), pull(out)[0], back

    outs, pulled, back = program(x, cos, sin)
    for out in outs:
        same_bits([out], [one(x, cos, sin)])
    there, again = one(x, cos, sin), one(x, cos, -sin)
    same_bits([pulled], [one(there, cos, -sin)])
    near = 4 * float(jnp.finfo(dtype).eps)
    wide = (there.astype(jnp.float32), again.astype(jnp.float32))
    np.testing.assert_allclose(back.astype("float32"), sum(wide), rtol=near, atol=near)


def test_threads_that_call_at_once():
    shapes = [((t,), n, dtype) for t in (1, 7, 300) for n in (1, 4) for dtype in DTYPES]

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            leading, heads, dtype = shapes[rng.integers(len(shapes))]
            x = jnp.asarray(rng.standard_normal((*leading, heads, 16)), dtype)
            rows = [jnp.asarray(rng.standard_normal((*leading, 8)), "float32")] * 2
            same_bits(bind([x], rows), bind([x], rows, "xla"))
        return seed

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


def python(code, **environment):
    """Runs a program of its own, with `x`, `rows`, `rotate` and `route` at hand."""
    names = (
        "import jax, jax.numpy as jnp, numpy as np, jrope, os, sys\n"
        "route = {'layout': jrope.RotaryLayout(head_dim=16, rotary_dim=16),"
        " 'implementation': 'cpu_inplace'}\n"
        "def operands(tokens):\n"
        "    return jnp.ones((tokens, 4, 16)), None, *jnp.ones((2, tokens, 8))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", names + code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_forked_child_runs_the_handler():
    """JAX is not safe to fork; the handler has no threads or locks of its own."""
    code = """
sys.path.insert(0, "tests")
import ctypes, signal, ffi_frames
from jrope._routes import _cpu_kernel
want = jrope.rotate(*operands(5), **route)[0]
compiled = _cpu_kernel.compiled("float32")
handler = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(compiled.address)
def turned():
    x = np.ones((5000, 4, 16), np.float32)
    rows = np.ones((2, 5000, 8), np.float32)
    assert ffi_frames.Call([x], *rows, [x]).run(handler) is None
    return x
before = turned()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if np.array_equal(turned(), before) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
np.testing.assert_array_equal(jrope.rotate(*operands(5), **route)[0], want)
print("both")
"""
    assert python(code) == (0, "both", "")


def test_a_process_may_end_while_heads_turn():
    code = """
run = jax.jit(lambda *a: jax.lax.fori_loop(
    0, 60, lambda i, x: jrope.rotate(x, *a[1:], **route)[0], a[0]))
for _ in range(3):
    out = run(*operands(20_000))
print("dispatched")
"""
    assert python(code) == (0, "dispatched", "")


def test_without_numba_the_device_half_works_and_the_route_declines():
    code = """
sys.modules["numba"] = None
import jrope.nnx, jrope.flashinfer, jrope.routes
operands = operands(5)
jrope.rotate(*operands, layout=route["layout"])
try:
    jrope.rotate(*operands, **route)
except ValueError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("llvmlite")]
"""
    code, said, error = python(code)
    assert (code, error) == (0, "")
    assert "'cpu_inplace' declines this rotation: its handler must be compiled" in said
    assert "by numba, which is not there" in said


def test_without_its_compiler_numba_does_not_serve():
    code = """
try:
    jrope.rotate(*operands(5), **route)
except ValueError as error:
    print(error)
"""
    code, said, error = python(code, NUMBA_DISABLE_JIT="1")
    assert (code, error) == (0, "")
    assert "must be compiled, and NUMBA_DISABLE_JIT forbids it" in said


def test_where_nothing_is_written_it_is_compiled_anew_and_says_so(tmp_path):
    code = """
import logging, numba.core.caching
logging.basicConfig(format="%(message)s", stream=sys.stdout)
numba.core.caching.CacheImpl._locator_classes = []
print(jrope.rotate(*operands(5), **route)[0].shape)
"""
    code, said, error = python(code)
    assert (code, error) == (0, "")
    assert said.splitlines()[-1] == "(5, 4, 16)"
    assert "anew in every process, since numba has no folder" in said


def rotation_of(platform="cpu", shape=(4, 2, 8), dtype="float32"):
    return Rotation(
        platform=platform,
        xs=(jax.ShapeDtypeStruct(shape, dtype),),
        rows=jax.ShapeDtypeStruct((*shape[:-2], 4), jnp.float32),
        is_neox_style=True,
        rotary_offset=0,
    )


def test_cpu_keeps_xla_unless_the_route_is_named():
    assert choose_route(rotation_of(), None) is XLA
    assert choose_route(rotation_of(), NAME) is CPU_INPLACE
    for platform in ("cuda", "tpu", "nosuch"):
        with pytest.raises(
            ValueError, match=f"must be one of .* on platform '{platform}'"
        ):
            choose_route(rotation_of(platform), NAME)


@pytest.mark.usefixtures("own_routes")
def test_a_platform_under_another_name_is_declined(monkeypatch):
    monkeypatch.setenv("JROPE_PLATFORM_ALIASES", "other=cpu")
    with pytest.raises(ValueError, match="is for the platform 'cpu', got 'other'"):
        choose_route(rotation_of("other"), NAME)


def test_dtypes_and_shapes_that_it_does_not_know_are_declined():
    with pytest.raises(ValueError, match="dtype must be one of .* got float8_e5m2"):
        choose_route(rotation_of(dtype="float8_e5m2"), NAME)
    (tokens,) = jax.export.symbolic_shape("tokens")
    with pytest.raises(ValueError, match=r"shapes must be known, got \(tokens, 2, 8\)"):
        choose_route(rotation_of(shape=(tokens, 2, 8)), NAME)


def test_another_machine_is_declined(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ValueError, match="little-endian machines with addresses of 64"):
        choose_route(rotation_of(), NAME)


@pytest.fixture
def unregistered(monkeypatch):
    """As in a process that has not yet looked at XLA's FFI."""
    from jrope._routes import _ffi

    # Targets of one name stay registered in XLA.
    monkeypatch.setattr(_ffi, "PROBE", f"jrope_ffi_probe_{next(COUNT)}")
    monkeypatch.setattr(_ffi, "_HELD", {})
    monkeypatch.setattr(_ffi, "differs", functools.cache(_ffi.differs.__wrapped__))
    return _ffi


COUNT = itertools.count()


@pytest.mark.parametrize("field", ["LAST_MINOR", "FIRST_MINOR"])
def test_another_version_of_xlas_ffi_is_declined(unregistered, monkeypatch, field):
    wrong = {"LAST_MINOR": 2, "FIRST_MINOR": 9}[field]
    monkeypatch.setattr(unregistered.layout, field, wrong)
    with pytest.raises(ValueError, match=r"declines .*XLA's FFI must have a version"):
        choose_route(rotation_of(), NAME)
    # Nothing was compiled or handed over, and the answer stays.
    assert list(unregistered._HELD) == [unregistered.PROBE]
    with pytest.raises(ValueError, match="must have a version from 0"):
        choose_route(rotation_of(), NAME)


def test_without_a_cpu_client_it_is_declined(unregistered, monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ValueError, match="no CPU client .*: Unknown backend cpu"):
        choose_route(rotation_of(), NAME)
    assert not unregistered._HELD


def test_a_handler_that_xla_refuses_is_declined(unregistered, monkeypatch):
    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("no room")

    unregistered.differs()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(ValueError, match="XLA refuses its handler: no room"):
        choose_route(rotation_of(), NAME)


def test_an_export_says_that_it_holds_a_custom_call():
    layout = RotaryLayout(head_dim=8, rotary_dim=8)
    run = jax.jit(lambda *a: rotate(*a, layout=layout, implementation=NAME)[0])
    operands = heads_of((4, 2, 8)), None, *rows_of((4,), 4)
    with pytest.raises(ValueError, match="(?s)custom call.*jrope_cpu_inplace_"):
        jax.export.export(run, platforms=["cpu"])(*operands)
