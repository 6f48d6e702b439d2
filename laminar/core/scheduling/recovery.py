"""Recovery: lost work finds a new place; work that waited too long is moved or given up.

Reads   state.work.lost, state.work.unscored, timers, replicas
Writes  trajectory placements and attempts
Emits   GenerateTrajectory, ScoreTrajectories, StartSession, EndTrajectories, RestartActor

A lost sibling resumes from the store's tokens on a replica of the same version. If none is found
within resume_timeout_ms, it starts over, on any live replica with room at the same or a newer
version, before any new group there. Restarts mostly hit long responses, and a fresh draw shortens
the data, so this is the second choice and is counted. In flight it resumes at once on any replica
that is at least as new.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.scheduling import admission, evaluation, groups, sessions
from laminar.core.scheduling.dispatch import (
    begins_again,
    lose_trajectory,
    newest_tokens,
    place_lost,
)
from laminar.core.state import indexes, keys
from laminar.core.state.indexes import get_pull_order, indexes_of
from laminar.core.state.lost_work import LostEntry, goes_anywhere
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import UNFINISHED
from laminar.core.state.work import Trajectory
from laminar.core.versions import load_sources
from laminar.core.versions.broadcast import is_run_ending
from laminar.events.reasons import DropReason
from laminar.names.ids import Purpose, TrajectoryId

DEATHS_MAX = 3
"""The number of replica deaths after which a prompt is quarantined (as in dask for bad tasks)."""
SERVED_MS = 1_000  #: the interval at which waiting work checks whether its version is still served
EVALUATION_ATTEMPTS_MAX = 3
"""The attempts after which an evaluation sample is missing: an evaluation always ends."""


def replica_lost(ctx: Context, name: str, *, blame: bool) -> None:
    """Find other places for everything that ran or was scored there.

    With `blame`, its work may have ended it."""
    state = ctx.state
    replica = state.members.replicas.get(name)
    ctx.clear_timer(keys.progress_timer(name))
    if replica is None:
        return
    for trajectory_id in list(replica.running):
        trajectory = state.work.trajectories[trajectory_id]
        trajectory.deaths += blame
        if state.work.groups[trajectory.group].purpose == Purpose.EVAL:
            fail_sibling(ctx, trajectory, DropReason.REPLICA_LOST, blame=blame)
        elif blame and trajectory.deaths >= DEATHS_MAX:
            groups.drop_sibling(ctx, trajectory, DropReason.QUARANTINED)
        else:
            lose_trajectory(ctx, trajectory_id)
    for trajectory_id in replica.incoming:
        state.repack.progress[trajectory_id].destination = ""  # its source releases it all the same
    indexes.remove_replica(state, replica)
    for trajectory in _list_waiting_on(state, name):
        ctx.end_command(groups.get_score_key(state, trajectory))
        state.work.unscored[trajectory.id] = None
    ctx.touch_all()


def _list_waiting_on(state: State, name: str) -> list[Trajectory]:
    """List trajectories that wait for a reward there, in the order of dispatch."""
    there = [state.work.trajectories[t] for t in indexes_of(state).trajectories.get(name, ())]
    found = [t for t in there if t.status == TrajectoryStatus.GENERATED]
    return sorted(found, key=lambda t: (state.work.groups[t.group].order, t.sibling))


def host_lost(ctx: Context, name: str) -> None:
    """Give the sessions of a lost host to other hosts, from their rows if they had no turn.

    A session that had one is restarted by its new host, which repeats its turns. An agent whose
    calls are made at most once is never run again."""
    state = ctx.state
    ctx.clear_timer(keys.progress_timer(name))
    for trajectory_id in list(indexes_of(state).sessions.get(name, ())):
        trajectory = state.work.trajectories[trajectory_id]
        if trajectory.status not in UNFINISHED:
            continue  # ended with a sibling
        indexes.assign_session(state, trajectory_id, "")
        if state.settings.runs_agents_once:
            fail_sibling(ctx, trajectory, DropReason.ENV_LOST, blame=False)
        elif trajectory.is_unsampled:
            sessions.restart_session(ctx, trajectory)
        elif trajectory.status == TrajectoryStatus.WAITING:
            ctx.end_command(keys.score_key(trajectory_id))
            state.work.unscored[trajectory_id] = None
    ctx.touch_all()


def handle_resume_timeout(ctx: Context, trajectory_id: TrajectoryId) -> None:
    """Let lost work that waited for its version start over, or wait on.

    With an environment it waits for a place while its version is served: longer episodes must not
    be the ones that begin again. An evaluation sample has no other version: if that is served
    nowhere, it is generated again."""
    state = ctx.state
    trajectory = state.work.trajectories[trajectory_id]
    held_out = state.work.groups[trajectory.group].purpose == Purpose.EVAL
    index = indexes_of(state).replicas
    waits = (held_out or state.settings.has_environment) and index.filter_kinds(
        lambda kind: kind.version == trajectory.version and kind.serving
    )
    if waits or _is_fetched(state, trajectory.version):
        return ctx.set_timer(keys.resume_timer(trajectory_id), SERVED_MS)
    if held_out:
        return fail_sibling(ctx, trajectory, DropReason.REPLICA_LOST, blame=False)
    indexes.end_version_wait(state, trajectory_id)
    ctx.touch_all()


def _is_fetched(state: State, version: int) -> bool:
    """Return whether the version is being fetched from another machine, which has a timeout."""
    return any(command.version == version for command in load_sources.list_fetches(state))


def fail_sibling(
    ctx: Context, trajectory: Trajectory, reason: DropReason, *, blame: bool = True
) -> None:
    """Drop a sibling that cannot be trained, or retry an evaluation sample.

    With `blame` the sample itself may be at fault, and its retries are limited."""
    group = ctx.state.work.groups[trajectory.group]
    if group.purpose == Purpose.TRAIN:
        return groups.drop_sibling(ctx, trajectory, reason)
    groups.drop_group(ctx, group, reason)
    if not blame or trajectory.attempt < EVALUATION_ATTEMPTS_MAX:
        evaluation.group_lost(ctx, group)
    else:
        evaluation.group_given_up(ctx, group)


def plan_lost(ctx: Context) -> None:
    """Place lost work: same version first; after its wait, anywhere at least as new."""
    state = ctx.state
    while (trajectory := _next_lost(state)) is not None and (
        replica := _find_replica(state, trajectory)
    ) is not None:
        if state.settings.has_environment and begins_again(state, trajectory, replica):
            _begin_session_again(ctx, trajectory)
        else:
            place_lost(ctx, trajectory, replica)


def _begin_session_again(ctx: Context, trajectory: Trajectory) -> None:
    """Run a session again whose tokens no weights can continue, unless it may run only once."""
    if ctx.state.settings.runs_agents_once:
        fail_sibling(ctx, trajectory, DropReason.ENV_LOST, blame=False)
    else:
        sessions.restart_session(ctx, trajectory)


def _next_lost(state: State) -> Trajectory | None:
    """Return the most urgent lost trajectory that can be placed."""
    if not state.work.lost:
        return None  # called after every event: mostly nothing is lost
    index, lost = indexes_of(state).replicas, indexes_of(state).lost
    newest = index.newest_able()
    first: list[LostEntry] = []
    for version in lost.list_versions():
        here, newer = bool(index.find_able_kinds(version)), newest > version
        first += lost.anywhere.get(version, [])[:1] if here or newer else []
        gone = version not in indexes_of(state).held and not state.versions.has_checkpoint(version)
        waiting = lost.waiting.get(version, [])
        if here:
            first += waiting[:1]
        elif newer and gone:  # an evaluation sample, which has no deadline, has no other version
            first += islice((entry for entry in waiting if entry[0] >= 0), 1)
    return state.work.trajectories[min(first)[3]] if first else None


def _find_replica(state: State, trajectory: Trajectory) -> Replica | None:
    """Return the replica that has sampled its last turn, if its version fits and it has room.

    Else the least loaded replica of its version; without one, of the newest. In flight any that is
    at least as new."""
    index, last = indexes_of(state).replicas, state.members.replicas.get(trajectory.replica)
    able = able_kinds(state, trajectory)
    if (
        state.settings.has_environment
        and last is not None
        and index.get_kind(last.name) in able
        and admission.count_free_slots(last) > 0
    ):
        return last
    if not able and state.work.groups[trajectory.group].purpose == Purpose.TRAIN:
        able = index.find_able_kinds(index.newest_able())
    return index.find_least_loaded(able, room=1)


def able_kinds(state: State, trajectory: Trajectory) -> Collection[Kind]:
    """Return the kinds of replicas with room that can continue from its tokens."""
    index = indexes_of(state).replicas
    if goes_anywhere(state, trajectory):
        return index.able_from(newest_tokens(state, trajectory))
    return index.find_able_kinds(trajectory.version)


def plan_unscored(ctx: Context) -> None:
    """Score responses whose replica is gone on another one; give sessions their turns."""
    state = ctx.state
    if state.settings.has_environment:
        return _plan_sessions(ctx)
    while state.work.unscored:
        index = indexes_of(state).replicas
        first = state.work.trajectories[next(iter(state.work.unscored))]
        late = (first.replica,) if first.batch_timeouts else ()
        scorer = index.find_least_loaded(index.kinds, room=0, but=late)
        scorer = scorer or index.find_least_loaded(index.kinds, room=0)
        if scorer is None:
            return
        together = groups.find_scorable(state, first)
        if together:
            groups.score_siblings(ctx, together, scorer.name)
        else:
            del state.work.unscored[first.id]


def _plan_sessions(ctx: Context) -> None:
    """Start sessions that wait for a host, and give finished turns to those that have one."""
    state = ctx.state
    while state.work.unscored and sessions.list_hosts(state):
        first = state.work.trajectories[next(iter(state.work.unscored))]
        if first.is_unsampled:
            del state.work.unscored[first.id]
            first.placement += 1
            sessions.start_session(ctx, first)
        else:
            groups.score_siblings(ctx, [first], sessions.find_host(state, first))


def watch_progress(ctx: Context, name: str) -> None:
    """Re-arm a replica's progress timer, or restart its silent engine."""
    state = ctx.state
    if not state.members.is_actor_alive(name):
        return  # the replica has left a stopping run
    replica = state.members.replicas.get(name)
    if replica is None:
        if not is_run_ending(state):
            limit_s = state.settings.engine_start_ms / 1000
            why = f"it was not ready {limit_s:g} s after it had joined"
            ctx.restart_actor(name, f"{why} (rollout.start_timeout_s)")
        return
    stall_ms = state.settings.stall_ms
    silent_ms = (ctx.stamped.time_ns - replica.progress_ns) // 1_000_000
    if store_orders.is_store_awaited(state):  # work that waits for the store samples nothing
        replica.progress_ns = ctx.stamped.time_ns
    elif replica.running and not get_pull_order(state, name) and silent_ms >= stall_ms:
        ctx.restart_actor(name, f"sampled nothing for {silent_ms} ms with work to do")
        replica.progress_ns = ctx.stamped.time_ns
    ctx.set_timer(keys.progress_timer(name), stall_ms)
