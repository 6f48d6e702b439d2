"""The planner: decides from the current state, until nothing is left to decide.

Reads   state, the replicas that were touched
Writes  through its stages, in the order of WRITES, which lists the records that each may write
Emits   the commands of those modules

When all replicas are touched, the index of replicas selects those that can be given something. They
are still visited in the order of all replicas, since work given to one cannot go to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heapreplace

from laminar.core import loading
from laminar.core.context import Context
from laminar.core.members import lifecycle
from laminar.core.repack import migration
from laminar.core.scheduling import admission, dispatch, evaluation, recovery
from laminar.core.scheduling.admission import has_room_for_group
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State
from laminar.core.steps import batching, step_replay

PLAN_ROUNDS_MAX = 10_000
"""The limit of planner rounds: a few reach the fixpoint; a loop here would be a bug."""

WRITES: dict[Callable[..., object], str] = {
    lifecycle.end_failed_run: "members work steps evaluations run orders",
    lifecycle.end_flat_data: "run orders",
    recovery.plan_lost: "members work orders",
    recovery.plan_unscored: "work orders",
    evaluation.plan_unserved: "evaluations",
    evaluation.plan_evaluation: "members work evaluations orders repack",
    loading.plan_reserved_pull: "members evaluations orders",
    dispatch.new_group: "members data work orders repack",
    loading.plan_pull: "members orders",
    migration.plan_migrations: "members work orders repack",
    step_replay.plan_step_repeat: "steps versions orders",
    batching.choose_batch: "work steps versions orders",
    lifecycle.plan_phase: "members work versions evaluations run orders",
}
"""The records of the state that each stage may write."""


def run_planner(ctx: Context) -> None:
    """Decide until nothing is left to decide."""
    for _ in range(PLAN_ROUNDS_MAX):
        lifecycle.end_failed_run(ctx)
        lifecycle.end_flat_data(ctx)
        _plan_replicas(ctx)
        if ctx.repack_due:
            migration.plan_migrations(ctx)
        decided = (
            step_replay.plan_step_repeat(ctx)
            or batching.choose_batch(ctx)
            or lifecycle.plan_phase(ctx)
        )
        if not (decided or ctx.any_touched):
            return
    raise AssertionError("the planner did not reach a fixpoint")


def _plan_replicas(ctx: Context) -> None:
    """Plan lost work, evaluation, new groups and pulls, in this order for every touched replica."""
    state = ctx.state
    recovery.plan_lost(ctx)
    recovery.plan_unscored(ctx)
    evaluation.plan_unserved(ctx)
    while ctx.any_touched:
        if state.settings.stream:  # a replica that has just begun to stream takes it
            recovery.plan_lost(ctx)
        names, all_touched = ctx.take_touched()
        touched = [state.members.replicas[n] for n in names if n in state.members.replicas]
        for replica in touched:
            _plan_reserved(ctx, replica)
        if all_touched:
            _plan_reserved_for_others(ctx, names)
        if state.settings.in_flight:  # groups begun before the load would be older than necessary
            _plan_pulls(ctx, touched, names, all_touched)
        _place_new_groups(ctx, touched, all_touched)
        if not state.settings.in_flight:
            _plan_pulls(ctx, touched, names, all_touched)


def _plan_reserved(ctx: Context, replica: Replica) -> None:
    """Plan work that takes precedence over new groups."""
    evaluation.plan_evaluation(ctx, replica)
    loading.plan_reserved_pull(ctx, replica)


def _plan_reserved_for_others(ctx: Context, but: Collection[str]) -> None:
    """Plan reserved work for the other replicas; the candidates depend on the evaluation."""
    state, last = ctx.state, -1
    while True:
        known = state.evaluations.running, state.evaluations.due
        for number in sorted(_for_reserved(state)):
            if number <= last:
                continue
            replica, last = indexes_of(state).replicas.replicas[number], number
            if replica.name not in but:
                _plan_reserved(ctx, replica)
            if known[0] is not state.evaluations.running or known[1] != state.evaluations.due:
                break
        else:
            return


def _for_reserved(state: State) -> dict[int, None]:
    """Return numbers of the replicas that evaluation or a reserved pull may use."""
    index = indexes_of(state).replicas
    begins = evaluation.find_starting_kinds(state)
    found = dict.fromkeys(
        index.with_room(begins) if state.settings.in_flight else index.iter_numbers(begins)
    )
    found |= dict.fromkeys(index.with_room(evaluation.may_help(state)))
    found |= dict.fromkeys(index.iter_empty(loading.may_pull_reserved(state)))
    return found


def _plan_pulls(
    ctx: Context, touched: list[Replica], names: Collection[str], all_touched: bool
) -> None:
    for replica in touched:
        loading.plan_pull(ctx, replica)
    if all_touched:
        _plan_pulls_of_others(ctx, names)


def _plan_pulls_of_others(ctx: Context, but: Collection[str]) -> None:
    index, in_flight = indexes_of(ctx.state).replicas, ctx.state.settings.in_flight
    behind = index.filter_kinds(lambda kind: kind.behind and not kind.loading)
    for number in sorted(index.iter_numbers(behind) if in_flight else index.iter_empty(behind)):
        if index.replicas[number].name not in but:
            loading.plan_pull(ctx, index.replicas[number])


# --- new groups -----------------------------------------------------------------------------------


def _place_new_groups(ctx: Context, touched: list[Replica], all_touched: bool) -> None:
    """Place new groups one at a time on the emptiest replica that admits and has room."""
    state = ctx.state
    others = _UntouchedReplicas(state, {r.name: None for r in touched}) if all_touched else None
    queue = [(r.load, i) for i, r in enumerate(touched) if has_room_for_group(state, r)]
    heapify(queue)
    while True:
        while queue and not _can_take_group(state, touched[queue[0][1]]):
            heappop(queue)  # a new group never makes another one admissible
        other = others.find_least_loaded() if others is not None else None
        if other is not None and not (queue and queue[0][0] <= other.load):
            dispatch.new_group(ctx, other)
        elif queue:
            replica = touched[queue[0][1]]
            dispatch.new_group(ctx, replica)
            heapreplace(queue, (replica.load, queue[0][1]))
        else:
            return


def _can_take_group(state: State, replica: Replica) -> bool:
    return has_room_for_group(state, replica) and admission.is_admitting(state, replica)


class _UntouchedReplicas:
    """Replicas that are touched only by a touch of all."""

    def __init__(self, state: State, but: dict[str, None]) -> None:
        self._state, self._but = state, but
        self._refused: dict[int, None] = {}  #: steps whose weights admit nothing more

    def find_least_loaded(self) -> Replica | None:
        """Return the least loaded replica that takes a group."""
        index, settings = indexes_of(self._state).replicas, self._state.settings
        size = 0 if settings.has_environment else settings.group_size  #: slots that a group takes
        while kinds := index.filter_kinds(self._may_admit):
            replica = index.find_least_loaded(kinds, size, self._but)
            if replica is None or not has_room_for_group(self._state, replica):
                return None  # the others have no fewer
            if admission.is_admitting(self._state, replica):
                return replica
            self._refused[replica.step] = None  # replicas of the same step refuse, too
        return None

    def _may_admit(self, kind: Kind) -> bool:
        draining = kind.behind and kind.satisfied
        return kind.serving and not draining and kind.step not in self._refused
