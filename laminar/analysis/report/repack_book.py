"""Repack statistics of a run: the replicas emptied, the trajectories migrated, cost and gain.

Reads   a replay
Gives   RepackStats: every migration; LatencyStats: latencies of the responses; `compute_summary`
        of each, its figures for the summary; was_given_away

A replica is freed when everything that it gave away has started elsewhere or has ended. Without
repack it would have run until the last of those trajectories finished, so its gain is measured up
to the moment when the last of them finishes at the destination. There it runs in a larger batch
than it would have had, so this figure is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laminar.analysis.log.trajectory_history import (
    Change,
    EventClock,
    HistoryTracker,
    Moment,
    Stage,
)
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.ids import Purpose, TrajectoryId


@dataclass(slots=True)
class Migration:
    """Migration of everything that a replica runs to another replica."""

    source: str
    destination: str
    ordered: Moment
    given: int  #: trajectories to give away
    moves: int = 0  #: trajectories that continued at the destination
    placed: Moment | None = None  #: when nothing is left to place
    expired: bool = False  #: the source did not answer in time
    freed: Moment | None = None  #: all of it has started elsewhere or has ended
    done: Moment | None = None  #: the last trajectory was finished, lost or ended
    awaited: set[TrajectoryId] = field(default_factory=set)  #: not finished yet
    prefilled: int = 0  #: tokens prefilled again, prompts included


def was_given_away(stamped: Stamped) -> bool:
    """Return whether this event gave work away: the replica released it, or failed to in time."""
    event = stamped.event
    if isinstance(event, ev.TimerFired):
        return event.timer.startswith(keys.deadline_timer(keys.release_key("")))
    return isinstance(event, ev.TrajectoriesReleased)


class RepackStats:
    """Collector of migrations, fed with events and the changes made by a HistoryTracker."""

    def __init__(self) -> None:
        self.policy = ""
        self.hand_overs: list[Migration] = []
        self._open: dict[str, Migration] = {}  #: by source, until it is freed
        self._moved: dict[TrajectoryId, Migration] = {}  #: until it is finished

    def record_event(
        self,
        now: Moment,
        stamped: Stamped,
        commands: list[Command],
        changes: list[Change],
        state: State,
    ) -> None:
        """Record one event."""
        self.policy = self.policy or state.settings.repack_policy
        if not self.policy:
            return
        for change in changes:
            self._record_change(change, now, stamped)
        self._record_completion(now, stamped, state)
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._record_order(command, now, state)

    def _record_order(self, command: cmd.ReleaseTrajectories, now: Moment, state: State) -> None:
        given = [item.trajectory_id for item in command.items]
        hand_over = Migration(
            command.to,
            state.repack.progress[given[0]].destination,
            now,
            given=len(given),
            awaited=set(given),
        )
        self.hand_overs.append(hand_over)
        self._open[command.to] = hand_over
        for trajectory_id in given:
            if trajectory_id in self._moved:
                self._end_trajectory(trajectory_id, now)
            self._moved[trajectory_id] = hand_over

    def _record_completion(self, now: Moment, stamped: Stamped, state: State) -> None:
        """Close the orders that are over; free the sources whose work has all started."""
        for source, hand_over in list(self._open.items()):
            if hand_over.placed is None and keys.release_key(source) not in state.orders.commands:
                hand_over.placed = now
                hand_over.expired = isinstance(stamped.event, ev.TimerFired)
            replica = state.members.replicas.get(source)
            if replica is None or not replica.outgoing:
                hand_over.freed = now if replica is not None else None
                del self._open[source]

    def _record_change(self, change: Change, now: Moment, stamped: Stamped) -> None:
        what, life = change
        hand_over = self._moved.get(life.trajectory_id)
        if hand_over is None:
            return
        there = life.placement.replica == hand_over.destination
        if what == Stage.DISPATCHED and there:
            hand_over.moves += 1
        elif what == Stage.STARTED and there:
            event = stamped.event
            assert isinstance(event, ev.TrajectoryStarted)
            hand_over.prefilled += event.prompt_tokens + event.tokens_resumed
        elif what in (Stage.FINISHED, Stage.ENDING, Stage.DISPATCHED) or (
            what == Stage.LOST and hand_over.placed
        ):
            self._end_trajectory(life.trajectory_id, now)

    def _end_trajectory(self, trajectory_id: TrajectoryId, now: Moment) -> None:
        hand_over = self._moved.pop(trajectory_id)
        hand_over.awaited.discard(trajectory_id)
        if not hand_over.awaited:
            hand_over.done = now

    def compute_summary(self) -> dict[str, Any] | None:
        """Return the figures of the summary; None for a run without repack."""
        if not self.policy:
            return None
        freed = [h for h in self.hand_overs if h.freed is not None]
        sooner = [max(_seconds_between(h.freed, h.done), 0.0) for h in freed if h.done is not None]
        return {
            "policy": self.policy,
            "replicas_emptied": len(self.hand_overs),
            "replicas_freed": len(freed),
            "moves": sum(h.moves for h in self.hand_overs),
            "expired": sum(h.expired for h in self.hand_overs),
            "tokens_prefilled_again": sum(h.prefilled for h in self.hand_overs),
            "release_s": _summarize_seconds([_seconds_between(h.ordered, h.placed) for h in freed]),
            "hand_over_s": _summarize_seconds(
                [_seconds_between(h.ordered, h.freed) for h in freed]
            ),
            "sooner_s": _summarize_seconds(sooner),
        }


def _seconds_between(begin: Moment | None, end: Moment | None) -> float:
    assert begin is not None and end is not None
    return (end.unix_ns - begin.unix_ns) / 1e9


def _summarize_seconds(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"mean": sum(seconds) / len(seconds), "max": max(seconds), "sum": sum(seconds)}


class LatencyStats:
    """Latencies of responses, from first placement to last token, and the repack statistics.

    Replay observer.
    """

    def __init__(self) -> None:
        self.moments, self.repack = EventClock(), RepackStats()
        self._lives = HistoryTracker()
        self._count, self._sum_ns, self._max_ns = 0, 0, 0  #: of training responses
        self._turns: dict[TrajectoryId, int] = {}  #: ns to the end of the latest turn, by response

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self.moments.locate_event(stamped)
        changes = self._lives.record_event(now, stamped.event, commands, state)
        for what, life in changes:
            if life.purpose != Purpose.TRAIN:
                continue
            if what == Stage.FINISHED:
                took_ns = now.unix_ns - life.placements[0].dispatched.unix_ns
                self._turns[life.trajectory_id] = took_ns
                self._add_latency(took_ns)
            elif what in (Stage.TURN, Stage.ENDING):
                took_ns = self._turns.pop(life.trajectory_id, 0)
                if what == Stage.TURN and took_ns:  # the turn that finished was not the last
                    self._add_latency(-took_ns, count=-1)
        self.repack.record_event(now, stamped, commands, changes, state)

    def _add_latency(self, took_ns: int, *, count: int = 1) -> None:
        self._count += count
        self._sum_ns += took_ns
        self._max_ns = max(self._max_ns, took_ns)

    def compute_summary(self) -> dict[str, Any]:
        count = self._count
        return {
            "latency_s_mean": self._sum_ns / count / 1e9 if count else None,
            "latency_s_max": self._max_ns / 1e9 if count else None,
            "repack": self.repack.compute_summary(),
        }
