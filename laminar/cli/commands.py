"""The commands of `laminar`: their list, and the exit code of each.

Reads   the words of the command line
Writes  the mistake of a user, as one sentence on stderr
Gives   the exit code
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from laminar.cli import (
    audit,
    clean,
    doctor,
    export,
    fork,
    init,
    log,
    plan,
    ps,
    quickstart,
    report,
    retrain,
    samples,
    scale,
    serve,
    stop,
    submit,
    tail,
    train,
    watch,
)
from laminar.cli.arguments import CommandParser
from laminar.launch.exit_handling import exit_code
from laminar.names.version import __version__


def build_parser() -> CommandParser:
    made = CommandParser(
        prog="laminar", description="Asynchronous RL post-training of language models."
    )
    made.add_argument("--version", action="version", version=f"laminar {__version__}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        quickstart, init, plan, train, fork, doctor, submit, serve, watch, ps,
        tail, scale, stop, clean, samples, log, audit, report, retrain, export,
    ):  # fmt: skip
        module.add_parser(subparsers)
    return made


def run_command(words: Sequence[str] | None = None) -> int:
    """Run one command, from its words to its exit code."""

    def command() -> int:
        arguments = build_parser().parse_args(sys.argv[1:] if words is None else words)
        code: int = arguments.function(arguments)
        return code

    return exit_code("laminar", command)
