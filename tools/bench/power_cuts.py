"""Recovery of a run from power cuts: all its processes are killed at once and it is resumed.

Usage: python -m tools.bench.power_cuts [-c configs/recipes/words/run.toml] [--cuts 2] [--seed 0]
           [--keep DIR] [key=value ...]
Prints one JSON line per cut and one for the run; exits 1 if the run fails, its books do not agree,
its log does not replay, its weights cannot be retrained from it, a prompt did not end exactly once
per pass, or work started over although its weights are on disk.

resumed       responses that continued from tokens in the store after this cut
tokens_kept   those tokens
started_over  responses that restarted because their weights no longer existed
next_step_s   from the resumption until the next step was done
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar.analysis.log.run_log import replay_log
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.ids import Purpose
from laminar.run.lock import holders
from tools.bench.kills.killed_run import APART_S
from tools.kit.real_run import POLL_S, BadRun, Run, check, print_lines


class Cut:
    """Outcome of the unfinished work at one resumption."""

    def __init__(self, at_ns: int, lost: dict[str, tuple[int, int]]) -> None:
        self.at_ns, self.lost = at_ns, lost  #: (version, attempt) of unfinished work, by trajectory
        self.on_disk: tuple[int, ...] | None = None  #: versions, once reported
        self.resumed = self.tokens_kept = self.started_over = 0
        self.next_step_s = 0.0


class Watch:
    """Observer of the log that counts cuts and the ends of each prompt and response."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self.ended = Counter[str]()  #: number of ends by response
        self.prompts: dict[tuple[str, int], set[str]] = {}  #: groups by pass and row
        self.wrong: list[str] = []  #: work that started over needlessly

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        event = stamped.event
        for command in commands:
            if isinstance(command, cmd.EndTrajectories):
                self._ends(command)
            elif isinstance(command, cmd.GenerateTrajectory) and self.cuts:
                self._placed(command)
        if isinstance(event, ev.RunResumed):
            lost = state.work.trajectories.values()
            under_way = {
                str(t.id): (t.version, t.attempt)
                for t in lost
                if t.status == TrajectoryStatus.LOST and not t.restart
            }
            self.cuts.append(Cut(stamped.time_ns, under_way))
        elif not self.cuts:
            return
        elif isinstance(event, ev.TrainerReady) and self.cuts[-1].on_disk is None:
            self.cuts[-1].on_disk = tuple(state.versions.checkpoint_paths)
        elif isinstance(event, ev.TrajectoryStarted) and event.tokens_resumed:
            self.cuts[-1].resumed += 1
            self.cuts[-1].tokens_kept += event.tokens_resumed
        elif isinstance(event, ev.StepCompleted) and not self.cuts[-1].next_step_s:
            self.cuts[-1].next_step_s = round((stamped.time_ns - self.cuts[-1].at_ns) / 1e9, 1)

    def _ends(self, command: cmd.EndTrajectories) -> None:
        for ending in command.endings:
            self.ended[ending.trajectory_id] += 1
            if ending.purpose == Purpose.TRAIN:
                row = ending.group.partition(".")[0], ending.row_index
                self.prompts.setdefault(row, set()).add(ending.group)

    def _placed(self, command: cmd.GenerateTrajectory) -> None:
        """Record that unfinished work is placed again."""
        cut = self.cuts[-1]
        before = cut.lost.pop(command.trajectory_id, None)
        if before is None or (command.version, command.attempt) == before:
            return
        cut.started_over += 1
        if before[0] in (cut.on_disk or ()):
            self.wrong.append(f"{command.trajectory_id} of version {before[0]}")

    def problems(self) -> Iterator[str]:
        twice = [name for name, times in self.ended.items() if times != 1]
        if twice:
            yield f"responses that ended more than once: {', '.join(twice[:5])}"
        several = [f"row {row} in pass {n}" for (n, row), g in self.prompts.items() if len(g) > 1]
        if several:
            yield f"prompts handed out more than once: {', '.join(several[:5])}"
        if self.wrong:
            yield f"started over although their weights are on disk: {', '.join(self.wrong[:5])}"


def run(
    run_dir: Path,
    config: str,
    settings: Sequence[str],
    cuts: int,
    seed: int,
    *,
    last: Sequence[str] = (),
    drained: bool = False,
) -> Watch:
    """Make a run with power cuts; raise BadRun if it fails or loses anything.

    last: settings that change at the last resumption.
    drained: whether to stop the run once it has resumed after the last cut, even if steps remain.
    """
    chance = random.Random(seed)
    with Run(run_dir, config, settings) as training:
        training.until_step(1)
        for number in range(cuts):
            _cut(training, chance)
            training.resume(last if number == cuts - 1 else ())
        if drained:
            training.drain()
    check(run_dir)
    watch = Watch()
    replay_log(run_dir, watch)
    if len(watch.cuts) != cuts:
        raise BadRun(f"the log has {len(watch.cuts)} of {cuts} resumptions")
    for problem in watch.problems():
        raise BadRun(problem)
    return watch


def _cut(training: Run, chance: random.Random) -> None:
    """Kill all processes with SIGKILL, a random time after the next step."""
    training.until_step(training.step() + 1)
    time.sleep(chance.uniform(0, APART_S))
    while living := holders(training.run_dir):
        for holder in living:
            try:
                os.kill(holder.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        training.train.poll()
        time.sleep(POLL_S)


def figures(watch: Watch) -> Iterator[dict[str, Any]]:
    for cut in watch.cuts:
        names = ("resumed", "tokens_kept", "started_over", "next_step_s")
        yield {name: getattr(cut, name) for name in names}
    yield {"name": "run", "cuts": len(watch.cuts), "answers_ended_once": len(watch.ended)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-c", "--config", default="configs/recipes/words/run.toml")
    parser.add_argument("--cuts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run directory to keep")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    return print_lines(_cut_run, args)


def _cut_run(run_dir: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return figures(run(run_dir, args.config, args.settings, args.cuts, args.seed))


if __name__ == "__main__":
    sys.exit(main())
