"""Checks of repack's migrations: eligible, durable before they continue, void when late.

Reads   decisions, the coordinator's state after them; what engines had sampled when they were told
        to stop, the store's rows
Raises  Violation

Only eligible trajectories migrate, an emptied replica has new work, and an answer to a release that
comes too late changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus
from laminar.core.state.work import Trajectory
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.ids import Purpose
from laminar.storage.rules import Row
from tools.simulator.runtime.violation import Violation

MOVES_MAX = 3


class Moves:
    """Checks of the migrations of one run."""

    def __init__(self) -> None:
        self._orders: dict[int, cmd.ReleaseTrajectories] = {}  #: orders by id
        self._expired: dict[int, int] = {}  #: event of the timeout, by order id

    def note(self, stamped: Stamped, commands: list[Command]) -> None:
        """Note what was decided at an event; a replay repeats it."""
        first = stamped.seq << 20
        for index, command in enumerate(commands):
            if isinstance(command, cmd.ReleaseTrajectories):
                self._orders[first + index] = command
        if isinstance(stamped.event, ev.TimerFired) and self._orders:
            orders = [n for n, o in self._orders.items() if n < first and _times(stamped.event, o)]
            if orders:
                self._expired.setdefault(max(orders), stamped.seq)

    def take_back(self, seq: int) -> None:
        """Forget what was decided after this event: a crash lost it."""
        self._orders = {n: order for n, order in self._orders.items() if n >> 20 <= seq}
        self._expired = {n: since for n, since in self._expired.items() if since <= seq}

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Check an event that the coordinator has handled."""
        event = stamped.event
        if isinstance(event, ev.TrajectoriesReleased):
            self._late_release_has_no_effect(event, commands, stamped.peer)
        orders = [c for c in commands if isinstance(c, cmd.ReleaseTrajectories)]
        for order in orders:
            self._moved_may_be_moved(order, state)
        if state.settings.repack_policy == "gain":
            share_is_kept(commands, state)
        if orders and state.settings.repack_policy == "gain":
            _emptied_has_new_work(len(orders), state)

    def _late_release_has_no_effect(
        self, event: ev.TrajectoriesReleased, commands: list[Command], source: str
    ) -> None:
        """Check late_release_has_no_effect: after the timeout its trajectories run elsewhere."""
        late = event.command_id in self._expired or event.command_id not in self._orders
        if late and commands:
            what = f"{source} answers release {event.command_id} too late, but is believed"
            raise Violation("late_release_has_no_effect", what, source)

    def _moved_may_be_moved(self, order: cmd.ReleaseTrajectories, state: State) -> None:
        """Check moved_may_be_moved: no batch waited for it, no replica died of it.

        Evaluation samples never migrate, other trajectories at most `MOVES_MAX` times.
        """
        for item in order.items:
            trajectory = state.work.trajectories[item.trajectory_id]
            found = self._why_not(trajectory, state)
            if found:
                what = f"{order.to} releases {trajectory.id}: {found}"
                raise Violation("moved_may_be_moved", what, trajectory.id)

    def _why_not(self, trajectory: Trajectory, state: State) -> str:
        times = sum(
            item.trajectory_id == trajectory.id
            for order in self._orders.values()
            for item in order.items
        )
        if times > MOVES_MAX:
            return f"for the {times}th time"
        if trajectory.batch_timeouts or trajectory.deaths:
            return (
                f"waited for {trajectory.batch_timeouts} times, {trajectory.deaths} replicas died"
            )
        evaluated = state.work.groups[trajectory.group].purpose == Purpose.EVAL
        return "it is an evaluation sample" if evaluated else ""


def _times(event: ev.TimerFired, order: cmd.ReleaseTrajectories) -> bool:
    return event.timer == keys.deadline_timer(keys.release_key(order.to))


def _share(state: State) -> int:
    """Return the number of new groups that a replica may run at a time: an equal part for each."""
    settings = state.settings
    admitted = settings.groups_per_step * (settings.max_staleness + 1)
    return math.ceil(admitted / len(state.members.live_replicas()))


def share_is_kept(commands: list[Command], state: State) -> None:
    """Check share_is_kept: a replica that was given new groups has at most its part of them.

    Evaluation prompts may follow; they take whatever room the replica has.
    """
    placed: dict[str, list[bool]] = {}  #: whether each is of a new group, by replica
    for command in commands:
        if isinstance(command, cmd.GenerateTrajectory):
            new = command.placement == 1 and command.purpose == Purpose.TRAIN
            placed.setdefault(command.to, []).append(new)
    for name in (name for name, new in placed.items() if any(new)):
        later = placed[name][::-1].index(True)
        running = len(state.members.replicas[name].running) - later
        most = state.settings.group_size * _share(state)
        if running > most:
            what = f"{name} was given new groups and runs {running} trajectories of {most}"
            raise Violation("share_is_kept", what, name)


def _emptied_has_new_work(emptied: int, state: State) -> None:
    """Check emptied_has_new_work: data and the staleness bound allow new groups for each."""
    data = state.data
    settings = state.settings
    unchosen = sum(
        group.purpose == Purpose.TRAIN and group.status in (GroupStatus.OPEN, GroupStatus.READY)
        for group in state.work.groups.values()
    )
    steps = state.versions.newest_step + settings.max_staleness - state.steps.chosen + 1
    allowed = settings.groups_per_step * steps - unchosen
    if settings.total_steps:
        left = settings.groups_per_step * (settings.total_steps - state.steps.chosen) - unchosen
    else:
        left = settings.total_epochs * data.num_train - data.cursor + len(data.unfinished_prompts)
    if emptied * min(settings.groups_per_version, _share(state)) > min(allowed, left):
        what = f"{emptied} replicas are emptied for {min(allowed, left)} new groups"
        raise Violation("emptied_has_new_work", what)


class Released:
    """Check that the store has all of a migrated trajectory before it continues elsewhere."""

    def __init__(self) -> None:
        self._ordered: set[tuple[str, int]] = set()  #: trajectories and placements to migrate
        self._sampled: dict[str, int] = {}  #: tokens at the stop, by request id

    def stopped(self, request_id: str, tokens: int) -> None:
        """Note that an engine stopped a request with so many tokens of the response sampled."""
        self._sampled[request_id] = tokens

    def observe(self, event: Event, commands: list[Command], rows: Mapping[str, Row]) -> None:
        """Check released_is_stored: a migrated trajectory continues with all its sampled tokens.

        Without an answer in time it continues with fewer, and the replica's copy is aborted.
        """
        answered = isinstance(event, ev.TrajectoriesReleased)
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._ordered.update((item.trajectory_id, item.placement) for item in command.items)
            elif isinstance(command, cmd.AbortTrajectories):
                taken = {(item.trajectory_id, item.placement) for item in command.items}
                self._ordered.difference_update(taken)
            elif isinstance(command, cmd.GenerateTrajectory) and answered:
                self._goes_on(command, rows)

    def _goes_on(self, command: cmd.GenerateTrajectory, rows: Mapping[str, Row]) -> None:
        before = (command.trajectory_id, command.placement - 1)
        sampled = self._sampled.get(f"{command.trajectory_id}@{command.placement - 1}", 0)
        if before not in self._ordered or not sampled:
            return
        row = rows.get(command.trajectory_id)
        if row is None or row.num_tokens < sampled:
            what = f"{sampled} tokens were sampled when it was released, the store has {row}"
            raise Violation("released_is_stored", what, command.trajectory_id)
