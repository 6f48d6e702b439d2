"""laminar train: run a training on this machine.

Reads   the config files and overrides of the command line
Writes  the run directory; the plan before a run, its summary after it
Starts  the processes of the run, through the supervisor; with --prepare nothing
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from laminar.cli.arguments import CommandParser
from laminar.config import Config, ConfigError
from laminar.launch.resume_check import resumed_config
from laminar.launch.sizing import load_sized_config
from laminar.launch.train import place_of, run_training


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train")
    add_sources(parser)
    add_ways(parser)
    take_train_settings(parser)
    parser.set_defaults(function=run_train)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options for the settings of a run: new ones, or those of a run to resume."""
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    text = "resume a run that was interrupted"
    parser.add_argument("--resume", type=Path, metavar="RUN", help=text)


def add_ways(parser: argparse.ArgumentParser) -> None:
    """Add the options for a new run: check it only, prepare it only, replace an old one."""
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--dry-run", action="store_true", help="check and show the plan, no run")
    text = "write the run directory, for daemons that you start yourself"
    less.add_argument("--prepare", action="store_true", help=text)
    add_move_old(parser)


def add_move_old(parser: argparse.ArgumentParser) -> None:
    text = "move an existing run directory aside"
    parser.add_argument("--move-old", action="store_true", help=text)


def take_train_settings(parser: CommandParser) -> None:
    """Accept settings, and the options that abbreviate common ones."""
    parser.take_settings(max_steps="trainer.total_training_steps", output_dir="run.output_dir")


def run_train(arguments: argparse.Namespace) -> int:
    """Start or resume a run; return its exit code."""
    config, run_dir = _prepare_run(arguments)
    return run_training(config, run_dir, arguments).code


def _prepare_run(arguments: argparse.Namespace) -> tuple[Config, Path]:
    """Return the settings, and the directory of the run."""
    if arguments.resume:
        if arguments.move_old:
            raise ConfigError("--resume continues a run, and --move-old moves it aside: give one")
        if arguments.prepare:
            raise ConfigError(
                "--prepare writes a new run directory, and --resume continues a run: give one; to "
                "resume with separate daemons, use `laminar-coord RUN --resume`"
            )
        run_dir = arguments.resume
        return resumed_config(run_dir, arguments.config, arguments.overrides), run_dir
    config = load_sized_config(arguments.config, arguments.overrides)
    return config, place_of(config, arguments.move_old, dry_run=arguments.dry_run)
