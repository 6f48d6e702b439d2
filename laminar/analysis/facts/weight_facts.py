"""Facts about the weights: what relays held, and what replicas loaded.

Reads   Happenings of a replay
Gives   WeightFacts, a part of the collector
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laminar.analysis.facts.happening import Add, Happening, Row
from laminar.analysis.facts.idle_reasons import source_of
from laminar.analysis.log.event_clock import EventClock, Moment
from laminar.core.state import keys
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import get_tag


@dataclass(slots=True)
class _Load:
    """Order to load weights."""

    command: cmd.PullWeights
    ordered: Moment
    source_detail: str
    ended: Moment | None = None
    outcome: str = ""
    loaded: int | None = None
    seconds: float | None = None
    probe_kl: float | None = None


class WeightFacts:
    """Tables `holdings`, `loads`."""

    def __init__(self, add: Add, clock: EventClock) -> None:
        self._add, self._clock = add, clock
        self._held: dict[str, dict[int, Moment]] = {}  #: versions by relay, with their arrival
        self._loads: dict[str, _Load] = {}  #: by replica

    def record(self, at: Happening) -> None:
        if not at.is_frequent:
            relays = at.state.members.relays
            gone = [name for name in self._held if name not in relays]
            self._record_held(at, [at.stamped.peer] if at.is_steady else [*gone, *relays])
        self._record_loads(at)

    def list_open(self) -> Iterator[tuple[str, Row]]:
        for relay, held in self._held.items():
            for version, since in held.items():
                yield "holdings", (relay, version, *self._clock.place(since), None, None)
        for load in self._loads.values():
            yield "loads", self._load_row(load)

    def _record_held(self, at: Happening, names: Iterable[str]) -> None:
        """Record what these relays have received and evicted."""
        relays = at.state.members.relays
        for name in names:
            held = self._held.setdefault(name, {})
            now = relays[name].held if name in relays else []
            for version in [v for v in held if v not in now]:
                times = (*self._clock.place(held.pop(version)), at.seconds, at.now.seq)
                self._add("holdings", (name, version, *times))
            for version in now:
                held.setdefault(version, at.now)
            if name not in relays:
                del self._held[name]

    def _record_loads(self, at: Happening) -> None:
        names = [at.stamped.peer] if at.is_frequent else list(self._loads)
        for name in names:
            load = self._loads.get(name)
            if load is None:
                continue
            outstanding = at.state.orders.commands.get(keys.pull_key(name))
            if outstanding is None or outstanding.cause != load.ordered.seq:
                self._end_load(at, name, load)
        for command in at.commands:
            if isinstance(command, cmd.PullWeights):
                source = source_of(at.state, command)
                self._loads[command.to] = _Load(command, at.now, source)

    def _end_load(self, at: Happening, name: str, load: _Load) -> None:
        load.ended, load.outcome = at.now, get_tag(at.event)
        if isinstance(at.event, ev.WeightsLoaded) and at.stamped.peer == name:
            event = at.event
            load.loaded, load.seconds, load.probe_kl = event.version, event.seconds, event.probe_kl
        self._add("loads", self._load_row(load))
        del self._loads[name]

    def _load_row(self, load: _Load) -> Row:
        order = load.command
        return (
            *(order.to, order.version, order.exact, order.purpose),
            *(order.holder or order.checkpoint, load.source_detail or None),
            *self._clock.place(load.ordered),
            *self._clock.place(load.ended),
            *(load.outcome or None, load.loaded, load.seconds, load.probe_kl),
        )
