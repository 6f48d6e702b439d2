"""laminar clean: free the shared memory left by killed runs of this user.

Reads   /dev/shm
Writes  nothing; removes weight arenas whose creator is dead, of any run

The start of any run does the same. Memory of live runs is not touched.
"""

from __future__ import annotations

import argparse
from typing import Any

from laminar.weights.arena.arena import sweep_arenas


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("clean")
    parser.set_defaults(function=run_clean)


def run_clean(arguments: argparse.Namespace) -> int:
    """Print the removed arenas and the memory freed."""
    swept = sweep_arenas()
    for arena in swept:
        print(f"removed {arena.path} ({arena.num_bytes} bytes)")
    if not swept:
        print("no shared memory of killed runs found")
    else:
        print(f"freed {sum(arena.num_bytes for arena in swept)} bytes of shared memory")
    return 0
