"""Answers to three questions about a run, from the causes recorded in its log.

Reads   the facts of a run directory
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
from collections.abc import Iterator

from laminar.analysis.facts.reader import Facts
from laminar.analysis.why.idle_report import explain_replica
from laminar.analysis.why.placement_changes import explain_trajectory
from laminar.analysis.why.step_wait import explain_step
from laminar.analysis.why.wording import QUESTION_HINT
from laminar.config import ConfigError


def explain_subject(facts: Facts, name: str, at: str = "") -> Iterator[str]:
    """Answer the question about one id; `at`: a time in seconds, or `#` and an event number."""
    if re.fullmatch(r"rollout-\d+(?:\.\d+)?", name):
        return explain_replica(facts, name, at)
    if at:
        raise ConfigError(
            f"--at applies to a replica such as rollout-0, but {name!r} is not one: remove it"
        )
    if re.fullmatch(r"e?\d+\.\d+(?:-\d+)?\.\d+", name):
        return explain_trajectory(facts, name)
    if match := re.fullmatch(r"(?:step-)?(\d+)", name):
        return explain_step(facts, int(match[1]))
    raise ConfigError(f"{name!r} is not an id that this command explains: {QUESTION_HINT}")
