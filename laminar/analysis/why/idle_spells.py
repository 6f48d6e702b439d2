"""Idle times of each replica, with the reasons why it got no new work.

Reads   a replay: each event, its commands, the state after it
Gives   IdleTracker: per replica the times without a trajectory, in spells of one reason each;
        source_of: the source of an exact version, and the alternatives

The reasons are those of core.scheduling.admission.find_not_admitted_reason on the replayed state,
preceded by activities other than generating: the replica pulls weights, has none, or is down. The
figures behind a reason are computed from the same state when the spell begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from laminar.analysis.log.display import step_number
from laminar.analysis.log.trajectory_history import Moment
from laminar.core.scheduling.admission import NotAdmittedReason, find_not_admitted_reason
from laminar.core.state import keys
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.versions import load_sources
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event, Stamped

DOWN, PULLING, NO_WEIGHTS, FREE = "down", "pulling", "no-weights", "free"


class Spell(NamedTuple):
    """Idle time with one reason; it lasts until the next spell begins."""

    reason: str
    since: Moment
    detail: str
    #: batches chosen so far, each of which changes the figures of the bound; or the event that
    #: ordered the load
    mark: int = 0


@dataclass(slots=True)
class IdlePeriod:
    """Time in which a replica ran nothing."""

    replica: str
    begin: Moment
    begun_by: Event
    spells: list[Spell] = field(default_factory=list)
    end: Moment | None = None  #: None while it lasts
    ended_by: Stamped | None = None

    def sum_by_reason(self, last: Moment) -> dict[str, int]:
        """Return nanoseconds by reason; `last` is the end of the log."""
        end = self.end or last
        found: dict[str, int] = {}
        following = [spell.since for spell in self.spells[1:]] + [end]
        for spell, until in zip(self.spells, following, strict=True):
            length_ns = until.unix_ns - spell.since.unix_ns
            found[spell.reason] = found.get(spell.reason, 0) + length_ns
        return found


class IdleTracker:
    """Tracker of the idle times of every replica that was ever ready."""

    def __init__(self) -> None:
        self.open: dict[str, IdlePeriod] = {}
        self.known: dict[str, Moment] = {}  #: time of each replica's first ready event

    def record_event(self, now: Moment, stamped: Stamped, state: State) -> list[IdlePeriod]:
        """Record one event; return the idle times that ended with it."""
        if isinstance(stamped.event, ev.TokenProgress):
            return []  # a gauge, which changes none of these reasons
        for name in state.members.replicas.keys() - self.known.keys():
            self.known[name] = now
        ended = []
        for name in self.known:
            replica = state.members.replicas.get(name)
            if replica is not None and replica.running:
                if idle := self.open.pop(name, None):
                    idle.end, idle.ended_by = now, stamped
                    ended.append(idle)
            else:
                self._extend_period(name, replica, now, stamped, state)
        return ended

    def _extend_period(
        self, name: str, replica: Replica | None, now: Moment, stamped: Stamped, state: State
    ) -> None:
        idle = self.open.get(name)
        if idle is None:
            idle = self.open[name] = IdlePeriod(name, now, stamped.event)
        reason = idle_reason(state, replica)
        mark = state.steps.chosen if reason == NotAdmittedReason.STALENESS_BOUND else 0
        if reason == PULLING:
            mark = state.orders.commands[keys.pull_key(name)].cause
        last = idle.spells[-1] if idle.spells else None
        if last is None or (last.reason, last.mark) != (reason, mark):
            idle.spells.append(Spell(reason, now, _describe_reason(state, replica, reason), mark))


def idle_reason(state: State, replica: Replica | None) -> str:
    """Return the activity of an empty replica, or the reason why it gets no work."""
    if replica is None or not state.members.is_actor_alive(replica.name):
        return DOWN
    if replica.loading:
        return PULLING
    if replica.version < 0:
        return NO_WEIGHTS
    return find_not_admitted_reason(state, replica) or FREE


def _describe_reason(state: State, replica: Replica | None, reason: str) -> str:
    """Return the figures behind a reason, as the end of a sentence."""
    if replica is None or reason == DOWN:
        return "its process ended"
    if reason == PULLING:
        return _describe_pull(state, replica)
    if reason == NO_WEIGHTS:
        none_here = state.members.newest_for(replica) < 0
        held = "its relay has none yet" if none_here else "it rejected what it loaded"
        return f"it has no weights: {held}"
    if reason == NotAdmittedReason.STALENESS_BOUND:
        return _describe_bound(state, replica.step) + _describe_newer(state, replica)
    if reason == NotAdmittedReason.NO_DATA:
        left = sum(state.work.deadlines.values())
        return f"the run needs no more groups: {left} are under way for the last batches"
    if reason == NotAdmittedReason.REPACKED:
        count = len(replica.outgoing)
        return f"{count} trajectories migrated away from it have not started elsewhere yet"
    if reason == NotAdmittedReason.RUN_ENDING:
        phase = "draining, as requested" if state.run.draining else state.run.phase
        return f"the run is {phase}"
    return "nothing prevents new work"


def _describe_pull(state: State, replica: Replica) -> str:
    outstanding = state.orders.commands[keys.pull_key(replica.name)]
    order = outstanding.command
    assert isinstance(order, cmd.PullWeights)
    wanted = f"v{order.version}" if order.exact else f"v{order.version} or newer"
    return (
        f"loading {wanted}{source_of(state, order)} (purpose {order.purpose}), ordered by "
        f"#{outstanding.cause}"
    )


def source_of(state: State, order: cmd.PullWeights) -> str:
    """Describe the source of an exact version, its estimated time, and the other sources.

    Empty if the replica's own relay has the version. `state` is the state after the order.
    """
    place = order.holder or order.checkpoint
    if not place:
        return ""
    replica, taken, others = state.members.replicas[order.to], "", []
    for source in load_sources.list_sources(state, replica, order.version):
        ms = load_sources.estimate_ms(source, state.versions.num_bytes)
        known = f"about {ms / 1000:.1f} s" if ms >= 0 else "unknown time"
        if source.name == place:
            taken = known
        elif source.name in state.versions.failed_sources:
            others.append(f"{source.name}: failed")
        else:
            others.append(f"{source.name}: {known}")
    alternatives = f", not from {', '.join(others)}" if others else ""
    return f" from {place} ({taken}){alternatives}"


def _describe_bound(state: State, step: int) -> str:
    """Describe the staleness bound in figures, for one more group of weights of `step` steps."""
    mine = step + state.settings.max_staleness

    def fit(deadline: int) -> int:
        return state.settings.groups_per_step * (deadline - state.steps.chosen + 1)

    def there(deadline: int) -> int:
        return sum(n for due, n in state.work.deadlines.items() if due <= deadline)

    later = [due for due in state.work.deadlines if due >= mine]
    tightest = min([mine, *later], key=lambda due: (fit(due) - there(due), due))
    return (
        f"a new group with its weights (after {step} steps) is due by step {step_number(mine)}; "
        f"the next batch is that of step {step_number(state.steps.chosen)}, so "
        f"{max(fit(tightest), 0)} groups fit by step {step_number(tightest)}, and "
        f"{there(tightest)} exist already"
    )


def _describe_newer(state: State, replica: Replica) -> str:
    """Describe the state of the newer weights that the replica needs."""
    making = state.orders.commands.get(keys.TRAIN)
    if state.members.newest_for(replica) > replica.version or making is None:
        return ""
    if state.versions.newest > replica.version:
        return f"; v{state.versions.newest} is published but has not reached {replica.relay} yet"
    step = state.steps.batch.step_index if state.steps.batch else state.steps.completed
    return (
        f"; its relay has nothing newer than v{replica.version}, and the trainer has been "
        f"working on step {step_number(step)} since #{making.cause}"
    )
