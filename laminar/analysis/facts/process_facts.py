"""Facts about processes: each life, its end and the reason.

Reads   Happenings of a replay
Gives   ProcessFacts, a part of the collector
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.tables import Add, ProcessRow
from laminar.core.state.members import ActorState
from laminar.core.state.process_failures import ProcessFailures
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import COORDINATOR
from laminar.names.roles import Role


@dataclass(slots=True)
class _Life(ProcessRow):
    """Life of one process."""

    boot_id: str = ""


class ProcessFacts:
    """Table `processes`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._lives: dict[str, _Life] = {}  #: latest, by name
        self._losses = ProcessFailures()
        self._reasons: dict[str, str] = {}

    def record(self, at: Happening) -> None:
        self._losses.record_event(at.stamped, at.commands)
        if at.is_steady and at.state.run.phase != Phase.ENDED:
            return
        if isinstance(at.event, ev.CoordinatorStarted):
            self._begin_coordinator(at)
        if at.state.run.phase == Phase.ENDED and COORDINATOR in self._lives:
            self._lives[COORDINATOR].ended = self._lives[COORDINATOR].ended or at.now
        for name, actor in at.state.members.actors.items():
            self._follow_actor(at, name, actor)
        for name, reason in self._losses.why.items():
            if self._reasons.get(name) != reason:
                self._reasons[name] = reason
                if name in self._lives:
                    self._lives[name].reason = reason or None

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for life in self._lives.values():
            yield "processes", life

    def _begin_coordinator(self, at: Happening) -> None:
        if before := self._lives.get(COORDINATOR):
            before.ended, before.reason = at.now, "another one began"
            self._add("processes", before)
        life = _Life(COORDINATOR, Role.COORDINATOR, "", None, at.now, ready=at.now)
        self._lives[COORDINATOR] = life

    def _follow_actor(self, at: Happening, name: str, actor: ActorState) -> None:
        life = self._lives.get(name)
        if life is None or life.boot_id != actor.boot_id:
            if life is not None:
                life.ended = life.ended or at.now
                self._add("processes", life)
            begun = (name, actor.role, actor.node, actor.pid, at.now)
            life = self._lives[name] = _Life(*begun, boot_id=actor.boot_id)
        if actor.ready and life.ready is None:
            life.ready = at.now
            if replica := at.state.members.replicas.get(name):
                # one more group, which waits for slots, is included
                life.slots = replica.capacity - at.state.settings.group_size
        if not actor.alive and life.ended is None:
            life.ended = at.now
