"""History of every trajectory, from first placement to end, with the event of each stage.

Reads   the events and commands of a replay, and the state after each
Gives   TrajectoryHistory and its Stays, HistoryTracker.record_event

Only accepted events are entered: a late event of a lost replica is in the log, but not in a
history. A history that has ended is returned with its last change and dropped here, so memory
depends on the number of trajectories open at one time, not on the length of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from laminar.analysis.facts.tables import Add, PlacementRow, TrajectoryRow, TurnRow, UpdateRow
from laminar.analysis.log.display import step_number
from laminar.analysis.log.event_clock import Moment
from laminar.core.state import keys
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import IN_ENGINE
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.events.reasons import EndKind, FinishReason
from laminar.names.ids import TrajectoryId


class Stage(StrEnum):
    """Changes of a history, in their usual order."""

    DISPATCHED = auto()
    STARTED = auto()
    UPDATED = auto()
    LOST = auto()
    FINISHED = auto()
    TURN = auto()
    SCORING = auto()
    REWARDED = auto()
    CHOSEN = auto()
    ENDING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Stay(PlacementRow):
    """Stay of a trajectory on one replica, under one placement number."""

    latest: int = -1  #: version with which it continues there


@dataclass(slots=True)
class TrajectoryHistory(TrajectoryRow):
    """History of one trajectory; `finished` and `finish_reason` are of its last turn."""

    stays: list[Stay] = field(default_factory=list)
    requested: Moment | None = None  #: request of its last turn

    @property
    def stay(self) -> Stay:
        """Latest stay."""
        return self.stays[-1]

    def begin_stay(
        self, number: int, replica: str, version: int, step: int, attempt: int, now: Moment
    ) -> None:
        """Add a stay, and take over the columns that are of the last one."""
        where = (self.trajectory, number, self.purpose, replica, version, step, attempt)
        self.stays.append(Stay(*where, self.turns, dispatched=now, latest=version))
        self.placements, self.replica, self.attempts = number, replica, attempt
        self.version, self.version_step = version, step
        self.started = self.prompt_tokens = None

    def note_truncation(self) -> None:
        """Set the limit that truncated it, by what is known of its end."""
        is_cut = self.finished is not None and self.finish_reason == FinishReason.LENGTH
        self.truncated_by = self.ended_by or (FinishReason.LENGTH if is_cut else None)


Change = tuple[Stage, TrajectoryHistory]
"""Change that an event made to a history."""


class HistoryTracker:
    """Histories that have not ended; tables `trajectories`, `placements`, `updates`, `turns`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._now = Moment(0, 0, 0.0)  #: present event
        self._changes: list[Change] = []  #: by the present event
        self.open: dict[TrajectoryId, TrajectoryHistory] = {}
        self._lost_how = "lost"  #: how the present event takes work from replicas

    def begin_with(self, state: State) -> None:
        """Begin with the open trajectories of a state; when they were placed is not known."""
        since = Moment(state.seq, 0, 0.0)
        for t in state.work.trajectories.values():
            group = state.work.groups[t.group]
            row = (t.id, t.group, t.sibling, group.purpose, group.row_index)
            life = TrajectoryHistory(*row, dispatched=since)
            life.begin_stay(t.placement, t.replica, t.version, t.step, t.attempt, since)
            if t.status not in IN_ENGINE:
                life.stay.left_at = since
            self.open[t.id] = life

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for life in self.open.values():
            yield "trajectories", life
            if life.stay.left_at is None:
                yield "placements", life.stay

    def record_event(
        self, now: Moment, stamped: Stamped, commands: list[Command], state: State
    ) -> list[Change]:
        """Record one event with its commands; return the changes in order."""
        event = stamped.event
        if isinstance(event, ev.TokenProgress):
            return []  # a gauge: it changes no history
        self._lost_how = "released" if was_given_away(stamped) else "lost"
        self._now, self._changes = now, []
        self._apply_event(event, state)
        self._record_updates(stamped, commands, state)
        self._record_losses(state)
        for command in commands:
            self._apply_command(command)
        return self._changes

    def _note_change(self, what: Stage, life: TrajectoryHistory) -> None:
        self._changes.append((what, life))

    def _apply_event(self, event: Event, state: State) -> None:
        if isinstance(event, ev.TrajectoryStarted):
            self._record_start(event, state)
        elif isinstance(event, ev.TrajectoryFinished):
            self._record_finish(event, state)
        elif isinstance(event, ev.TurnRequested):
            self._record_turn(event, state)
        elif isinstance(event, ev.TrajectoryRewarded):
            self._record_reward(event, state)
        elif isinstance(event, ev.TrajectoriesEnded):
            self._record_ends(event, state)

    def _record_updates(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Record the running trajectories that continue with weights loaded in flight."""
        if not isinstance(stamped.event, ev.WeightsLoaded) or not state.settings.in_flight:
            return
        placed = {c.trajectory_id for c in commands if isinstance(c, cmd.GenerateTrajectory)}
        replica = state.members.replicas.get(stamped.peer)
        for name in replica.running if replica is not None else ():
            trajectory = state.work.trajectories[name]
            if name in placed or trajectory.status not in IN_ENGINE:
                continue
            stay = self.open[name].stay
            if stay.latest < trajectory.version:
                stay.latest = trajectory.version
                place = (name, stay.placement, stay.replica)
                self._add("updates", UpdateRow(*place, stay.latest, self._now))
                self._note_change(Stage.UPDATED, self.open[name])

    def _record_start(self, event: ev.TrajectoryStarted, state: State) -> None:
        life = self._find_accepted(event, state, TrajectoryStatus.RUNNING)
        if life is not None and life.stay.started is None:
            life.stay.tokens_resumed = event.tokens_resumed
            life.started = life.stay.started = self._now
            life.prompt_tokens = life.stay.prompt_tokens = event.prompt_tokens or None
            self._note_change(Stage.STARTED, life)

    def _record_finish(self, event: ev.TrajectoryFinished, state: State) -> None:
        has_sessions = state.settings.has_environment
        status = TrajectoryStatus.WAITING if has_sessions else TrajectoryStatus.GENERATED
        life = self._find_accepted(event, state, status)
        if life is not None and life.finished is None:
            life.finished, life.finish_reason = self._now, event.finish_reason or None
            life.tokens = event.num_tokens
            life.note_truncation()
            self._leave_placement(life, Stage.FINISHED, "finished")
            stay = life.stay
            begun = (life.trajectory, life.turns, stay.replica, stay.version, life.requested)
            times = (stay.dispatched, stay.started, self._now)
            self._add("turns", TurnRow(*begun, *times, life.tokens, event.finish_reason))

    def _record_turn(self, event: ev.TurnRequested, state: State) -> None:
        """Record that a turn follows; only a change of replica counts as a move."""
        life = self.open.get(event.trajectory_id)
        trajectory = state.work.trajectories.get(event.trajectory_id)
        if life is None or trajectory is None or life.placements != event.placement:
            return
        waits = trajectory.status == TrajectoryStatus.WAITING
        if waits and trajectory.placement == event.placement:
            return
        life.requested = self._now
        if life.finished is not None:
            life.finished, life.turns = None, life.turns + 1
            life.note_truncation()
            self._note_change(Stage.TURN, life)
        elif life.stay.left_at is None:  # its session has started
            self._leave_placement(life, Stage.TURN, "turn")

    def _find_accepted(
        self, event: ev.TrajectoryStarted | ev.TrajectoryFinished, state: State, status: str
    ) -> TrajectoryHistory | None:
        """Return the history of the trajectory if the state accepted its event."""
        trajectory = state.work.trajectories.get(event.trajectory_id)
        accepted = event.placement, status
        if trajectory is None or (trajectory.placement, trajectory.status) != accepted:
            return None
        return self.open[event.trajectory_id]

    def _record_reward(self, event: ev.TrajectoryRewarded, state: State) -> None:
        life = self.open.get(event.trajectory_id)
        trajectory = state.work.trajectories.get(event.trajectory_id)
        if life is None or trajectory is None or life.rewarded is not None:
            return
        if trajectory.reward_bits == event.reward_bits:  # still -1 if the sender is fenced
            life.rewarded, life.reward = self._now, float_of(event.reward_bits)
            life.correct = event.correct
            life.reward_reason, life.ended_by = event.reason or None, event.ended_by or None
            life.note_truncation()
            self._note_change(Stage.REWARDED, life)

    def _record_ends(self, event: ev.TrajectoriesEnded, state: State) -> None:
        for row in event.ended:
            if row.trajectory_id not in state.work.trajectories and row.trajectory_id in self.open:
                life = self.open.pop(row.trajectory_id)
                life.ended, life.tokens = self._now, row.num_tokens
                life.tokens_lost = row.tokens_lost
                self._add("trajectories", life)
                self._note_change(Stage.ENDED, life)

    def _record_losses(self, state: State) -> None:
        for name in state.work.lost:
            life = self.open[name]
            if life.stay.left_at is None:
                self._leave_placement(life, Stage.LOST, self._lost_how)

    def _apply_command(self, command: Command) -> None:
        if isinstance(command, cmd.OpeningCommand):
            self._record_dispatch(command)
        elif isinstance(command, cmd.ScoreTrajectories):
            for item in command.items:
                life = self.open[item.trajectory_id]
                life.scorer, life.scoring = command.to or None, self._now
                self._note_change(Stage.SCORING, life)
        elif isinstance(command, cmd.TrainStep):
            for name in command.trajectories:
                life = self.open[name]
                life.chosen = self._now
                self._note_change(Stage.CHOSEN, life)
        elif isinstance(command, cmd.EndTrajectories):
            for ending in command.endings:
                self._record_ending(ending)

    def _record_dispatch(self, command: cmd.OpeningCommand) -> None:
        life = self.open.get(command.trajectory_id)
        if life is None:
            row = (command.group, command.sibling, command.purpose, command.row_index)
            life = TrajectoryHistory(command.trajectory_id, *row, dispatched=self._now)
            self.open[command.trajectory_id] = life
        elif life.stay.left_at is None:  # lost and placed again by the same event
            self._leave_placement(life, Stage.LOST, self._lost_how)
        weights = (command.version, command.version_step)
        life.begin_stay(command.placement, command.to, *weights, command.attempt, self._now)
        self._note_change(Stage.DISPATCHED, life)

    def _record_ending(self, ending: cmd.TrajectoryEnding) -> None:
        life = self.open[ending.trajectory_id]
        life.ending, life.outcome = self._now, ending.end
        life.outcome_reason = ending.reason or None
        if ending.end == EndKind.TRAINED:
            oldest = next(s.version_step for s in life.stays if s.attempt == life.attempts)
            life.step, life.staleness = step_number(ending.step), ending.step - oldest
        elif ending.step >= 0:
            life.step = ending.step
        if life.stay.left_at is None:
            self._leave_placement(life, Stage.ENDING, "ended")
        else:
            self._note_change(Stage.ENDING, life)

    def _leave_placement(self, life: TrajectoryHistory, what: Stage, how: str) -> None:
        life.stay.left_at, life.stay.left_how = self._now, how
        self._add("placements", life.stay)
        self._note_change(what, life)


def was_given_away(stamped: Stamped) -> bool:
    """Return whether this event gave work away: the replica released it, or failed to in time."""
    event = stamped.event
    if isinstance(event, ev.TimerFired):
        return event.timer.startswith(keys.deadline_timer(keys.release_key("")))
    return isinstance(event, ev.TrajectoriesReleased)
