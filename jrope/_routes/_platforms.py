"""Which platform's routes a name stands for, as the PJRT client reports it."""

import os

ENVIRONMENT_VARIABLE = "JROPE_PLATFORM_ALIASES"

# Reported name to the name in the table of routes. No Gaudi plugin for JAX is public,
# so the name that one would report is not known; these are the likely ones.
ALIASES: dict[str, str] = {"gaudi": "hpu", "habana": "hpu"}

# Platforms whose compiler is XLA, on which plain JAX goes before the composite form.
XLA_PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu"})


def canonical_platform(reported: str) -> str:
    """The platform whose routes serve a reported name; the environment goes first.

    Raises:
      ValueError: if the environment variable is malformed.
    """
    name = _from_environment().get(reported, reported)
    return ALIASES.get(name, name)


def _from_environment() -> dict[str, str]:
    """Read at every lowering, never kept: a few names against a compilation."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    pairs = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    for reported, equals, platform in pairs:
        if not (reported and equals and platform):
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} must be REPORTED=PLATFORM pairs joined by "
                f"commas, such as synapse=hpu, got {text!r}"
            )
    return {reported.strip(): platform.strip() for reported, _, platform in pairs}
