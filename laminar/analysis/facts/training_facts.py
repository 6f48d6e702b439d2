"""Facts about training: steps, what the trainer waited for, versions, evaluations, warnings.

Reads   Happenings of a replay
Gives   TrainingFacts, a part of the collector
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

import msgspec

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.tables import (
    Add,
    EvaluationRow,
    StepRow,
    TrainerWaitRow,
    VersionRow,
    WarningRow,
)
from laminar.analysis.log.display import step_number
from laminar.core.state import keys
from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.indexes import live_actor
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.steps.batching import batch_size
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.roles import Role

TrainerWaitReason = Literal["start", "publish", "groups", "strategy", "staleness-bound"]
EVALUATION_FIELDS = [column.name for column in fields(EvaluationRow)][2:]

_encode = msgspec.json.Encoder().encode


class TrainingFacts:
    """Tables `steps`, `trainer_waits`, `versions`, `evaluations`, `warnings`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._steps: dict[int, StepRow] = {}  #: without a report, by index
        self._ordered = -1  #: highest index that was ordered
        self._waits: list[TrainerWaitRow] = []  #: since the trainer was last training
        self._published: set[int] = set()
        self._results = 0
        self._warnings = 0

    def record(self, at: Happening) -> None:
        event = at.event
        if isinstance(event, ev.StepCompleted):
            self._complete_step(at, event)
        elif isinstance(event, ev.WeightsPublished):
            self._record_version(at, event)
        if not isinstance(event, ev.TokenProgress):
            self._record_results(at)
            self._follow_trainer(at)

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for step in self._steps.values():
            yield "steps", step

    def _record_version(self, at: Happening, event: ev.WeightsPublished) -> None:
        accepted = event.version == at.state.versions.newest
        if accepted and event.version not in self._published:
            self._published.add(event.version)
            row = VersionRow(event.version, event.step, at.now, event.digest)
            self._add("versions", row)

    def _record_results(self, at: Happening) -> None:
        for result in at.state.evaluations.results[self._results :]:
            self._results += 1
            facts = describe_evaluation(result)
            values = (facts[name] for name in EVALUATION_FIELDS)
            self._add("evaluations", EvaluationRow(result.index, at.now, *values))
        warnings = at.state.signals.warnings
        if len(warnings) != self._warnings:
            for kind, text in list(warnings.items())[self._warnings :]:
                step = at.state.steps.completed
                self._add("warnings", WarningRow(kind, at.now, step, text))
            self._warnings = len(warnings)

    def _follow_trainer(self, at: Happening) -> None:
        for command in at.commands:
            if isinstance(command, cmd.TrainStep):
                self._order_step(at, command)
        reason = find_trainer_wait_reason(at.state)
        if not reason:
            self._waits = []
        elif not self._waits or self._waits[-1].reason != reason:
            if self._waits:
                self._waits[-1].ended = at.now
            detail = describe_trainer_wait(at.state, reason)
            wait = TrainerWaitRow(reason=reason, began=at.now, detail=detail, cause=at.cause)
            self._waits.append(wait)

    def _order_step(self, at: Happening, command: cmd.TrainStep) -> None:
        index = command.step_index
        step = self._steps.get(index)
        if step is None:
            step = self._steps[index] = self._begin_step(at, index)
        step.version, step.trajectories = command.version, list(command.trajectories)

    def _begin_step(self, at: Happening, index: int) -> StepRow:
        """Return the row of a step that is not open; its first order ends the waits before it."""
        batch, waited = at.state.steps.batch, 0.0
        if index > self._ordered:
            self._ordered = index
            for wait in self._waits:
                wait.step, wait.ended = step_number(index), wait.ended or at.now
                self._add("trainer_waits", wait)
            if self._waits:
                waited = at.now.seconds - self._waits[0].began.seconds
        self._waits = []
        groups = len(batch.groups) if batch is not None else 0
        return StepRow(step_number(index), ordered=at.now, groups=groups, waited=waited)

    def _complete_step(self, at: Happening, event: ev.StepCompleted) -> None:
        step = self._steps.get(event.step_index)
        if step is None or event.step_index >= at.state.steps.completed:
            return  # the run failed without the batch
        step.completed, step.tokens, step.changed = at.now, event.num_tokens, event.changed
        step.reason = event.reason or None
        step.left_out = _encode(event.left_out).decode() if event.left_out else None
        step.metrics = _encode(event.metrics).decode()
        self._add("steps", self._steps.pop(event.step_index))


def find_trainer_wait_reason(state: State) -> TrainerWaitReason | None:
    """Return the reason why a ready trainer is not training; None while it trains."""
    trainer = live_actor(state, Role.TRAINER)
    if trainer is None or not trainer.ready or state.steps.batch is not None:
        return None
    if state.run.phase == Phase.STARTING:
        return "start"
    if keys.PUBLISH in state.orders.commands:
        return "publish"
    if not batch_size(state):
        return "groups"
    return "strategy" if keys.PROPOSE in state.orders.commands else "staleness-bound"


def describe_trainer_wait(state: State, reason: TrainerWaitReason) -> str:
    """Return the figures behind a reason, as the end of a sentence."""
    if reason == "start":
        return "the first weights were not published yet"
    if reason == "publish":
        return f"v{state.versions.owed} had to be published first"
    if reason == "groups":
        ready, unfinished = len(state.work.ready), sum(state.work.deadlines.values())
        needed = state.settings.groups_per_step
        return f"{ready} of {needed} groups were complete, {unfinished} were open"
    if reason == "strategy":
        return "the batch strategy had not answered yet"
    return "training the complete groups now would have made another group too stale"
