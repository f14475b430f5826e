"""`python -m jrope explain CONFIG.json`: what a config.json means."""

import argparse
import contextlib
import sys
from pathlib import Path

from jrope import explain


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; the exit status, 1 where a config is refused."""
    parser = argparse.ArgumentParser(prog="python -m jrope", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("explain", help="what a config.json means")
    command.add_argument("config", type=Path, help="the config.json")
    command.add_argument("--layer-type", help="these layers alone")
    command.add_argument(
        "--pairing",
        choices=("neox", "gptj"),
        help="for model types that jrope does not know (is_neox_style)",
    )
    command.add_argument(
        "--max-position-embeddings",
        type=int,
        help="rows of the table, for longer contexts",
    )
    command.add_argument("--plot", type=Path, help="draw wavelengths, such as out.svg")
    command.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    try:
        text = explain.run(
            given.config,
            picture=given.plot,
            as_json=given.json,
            layer_type=given.layer_type,
            max_position_embeddings=given.max_position_embeddings,
            is_neox_style=None if given.pairing is None else given.pairing == "neox",
        )
    except ModuleNotFoundError:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, TypeError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):  # The reader has seen enough.
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
