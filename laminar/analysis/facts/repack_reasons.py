"""Reasons why repack left a replica as it was, at each search for replicas to empty.

Reads   an event, its commands, the state after it
Gives   list_decisions; REASONS, the text of each reason; NOT_STRAGGLING

The reasons are the predicates of core/repack/stragglers.py and core/repack/packing.py, evaluated on
the state after the event, which includes all other decisions of that event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from laminar.core.repack import packing as repack
from laminar.core.repack import stragglers
from laminar.core.scheduling.admission import first_share, groups_wanted
from laminar.core.state import keys
from laminar.core.state.members import Replica
from laminar.core.state.migrations import NotStragglerReason, StayReason, StragglerLoad
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped

Outcome = Literal["emptied", "given", "loading", "bound", "data", "others-first", "changed"]
"""The outcomes that no predicate of the core explains."""
Reason = NotStragglerReason | StayReason | Outcome
EMPTIED: Outcome = "emptied"

REASONS: dict[Reason, str] = {
    EMPTIED: "it was emptied",
    "given": "it was already being emptied",
    NotStragglerReason.ADMITS: "it took new groups",
    NotStragglerReason.NO_GAUGES: "its engine had not reported since its last order",
    NotStragglerReason.WAITING: "trajectories waited for a slot in its engine",
    NotStragglerReason.STREAMING: "it began with weights that its relay was still receiving",
    NotStragglerReason.EMPTY: "it ran nothing",
    NotStragglerReason.FULL: "its decode batch was full",
    "loading": "it was loading weights",
    StayReason.RECEIVES: "trajectories of others were migrating to it",
    StayReason.NO_NEWER_WEIGHTS: "no newer weights were published",
    StayReason.WEIGHTS_NOT_HERE: "its relay did not have the newest weights yet",
    StayReason.EVALUATION: "an evaluation of its version was due",
    StayReason.EVALUATION_SAMPLE: "it ran evaluation samples",
    StayReason.BATCH_WAITS: "a batch had waited for its trajectories",
    StayReason.CAUSED_LOSSES: "its trajectories had already lost a replica",
    StayReason.MIGRATED_OFTEN: f"its trajectories had moved {stragglers.MIGRATIONS_MAX} times",
    "bound": "the staleness bound had no room for new groups",
    "data": "the run needed no more groups",
    "others-first": "replicas that were empty or loading came first",
    StayReason.ALONE: "no other replica of its version was a straggler",
    StayReason.NO_ROOM: "no straggler of its version had room for its trajectories",
    StayReason.NO_GAIN: (
        "prefill and slower steps elsewhere would have cost more steps than it gained"
    ),
    "changed": "the same event emptied others or chose a batch",
}
"""Text of each reason, as the end of a sentence."""
NOT_STRAGGLING = (*NotStragglerReason, "loading")


def list_decisions(
    stamped: Stamped, commands: list[Command], state: State
) -> Iterator[tuple[Replica, Reason, str]]:
    """Yield each replica with work, the outcome and its figures, if repack searched here."""
    if not _is_decision_time(stamped, state):
        return
    released = {c.to for c in commands if isinstance(c, cmd.ReleaseTrajectories)}
    found = stragglers.find_stragglers(state)
    mine = {load.name: load for loads in found.values() for load in loads}
    for replica in state.members.replicas.values():
        if replica.running:
            load = mine.get(replica.name)
            is_emptied = replica.name in released
            reason = EMPTIED if is_emptied else _find_reason(state, replica, load, found)
            yield replica, reason, _describe_reason(state, replica, load, reason)


def _is_decision_time(stamped: Stamped, state: State) -> bool:
    """Return whether repack searched at this event, which then restarted its timer."""
    if not isinstance(stamped.event, ev.TimerFired | ev.WeightsPublished):
        return False
    next_ns = stamped.time_ns + state.settings.repack_interval_ms * 1_000_000
    return state.orders.timers.get(keys.REPACK) == next_ns


def _find_reason(
    state: State,
    replica: Replica,
    mine: StragglerLoad | None,
    found: dict[int, list[StragglerLoad]],
) -> Reason:
    """Return why the replica keeps its work, tested in the core's order.

    `mine` is the replica's load if it is a straggler.
    """
    if replica.outgoing:
        return "given"
    if replica.loading or not state.members.is_actor_alive(replica.name):
        return "loading"
    if reason := stragglers.find_not_straggler_reason(
        state, replica
    ) or stragglers.find_not_emptied_reason(state, replica):
        return reason
    gain = state.settings.repack_policy == "gain"
    if gain and not stragglers.released_max(state):
        return _no_new_groups(state)
    assert mine is not None, replica
    others = [standing for standing in found[replica.version] if standing is not mine]
    prefill = state.settings.repack_prefill_tokens if gain else 0
    return repack.find_not_packed_reason(mine, others, prefill) or "changed"


def _no_new_groups(state: State) -> Outcome:
    needed = first_share(state)
    if groups_wanted(state) < needed:
        return "data"
    return "bound" if stragglers.within_bound(state) < needed else "others-first"


def _describe_reason(
    state: State, replica: Replica, mine: StragglerLoad | None, reason: Reason
) -> str:
    """Return the figures behind a reason."""
    packing = replica.repack
    if reason == StayReason.NO_ROOM and mine is not None:
        return f"{mine.running} trajectories, which need {mine.need} tokens of cache"
    if reason == StayReason.NO_GAIN and mine is not None:
        return f"it would have been empty in {mine.longest} steps, by the lengths so far"
    if reason == NotStragglerReason.WAITING and packing is not None:
        return f"{packing.waiting} waited"
    if reason == NotStragglerReason.FULL and packing is not None:
        return f"{replica.load} of {packing.max_batch} running or incoming"
    if reason == StayReason.RECEIVES:
        return f"{len(replica.incoming)} incoming"
    if reason == StayReason.WEIGHTS_NOT_HERE:
        held = state.members.newest_for(replica)
        return f"v{state.versions.newest} was published, {replica.relay} had v{held}"
    if reason == StayReason.NO_NEWER_WEIGHTS:
        return f"v{state.versions.newest} was the newest"
    if reason == "bound":
        room, needed = stragglers.within_bound(state), first_share(state)
        return f"room for {max(room, 0)} with the newest weights, a replica's share is {needed}"
    found = (state.work.trajectories[t] for t in replica.running)
    return next(
        (t.id for t in found if stragglers.find_not_migrated_reason(state, t) == reason), ""
    )
