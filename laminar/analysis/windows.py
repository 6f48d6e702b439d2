"""When something held in the coordinator's state: from one event of the log to the next.

Reads   the events of a replay and the state after each
Gives   windows by name, in unix ns

The processes record what they did; only the state knows what they were allowed to do. Names are
tuples: ("bound",) all serving replicas are refused by the staleness bound and idle, ("phase", p),
("trainer-free",) no command to the trainer is outstanding, and per actor ("live", a),
("running", a), ("loading", a), ("bound", a), ("spare", a) refused though it is not full.
"""

from __future__ import annotations

from collections.abc import Iterator

from laminar.analysis.history import WallClock
from laminar.analysis.intervals import Intervals, union
from laminar.core.admission import refusal, room, serving
from laminar.core.state import Replica, State
from laminar.core.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Stamped

Name = tuple[str, ...]

STALENESS_BOUND = "staleness-bound"  #: as admission.refusal says it


class Windows:
    """An observer of a replay."""

    def __init__(self) -> None:
        self.first_ns = 0
        self.last_ns = 0
        self._clock = WallClock()
        self._since: dict[Name, int] = {}
        self._closed: dict[Name, list[tuple[int, int]]] = {}

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self.last_ns = self._clock.unix_ns(stamped)
        self.first_ns = self.first_ns or now
        if isinstance(stamped.event, ev.TokenProgress):
            return  # a gauge: it changes nothing that is named here
        holding = dict.fromkeys(_names(state))
        for name in [n for n in self._since if n not in holding]:
            self._closed.setdefault(name, []).append((self._since.pop(name), now))
        for name in holding:
            self._since.setdefault(name, now)

    def __getitem__(self, name: Name) -> Intervals:
        """When it held; what still holds is cut at the last event."""
        closed = self._closed.get(name, [])
        open_since = [(self._since[name], self.last_ns)] if name in self._since else []
        return union(closed + open_since)


def _names(state: State) -> Iterator[Name]:
    yield "phase", state.phase
    if state.batch is None and not {"publish", "export"} & state.commands.keys():
        yield ("trainer-free",)
    if state.phase not in (Phase.STOPPING, Phase.ENDED):
        for actor in state.actors.values():
            if actor.alive and actor.ready:
                yield "live", actor.name
    live = state.live_replicas()
    refusals = [refusal(state, replica) for replica in live]
    for replica, reason in zip(live, refusals, strict=True):
        yield from _replica_names(replica, reason)
    if _held_back(state, live, refusals):
        yield ("bound",)


def _replica_names(replica: Replica, reason: str) -> Iterator[Name]:
    if replica.running:
        yield "running", replica.name
    if replica.loading:
        yield "loading", replica.name
    if reason == STALENESS_BOUND:
        yield "bound", replica.name
    if reason and room(replica) > 0:
        yield "spare", replica.name


def _held_back(state: State, live: list[Replica], refusals: list[str]) -> bool:
    """The staleness bound lets no replica start anything, and none has anything to go on with."""
    if any(replica.running or replica.loading for replica in live):
        return False
    reasons = [r for replica, r in zip(live, refusals, strict=True) if serving(state, replica)]
    return bool(reasons) and all(reason == STALENESS_BOUND for reason in reasons)
