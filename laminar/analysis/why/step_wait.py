"""Report on the wait before a step: the trainer's idle time and the last groups of its batch.

Reads   a replay
Gives   StepWait, an observer that ends with sentences
Raises  ConfigError for a step that was never ordered
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from laminar.analysis.log.display import step_number
from laminar.analysis.facts.trajectory_history import (
    EventClock,
    HistoryTracker,
    Moment,
    Placement,
    Stage,
    TrajectoryHistory,
)
from laminar.analysis.why.idle_spells import IdlePeriod, IdleTracker, Spell
from laminar.analysis.why.wording import QUESTION_HINT, describe_event, spell_lines
from laminar.config import ConfigError
from laminar.core.state import keys
from laminar.core.state.indexes import live_actor
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.steps.batching import batch_size
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.ids import GroupId, TrajectoryId
from laminar.names.roles import Role

TrainerWaitReason = Literal["start", "publish", "groups", "strategy", "staleness-bound"]
LAST_GROUPS = 3  #: of a batch, in the report


class StepWait:
    """Time in which the trainer was free before one step, and the groups missing from its batch."""

    def __init__(self, step: int) -> None:
        """Initialize; `step` is counted from 1."""
        self.step = step
        self._moments, self._lives, self._idleness = EventClock(), HistoryTracker(), IdleTracker()
        self._spells: list[Spell] = []  #: since the trainer was last training
        self._freed_by: Stamped | None = None
        self._complete: dict[GroupId, Moment] = {}
        self._dispatch: dict[TrajectoryId, Stamped] = {}
        self._idle: dict[
            tuple[str, int], IdlePeriod
        ] = {}  #: by replica and the event that ended it
        self._published: dict[int, Moment] = {}
        self._latest = 0
        self._batch: list[TrajectoryHistory] = []
        self._chosen: tuple[Moment, Stamped] | None = None

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if self._chosen is not None:
            return
        now = self._moments.locate_event(stamped)
        for what, life in self._lives.record_event(now, stamped.event, commands, state):
            if what == Stage.DISPATCHED:
                self._dispatch[life.trajectory_id] = stamped
            elif what == Stage.ENDED:
                self._dispatch.pop(life.trajectory_id, None)
        for idle in self._idleness.record_event(now, stamped, state):
            self._idle[idle.replica, now.seq] = idle
        if isinstance(stamped.event, ev.WeightsPublished):
            self._published.setdefault(stamped.event.version, now)
        for group in state.work.ready:
            self._complete.setdefault(group, now)
        self._follow_trainer(now, stamped, commands, state)

    def _follow_trainer(
        self, now: Moment, stamped: Stamped, commands: list[Command], state: State
    ) -> None:
        for command in commands:
            if isinstance(command, cmd.TrainStep):
                self._latest = step_number(command.step_index)
                if self._latest == self.step:
                    self._chosen = (now, stamped)
                    self._batch = [self._lives.open[name] for name in command.trajectories]
                    return
        reason = _find_trainer_wait_reason(state)
        if not reason:
            self._spells, self._freed_by = [], None
        elif not self._spells or self._spells[-1].reason != reason:
            self._freed_by = self._freed_by or stamped
            self._spells.append(Spell(reason, now, _trainer_detail(state, reason)))

    def format_lines(self) -> Iterable[str]:
        if self._chosen is None:
            last = f"the last is step {self._latest}" if self._latest else "no step was ordered"
            raise ConfigError(f"step {self.step} was never ordered ({last}): {QUESTION_HINT}")
        (chosen, cause), at = self._chosen, self._moments.format_time
        if self._freed_by is None:
            yield (
                f"Step {self.step} did not wait: its batch was complete when the trainer became "
                f"free, at {at(chosen)}, by {describe_event(cause)}."
            )
        else:
            free = self._spells[0].since
            waited_s = (chosen.unix_ns - free.unix_ns) / 1e9
            yield (
                f"Step {self.step} waited {waited_s:.3f} s: the trainer became free at "
                f"{at(free)}, by {describe_event(self._freed_by)}, and got its batch at "
                f"{at(chosen)}, by {describe_event(cause)}."
            )
            yield from spell_lines(self._spells, chosen, self._moments)
        yield from self._group_lines(chosen)

    def _group_lines(self, chosen: Moment) -> Iterable[str]:
        groups: dict[GroupId, list[TrajectoryHistory]] = {}
        for life in self._batch:
            groups.setdefault(life.group, []).append(life)
        complete = {group: self._complete.get(group, chosen) for group in groups}
        free = self._spells[0].since if self._spells else chosen
        missing = [group for group in groups if complete[group].seq > free.seq]
        if missing:
            yield f"{len(missing)} of its {len(groups)} groups were not complete then."
        order = sorted(groups, key=lambda group: complete[group].seq, reverse=True)
        last = [max(groups[group], key=_rewarded_seq) for group in order[:LAST_GROUPS]]
        if missing:
            yield _share_line(last[0], free, chosen)
        for life in last:
            yield (
                f"Group {life.group} was complete at "
                f"{self._moments.format_time(complete[life.group])}, "
                f"with {life.trajectory_id} as its last:"
            )
            yield from self._part_lines(life, chosen)

    def _part_lines(self, life: TrajectoryHistory, chosen: Moment) -> Iterable[str]:
        """Yield the stages from dispatched to chosen, each with its length."""
        placement = life.placement
        yield (
            f"  dispatched at {self._moments.format_time(placement.dispatched)} to "
            f"{placement.replica} "
            f"with v{placement.version}, by {describe_event(self._dispatch[life.trajectory_id])}"
        )
        yield from self._before_lines(placement, self._dispatch[life.trajectory_id], life.turns)
        tokens = f"{life.num_tokens} tokens, {life.finish_reason}"
        score = f"by {life.scorer}, reward {life.reward:.3g}" if life.reward is not None else ""
        before = placement.dispatched
        for name, moment, detail in (
            ("started", placement.started, placement.replica),
            ("finished", life.finished, tokens),
            ("rewarded", life.rewarded, score),
            ("chosen", chosen, f"for step {self.step}"),
        ):
            if moment is not None:
                seconds = (moment.unix_ns - before.unix_ns) / 1e9
                yield f"  {name} {seconds:.3f} s later (#{moment.seq}): {detail}"
                before = moment

    def _before_lines(self, placement: Placement, cause: Stamped, turns: int) -> Iterable[str]:
        """Yield the preceding idle time of its replica, and the weights that ended it."""
        idle = self._idle.get((placement.replica, placement.dispatched.seq))
        if idle is not None:
            parts = idle.sum_by_reason(placement.dispatched)
            listed = ", ".join(f"{reason} {ns / 1e9:.3f} s" for reason, ns in parts.items())
            begin = self._moments.format_time(idle.begin)
            yield f"    {placement.replica} had been idle since {begin}: {listed}"
        elif isinstance(cause.event, ev.TrajectoryFinished) and cause.peer == placement.replica:
            yield f"    {placement.replica} had no room for it earlier"
        if published := self._published.get(placement.version):
            at = self._moments.format_time(published)
            yield f"    v{placement.version} was published at {at}"
        if placement.number > turns:
            yield f"    placement {placement.number}: see `laminar log why` of the trajectory"


def _share_line(life: TrajectoryHistory, free: Moment, chosen: Moment) -> str:
    """Divide the trainer's wait among the stages of the last sibling."""
    parts = (
        ("not dispatched", life.placement.dispatched),
        ("queued at its replica", life.placement.started),
        ("generated", life.finished),
        ("rewarded", life.rewarded),
        ("complete (its batch was not)", chosen),
    )
    shares, before = [], free.unix_ns
    for name, until in parts:
        if until is not None and until.unix_ns > before:
            shares.append(f"{name} for {(until.unix_ns - before) / 1e9:.3f} s")
            before = until.unix_ns
    return f"While the trainer waited, {life.trajectory_id}, the last, was {', '.join(shares)}."


def _rewarded_seq(life: TrajectoryHistory) -> int:
    return life.rewarded.seq if life.rewarded else 0


def _find_trainer_wait_reason(state: State) -> TrainerWaitReason | None:
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


def _trainer_detail(state: State, reason: TrainerWaitReason) -> str:
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
