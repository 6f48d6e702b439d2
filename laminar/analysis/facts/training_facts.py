"""Facts about training: steps, what the trainer waited for, versions, evaluations, warnings.

Reads   Happenings of a replay
Gives   TrainingFacts, a part of the collector
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from laminar.analysis.facts.happening import Add, Happening, Row
from laminar.analysis.log.display import step_number
from laminar.analysis.log.event_clock import EventClock, Moment
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
EVALUATION_FIELDS = (
    "step", "version", "final", "correct", "total", "missing",
    "share", "share_se", "score", "score_se", "mean_length", "truncated_share",
)  # fmt: skip

_encode = msgspec.json.Encoder().encode


class _Wait(NamedTuple):
    """Part of a wait of the trainer, for one reason."""

    reason: TrainerWaitReason
    began: Moment
    detail: str
    cause: str


@dataclass(slots=True)
class _Step:
    """Ordered step."""

    command: cmd.TrainStep  #: latest order
    ordered: Moment  #: first order
    groups: int
    waited: float
    completed: Moment | None = None
    report: ev.StepCompleted | None = None


class TrainingFacts:
    """Tables `steps`, `trainer_waits`, `versions`, `evaluations`, `warnings`."""

    def __init__(self, add: Add, clock: EventClock) -> None:
        self._add, self._clock = add, clock
        self._steps: dict[int, _Step] = {}  #: without a report, by index
        self._ordered = -1  #: highest index that was ordered
        self._waits: list[_Wait] = []  #: since the trainer was last training
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

    def list_open(self) -> Iterator[tuple[str, Row]]:
        for step in self._steps.values():
            yield "steps", self._step_row(step)

    def _record_version(self, at: Happening, event: ev.WeightsPublished) -> None:
        accepted = event.version == at.state.versions.newest
        if accepted and event.version not in self._published:
            self._published.add(event.version)
            facts = (event.version, event.step, at.seconds, at.now.seq, event.digest)
            self._add("versions", facts)

    def _record_results(self, at: Happening) -> None:
        for result in at.state.evaluations.results[self._results :]:
            self._results += 1
            facts = describe_evaluation(result)
            values = (facts[name] for name in EVALUATION_FIELDS)
            self._add("evaluations", (result.index, at.seconds, at.now.seq, *values))
        warnings = at.state.signals.warnings
        if len(warnings) != self._warnings:
            for kind, text in list(warnings.items())[self._warnings :]:
                step = at.state.steps.completed
                self._add("warnings", (kind, at.seconds, at.now.seq, step, text))
            self._warnings = len(warnings)

    def _follow_trainer(self, at: Happening) -> None:
        for command in at.commands:
            if isinstance(command, cmd.TrainStep):
                self._order_step(at, command)
        reason = find_trainer_wait_reason(at.state)
        if not reason:
            self._waits = []
        elif not self._waits or self._waits[-1].reason != reason:
            detail = describe_trainer_wait(at.state, reason)
            self._waits.append(_Wait(reason, at.now, detail, at.cause))

    def _order_step(self, at: Happening, command: cmd.TrainStep) -> None:
        index = command.step_index
        if before := self._steps.get(index):
            before.command = command
            return
        batch = at.state.steps.batch
        groups = len(batch.groups) if batch is not None else 0
        waited = 0.0
        if index > self._ordered:
            self._ordered = index
            for number, wait in enumerate(self._waits):
                following = self._waits[number + 1].began if self._waits[number + 1 :] else at.now
                times = (*at.clock.place(wait.began), *at.clock.place(following))
                row = (step_number(index), wait.reason, *times, wait.detail, wait.cause)
                self._add("trainer_waits", row)
            if self._waits:
                waited = at.seconds - (at.clock.place(self._waits[0].began)[0] or 0.0)
        self._waits = []
        self._steps[index] = _Step(command, at.now, groups, waited)

    def _complete_step(self, at: Happening, event: ev.StepCompleted) -> None:
        step = self._steps.get(event.step_index)
        if step is not None and event.step_index < at.state.steps.completed:
            step.completed, step.report = at.now, event  # else the run failed without the batch
            del self._steps[event.step_index]
            self._add("steps", self._step_row(step))

    def _step_row(self, step: _Step) -> Row:
        command, report = step.command, step.report
        done: Row = (None,) * 4
        if report is not None:
            left_out = _encode(report.left_out).decode() if report.left_out else None
            done = (report.num_tokens, report.changed, report.reason or None, left_out)
        return (
            *(step_number(command.step_index), command.version),
            *self._clock.place(step.ordered),
            *self._clock.place(step.completed),
            *(step.groups, list(command.trajectories), *done[:3], step.waited, done[3]),
            _encode(report.metrics).decode() if report is not None else None,
        )


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
