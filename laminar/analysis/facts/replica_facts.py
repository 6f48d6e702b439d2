"""Facts about replicas: their states, the conditions that held, their gauges.

Reads   Happenings of a replay
Gives   ReplicaFacts, a part of the collector

Most events concern one replica. All replicas are looked at only after an event that can change
others, or when a reason to take no new group has changed, so that the cost of an event does not
depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.idle_reasons import PULLING, describe_idle_reason, idle_reason
from laminar.analysis.facts.tables import Add, ConditionRow, GaugeRow, ReplicaStateRow
from laminar.analysis.log.event_clock import Moment
from laminar.core.scheduling.admission import (
    NotAdmittedReason,
    count_free_slots,
    find_not_admitted_reason,
)
from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind, Load
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev

BUSY = "busy"
BOUND = NotAdmittedReason.STALENESS_BOUND
_Filed = tuple[Kind, Load]
Condition = tuple[str, str]
"""Process, or an empty string for the run, and the name of the condition."""


@dataclass(slots=True)
class _Spell(ReplicaStateRow):
    """Time in one state."""

    #: version while busy; batches chosen so far, each of which changes the figures of the bound; or
    #: the event that ordered the load
    mark: int = 0


class ReplicaFacts:
    """Tables `replica_states`, `conditions`, `gauges`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._spells: dict[str, _Spell] = {}  #: by replica that was ever ready
        self._busy: set[str] = set()  #: live replicas that run something
        self._reasons: dict[Kind, NotAdmittedReason | None] = {}  #: why they take no new group
        self._filed: dict[str, _Filed | None] = {}  #: inputs of those reasons, by replica
        self._chosen = -1  #: batches
        self._phase = ""
        self._held: dict[str, frozenset[Condition]] = {}  #: conditions by owner
        self._since: dict[Condition, Moment] = {}

    def record(self, at: Happening) -> None:
        if isinstance(at.event, ev.TokenProgress):
            return self._add_gauge(at, at.event)
        state = at.state
        index = indexes_of(state).replicas
        reasons = {  # the same for all of a kind
            kind: find_not_admitted_reason(state, index.replicas[next(iter(loads.values()))[0]])
            for kind, loads in index.kinds.items()
        }
        changed = {k for k, why in reasons.items() if self._reasons.get(k, why) != why}
        general = not at.is_frequent or changed or state.steps.chosen != self._chosen
        names = self._find_changed(state, changed) if general else {}
        self._reasons, self._chosen = reasons, state.steps.chosen
        for name in {**names, **dict.fromkeys(_named_by(at))}:
            if name in state.members.replicas or name in self._spells:
                self._filed[name] = index.filed.get(name)
                self._update_replica(at, name)
        if not at.is_steady or state.run.phase != self._phase:
            self._phase = state.run.phase
            self._update_live(at)
        self._set_held(at, "", self._list_of_run(state))

    def _find_changed(self, state: State, kinds: set[Kind]) -> dict[str, None]:
        """Return the replicas whose inputs, or the reasons of whose kind, have changed."""
        filed, chosen = indexes_of(state).replicas.filed, state.steps.chosen != self._chosen
        found: dict[str, None] = {}
        for name in {**self._spells, **state.members.replicas}:
            now = filed.get(name)
            bound = chosen and name in self._spells and self._spells[name].state == BOUND
            if bound or now != self._filed.get(name) or (now is not None and now[0] in kinds):
                found[name] = None
        return found

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for spell in self._spells.values():
            yield "replica_states", spell
        for condition, since in self._since.items():
            yield "conditions", ConditionRow(*condition, since)

    def _add_gauge(self, at: Happening, event: ev.TokenProgress) -> None:
        name, members = at.stamped.peer, at.state.members
        if name not in members.replicas:
            return
        if members.actors[name].incarnation != at.stamped.incarnation:
            return  # from an earlier process of this name
        use = (event.running, event.waiting, event.kv_used_tokens, event.kv_capacity_tokens)
        self._add("gauges", GaugeRow(name, at.now, at.state.run.phase, *use, event.tokens_total))

    def _update_replica(self, at: Happening, name: str) -> None:
        state = at.state
        replica = state.members.replicas.get(name)
        kind = indexes_of(state).replicas.get_kind(name)
        if kind is None or replica is None:
            self._set_held(at, name, frozenset())
            self._busy.discard(name)
        else:
            self._set_held(at, name, _of_replica(replica, self._reasons[kind]))
            (self._busy.add if replica.running else self._busy.discard)(name)
        if replica is not None and replica.running:
            what, mark = BUSY, replica.version
        else:
            what = idle_reason(state, replica)
            mark = state.steps.chosen if what == BOUND else 0
            if what == PULLING:
                mark = state.orders.commands[keys.pull_key(name)].cause
        last = self._spells.get(name)
        if last is None or (last.state, last.mark) != (what, mark):
            self._begin_spell(at, name, replica, what, mark)

    def _begin_spell(
        self, at: Happening, name: str, replica: Replica | None, what: str, mark: int
    ) -> None:
        last = self._spells.get(name)
        if last is not None:
            last.ended = at.now
            self._add("replica_states", last)
        spell = self._spells[name] = _Spell(name, what, at.now, cause=at.cause, mark=mark)
        spell.version = replica.version if replica is not None else -1
        if what != BUSY:
            before = last.idle_since_event if last is not None else None
            spell.idle_since_event = at.now.seq if before is None else before
            spell.detail = describe_idle_reason(at.state, replica, what) or None

    def _update_live(self, at: Happening) -> None:
        over = at.state.run.phase in (Phase.STOPPING, Phase.ENDED)
        actors = () if over else at.state.members.actors.values()
        live = frozenset((actor.name, "live") for actor in actors if actor.alive and actor.ready)
        self._set_held(at, "live", live)

    def _list_of_run(self, state: State) -> frozenset[Condition]:
        found: set[Condition] = {("", f"phase-{state.run.phase}")}
        if state.steps.batch is None and not {"publish", "export"} & state.orders.commands.keys():
            found.add(("", "trainer-free"))
        if not self._busy and not any(kind.loading for kind in self._reasons):
            serving = {reason for kind, reason in self._reasons.items() if kind.serving}
            if serving == {NotAdmittedReason.STALENESS_BOUND}:
                found.add(("", "bound"))  # it blocks every serving replica, and none has work
        return frozenset(found)

    def _set_held(self, at: Happening, owner: str, conditions: frozenset[Condition]) -> None:
        before = self._held.get(owner, frozenset())
        if conditions == before:
            return
        self._held[owner] = conditions
        for condition in before - conditions:
            since = self._since.pop(condition)
            self._add("conditions", ConditionRow(*condition, since, at.now))
        for condition in conditions - before:
            self._since[condition] = at.now


def _named_by(at: Happening) -> Iterable[str]:
    """Return the replicas that an event, its commands or its changes concern."""
    names = {at.stamped.peer, *(command.to for command in at.commands)}
    return names | {life.stay.replica for _, life in at.changes}


def _of_replica(replica: Replica, reason: NotAdmittedReason | None) -> frozenset[Condition]:
    """Return the conditions that hold for a replica; `reason`: why it takes no new group."""
    holds = {
        "running": bool(replica.running),
        "loading": replica.loading,
        "bound": reason == NotAdmittedReason.STALENESS_BOUND,
        "spare": bool(reason) and count_free_slots(replica) > 0,
    }
    return frozenset((replica.name, what) for what, does in holds.items() if does)
