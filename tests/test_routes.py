"""Routes from outside: registering, aliases, and the program that is printed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import assert_static, composites, operations

from jrope import RotaryLayout, rotate, routes
from jrope._routes import route_names, routes_for

LAYOUT = RotaryLayout(head_dim=8, rotary_dim=8)
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("own_routes")


def shifted(x, cos, sin, *, mode):
    """The definition plus 100, so that its use is seen in the result."""
    return routes.definition(x, cos, sin, mode=mode) + jnp.asarray(100, x.dtype)


SHIFT = routes.FullWidthRoute(name="shift", kernel=shifted)


def arrays():
    query = jnp.asarray(RNG.standard_normal((3, 4, 8)), jnp.float32)
    angles = RNG.uniform(0, 6, (3, 4))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    return query, cos, sin


@jax.jit
def jitted(query, cos, sin):
    return rotate(query, None, cos, sin, layout=LAYOUT)[0]


def eager(query, cos, sin):
    return rotate(query, None, cos, sin, layout=LAYOUT)[0]


def program(platform, *, backward=False, **options):
    lowered = routes.lower_step(
        platform, (2, 5, 4, 8), layout=LAYOUT, backward=backward, **options
    )
    return lowered.as_text()


@pytest.mark.parametrize("run", [eager, jitted], ids=["eager", "jit"])
def test_functions_that_ran_before_take_the_new_route(run):
    operands = arrays()
    before = np.asarray(run(*operands))
    routes.register("cpu", SHIFT)
    np.testing.assert_allclose(run(*operands), before + 100, rtol=1e-6)
    routes.unregister("cpu", "shift")
    np.testing.assert_array_equal(run(*operands), before)


def test_under_every_transformation():
    query, cos, sin = arrays()
    weight = jnp.asarray(RNG.standard_normal(query.shape), jnp.float32)

    def loss(query):
        return jnp.vdot(eager(query, cos, sin), weight)

    def mapped(query):
        return jax.vmap(eager)(query[None], cos[None], sin[None])[0]

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    sharded = jax.shard_map(eager, mesh=mesh, in_specs=spec, out_specs=spec)
    plain = [np.asarray(f(query)) for f in (mapped, jax.grad(loss))]
    plain.append(np.asarray(sharded(query, cos, sin)))
    routes.register("cpu", SHIFT)
    now = [mapped(query), jax.grad(loss)(query), sharded(query, cos, sin)]
    for before, after in zip(plain, now, strict=True):
        np.testing.assert_allclose(after, before + 100, rtol=1e-5)


def test_an_export_for_several_platforms_changes_on_one():
    operands = arrays()
    before = np.asarray(jitted(*operands))
    routes.register("hpu", SHIFT)
    exported = jax.export.export(jitted, platforms=["cpu", "hpu"])(*operands)
    assert "stablehlo.case" in exported.mlir_module()
    assert "1.000000e+02" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(*operands), before)


@pytest.mark.parametrize("name", ["hpu", "gaudi", "habana"])
@pytest.mark.parametrize("reported", ["hpu", "gaudi", "habana"])
def test_gaudis_names_are_one_platform(name, reported):
    routes.register(name, SHIFT)
    assert routes_for(reported)[0] is SHIFT
    assert routes_for("nosuch")[0] is routes_for("cpu")[1] is routes.COMPOSITE
    assert "1.000000e+02" in program(reported)
    assert "1.000000e+02" not in program("nosuch")


def test_a_name_is_forced_by_argument_or_by_environment(monkeypatch):
    routes.register("hpu", SHIFT)
    assert SHIFT not in routes_for("synapse")
    routes.alias("synapse", "gaudi")
    assert routes_for("synapse") == routes_for("hpu")
    assert SHIFT not in routes_for("other")
    monkeypatch.setenv(routes.ENVIRONMENT_VARIABLE, " other = habana , cpu=hpu,")
    assert routes_for("other") == routes_for("cpu") == routes_for("hpu")
    assert "1.000000e+02" in program("other")


def test_aliases_lead_to_aliases_in_any_order(monkeypatch):
    routes.register("hpu", SHIFT)
    routes.alias("first", "second")
    assert SHIFT not in routes_for("first")
    routes.alias("second", "habana")
    assert routes_for("first") == routes_for("second") == routes_for("hpu")
    monkeypatch.setenv(routes.ENVIRONMENT_VARIABLE, "a=b,b=first,second=cpu")
    assert routes_for("a") == routes_for("first") == routes_for("cpu")
    assert SHIFT not in routes_for("a")


def test_aliases_in_a_circle_are_refused(monkeypatch):
    routes.alias("first", "second")
    for pair in (("second", "first"), ("own", "own"), ("hpu", "gaudi")):
        with pytest.raises(ValueError, match="must lead to a platform, got the circle"):
            routes.alias(*pair)
    assert routes_for("second") == routes_for("nosuch")
    monkeypatch.setenv(routes.ENVIRONMENT_VARIABLE, "second=first")
    with pytest.raises(ValueError, match="circle first -> second -> first; is one of"):
        program("first")


@pytest.mark.parametrize("by_environment", [False, True])
def test_routes_of_a_name_that_becomes_an_alias_are_kept(monkeypatch, by_environment):
    other = dataclasses.replace(SHIFT, name="other")
    routes.register("synapse", SHIFT)
    routes.register("hpu", other)
    if by_environment:
        monkeypatch.setenv(routes.ENVIRONMENT_VARIABLE, "synapse=hpu")
    else:
        routes.alias("synapse", "hpu")
    for name in ("synapse", "hpu", "gaudi"):
        listed = [route.name for route in routes_for(name)]
        assert listed == ["other", "shift", "composite", "xla"]
    assert "1.000000e+02" in program("gaudi", implementation="shift")
    with pytest.raises(ValueError, match="must be new on platform"):
        routes.register("hpu", SHIFT)
    routes.register("synapse", dataclasses.replace(SHIFT, name="newest"))
    assert routes_for("hpu")[0].name == "newest"
    routes.unregister("hpu", "shift")
    assert SHIFT not in routes_for("synapse")


def test_platforms_with_routes_of_one_name_do_not_become_one():
    routes.register("synapse", SHIFT)
    routes.register("hpu", SHIFT)
    with pytest.raises(
        ValueError, match=r"of different names.*got \['shift'\] on both"
    ):
        routes.alias("synapse", "hpu")
    routes.unregister("hpu", "shift")
    assert SHIFT not in routes_for("hpu") and SHIFT in routes_for("synapse")


@pytest.mark.parametrize(
    ("platform", "error"),
    [(None, TypeError), (5, TypeError), ("", ValueError), (" hpu", ValueError)],
)
def test_what_is_no_platform_is_refused(platform, error):
    with pytest.raises(error, match="platform must be a"):
        routes.register(platform, SHIFT)
    with pytest.raises(error, match="platform must be a"):
        routes.unregister(platform, "shift")
    with pytest.raises(error, match="platform must be a"):
        routes.alias("synapse", platform)
    with pytest.raises(error, match="reported must be a"):
        routes.alias(platform, "hpu")
    with pytest.raises(error, match="platform must be a"):
        routes.lower_step(platform, (2, 5, 4, 8), layout=LAYOUT)


@pytest.mark.parametrize("text", ["hpu", "=hpu", "synapse=", "a=b,c", "a=b=c"])
def test_a_malformed_environment_is_an_error(monkeypatch, text):
    monkeypatch.setenv(routes.ENVIRONMENT_VARIABLE, text)
    with pytest.raises(ValueError, match=r"must be REPORTED=PLATFORM pairs.*got '"):
        routes_for("cpu")


def test_the_newest_goes_first_and_names_are_taken_once():
    other = dataclasses.replace(SHIFT, name="other")
    routes.register("hpu", SHIFT)
    routes.register("gaudi", other)
    names = [route.name for route in routes_for("hpu")]
    assert names == ["other", "shift", "composite", "xla"]
    assert {"other", "shift"} <= set(route_names())
    for platform, route in (("habana", SHIFT), ("hpu", routes.COMPOSITE)):
        with pytest.raises(ValueError, match="must be new on platform .*twice"):
            routes.register(platform, route)
    with pytest.raises(ValueError, match=r"one of \['other', 'shift'\].*got 'xla'"):
        routes.unregister("hpu", "xla")


def test_what_is_no_route_is_refused():
    with pytest.raises(TypeError, match="must have name, declines and run, got func"):
        routes.register("hpu", shifted)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass
class Bare:
    name: Any = "bare"
    declines: Any = SHIFT.declines
    run: Any = SHIFT.run


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (Bare(run=None), r"must have name, declines and run.*without \['run'\]"),
        (Bare(declines="no"), r"must have name, .*without \['declines'\]"),
        (Bare(name=None), "a route's name must be a str.*got None"),
        (Bare(name=""), "a route's name must be a str.*got ''"),
        (Bare(name=5), "a route's name must be a str.*got 5"),
        (Bare, "must be an object, got the class Bare; are the parentheses missing"),
        (None, "must have name, declines and run, got NoneType"),
    ],
)
def test_what_only_looks_like_a_route_is_refused(route, message):
    names = route_names()
    with pytest.raises(TypeError, match=message):
        routes.register("hpu", route)
    assert route_names() == names


def test_a_route_that_declines_leaves_the_composite():
    def refuses(rotation):
        return "bfloat16 only" if rotation.dtype != jnp.bfloat16 else None

    routes.register("hpu", dataclasses.replace(SHIFT, refuses=refuses))
    assert composites(program("hpu", dtype="float32"))
    assert not composites(program("hpu", dtype="bfloat16"))
    with pytest.raises(ValueError, match="'shift' declines.*bfloat16 only"):
        program("hpu", dtype="float32", implementation="shift")


@pytest.mark.parametrize("is_backward", [False, True])
def test_the_program_and_its_operations(is_backward):
    lowered = routes.lower_step(
        "hpu", (2, 5, 4, 8), layout=LAYOUT, backward=is_backward
    )
    assert_static(lowered.as_text())
    outside, inside = routes.operations(lowered)
    both = {name.removeprefix("stablehlo.") for name in outside + inside}
    found = operations(lowered.as_text())
    assert both - {"func.func", "func.return"} == found
    assert outside["stablehlo.composite"] == (4 if is_backward else 2)
    assert outside["stablehlo.gather"] == 1
    assert inside["stablehlo.multiply"] and "stablehlo.multiply" not in outside


@pytest.mark.parametrize(
    ("shape", "options", "error"),
    [
        ((), {}, r"shape must be \[\*B, T, N, H\] of the query, got \(\)"),
        ((4, 8), {}, r"shape must be \[\*B, T, N, H\] of the query"),
        ((-1, 4, 8), {}, "a size in shape must be at least 0, got -1"),
        ((2.0, 4, 8), {}, "a size in shape must be an int, got 2.0"),
        ((2, 4, 8), {"key_heads": -1}, "key_heads must be at least 1, got -1"),
        ((2, 4, 8), {"max_position_embeddings": 0}, "max_position_.* be at least 1"),
        (None, {}, r"shape must be \[\*B, T, N, H\] of the query, got None"),
        (8, {}, r"shape must be \[\*B, T, N, H\] of the query, got 8"),
        ("abc", {}, r"shape must be \[\*B, T, N, H\] of the query, got 'abc'"),
        (("2", 4, 8), {}, "a size in shape must be an int, got '2'"),
        ((2, 4, 8), {"layout": None}, "must be a RotaryLayout.* got NoneType"),
        ((2, 4, 8), {"key_heads": "1"}, "key_heads must be an int, got '1'"),
        ((2, 4, 8), {"dtype": "nosuch"}, "dtype must be one of JAX's.* got 'nosuch'"),
        ((2, 4, 8), {"dtype": object()}, "dtype must be one of JAX's.* got <object"),
        ((2, 4, 8), {"backward": "yes"}, "backward must be a bool, got 'yes'"),
        ((2, 4, 8), {"out_of_range": 3}, "out_of_range must be one of .* got 3"),
        ((2, 4, 8), {"implementation": 3}, "implementation must be"),
    ],
)
def test_a_step_of_no_size_is_refused(unchecked, shape, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        routes.lower_step("hpu", shape, **{"layout": LAYOUT, **options})


@pytest.mark.parametrize("shape", [(2, 0, 2, 8), (0, 5, 2, 8), (0, 2, 8)])
def test_a_step_of_no_tokens_is_a_program(shape):
    assert (
        len(composites(routes.lower_step("hpu", shape, layout=LAYOUT).as_text())) == 2
    )


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jrope.routes", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_what_a_plugin_receives():
    done = command("--platform", "hpu", "--shape", "2,16,8,128", "--key-heads", "2")
    assert (done.returncode, done.stderr) == (0, "")
    *text, outside, inside = done.stdout.strip().splitlines()
    assert_static("\n".join(text))
    rows = "2x16x1x128xf32"
    assert composites("\n".join(text)) == [
        (f"2x16x{n}x128xbf16", rows, rows, 0, 1) for n in (8, 2)
    ]
    assert outside.startswith("// operations: ") and "2 stablehlo.composite" in outside
    assert inside.startswith("// operations inside composites: 2 func.return")


def main(capsys, *arguments):
    code = routes.main(["--platform", "hpu", *arguments])
    return code, *capsys.readouterr()


def test_the_commands_options(capsys):
    options = ("--shape", "5,8,16", "--rotary-dim", "8", "--pairing", "gptj")
    code, out, _ = main(capsys, *options, "--narrow-rows", "--backward")
    assert code == 0
    assert composites(out)[0] == ("5x8x8xbf16", "5x1x8xbf16", "5x1x8xbf16", 1, 1)
    assert len(composites(out)) == 4


def test_the_command_refuses(capsys):
    code, out, err = main(capsys, "--shape", "5,8,16", "--rotary-dim", "7")
    assert (code, out) == (1, "") and "refused: rotary_dim must be even" in err
    code, out, err = main(capsys, "--shape", "5,8,16", "--rotary-dim", "0")
    assert (code, out) == (1, "") and "rotary_dim must be at least 2" in err
    with pytest.raises(SystemExit):
        main(capsys, "--shape", "8,16")
    assert "must be [*B, T, N, H], got 8,16" in capsys.readouterr().err
