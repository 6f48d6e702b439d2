"""laminar quickstart: the shipped config on the shipped model, from any directory.

Reads   configs/quickstart.toml and its model, which come with the package; settings of the words
Writes  runs/quickstart below the current directory, after moving an older one aside
"""

from __future__ import annotations

import argparse
from typing import Any

from laminar.cli.shipped import QUICKSTART_CONFIG, QUICKSTART_MODEL
from laminar.cli.train import train


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quickstart", help="train the small model that comes with Laminar; two minutes"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and show the plan, no run")
    parser.take_settings()
    parser.set_defaults(
        function=quickstart, config=[QUICKSTART_CONFIG], resume=None, prepare=False, move_old=True
    )


def quickstart(arguments: argparse.Namespace) -> int:
    """As `laminar train -c configs/quickstart.toml --move-old`; its exit code."""
    arguments.overrides.insert(0, f"model.name={QUICKSTART_MODEL}")
    return train(arguments)
