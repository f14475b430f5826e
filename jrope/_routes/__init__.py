"""The table of routes: which ways there are to run the rotation on each platform."""

from jrope._routes._platforms import XLA_PLATFORMS, canonical_platform
from jrope._routes._route import Rotation, Route
from jrope._routes.composite import COMPOSITE
from jrope._routes.cpu_inplace import CPU_INPLACE
from jrope._routes.pallas import PALLAS
from jrope._routes.xla import XLA

# Best first, for each platform. XLA, which takes every case on every platform, and the
# composite form come last and are not written here. See README.md.
ROUTES: dict[str, tuple[Route, ...]] = {}

# Routes that serve only who names them, likewise by platform.
BY_NAME: dict[str, tuple[Route, ...]] = {
    "cpu": (CPU_INPLACE,),
    "cuda": (PALLAS,),
}


def routes_for(platform: str) -> tuple[Route, ...]:
    """The routes of a platform, known or not, best first.

    A platform that XLA does not compile for gets the composite form before plain JAX,
    which takes all that gets to it: what comes after it is chosen only by name.
    """
    canonical = canonical_platform(platform)
    general = (XLA, COMPOSITE) if canonical in XLA_PLATFORMS else (COMPOSITE, XLA)
    held = (route for name in keys_of(platform) for route in ROUTES[name])
    return (*held, *general, *BY_NAME.get(canonical, ()))


def keys_of(platform: str) -> list[str]:
    """Keys of `ROUTES` that stand for the same platform, its own first.

    There are several where routes were registered for a name before it became an alias.
    """
    canonical = canonical_platform(platform)
    keys = [name for name in ROUTES if canonical_platform(name) == canonical]
    return sorted(keys, key=lambda name: name != canonical)


def route_names() -> tuple[str, ...]:
    """Every name that `implementation=` may have."""
    tables = (*ROUTES.values(), *BY_NAME.values())
    names = {route.name for routes in tables for route in routes}
    return tuple(sorted(names | {XLA.name, COMPOSITE.name}))


def needs_devices(implementation: str | None) -> bool:
    """Whether a route must know the devices that its program is lowered for."""
    return implementation in (CPU_INPLACE.name, PALLAS.name)


def choose_route(rotation: Rotation, implementation: str | None) -> Route:
    """The best route that takes the case, or the one that was asked for.

    Raises:
      ValueError: if the route asked for is not one of the platform's, or declines; the
        message gives its reason.
    """
    candidates = routes_for(rotation.platform)
    if implementation is None:
        return next(route for route in candidates if route.declines(rotation) is None)
    for route in candidates:
        if route.name == implementation:
            reason = route.declines(rotation)
            if reason is None:
                return route
            raise ValueError(
                f"implementation={implementation!r} declines this rotation: {reason}"
            )
    raise ValueError(
        f"implementation must be one of {[route.name for route in candidates]} on "
        f"platform {rotation.platform!r}, got {implementation!r}"
    )


__all__ = [
    "BY_NAME",
    "ROUTES",
    "Rotation",
    "Route",
    "choose_route",
    "needs_devices",
    "route_names",
    "routes_for",
]
