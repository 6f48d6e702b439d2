"""Intervals during which a condition held in the coordinator's state, between events of the log.

Reads   the events of a replay and the state after each
Gives   intervals by name, in unix ns

The processes record what they did; only the state records what they were permitted to do. Names are
tuples: ("bound",) all serving replicas are idle and refused by the staleness bound, ("phase", p),
("trainer-free",) no command to the trainer is outstanding, and per actor ("live", a),
("running", a), ("loading", a), ("bound", a), ("spare", a) refused although it is not full.
"""

from __future__ import annotations

from laminar.analysis.log.intervals import Intervals, merge_intervals
from laminar.analysis.log.run_log import WallClock
from laminar.core.scheduling.admission import (
    NotAdmittedReason,
    count_free_slots,
    find_not_admitted_reason,
)
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind, Load
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Stamped

Name = tuple[str, ...]
_Filed = tuple[tuple[Kind, Load], bool]
"""Inputs of the decisions about a replica, and whether it runs nothing."""


class StateIntervals:
    """Replay observer whose cost is negligible for events that change no condition."""

    def __init__(self) -> None:
        self.first_ns = 0
        self.last_ns = 0
        self._clock = WallClock()
        self._now = 0
        self._held: dict[str, frozenset[Name]] = {}  #: conditions by owner
        self._reasons: dict[Kind, NotAdmittedReason | None] = {}  #: why they take no new group
        self._filed: dict[str, _Filed] = {}  #: inputs of the live replicas
        self._since: dict[Name, int] = {}
        self._closed: dict[Name, list[tuple[int, int]]] = {}

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self._now = self.last_ns = self._clock.unix_ns(stamped)
        self.first_ns = self.first_ns or self._now
        if isinstance(stamped.event, ev.TokenProgress):
            return  # a gauge, which changes none of these conditions
        over = state.run.phase in (Phase.STOPPING, Phase.ENDED)
        live = (
            () if over else (a.name for a in state.members.actors.values() if a.alive and a.ready)
        )
        self._set_held("live", frozenset(("live", name) for name in live))
        held_back = self._update_replicas(state)
        self._set_held("", _of_run(state, held_back))

    def _update_replicas(self, state: State) -> bool:
        """Return whether the staleness bound blocks every serving replica and none has work."""
        index = indexes_of(state).replicas
        reasons = {  # the same for all of a kind
            kind: find_not_admitted_reason(state, index.replicas[next(iter(loads.values()))[0]])
            for kind, loads in index.kinds.items()
        }
        as_before, self._reasons = reasons == self._reasons, reasons
        for name in self._filed.keys() - index.filed.keys():  # no longer live
            del self._filed[name]
            self._set_held(name, frozenset())
        for name, filed in index.filed.items():
            replica = state.members.replicas[name]
            found = filed, not replica.running
            if not as_before or found != self._filed.get(name):
                self._filed[name] = found
                self._set_held(name, _of_replica(replica, reasons[filed[0]]))
        busy = any(kind.loading for kind in reasons) or any(
            state.members.replicas[name].running for name in index.filed
        )
        serving = {reason for kind, reason in reasons.items() if kind.serving}
        return not busy and serving == {NotAdmittedReason.STALENESS_BOUND}

    def _set_held(self, owner: str, names: frozenset[Name]) -> None:
        before = self._held.get(owner, frozenset())
        if names != before:
            self._held[owner] = names
            for name in names ^ before:
                self._toggle_interval(name)

    def _toggle_interval(self, name: Name) -> None:
        """Begin or end the interval of this name."""
        if name in self._since:
            self._closed.setdefault(name, []).append((self._since.pop(name), self._now))
        else:
            self._since[name] = self._now

    def __getitem__(self, name: Name) -> Intervals:
        """Return the intervals of this name; open ones are cut at the last event."""
        closed = self._closed.get(name, [])
        open_since = [(self._since[name], self.last_ns)] if name in self._since else []
        return merge_intervals(closed + open_since)


def _of_run(state: State, held_back: bool) -> frozenset[Name]:
    found: set[Name] = {("phase", state.run.phase)}
    if state.steps.batch is None and not {"publish", "export"} & state.orders.commands.keys():
        found.add(("trainer-free",))
    if held_back:
        found.add(("bound",))
    return frozenset(found)


def _of_replica(replica: Replica, reason: NotAdmittedReason | None) -> frozenset[Name]:
    """Return the conditions that hold for a replica; `reason`: why it takes no new group."""
    holds = {
        "running": bool(replica.running),
        "loading": replica.loading,
        "bound": reason == NotAdmittedReason.STALENESS_BOUND,
        "spare": bool(reason) and count_free_slots(replica) > 0,
    }
    return frozenset((what, replica.name) for what, does in holds.items() if does)
