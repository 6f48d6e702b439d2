"""Reasons why a replica runs nothing, with the figures behind them.

Reads   the state after an event
Gives   idle_reason; describe_idle_reason, its figures; source_of: the source of an exact version,
        and the alternatives

The reasons are those of core.scheduling.admission.find_not_admitted_reason on the replayed state,
preceded by activities other than generating: the replica pulls weights, has none, or is down.
"""

from __future__ import annotations

from laminar.analysis.log.display import step_number
from laminar.core.scheduling.admission import NotAdmittedReason, find_not_admitted_reason
from laminar.core.state import keys
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.versions import load_sources
from laminar.events import commands as cmd

DOWN, PULLING, NO_WEIGHTS, FREE = "down", "pulling", "no-weights", "free"


def idle_reason(state: State, replica: Replica | None) -> str:
    """Return the activity of an empty replica, or the reason why it gets no work."""
    if replica is None or not state.members.is_actor_alive(replica.name):
        return DOWN
    if replica.loading:
        return PULLING
    if replica.version < 0:
        return NO_WEIGHTS
    return find_not_admitted_reason(state, replica) or FREE


def describe_idle_reason(state: State, replica: Replica | None, reason: str) -> str:
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
