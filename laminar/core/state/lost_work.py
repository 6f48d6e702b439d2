"""Lost work in the order in which it is placed again.

Reads   state.work.lost, resume timers, trajectory.restart
Gives   LostWork (`indexes_of(state).lost`): by version, the work to place next, and the work that
        still waits for its own version

Part of the indexes: it follows from the state, and core/state/indexes.py keeps it up to date.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count
from typing import Any

from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.core.state.work import Trajectory
from laminar.names.ids import Purpose, TrajectoryId


def goes_anywhere(state: State, trajectory: Trajectory) -> bool:
    """Return whether any newer version does for it at once; an evaluation sample has only one."""
    in_flight = state.settings.in_flight or trajectory.is_unsampled
    return in_flight and state.work.groups[trajectory.group].purpose == Purpose.TRAIN


LostEntry = tuple[int, int, int, TrajectoryId]
"""An entry of lost work, most urgent first: (deadline, dispatch order, loss number, id)."""


class LostWork:
    """Lost trajectories by version, and by whether any newer version will do as well."""

    def __init__(self, state: State) -> None:
        #: work that waits for its version
        self.waiting: dict[int, list[LostEntry]] = {}
        #: work whose wait is over, that begins again from the prompt, or is in flight
        self.anywhere: dict[int, list[LostEntry]] = {}
        #: work in the order of the losses, without trajectories that begin again
        self.resumable: dict[int, dict[TrajectoryId, None]] = {}
        self._entries: dict[TrajectoryId, LostEntry] = {}
        self._count = count()
        for trajectory_id in state.work.lost:
            self.add(state, state.work.trajectories[trajectory_id])
            if keys.resume_timer(trajectory_id) not in state.orders.timers:
                self.end_version_wait(state.work.trajectories[trajectory_id])

    def add(self, state: State, trajectory: Trajectory) -> None:
        """Add a lost trajectory: it waits for its version, unless any newer one does at once."""
        group = state.work.groups[trajectory.group]
        entry = (group.deadline, group.order, next(self._count), trajectory.id)
        self._entries[trajectory.id] = entry
        anywhere = trajectory.restart or goes_anywhere(state, trajectory)
        queues = self.anywhere if anywhere else self.waiting
        insort(queues.setdefault(trajectory.version, []), entry)
        if not anywhere:
            self.resumable.setdefault(trajectory.version, {})[trajectory.id] = None

    def remove(self, trajectory: Trajectory) -> None:
        entry, version = self._entries.pop(trajectory.id), trajectory.version
        if not _remove_entry(self.waiting, version, entry):
            _remove_entry(self.anywhere, version, entry)
        self._remove_resumable(trajectory)

    def end_version_wait(self, trajectory: Trajectory) -> None:
        """Accept any newer version from now on."""
        entry = self._entries[trajectory.id]
        if _remove_entry(self.waiting, trajectory.version, entry):
            insort(self.anywhere.setdefault(trajectory.version, []), entry)

    def restart_from_prompt(self, trajectory: Trajectory) -> None:
        """Discard the tokens of a lost trajectory, which begins again."""
        self.end_version_wait(trajectory)
        self._remove_resumable(trajectory)

    def _remove_resumable(self, trajectory: Trajectory) -> None:
        same = self.resumable.get(trajectory.version, {})
        same.pop(trajectory.id, None)
        if not same:
            self.resumable.pop(trajectory.version, None)

    def list_versions(self) -> dict[int, None]:
        """Return all versions of lost work."""
        return dict.fromkeys([*self.waiting, *self.anywhere])

    def to_comparable(self) -> Any:
        """Return a value that is equal for indexes with equal contents."""
        queues = (self.waiting, self.anywhere)
        order = [{v: [e[3] for e in queue] for v, queue in kind.items()} for kind in queues]
        return order, {v: list(same) for v, same in self.resumable.items()}, self.list_wanted()

    def list_wanted(self) -> list[int]:
        """List the versions that lost work could resume on, earliest loss first."""
        first = {v: self._entries[next(iter(same))][2] for v, same in self.resumable.items()}
        return sorted(first, key=first.__getitem__)


def _remove_entry(queues: dict[int, list[LostEntry]], version: int, entry: LostEntry) -> bool:
    """Remove an entry and return whether it was there."""
    queue = queues.get(version, [])
    place = bisect_left(queue, entry)
    if place == len(queue) or queue[place] != entry:
        return False
    del queue[place]
    if not queue:
        del queues[version]
    return True
