"""Why something was as it was: three questions, answered from the causes that the log recorded.

Reads   the event log of a run directory, by replay
Gives   sentences with event numbers and times (seconds since the run's first event)
Raises  ConfigError for what the run never had

    a trajectory   why did it move: what was lost, who said so, what placed it where
    a replica      why was it idle at a time: what refused it new work, what ended that
    a step         what did it wait for: the groups that the batch needed last, and their parts

Nothing is guessed from durations: every sentence names the event that it is drawn from, and what
was refused is asked of the core's own predicates in the state as it was then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from laminar.analysis.log.run_log import replay_log
from laminar.analysis.why.idle_report import IdleReport
from laminar.analysis.why.placement_changes import PlacementChanges
from laminar.analysis.why.step_wait import StepWait
from laminar.analysis.why.wording import QUESTION_HINT
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.events.base import Command, Stamped
from laminar.names.ids import TrajectoryId


class Explanation(Protocol):
    """An observer of a replay that has something to say at its end."""

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None: ...

    def format_lines(self) -> Iterable[str]:
        """Raises ConfigError when the log does not have what was asked about."""


def explain_subject(run_dir: Path, name: str, at: str = "") -> Iterable[str]:
    """The answer for one id; `at` is a time for a replica: seconds, or `#` and an event number."""
    answer = _parse_question(name, at)
    replay_log(run_dir, answer)
    return answer.format_lines()


def _parse_question(name: str, at: str) -> Explanation:
    if re.fullmatch(r"rollout-\d+(?:\.\d+)?", name):
        return IdleReport(name, at)
    if at:
        raise ConfigError(f"--at is a time for a replica such as rollout-0, {name!r} is none")
    if re.fullmatch(r"e?\d+\.\d+(?:-\d+)?\.\d+", name):
        return PlacementChanges(TrajectoryId(name))
    if match := re.fullmatch(r"(?:step-)?(\d+)", name):
        return StepWait(int(match[1]))
    raise ConfigError(f"{name!r} is nothing that can be asked about: {QUESTION_HINT}")
