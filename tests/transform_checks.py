"""What each transform must do to an operation: a check a transform, for every case."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

MAPPED = "BTNK"
STEP = 1e-5


def close(actual, exact, *, bits=20):
    """Float32's rounding of a few operations; integers and bools exactly."""
    assert len(actual) == len(exact)
    for one, other in zip(actual, exact, strict=True):
        assert one.shape == np.shape(other)
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, other)
            continue
        size = max(1.0, float(np.max(np.abs(other))))
        np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-bits * size)


def instance(case, seed=0):
    return case.make(np.random.default_rng(seed))


def instances(case):
    """Two, and every operand of both in one array."""
    both = [instance(case, seed) for seed in (1, 2)]
    return both, [np.stack(pair) for pair in zip(*both, strict=True)]


def on_device(arrays):
    return tuple(map(jnp.asarray, arrays))


def value(case, run):
    given = instance(case)
    close(run(*on_device(given)), case.exact(*given))


def directions(case, given, seed):
    """A direction for each moving operand."""
    rng = np.random.default_rng(seed)
    return {i: rng.standard_normal(given[i].shape) for i in case.moving}


def along(case, given, direction):
    """The exact derivative of every result along a direction."""

    def at(step):
        moved = [
            np.float64(x) + step * direction[i] if i in direction else x
            for i, x in enumerate(given)
        ]
        return case.exact(*moved)

    pairs = zip(at(STEP), at(-STEP), strict=True)
    return [(np.float64(a) - b) / (2 * STEP) for a, b in pairs]


def weighted(case, run):
    """Its results times weights: a program that is differentiated around it."""
    count = len(case.letters)

    def both(*given):
        outs, weights = run(*given[:count]), given[count:]
        pairs = zip(outs, weights, strict=True)
        return tuple(out.astype(jnp.float32) * weight for out, weight in pairs)

    def exact(*given):
        outs, weights = case.exact(*given[:count]), given[count:]
        return tuple(out * weight for out, weight in zip(outs, weights, strict=True))

    def make(rng):
        given = case.make(rng)
        shapes = [np.shape(out) for out in case.exact(*given)]
        weights = [np.float32(rng.standard_normal(shape)) for shape in shapes]
        return (*given, *weights)

    made = dataclasses.replace(
        case,
        make=make,
        exact=exact,
        letters=(*case.letters, *case.results),
        moving=tuple(range(count, count + len(case.results))),
    )
    return made, both


def differentiable(case, run):
    """The operation, or what multiplies its results where it has no derivative."""
    return (case, run) if case.moving else weighted(case, run)


def of_moving(case, run, arrays):
    """The operation as a function of what is differentiated."""

    def moved(*values):
        operands = list(arrays)
        for i, x in zip(case.moving, values, strict=True):
            operands[i] = x
        return tuple(run(*operands))

    return moved


def jvp(case, run):
    """Results and their tangents, by forward mode."""
    case, run = differentiable(case, run)
    given = instance(case)
    direction = directions(case, given, 1)

    @jax.jit
    def forward(arrays, tangents):
        values = [arrays[i] for i in case.moving]
        return jax.jvp(of_moving(case, run, arrays), values, tangents)

    tangents = [jnp.asarray(direction[i], jnp.float32) for i in case.moving]
    outs, dots = forward(on_device(given), tangents)
    close(outs, case.exact(*given))
    close(dots, along(case, given, direction))


def pulled(case, run):
    """A function of operands and cotangents: results, and gradients by reverse mode."""

    def both(arrays, cotangents):
        values = [arrays[i] for i in case.moving]
        outs, pull = jax.vjp(of_moving(case, run, arrays), *values)
        return outs, pull(cotangents)

    return both


def grad(case, run, *, jit=jax.jit):
    """The results, and the gradient's products with random directions."""
    case, run = differentiable(case, run)
    given = instance(case)
    exact = case.exact(*given)
    rng = np.random.default_rng(2)
    cotangents = tuple(np.float32(rng.standard_normal(np.shape(x))) for x in exact)
    outs, gradients = jit(pulled(case, run))(on_device(given), on_device(cotangents))
    close(outs, exact)
    for seed in (3, 4, 5):
        direction = directions(case, given, seed)
        dots = along(case, given, direction)
        wanted = sum(np.vdot(d, ct) for d, ct in zip(dots, cotangents, strict=True))
        products = [
            np.float64(gradient) * direction[i]
            for i, gradient in zip(case.moving, gradients, strict=True)
        ]
        size = sum(np.abs(product).sum() for product in products)
        found = sum(product.sum() for product in products)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * size)


def jit(case, run):
    value(case, jax.jit(run))


def vmap(case, run):
    """Over each axis of tokens and of heads, of operands that have it."""
    given = instance(case)
    letters = [x for x in MAPPED if any(x in own for own in case.letters)]
    if not letters:
        vmap_all(case, run)
        return

    @jax.jit
    def over_each(*arrays):
        return [
            jax.vmap(run, axes_of(case, letter))(*apart(case, letter, arrays))
            for letter in letters
        ]

    outs = over_each(*on_device(given))
    for letter, lanes in zip(letters, outs, strict=True):
        wanted = [case.exact(*lane) for lane in lanes_of(case, letter, given)]
        close(lanes, [np.stack(each) for each in zip(*wanted, strict=True)])


def axes_of(case, letter):
    return [own.find(letter) if letter in own else None for own in case.letters]


def apart(case, letter, arrays):
    """A batch axis goes; of the others every call gets one entry, as an axis of 1."""
    return [
        x if at is None or letter == "B" else jnp.expand_dims(x, at + 1)
        for x, at in zip(arrays, axes_of(case, letter), strict=True)
    ]


def lanes_of(case, letter, given):
    axes = axes_of(case, letter)
    count = next(
        x.shape[at] for x, at in zip(given, axes, strict=True) if at is not None
    )
    for i in range(count):
        index = i if letter == "B" else [i]
        yield [
            x if at is None else np.take(x, index, at)
            for x, at in zip(given, axes, strict=True)
        ]


def vmap_all(case, run):
    """Over a new axis of every operand, tables, weights and caches too."""
    both, stacked = instances(case)
    outs = jax.jit(jax.vmap(run))(*on_device(stacked))
    wanted = zip(*(case.exact(*given) for given in both), strict=True)
    close(outs, [np.stack(pair) for pair in wanted])


def scan(case, run):
    """Two steps; what an operation rewrites is carried from the first to the second."""
    both, stacked = instances(case)
    places = list(case.carried)
    first = on_device(both[0])

    def step(carry, given):
        operands = list(given)
        for i, x in zip(places, carry, strict=True):
            operands[i] = x
        outs = run(*operands)
        return [outs[case.carried[i]] for i in places], outs

    run_all = jax.jit(lambda first, stacked: lax.scan(step, first, stacked))
    _, outs = run_all([first[i] for i in places], on_device(stacked))
    start = case.exact(*both[0])
    operands = list(both[1])
    for i in places:
        operands[i] = start[case.carried[i]]
    pairs = zip(start, case.exact(*operands), strict=True)
    close(outs, [np.stack(pair) for pair in pairs])


def remat(case, run):
    grad(case, jax.checkpoint(run))


def shard_map(case, run):
    """Batches over one axis of devices and heads over another, and its gradient.

    What has no batch runs once on each of two devices, on operands of its own.
    """
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    on = functools.partial(jax.shard_map, mesh=mesh)
    names = {"B": "data", "N": "heads", "K": "heads"}
    held = {letter for own in case.letters for letter in own} & set(names)
    if "B" in held:

        def spec(own):
            return Spec(*(names[x] if x in held else None for x in own))

        specs = tuple(map(spec, case.letters)), tuple(map(spec, case.results))
        grad(case, on(run, in_specs=specs[0], out_specs=specs[1]))
        return

    def alone(*operands):
        return [out[None] for out in run(*(x[0] for x in operands))]

    both, stacked = instances(case)
    spread = on(alone, in_specs=Spec("data"), out_specs=Spec("data"))
    outs = jax.jit(spread)(*on_device(stacked))
    wanted = zip(*(case.exact(*given) for given in both), strict=True)
    close(outs, [np.stack(pair) for pair in wanted])


def donated(case, run):
    """What becomes a result is used up, and nothing else is."""
    given = instance(case)
    arrays = on_device(given)
    outs = jax.jit(run, donate_argnums=tuple(case.carried))(*arrays)
    close(outs, case.exact(*given))
    for i, x in enumerate(arrays):
        assert x.is_deleted() == (i in case.carried)
        if i not in case.carried:
            np.testing.assert_array_equal(x, given[i])


def x64(case, run):
    """No result is wider for it, whatever is promoted; int64 is no position."""
    shapes = jax.eval_shape(run, *on_device(instance(case)))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        arrays = on_device(instance(case))
        wide = jax.eval_shape(run, *arrays)
        grad(case, run)
        for i, x in enumerate(arrays):
            if x.dtype == jnp.int32:
                operands = [*arrays[:i], x.astype(jnp.int64), *arrays[i + 1 :]]
                with pytest.raises(TypeError, match="on the device must be int32"):
                    run(*operands)
    assert [x.dtype for x in wide] == [x.dtype for x in shapes]


def float64(case, run):
    given = [
        np.float64(x) if set(own) & set("HF") else x
        for x, own in zip(instance(case), case.letters, strict=True)
    ]
    with jax.enable_x64(True):
        outs = jax.jit(run)(*on_device(given))
        assert all(out.dtype == jnp.float64 for out in outs)
        close(outs, case.exact(*given), bits=case.float64_bits)


def debug_nans(case, run):
    with jax.debug_nans(True):
        grad(case, run)


def disable_jit(case, run):
    with jax.disable_jit():
        grad(case, run, jit=lambda function: function)


def strict(case, run):
    """Nothing is promoted: it is the program whose values `grad` checks."""
    case, run = differentiable(case, run)
    given = instance(case)
    cotangents = tuple(map(np.float32, case.exact(*given)))
    operands = on_device(given), on_device(cotangents)

    def program(promotion, ranks):
        context = jax.numpy_dtype_promotion(promotion), jax.numpy_rank_promotion(ranks)
        with context[0], context[1]:
            text = str(jax.make_jaxpr(pulled(case, run))(*operands))
        return re.sub("0x[0-9a-f]+", "", text)

    assert program("strict", "raise") == program("standard", "allow")


CHECKS = {
    "jit": jit,
    "vmap": vmap,
    "vmap of all": vmap_all,
    "grad": grad,
    "jvp": jvp,
    "scan": scan,
    "remat": remat,
    "shard_map": shard_map,
    "donated": donated,
    "x64": x64,
    "float64": float64,
    "debug_nans": debug_nans,
    "disable_jit": disable_jit,
    "strict": strict,
}
