"""Every device operation, on each of its routes, under each of JAX's transforms.

The cells are those of the documentation's page; CHECKS says what each must do.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
import transform_cases
import transform_fused
from transform_checks import CHECKS, instance, on_device

import jrope
from docs.transforms_page import (
    OPERATIONS,
    RULES,
    TRANSFORMS,
    Absent,
    Refused,
    cells,
    make_page,
    outcome,
)
from jrope import fused, positions_jax
from jrope._routes import BY_NAME, route_names
from jrope._routes.cpu_inplace import CPU_INPLACE
from jrope._routes.pallas import PallasRoute
from jrope.fused._kernels import PLATFORMS, Kernels
from pallas_kernels import jax_too_old

CASES = transform_cases.CASES | transform_fused.CASES
RUN = [cell for cell in cells() if not isinstance(outcome(*cell), Absent)]


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    """Transforms act before LLVM optimises, which costs half of these tests' time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def on_route(monkeypatch):
    """An operation on a route; here the kernels are interpreted."""

    def found(operation, route):
        if route == "pallas":
            if jax_too_old() is not None:
                pytest.skip(str(jax_too_old()))
            routes = (CPU_INPLACE, PallasRoute(interpret=True))
            monkeypatch.setitem(BY_NAME, "cpu", routes)
            monkeypatch.setitem(PLATFORMS, "cpu", Kernels(interpret=True))
        named = None if route in ("plain", "default") else route
        case = CASES[operation]
        return case, functools.partial(case.run, named)

    return found


@pytest.mark.parametrize(
    ("operation", "route", "transform"), RUN, ids=[", ".join(cell) for cell in RUN]
)
def test_cell(operation, route, transform, on_route):
    case, run = on_route(operation, route)
    refused = outcome(operation, route, transform)
    if isinstance(refused, Refused):
        with pytest.raises(refused.error, match=refused.message):
            CHECKS[transform](case, run)
        return
    if outcome(operation, route, "grad") is not None:
        case = dataclasses.replace(case, moving=())
    CHECKS[transform](case, run)


def test_the_table_names_every_device_operation_route_and_check():
    assert set(CASES) == set(OPERATIONS)
    assert set(CHECKS) == set(TRANSFORMS)
    assert {route for row in OPERATIONS.values() for route in row} == {
        *route_names(),
        "plain",
        "default",
    }
    # `stack_tables` builds on the host; what starts with a capital is a class.
    held = {name for name in jrope._DEVICE_HALF if name.islower()} - {"stack_tables"}
    held |= {f"fused.{name}" for name in fused.__all__ if name.islower()}
    held |= {
        f"positions_jax.{name}"
        for name, value in vars(positions_jax).items()
        if getattr(value, "__module__", "") == positions_jax.__name__
        and not name.startswith("_")
    }
    held |= {"nnx.RotaryEmbedding", "linen.RotaryEmbedding"}
    assert {name.split(",")[0] for name in OPERATIONS} == held


@pytest.mark.parametrize("rule", RULES, ids=[rule.outcome.says for rule in RULES])
def test_every_exception_is_one(rule):
    """No rule is idle, and where there is nothing to run there is nothing."""
    found = [cell for cell in cells() if outcome(*cell) is rule.outcome]
    assert {operation for operation, *_ in found} <= set(rule.operations)
    assert {cell[2] for cell in found} == set(rule.transforms)
    if not isinstance(rule.outcome, Absent):
        return
    for operation, _, transform in found:
        case = CASES[operation]
        if transform == "float64":
            assert not any(set(letters) & set("HF") for letters in case.letters)
            continue
        given = on_device(instance(case))
        results = jax.eval_shape(functools.partial(case.run, None), *given)
        kinds = {(x.shape, x.dtype) for x in given}
        assert not kinds & {(out.shape, out.dtype) for out in results}


@pytest.mark.parametrize("operation", ["nnx.RotaryEmbedding", "linen.RotaryEmbedding"])
@pytest.mark.parametrize("route", ["composite", "cpu_inplace"])
def test_layers_hand_their_route_on(operation, route):
    case = CASES[operation]
    run = functools.partial(case.run, route)
    text = str(jax.make_jaxpr(run)(*on_device(instance(case))))
    assert text.count("implementation=") == text.count(f"implementation={route}") > 0


def test_debug_nans_finds_positions_that_are_out_of_range():
    case = CASES["apply_rope"]
    positions, query, key, table = on_device(instance(case))
    past = positions.at[0, 0].set(table.shape[0])

    def run(positions, **options):
        layout = transform_cases.LAYOUT
        return jrope.apply_rope(positions, query, key, table, layout=layout, **options)

    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="nan"):
            jax.jit(run)(past)
        with pytest.raises(ValueError, match="positions must be below the table's 32"):
            run(np.asarray(past))
        jax.jit(functools.partial(run, out_of_range="clip"))(past)


def test_the_page_has_a_row_for_every_operation_and_route():
    page = make_page()
    for operation, routes in OPERATIONS.items():
        for route in routes:
            row = re.search(rf"^\| `{operation}` \| {route} \| (.*) \|$", page, re.M)
            assert row
            marks = row[1].split(" | ")
            for mark, transform in zip(marks, TRANSFORMS, strict=True):
                found = outcome(operation, route, transform)
                assert (mark == "yes") == (found is None)
                assert found is None or re.search(
                    rf"^- \*\*{mark}\*\*: .*{re.escape(found.says)}$", page, re.M
                )
