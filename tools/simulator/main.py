"""The simulator: runs in virtual time, with faults drawn from a seed and independent checks."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laminar.cli.arguments import CommandParser
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.events.base import Command, Stamped
from laminar.launch.exit_handling import exit_code
from tools.simulator.config import Choices, load
from tools.simulator.coverage import EXPECTED, Coverage
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import Outcome, event_line, run_seed, run_seeds, story

PROGRAM = "python -m tools.simulator"
PROGRESS_S = 5.0


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, simulate, and return the exit code."""

    def command() -> int:
        return run(parser().parse_args(sys.argv[1:] if words is None else words))

    return exit_code("simulator", command)


def parser() -> CommandParser:
    made = CommandParser(prog=PROGRAM, description="Simulate runs with faults, in virtual time.")
    made.add_argument("-c", "--config", type=Path, required=True, metavar="FILE", help="TOML")
    seeds = made.add_mutually_exclusive_group(required=True)
    seeds.add_argument("--seed", type=int, metavar="N", help="one run")
    seeds.add_argument("--seeds", metavar="A..B", help="a run for each seed, both ends included")
    made.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes")
    made.add_argument("--events", action="store_true", help="one line per event (one seed)")
    made.add_argument("--marks", action="store_true", help="rare paths: how often each was hit")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Run the seeds, and return 0 if every promise was kept, else 1."""
    choices = load(arguments.config, KINDS)
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs}: give 1 or more processes")
    if arguments.seed is not None:
        return _run_one(choices, arguments)
    if arguments.events:
        raise ConfigError("--events shows one run: give --seed N instead of --seeds")
    return _run_many(choices, arguments)


def _run_one(choices: Choices, arguments: argparse.Namespace) -> int:
    def show(stamped: Stamped, commands: list[Command], state: State) -> None:
        print(event_line(stamped, commands))

    outcome = run_seed(choices, arguments.seed, show if arguments.events else None)
    print(summary(outcome))
    if arguments.marks:
        _print_marks(outcome.coverage)
    return _report(choices, arguments.config, outcome)


def _run_many(choices: Choices, arguments: argparse.Namespace) -> int:
    seeds = _range(arguments.seeds)
    started = shown = time.monotonic()
    coverage, events, broken, failed = Coverage(), 0, 0, 0
    for done, outcome in enumerate(run_seeds(choices, seeds, arguments.jobs), 1):
        events += outcome.events
        failed += bool(outcome.failure)
        coverage.merge(outcome.coverage)
        broken += _report(choices, arguments.config, outcome)
        now = time.monotonic()
        if now - shown > PROGRESS_S:
            shown = now
            print(f"{done} of {len(seeds)} runs, {broken} broken", file=sys.stderr)
    elapsed = time.monotonic() - started
    print(
        f"{len(seeds)} runs, {broken} broken, {failed} ended early after a loss; {events} "
        f"events, {events / elapsed:.0f} per second"
    )
    if arguments.marks:
        _print_marks(coverage.counts)
    return 1 if broken else 0


def summary(outcome: Outcome) -> str:
    """Return a one-line summary of a run."""
    ended = outcome.failure or "complete"
    faults = ", ".join(outcome.faults) or "none"
    return (
        f"seed {outcome.seed}: {ended}; {outcome.events} events in {outcome.virtual_s:.1f} s of "
        f"virtual time, {outcome.coordinators} coordinators; faults: {faults}; "
        f"state {outcome.digest or 'unknown'}"
    )


def _report(choices: Choices, path: Path, outcome: Outcome) -> int:
    """Print the broken promise and how to reproduce it; return 1 if there is one, else 0."""
    if not outcome.invariant:
        return 0
    print(f"seed {outcome.seed} broke {outcome.invariant}: {outcome.details}")
    print(f"  story of {', '.join(outcome.subjects) or 'its end'}:")
    for line in story(choices, outcome):
        print(f"  {line}")
    again = shlex.join(["-c", str(path), "--seed", str(outcome.seed), "--events"])
    print(f"  reproduce: {PROGRAM} {again}")
    return 1


def _print_marks(counts: dict[str, int]) -> None:
    for name in EXPECTED:
        print(f"{counts.get(name, 0):>10}  {name}")
    for name in sorted(set(counts) - set(EXPECTED)):
        print(f"{counts[name]:>10}  {name} (not expected by name)")
    hit = sum(name in counts for name in EXPECTED)
    print(f"{hit} of {len(EXPECTED)} expected marks were hit")


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"--seeds {text!r}: give two numbers, such as 1..1000")
    return range(int(first), int(last) + 1)
