"""laminar quickstart: train the recipe `words` with --move-old, from any directory.

Reads   configs/recipes/words/run.toml and its model, which come with the package; settings
Writes  runs/quickstart below the current directory, after moving an older one aside
"""

from __future__ import annotations

from typing import Any

from laminar.cli.init import QUICKSTART_CONFIG
from laminar.cli.train import add_ways, run_train, take_train_settings


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("quickstart")
    add_ways(parser)
    take_train_settings(parser)
    parser.set_defaults(function=run_train, config=[QUICKSTART_CONFIG], resume=None, move_old=True)
