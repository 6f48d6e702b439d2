"""laminar: the command line. Parses, builds, runs; a user's mistake is one sentence and exit 2."""

from __future__ import annotations

import argparse
import sys

from laminar import exit_codes
from laminar.cli import audit, clean, log, report, sim, train
from laminar.config import ConfigError


def main(argv: list[str] | None = None) -> None:
    """Entry of the `laminar` command."""
    parser = argparse.ArgumentParser(
        prog="laminar", description="Asynchronous RL post-training of language models."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (train, clean, log, audit, report, sim):
        module.add_parser(subparsers)
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *_spelled_with_dashes(rest)]
    try:
        code = arguments.function(arguments)
    except ConfigError as error:
        print(f"laminar: {error}", file=sys.stderr)
        code = exit_codes.USER_ERROR
    sys.exit(code)


def _spelled_with_dashes(rest: list[str]) -> list[str]:
    """`--a.b c` and `--a.b=c` mean `a.b=c`."""
    overrides, words = [], iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is neither key=value nor --key value")
        name = word.removeprefix("--")
        overrides.append(name if "=" in name else f"{name}={next(words, '')}")
    return overrides


if __name__ == "__main__":
    main()
