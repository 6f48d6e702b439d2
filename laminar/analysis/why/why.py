"""Answers to three questions about a run, from the causes recorded in its log.

Reads   the event log of a run directory, by replay
Gives   sentences with event numbers and times (seconds since the run's first event)
Raises  ConfigError for an id or a time that the run never had

    a trajectory   why did it move: what was lost, which process reported it, where it was placed
    a replica      why was it idle at a time: what refused it new work, what ended that
    a step         what did it wait for: the groups that the batch needed last, and their stages

Nothing is inferred from durations: every sentence names its event, and refusals are found by the
core's predicates on the state at that time.
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
    """Replay observer that reports at its end."""

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None: ...

    def format_lines(self) -> Iterable[str]:
        """Yield the report; raise ConfigError if the log does not have its subject."""


def explain_subject(run_dir: Path, name: str, at: str = "") -> Iterable[str]:
    """Answer the question about one id; `at`: a time in seconds, or `#` and an event number."""
    answer = _parse_question(name, at)
    replay_log(run_dir, answer)
    return answer.format_lines()


def _parse_question(name: str, at: str) -> Explanation:
    if re.fullmatch(r"rollout-\d+(?:\.\d+)?", name):
        return IdleReport(name, at)
    if at:
        raise ConfigError(
            f"--at applies to a replica such as rollout-0, but {name!r} is not one: remove it"
        )
    if re.fullmatch(r"e?\d+\.\d+(?:-\d+)?\.\d+", name):
        return PlacementChanges(TrajectoryId(name))
    if match := re.fullmatch(r"(?:step-)?(\d+)", name):
        return StepWait(int(match[1]))
    raise ConfigError(f"{name!r} is not an id that this command explains: {QUESTION_HINT}")
