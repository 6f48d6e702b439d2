"""History of every trajectory, from first placement to end, with the event of each stage.

Reads   the events and commands of a replay, and the state after each
Gives   TrajectoryHistory and its Placements, HistoryTracker.record_event

Only accepted events are entered: a late event of a lost replica is in the log, but not in a
history. A history that has ended is returned with its last change and dropped here, so memory
depends on the number of trajectories open at one time, not on the length of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple

from laminar.analysis.log.event_clock import Moment
from laminar.core.state import keys
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import IN_ENGINE
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.ids import GroupId, TrajectoryId


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
class Placement:
    """Stay of a trajectory on one replica, under one placement number."""

    number: int
    replica: str
    version: int
    step: int  #: step that made the version
    attempt: int
    dispatched: Moment
    turn: int = 1  #: turn that it began with
    started: Moment | None = None
    tokens_resumed: int = 0
    prompt_tokens: int | None = None
    left: Moment | None = None
    left_how: str = ""  #: finished, turn, lost, released or ended
    moved_because: str = ""  #: why it followed a lost or released one
    moved_from: str = ""  #: source of its weights, if the replica had to load them
    recorded: bool = False  #: whether the facts have it
    #: versions loaded in flight, with which it continued there
    updates: list[tuple[Moment, int]] = field(default_factory=list)


@dataclass(slots=True)
class TrajectoryHistory:
    """History of one trajectory; stages not yet reached are None or empty."""

    trajectory_id: TrajectoryId
    group: GroupId
    sibling: int
    purpose: str
    row_index: int
    placements: list[Placement] = field(default_factory=list)
    requested: Moment | None = None  #: request of its last turn
    finished: Moment | None = None  #: of its last turn
    turns: int = 1  #: begun, or due
    num_tokens: int = 0
    finish_reason: str = ""  #: of its last turn, as reported by the engine
    ended_by: str = ""  #: reason why its environment ended it
    scorer: str = ""  #: replica asked to score it
    scoring: Moment | None = None
    rewarded: Moment | None = None
    reward: float | None = None
    correct: bool | None = None
    reward_reason: str = ""
    chosen: Moment | None = None
    ending: Moment | None = None  #: when its end was decided
    ended: Moment | None = None  #: when the store had written it
    end: str = ""  #: trained | evaluated | dropped
    end_reason: str = ""
    end_step: int = -1
    tokens_lost: int = 0  #: tokens of earlier attempts

    @property
    def placement(self) -> Placement:
        """Latest placement."""
        return self.placements[-1]


class Change(NamedTuple):
    """Change that an event made to a history."""

    what: Stage
    life: TrajectoryHistory


class HistoryTracker:
    """Histories that have not ended."""

    def __init__(self) -> None:
        self.open: dict[TrajectoryId, TrajectoryHistory] = {}
        self._lost_how = "lost"  #: how the present event takes work from replicas

    def begin_with(self, state: State) -> None:
        """Begin with the open trajectories of a state; when they were placed is not known."""
        since = Moment(state.seq, 0)
        for t in state.work.trajectories.values():
            group = state.work.groups[t.group]
            life = TrajectoryHistory(t.id, t.group, t.sibling, group.purpose, group.row_index)
            at = (t.placement, t.replica, t.version, t.step, t.attempt, since)
            life.placements.append(Placement(*at))
            if t.status not in IN_ENGINE:
                life.placement.left = since
            self.open[t.id] = life

    def record_event(
        self, now: Moment, stamped: Stamped, commands: list[Command], state: State
    ) -> list[Change]:
        """Record one event with its commands; return the changes in order."""
        event = stamped.event
        if isinstance(event, ev.TokenProgress):
            return []  # a gauge: it changes no history
        self._lost_how = "released" if was_given_away(stamped) else "lost"
        changes = [
            *self._apply_event(now, event, state),
            *self._record_updates(now, stamped, commands, state),
            *self._record_losses(now, state),
        ]
        for command in commands:
            changes += self._apply_command(now, command)
        return changes

    def _apply_event(self, now: Moment, event: Event, state: State) -> Iterator[Change]:
        if isinstance(event, ev.TrajectoryStarted):
            yield from self._record_start(now, event, state)
        elif isinstance(event, ev.TrajectoryFinished):
            yield from self._record_finish(now, event, state)
        elif isinstance(event, ev.TurnRequested):
            yield from self._record_turn(now, event, state)
        elif isinstance(event, ev.TrajectoryRewarded):
            yield from self._record_reward(now, event, state)
        elif isinstance(event, ev.TrajectoriesEnded):
            yield from self._record_ends(now, event, state)

    def _record_updates(
        self, now: Moment, stamped: Stamped, commands: list[Command], state: State
    ) -> Iterator[Change]:
        """Record the running trajectories that continue with weights loaded in flight."""
        if not isinstance(stamped.event, ev.WeightsLoaded) or not state.settings.in_flight:
            return
        placed = {c.trajectory_id for c in commands if isinstance(c, cmd.GenerateTrajectory)}
        replica = state.members.replicas.get(stamped.peer)
        for name in replica.running if replica is not None else ():
            trajectory = state.work.trajectories[name]
            if name in placed or trajectory.status not in IN_ENGINE:
                continue
            placement = self.open[name].placement
            last = placement.updates[-1][1] if placement.updates else placement.version
            if last < trajectory.version:
                placement.updates.append((now, trajectory.version))
                yield Change(Stage.UPDATED, self.open[name])

    def _record_start(
        self, now: Moment, event: ev.TrajectoryStarted, state: State
    ) -> Iterator[Change]:
        life = self._find_accepted(event, state, TrajectoryStatus.RUNNING)
        if life is not None and life.placement.started is None:
            life.placement.started, life.placement.tokens_resumed = now, event.tokens_resumed
            life.placement.prompt_tokens = event.prompt_tokens or None
            yield Change(Stage.STARTED, life)

    def _record_finish(
        self, now: Moment, event: ev.TrajectoryFinished, state: State
    ) -> Iterator[Change]:
        has_sessions = state.settings.has_environment
        status = TrajectoryStatus.WAITING if has_sessions else TrajectoryStatus.GENERATED
        life = self._find_accepted(event, state, status)
        if life is not None and life.finished is None:
            life.finished, life.finish_reason = now, event.finish_reason
            life.num_tokens = event.num_tokens
            yield from _leave_placement(life, now, Stage.FINISHED, "finished")

    def _record_turn(self, now: Moment, event: ev.TurnRequested, state: State) -> Iterator[Change]:
        """Record that a turn follows; only a change of replica counts as a move."""
        life = self.open.get(event.trajectory_id)
        trajectory = state.work.trajectories.get(event.trajectory_id)
        if life is None or trajectory is None or life.placement.number != event.placement:
            return
        waits = trajectory.status == TrajectoryStatus.WAITING
        if waits and trajectory.placement == event.placement:
            return
        life.requested = now
        if life.finished is not None:
            life.finished, life.turns = None, life.turns + 1
            yield Change(Stage.TURN, life)
        elif life.placement.left is None:  # its session has started
            yield from _leave_placement(life, now, Stage.TURN, "turn")

    def _find_accepted(
        self, event: ev.TrajectoryStarted | ev.TrajectoryFinished, state: State, status: str
    ) -> TrajectoryHistory | None:
        """Return the history of the trajectory if the state accepted its event."""
        trajectory = state.work.trajectories.get(event.trajectory_id)
        accepted = event.placement, status
        if trajectory is None or (trajectory.placement, trajectory.status) != accepted:
            return None
        return self.open[event.trajectory_id]

    def _record_reward(
        self, now: Moment, event: ev.TrajectoryRewarded, state: State
    ) -> Iterator[Change]:
        life = self.open.get(event.trajectory_id)
        trajectory = state.work.trajectories.get(event.trajectory_id)
        if life is None or trajectory is None or life.rewarded is not None:
            return
        if trajectory.reward_bits == event.reward_bits:  # still -1 if the sender is fenced
            life.rewarded, life.reward = now, float_of(event.reward_bits)
            life.correct = event.correct
            life.reward_reason, life.ended_by = event.reason, event.ended_by
            yield Change(Stage.REWARDED, life)

    def _record_ends(
        self, now: Moment, event: ev.TrajectoriesEnded, state: State
    ) -> Iterator[Change]:
        for row in event.ended:
            if row.trajectory_id not in state.work.trajectories and row.trajectory_id in self.open:
                life = self.open.pop(row.trajectory_id)
                life.ended, life.num_tokens = now, row.num_tokens
                life.tokens_lost = row.tokens_lost
                yield Change(Stage.ENDED, life)

    def _record_losses(self, now: Moment, state: State) -> Iterator[Change]:
        for name in state.work.lost:
            life = self.open[name]
            if life.placement.left is None:
                yield from _leave_placement(life, now, Stage.LOST, self._lost_how)

    def _apply_command(self, now: Moment, command: Command) -> Iterator[Change]:
        if isinstance(command, cmd.OpeningCommand):
            yield from self._record_dispatch(now, command)
        elif isinstance(command, cmd.ScoreTrajectories):
            for item in command.items:
                life = self.open[item.trajectory_id]
                life.scorer, life.scoring = command.to, now
                yield Change(Stage.SCORING, life)
        elif isinstance(command, cmd.TrainStep):
            for name in command.trajectories:
                life = self.open[name]
                life.chosen = now
                yield Change(Stage.CHOSEN, life)
        elif isinstance(command, cmd.EndTrajectories):
            for ending in command.endings:
                yield from self._record_ending(now, ending)

    def _record_dispatch(self, now: Moment, command: cmd.OpeningCommand) -> Iterator[Change]:
        life = self.open.get(command.trajectory_id)
        if life is None:
            name, group, row_index = command.trajectory_id, command.group, command.row_index
            life = TrajectoryHistory(name, group, command.sibling, command.purpose, row_index)
            self.open[name] = life
        elif life.placement.left is None:  # lost and placed again by the same event
            yield from _leave_placement(life, now, Stage.LOST, self._lost_how)
        life.placements.append(
            Placement(
                command.placement,
                command.to,
                command.version,
                command.version_step,
                command.attempt,
                dispatched=now,
                turn=life.turns,
            )
        )
        yield Change(Stage.DISPATCHED, life)

    def _record_ending(self, now: Moment, ending: cmd.TrajectoryEnding) -> Iterator[Change]:
        life = self.open[ending.trajectory_id]
        life.ending, life.end, life.end_reason = now, ending.end, ending.reason
        life.end_step = ending.step
        if life.placement.left is None:
            yield from _leave_placement(life, now, Stage.ENDING, "ended")
        else:
            yield Change(Stage.ENDING, life)


def was_given_away(stamped: Stamped) -> bool:
    """Return whether this event gave work away: the replica released it, or failed to in time."""
    event = stamped.event
    if isinstance(event, ev.TimerFired):
        return event.timer.startswith(keys.deadline_timer(keys.release_key("")))
    return isinstance(event, ev.TrajectoriesReleased)


def _leave_placement(
    life: TrajectoryHistory, now: Moment, what: Stage, how: str
) -> Iterator[Change]:
    life.placement.left, life.placement.left_how = now, how
    yield Change(what, life)
