"""Steps that a run trained, according to its event log, and the resulting weights.

Reads   RUN/events/
Gives   read_trained_steps: the first weights and all completed steps
Raises  ConfigError for a log that cannot be read
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from laminar.analysis.log.run_log import replay_log
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.ids import TrajectoryId


class TrainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Completed step."""

    step_index: int
    version: int
    trajectories: tuple[TrajectoryId, ...]  #: in the order given to the trainer
    digest: str  #: digest of the version as published; empty if it was not


class TrainedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The trained steps of one run, in order."""

    first_step: int  #: steps completed at the start; for a fork, those of its checkpoint
    first_version: int
    first_digest: str  #: digest of the initial weights; empty if none were published
    first_chain: str  #: digest of the training that made those weights; empty if none
    functions: dict[str, str]  #: digest of each user function's file, by setting
    steps: tuple[TrainedStep, ...]


class _StepReader:
    """Replay observer of ordered steps, completed steps and published digests."""

    def __init__(self) -> None:
        self.completed: list[cmd.TrainStep] = []
        self.digests: dict[int, str] = {}
        self._ordered: dict[int, cmd.TrainStep] = {}  #: latest order, by index of the step
        self._steps = 0

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        event = stamped.event
        if isinstance(event, ev.StepCompleted) and state.steps.completed > self._steps:
            self.completed.append(self._ordered[event.step_index])
        self._steps = state.steps.completed
        if state.versions.newest_digest:
            self.digests.setdefault(state.versions.newest, state.versions.newest_digest)
        for command in commands:
            if isinstance(command, cmd.TrainStep):
                self._ordered[command.step_index] = command


def read_trained_steps(run_dir: Path) -> TrainedSteps:
    """Return all steps completed in the log so far."""
    reader = _StepReader()
    state = replay_log(run_dir, reader).machine.state
    steps = (
        TrainedStep(
            step_index=command.step_index,
            version=command.version,
            trajectories=command.trajectories,
            digest=reader.digests.get(command.version, ""),
        )
        for command in reader.completed
    )
    return TrainedSteps(
        first_step=state.data.first_step,
        first_version=state.data.first_version,
        first_digest=reader.digests.get(state.data.first_version, ""),
        first_chain=state.data.origin.digest if state.data.origin is not None else "",
        functions=state.steps.function_digests,
        steps=tuple(steps),
    )
