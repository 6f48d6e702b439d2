"""Facts about the weights: what relays held, and what replicas loaded.

Reads   Happenings of a replay
Gives   WeightFacts, a part of the collector
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.idle_reasons import source_of
from laminar.analysis.facts.tables import Add, HoldingRow, LoadRow
from laminar.analysis.log.event_clock import Moment
from laminar.core.state import keys
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import get_tag


class WeightFacts:
    """Tables `holdings`, `loads`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._held: dict[str, dict[int, Moment]] = {}  #: versions by relay, with their arrival
        self._loads: dict[str, LoadRow] = {}  #: by replica

    def record(self, at: Happening) -> None:
        if not at.is_frequent:
            relays = at.state.members.relays
            gone = [name for name in self._held if name not in relays]
            self._record_held(at, [at.stamped.peer] if at.is_steady else [*gone, *relays])
        self._record_loads(at)

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for relay, held in self._held.items():
            for version, since in held.items():
                yield "holdings", HoldingRow(relay, version, since)
        for load in self._loads.values():
            yield "loads", load

    def _record_held(self, at: Happening, names: Iterable[str]) -> None:
        """Record what these relays have received and evicted."""
        relays = at.state.members.relays
        for name in names:
            held = self._held.setdefault(name, {})
            now = relays[name].held if name in relays else []
            for version in [v for v in held if v not in now]:
                self._add("holdings", HoldingRow(name, version, held.pop(version), at.now))
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
                self._loads[command.to] = LoadRow(
                    replica=command.to,
                    version=command.version,
                    exact=command.exact,
                    purpose=command.purpose,
                    source=command.holder or command.checkpoint,
                    source_detail=source_of(at.state, command) or None,
                    ordered=at.now,
                )

    def _end_load(self, at: Happening, name: str, load: LoadRow) -> None:
        load.ended, load.outcome = at.now, get_tag(at.event)
        if isinstance(at.event, ev.WeightsLoaded) and at.stamped.peer == name:
            event = at.event
            load.loaded, load.seconds, load.probe_kl = event.version, event.seconds, event.probe_kl
        self._add("loads", load)
        del self._loads[name]
