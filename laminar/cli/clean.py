"""laminar clean: give back the shared memory that killed runs of this user have left.

Reads   /dev/shm
Writes  nothing; removes weight arenas whose creator is dead, whichever run it was of

The start of any run does the same. Memory of runs that live is left alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from laminar.weights.arena.arena import sweep_arenas


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("clean", help="remove the shared memory of killed runs")
    parser.set_defaults(function=run_clean)


def run_clean(arguments: argparse.Namespace) -> int:
    """Say what was removed and how much memory that gave back."""
    swept = sweep_arenas()
    for arena in swept:
        print(f"removed {arena.path} ({arena.num_bytes} bytes)")
    if not swept:
        print("no killed run of yours has left shared memory")
    else:
        print(f"freed {sum(arena.num_bytes for arena in swept)} bytes of shared memory")
    return 0
