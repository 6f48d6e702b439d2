"""Which lines of the actors' logic simulated seeds execute.

Usage: python tools/simulated_lines.py [--seeds 300] [--missing]

Prints the share of executed statements of each file of laminar/actors (what starts real processes
stands in laminar/actors/system and is left out), and of all together; with --missing also the lines
that no seed reached. The exit code is 1 below 90 %. Faces of ports have no code and do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from coverage import Coverage

ROOT = Path(__file__).resolve().parents[1]
ACTORS = ROOT / "laminar" / "actors"
WANTED = 0.9
FACES = (r"^\s*class \w+\(.*Protocol.*\):", r":\s*\.\.\.\s*$", r"^\s*\.\.\.\s*$")


class Executed(NamedTuple):
    """Of one file."""

    statements: int
    missing: list[int]  #: lines

    @property
    def share(self) -> float:
        return 1 - len(self.missing) / self.statements if self.statements else 1.0


def executed(seeds: Iterable[int]) -> dict[str, Executed]:
    """By file name, of the default swarm. Call it before anything of laminar is imported."""
    files = sorted(path for path in ACTORS.glob("*.py") if path.stem != "__init__")
    coverage = Coverage(data_file=None, include=[str(path) for path in files])
    for face in FACES:
        coverage.exclude(face)
    coverage.start()
    from laminar.sim.config import SimConfig
    from laminar.sim.run import run_seed

    broken = [seed for seed in seeds if run_seed(SimConfig(), seed).invariant]
    coverage.stop()
    if broken:
        raise RuntimeError(f"seeds {broken} broke a promise")
    found = {}
    for path in files:
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        found[path.name] = Executed(len(statements), missing)
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="seeds 1 to N")
    parser.add_argument("--missing", action="store_true", help="show the lines that were not")
    arguments = parser.parse_args(words)
    found = executed(range(1, arguments.seeds + 1))
    for name, file in found.items():
        lines = f"  {', '.join(map(str, file.missing))}" if arguments.missing else ""
        print(f"{file.share:7.1%}  {file.statements:4} statements  {name}{lines}")
    statements = sum(file.statements for file in found.values())
    share = 1 - sum(len(file.missing) for file in found.values()) / statements
    print(f"{share:7.1%}  of {statements} statements, {arguments.seeds} seeds")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
