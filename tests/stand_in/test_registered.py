"""A vendor's own route on the stand-in: used there, in every way, and there alone."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from vendor import route as vendor_route

from jrope import RotaryLayout, rotate, routes

pytestmark = [pytest.mark.hpu, pytest.mark.usefixtures("own_routes")]
RNG = np.random.default_rng(0)
LAYOUT = RotaryLayout(head_dim=16, rotary_dim=16)
SHIFT = 100.0


def operands(layout=LAYOUT):
    x = RNG.standard_normal((2, 5, 3, layout.head_dim)).astype(np.float32)
    angles = RNG.uniform(0, 6, (2, 5, layout.rotary_dim // 2))
    return x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def turn(x, cos, sin):
    return rotate(x, None, cos, sin, layout=LAYOUT)[0]


def gradient(x, cos, sin):
    """Of <turn(x), 1>: itself a rotation, back, so that it is shifted as well."""
    return jax.grad(lambda x: jnp.sum(turn(x, cos, sin)))(x)


def on_a_mesh(*arrays):
    platform = next(iter(arrays[0].devices())).platform
    mesh = jax.make_mesh(
        (2,), ("b",), devices=jax.devices(platform)[:2], axis_types=(AxisType.Auto,)
    )
    placed = jax.device_put(arrays, NamedSharding(mesh, P("b")))
    mapped = jax.shard_map(turn, mesh=mesh, in_specs=P("b"), out_specs=P("b"))
    return jax.jit(mapped)(*placed)


def exported(x, cos, sin):
    made = jax.export.export(jax.jit(turn), platforms=["cpu", "hpu"])(x, cos, sin)
    return jax.export.deserialize(made.serialize()).call(x, cos, sin)


jitted = jax.jit(turn)
WAYS = {
    "eager": turn,
    "jit": jitted,
    "vmap": jax.vmap(turn),
    "grad": gradient,
    "shard_map": on_a_mesh,
    "export": exported,
}


def shifted(x, cos, sin, *, mode):
    return routes.definition(x, cos, sin, mode=mode) + jnp.asarray(SHIFT, x.dtype)


@pytest.mark.parametrize("way", WAYS)
def test_a_route_changes_results_on_its_platform_alone(hpu, cpu, way):
    run, given = WAYS[way], operands()
    on = {device: jax.device_put(given, device) for device in (hpu, cpu)}
    before = {device: np.asarray(run(*arrays)) for device, arrays in on.items()}
    np.testing.assert_allclose(before[hpu], before[cpu], rtol=0, atol=2e-6)
    routes.register("gaudi", routes.FullWidthRoute(name="shift", kernel=shifted))
    after = {device: run(*arrays) for device, arrays in on.items()}
    assert after[hpu].devices() <= set(jax.devices("hpu"))
    assert after[cpu].devices() <= set(jax.devices("cpu"))
    np.testing.assert_allclose(after[hpu], before[hpu] + SHIFT, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[cpu], before[cpu])


def test_eager_calls_follow_the_arrays_and_not_the_default(hpu, cpu):
    assert jax.devices()[0] == hpu
    routes.register("hpu", routes.FullWidthRoute(name="shift", kernel=shifted))
    given = operands()
    x, cos, sin = jax.device_put(given, cpu)
    assert float(jnp.abs(turn(x, cos, sin)).max()) < SHIFT / 2
    assert turn(x, cos, sin).devices() == {cpu}
    with jax.default_device(cpu):
        moved = turn(*jax.device_put(given, hpu))
    assert moved.devices() == {hpu} and float(jnp.abs(moved).max()) > SHIFT / 2


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["blockwise", "pairwise"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_a_fused_target_forward_and_backward(
    stand_in, hpu, cpu, fused, is_neox_style, rotary_dim
):
    layout = RotaryLayout(
        head_dim=16, rotary_dim=rotary_dim, is_neox_style=is_neox_style
    )

    @jax.jit
    def step(x, cos, sin):
        def loss(x):
            return jnp.sum(rotate(x, None, cos, sin, layout=layout)[0] ** 3)

        return jax.value_and_grad(loss)(x)

    given = operands(layout)
    plain = step(*jax.device_put(given, hpu))
    routes.register("hpu", vendor_route("stand_in_fused"))
    fused.calls.clear()
    compiled = len(stand_in.programs)
    vendor = jax.block_until_ready(step(*jax.device_put(given, hpu)))
    assert not fused.errors
    assert fused.calls == [0 if is_neox_style else 1] * 2  # Forward and backward.
    (text,) = stand_in.texts_since(compiled) or [stand_in.text()]
    assert text.count("@stand_in_fused") == 2 and "stablehlo.composite" not in text
    for ours, theirs in zip(plain, vendor, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-5)
    on_cpu = step(*jax.device_put(given, cpu))
    assert len(fused.calls) == 2 and on_cpu[1].devices() == {cpu}
    np.testing.assert_allclose(on_cpu[1], vendor[1], rtol=2e-6, atol=2e-5)


def test_where_the_fused_target_declines_the_composite_runs(hpu, fused):
    routes.register("hpu", vendor_route("stand_in_fused"))
    fused.calls.clear()
    x, cos, sin = jax.device_put(operands(), hpu)
    jax.block_until_ready(turn(x.astype(jnp.bfloat16), cos, sin))
    assert not fused.calls
    jax.block_until_ready(turn(x, cos, sin))
    assert fused.calls == [0]
    with pytest.raises(ValueError, match="'vendor' declines.*is for float32"):
        rotate(
            *(x.astype(jnp.bfloat16), None, cos, sin),
            layout=LAYOUT,
            implementation="vendor",
        )


ORDER = """
import sys
sys.path[:0] = {paths!r}
import jax, numpy as np
import plugin, vendor
from jrope import RotaryLayout, rotate, routes

kernel = vendor.FusedRope()
def load():
    global stand_in
    stand_in = plugin.load({reported!r})
def accept():
    jax.devices()
    plugin.accept_targets(stand_in, {reported!r})
def target():
    jax.ffi.register_ffi_target("fused", kernel.capsule(), platform={reported!r})
def route():
    routes.register("hpu", vendor.route("fused"))
jax.config.update("jax_platforms", "{reported},cpu")
for act in ({order}):
    act()
x = np.ones((4, 2, 8), np.float32)
rows = np.full((4, 4), 0.6, np.float32), np.full((4, 4), 0.8, np.float32)
out = jax.jit(lambda x, c, s: rotate(x, None, c, s,
    layout=RotaryLayout(head_dim=8, rotary_dim=8))[0])(x, *rows)
assert next(iter(out.devices())).platform == {reported!r}
np.testing.assert_allclose(out[..., :4], -0.2, rtol=1e-5)
np.testing.assert_allclose(out[..., 4:], 1.4, rtol=1e-5)
assert kernel.calls == [0] and not kernel.errors, (kernel.calls, kernel.errors)
"""


@pytest.mark.parametrize(
    ("reported", "order", "environment"),
    [
        ("hpu", "route, target, load, accept", {}),
        ("hpu", "load, accept, target, route", {}),
        ("habana", "route, load, target, accept", {}),
        (
            "synapse",
            "load, route, accept, target",
            {"JROPE_PLATFORM_ALIASES": "synapse=hpu"},
        ),
    ],
)
def test_targets_and_routes_come_before_or_after_the_plugin(
    reported, order, environment
):
    here = Path(__file__).parent
    code = ORDER.format(
        paths=[str(here), str(here.parents[1])], reported=reported, order=order
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
