"""The commands of `laminar`: their list, and the exit code of each.

Reads   the words of the command line
Writes  the mistake of a user, as one sentence on stderr
Gives   the exit code
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from laminar.cli.arguments import CommandParser
from laminar.config import ConfigError
from laminar.launch.exit_handling import exit_code
from laminar.names.version import __version__
from laminar.run.command_line import shell_command

COMMANDS = {  # by module of laminar.cli, in the order of `laminar --help`
    "quickstart": "train the small model that comes with Laminar; two minutes",
    "init": "write a config, a reward and ten prompts",
    "plan": "show whether a run fits, here or on GPUs that you name, and its best layouts",
    "train": "run everything on this machine",
    "fork": "start a new run from a checkpoint of another",
    "doctor": "check this machine, and the cluster, for a run",
    "agent": "try an agent: its conversations about three rows",
    "submit": "run on a Slurm cluster, as jobs",
    "serve": "run one machine's part of a prepared run, as a batch system does",
    "status": "show how a run is doing, and who waits for whom; with --follow, until it ends",
    "ps": "show the processes of a run, or all live runs",
    "tail": "show the last lines of the logs of a run's processes, and follow them",
    "scale": "change how many rollout machines a run on Slurm has",
    "stop": "end a run gracefully, and wait for it",
    "clean": "remove the shared memory of killed runs",
    "samples": "read what the model wrote: prompts, responses, rewards",
    "log": "replay and read the event log of a run",
    "audit": "check that the records of coordinator, store and trainer agree",
    "view": "show runs on a local page: timeline, any past moment, samples; live too",
    "report": "write a page with figures, charts and samples of runs",
    "retrain": "repeat the training of a run from its log, and compare the weights of every step",
    "export": "write the model of a run to serve or upload, with a model card",
}


RENAMED = {
    "watch": "status --follow",
    "log tail": "log dump -n 20",
    "log stats": "log dump --stats",
    "log export": 'log sql RUN "select ..." --format parquet -o FILE',
}
"""Former commands, with their present words; those with RUN take other words."""


class LazyCommand(CommandParser):
    """Parser of one command, which imports its module only to parse its words."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        program, name = self.prog.split()
        made = CommandParser(prog=program).add_subparsers()
        importlib.import_module(f"laminar.cli.{name}").add_parser(made)
        parser: CommandParser = made.choices[name]
        parser.description = parser.description or COMMANDS[name]
        return parser.parse_known_args(args, namespace)


def build_parser() -> CommandParser:
    made = CommandParser(
        prog="laminar", description="Asynchronous RL post-training of language models."
    )
    made.add_argument("--version", action="version", version=f"laminar {__version__}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND", parser_class=LazyCommand)
    for name, text in COMMANDS.items():
        subparsers.add_parser(name, help=text)
    return made


def _check_renamed(given: Sequence[str]) -> None:
    """Raise ConfigError for a former command, with the present one to copy."""
    for count in (1, 2):
        old = " ".join(given[:count])
        if now := RENAMED.get(old):
            rest = () if "RUN" in now else given[count:]
            raise ConfigError(f"laminar {old} is now {' '.join([shell_command(), now, *rest])}")


def run_command(words: Sequence[str] | None = None) -> int:
    """Run one command, from its words to its exit code."""

    def command() -> int:
        given = sys.argv[1:] if words is None else words
        _check_renamed(given)
        arguments = build_parser().parse_args(given)
        code: int = arguments.function(arguments)
        return code

    return exit_code("laminar", command)
