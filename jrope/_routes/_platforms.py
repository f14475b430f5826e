"""Which platform's routes a name stands for, as the PJRT client reports it."""

import os

ENVIRONMENT_VARIABLE = "JROPE_PLATFORM_ALIASES"

# Reported name to the name that it stands for, which may stand for another in turn. No
# Gaudi plugin for JAX is public, so the name that one would report is not known; these
# are the likely ones.
ALIASES: dict[str, str] = {"gaudi": "hpu", "habana": "hpu"}

# Platforms whose compiler is XLA, on which plain JAX goes before the composite form.
XLA_PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu"})


def canonical_platform(reported: str) -> str:
    """The platform whose routes serve a reported name; the environment goes first.

    Raises:
      ValueError: if the environment variable is malformed, or leads in a circle.
    """
    return follow(reported, ALIASES | _from_environment())


def follow(name: str, aliases: dict[str, str]) -> str:
    """The name at the end of a chain of aliases.

    Raises:
      ValueError: if the chain has no end.
    """
    chain = [name]
    while chain[-1] in aliases:
        chain.append(aliases[chain[-1]])
        if chain[-1] in chain[:-1]:
            raise ValueError(
                f"platform aliases must lead to a platform, got the circle "
                f"{' -> '.join(chain)}; is one of alias() or {ENVIRONMENT_VARIABLE} "
                f"the wrong way round?"
            )
    return chain[-1]


def check_platform(name: str, value: object) -> None:
    """Raises unless it is the name of a platform."""
    if not isinstance(value, str):
        raise TypeError(
            f"{name} must be a str, the name that a PJRT client reports, got {value!r}"
        )
    if not value or value != value.strip():
        raise ValueError(
            f"{name} must be a name without spaces around it, got {value!r}"
        )


def _from_environment() -> dict[str, str]:
    """Read at every lowering, never kept: a few names against a compilation."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    pairs = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    for reported, equals, platform in pairs:
        if not (reported and equals and platform) or "=" in platform:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} must be REPORTED=PLATFORM pairs joined by "
                f"commas, such as synapse=hpu, got {text!r}"
            )
    return {reported.strip(): platform.strip() for reported, _, platform in pairs}
