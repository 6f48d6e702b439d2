"""Facts about repack: the replicas emptied, the trajectories migrated, what each search found.

Reads   Happenings of a replay
Gives   RepackFacts, a part of the collector

A replica is freed when everything that it gave away has started elsewhere or has ended. Without
repack it would have run until the last of those trajectories finished, so its gain is measured up
to the moment when the last of them finishes at the destination. There it runs in a larger batch
than it would have had, so this figure is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.repack_reasons import NOT_STRAGGLING, list_decisions
from laminar.analysis.facts.tables import Add, MigrationRow, RepackDecisionRow
from laminar.analysis.facts.trajectory_history import Change, Stage
from laminar.analysis.log.event_clock import Moment
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Stamped
from laminar.names.ids import TrajectoryId


@dataclass(slots=True)
class Migration(MigrationRow):
    """Migration of everything that a replica runs to another replica."""

    awaited: set[TrajectoryId] = field(default_factory=set)  #: not finished yet


class RepackFacts:
    """Tables `migrations`, `repack_decisions`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._pending: list[Migration] = []
        self._open: dict[str, Migration] = {}  #: by source, until it is freed
        self._moved: dict[TrajectoryId, Migration] = {}  #: until it is finished

    def record(self, at: Happening) -> None:
        if not at.state.settings.repack_policy:
            return
        for change in at.changes:
            self._record_change(change, at.now, at.stamped)
        self._record_completion(at.now, at.stamped, at.state)
        for command in at.commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._record_order(command, at.now, at.state)
        for replica, reason, detail in list_decisions(at.stamped, at.commands, at.state):
            names = None if reason in NOT_STRAGGLING else list(replica.running)
            found = (replica.version, len(replica.running), reason, detail or None, names)
            self._add("repack_decisions", RepackDecisionRow(replica.name, at.now, *found))
        self._add_complete()

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for hand_over in self._pending:
            yield "migrations", hand_over

    def _record_order(self, command: cmd.ReleaseTrajectories, now: Moment, state: State) -> None:
        given = [item.trajectory_id for item in command.items]
        hand_over = Migration(
            command.to,
            state.repack.progress[given[0]].destination,
            state.members.replicas[command.to].version,
            now,
            given=len(given),
            trajectories=list(given),
            awaited=set(given),
        )
        self._pending.append(hand_over)
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
        hand_over = self._moved.get(life.trajectory)
        if hand_over is None:
            return
        there = life.stay.replica == hand_over.destination
        if what == Stage.DISPATCHED and there:
            hand_over.moved += 1
        elif what == Stage.STARTED and there:
            event = stamped.event
            assert isinstance(event, ev.TrajectoryStarted)
            hand_over.tokens_prefilled += event.prompt_tokens + event.tokens_resumed
        elif what in (Stage.FINISHED, Stage.ENDING, Stage.DISPATCHED) or (
            what == Stage.LOST and hand_over.placed
        ):
            self._end_trajectory(life.trajectory, now)

    def _end_trajectory(self, trajectory_id: TrajectoryId, now: Moment) -> None:
        hand_over = self._moved.pop(trajectory_id)
        hand_over.awaited.discard(trajectory_id)
        if not hand_over.awaited:
            hand_over.done = now

    def _add_complete(self) -> None:
        """Add the migrations to which nothing more can happen."""
        for hand_over in self._pending[:]:
            if not hand_over.awaited and self._open.get(hand_over.source) is not hand_over:
                self._pending.remove(hand_over)
                self._add("migrations", hand_over)
