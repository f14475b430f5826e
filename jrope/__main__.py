"""`python -m jrope explain CONFIG.json`: what a config.json means."""

import argparse
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
    command.add_argument("--plot", type=Path, help="draw wavelengths, such as out.svg")
    command.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    try:
        text = explain.run(
            given.config,
            layer_type=given.layer_type,
            picture=given.plot,
            as_json=given.json,
        )
    except (OSError, TypeError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
