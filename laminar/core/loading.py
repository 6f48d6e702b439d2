"""Weight loading: which versions exist, which replica pulls which, and when.

Reads   WeightsPublished, WeightsLoaded, WeightsRejected, VersionMissing, CheckpointSaved,
        CheckpointRefused
Writes  state.versions, relay.held,
        replica.version
Emits   PullWeights, RestartActor

A replica changes its version only when it holds no trajectory, so every trajectory has exactly one.
In flight it loads newer weights as soon as its relay has them, and running trajectories continue
with them; evaluation samples are excepted, since each has one version. A replica whose relay has
nothing yet begins with the version that the relay is receiving (`rollout.load`): decisions count it
as serving that version, and it samples nothing before the weights are verified. A number is
allocated with the step that makes the weights and is never reused. A replica pulls from the relay
of its own machine; a version that this relay lacks is fetched from another machine's relay, or
loaded from a checkpoint (core/versions/load_sources.py).
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.registry import handles
from laminar.core.repack import migration
from laminar.core.scheduling import dispatch, evaluation
from laminar.core.scheduling.admission import is_serving
from laminar.core.state import indexes, keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import indexes_of, master_relay
from laminar.core.state.lost_work import goes_anywhere
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.validation import COUNT_MAX, accept_any, are_allocated, of_a_version
from laminar.core.versions import broadcast, load_sources, pinning, publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import PullPurpose
from laminar.names.ids import Purpose

PULL_TIMEOUT_MS = 300_000
"""The minimum timeout for one copy of the model inside a machine; all versions have equal size."""
LOAD_SHARE = 2  #: the ratio of a load's timeout to the longest load of the run: machines are shared
LOAD_MS_MAX = 86_400_000
"""The maximum timeout of a load, a day; it bounds wrongly reported figures, too."""
FAILED_LOADS_MAX = 2
"""The failed loads in a row after which a replica is restarted; the fault is then its own."""


def _has_valid_versions(state: State, event: ev.WeightsPublished) -> bool:
    return of_a_version(state, event) and are_allocated(state, event.held)


@handles(ev.WeightsPublished, valid=_has_valid_versions)
def on_weights_published(ctx: Context, event: ev.WeightsPublished) -> None:
    """Record the newest version, which empty replicas pull next, once their relay has it."""
    state, versions = ctx.state, ctx.state.versions
    relay = master_relay(state)
    if relay is None or relay.name != ctx.stamped.peer:
        return ctx.ignore("not-the-head")
    previous_step, news = versions.newest_step, event.version > versions.newest
    if news and event.version == versions.export and event.digest != versions.newest_digest:
        return _export_differs(ctx, event)
    if news:
        _record_newest(state, event)
    known = not broadcast.record_held_versions(ctx, relay, event.version, event.digest, event.held)
    if relay.newest < event.version:  # it has other bytes, and loads again
        return ctx.ignore("repeat") if known else publishing.renumber_newest(ctx, event.digest)
    if publishing.end_republish(ctx, event.version) or not known or news:
        if event.version >= publishing.last_made(state):  # a newer one is still due otherwise
            ctx.clear_timer(keys.WEIGHTS)
    else:
        ctx.ignore("repeat")
    if news:
        evaluation.schedule_evaluation(ctx, event.version, event.step, previous_step)
        _expect_newest(ctx)
        pinning.send_pins(ctx)
        migration.schedule_repack(ctx)


def _record_newest(state: State, event: ev.WeightsPublished) -> None:
    """Record the newest version, whose digest a repeat of its step is compared with."""
    state.versions.record_newest(event.version, event.step, event.digest)
    for trained in state.steps.trained:
        if trained.version == event.version:
            trained.digest = event.digest


def _export_differs(ctx: Context, event: ev.WeightsPublished) -> None:
    trained = ctx.state.versions.newest_digest
    found = f"{event.digest}, but {trained} was trained"
    if not fail_run(ctx, FailureKind.EXPORT_DIFFERS, ctx.stamped.peer, found):
        ctx.ignore("run-ending")


def _expect_newest(ctx: Context) -> None:
    """Let relays with the newest version offer it, and give the others a time to get it."""
    state = ctx.state
    for relay in state.members.relays.values():
        if (
            relay.newest == state.versions.newest
            and relay.newest_digest != state.versions.newest_digest
        ):
            broadcast.restart_for_other_bytes(ctx, relay, relay.newest_digest)
        elif relay.newest >= state.versions.newest:
            broadcast.touch_replicas(ctx, relay)
        else:
            broadcast.await_newest(ctx, relay)


def _end_pull(ctx: Context) -> Replica | None:
    """End the sender's order to load; return None, counted, if it has none."""
    name = ctx.stamped.peer
    replica = ctx.state.members.replicas.get(name)
    if replica is None or ctx.end_command(keys.pull_key(name)) is None:
        ctx.ignore("not-pulling")
        return None
    return replica


def _has_valid_load_time(state: State, event: ev.WeightsLoaded) -> bool:
    return of_a_version(state, event) and 0 <= event.seconds <= COUNT_MAX


@handles(ev.WeightsLoaded, valid=_has_valid_load_time)
def on_weights_loaded(ctx: Context, event: ev.WeightsLoaded) -> None:
    """Let the replica serve again, with a fresh share of new groups."""
    state, ordered = ctx.state, indexes.get_pull_order(ctx.state, ctx.stamped.peer)
    replica = _end_pull(ctx)
    if replica is None:
        return
    streamed = ordered is not None and ordered.purpose == PullPurpose.STREAM
    replica.version, replica.step, replica.digest = event.version, event.step, event.digest
    replica.loading, replica.failed_loads = False, 0
    replica.groups_taken = replica.groups_taken if streamed else 0
    took_ms = int(event.seconds * 1000)
    if ordered is not None and event.reloaded:
        load_sources.record_load(state, ordered, event.num_bytes, took_ms)
    alone = ordered is None or load_sources.is_plain_load(ordered)
    if event.reloaded and alone and _time_for(took_ms) > PULL_TIMEOUT_MS:
        state.versions.slow_load_ms = max(state.versions.slow_load_ms, took_ms)
    replica.progress_ns = ctx.stamped.time_ns
    for trajectory_id in replica.running:
        state.work.trajectories[trajectory_id].version = event.version
    indexes.update_replica(state, replica)
    pinning.send_pins(ctx)
    if state.work.lost or evaluation.is_evaluation_waiting(state):
        ctx.touch_all()  # the versions of replicas decide which ones the others load
    else:
        ctx.touch_replica(replica.name)


@handles(ev.WeightsRejected, valid=accept_any)
def on_weights_rejected(ctx: Context, event: ev.WeightsRejected) -> None:
    """Drop the weights after a failed digest or probe; restart the replica after a second failure.

    What ran there continues elsewhere with the tokens from before the load."""
    replica = _end_pull(ctx)
    if replica is None:
        return
    _drop_weights(ctx, replica)
    replica.failed_loads += 1
    indexes.update_replica(ctx.state, replica)
    ctx.touch_replica(replica.name)
    if replica.failed_loads >= FAILED_LOADS_MAX:
        ctx.restart_actor(replica.name, f"rejected weights {event.version}: {event.reason}")


def _drop_weights(ctx: Context, replica: Replica) -> None:
    """Unset the replica's weights; its running trajectories wait for another place."""
    for trajectory_id in list(replica.running):
        dispatch.lose_trajectory(ctx, trajectory_id)
    replica.version, replica.step, replica.loading = -1, -1, False


def _has_valid_held(state: State, event: ev.VersionMissing) -> bool:
    return are_allocated(state, event.held)


@handles(ev.VersionMissing, valid=_has_valid_held)
def on_version_missing(ctx: Context, event: ev.VersionMissing) -> None:
    """Decide again without the version that the relay has evicted.

    The relay has reported what it received since then; older versions that it no longer holds are
    gone. A failed source is not asked again before it responds."""
    state, ordered = ctx.state, indexes.get_pull_order(ctx.state, ctx.stamped.peer)
    replica = _end_pull(ctx)
    if replica is None:
        return
    replica.loading = False
    if ordered is not None and ordered.purpose == PullPurpose.STREAM:
        _drop_weights(ctx, replica)
        state.versions.failed_sources[replica.relay] = None
    if ordered is not None and ordered.holder:
        state.versions.failed_sources[ordered.holder] = None
    indexes.update_replica(state, replica)
    relay = state.members.relays.get(replica.relay)
    if relay is not None:
        latest = max(event.held, default=event.version)
        left = [v for v in relay.held if v in event.held or v > latest]
        indexes.set_held(state, relay, left)
    ctx.touch_all()


def _has_valid_kept(state: State, event: ev.CheckpointSaved) -> bool:
    there = event.version in event.kept and are_allocated(state, event.kept)
    return there and of_a_version(state, event)


@handles(ev.CheckpointSaved, valid=_has_valid_kept)
def on_checkpoint_saved(ctx: Context, event: ev.CheckpointSaved) -> None:
    """Record a checkpoint; lost work whose version no relay holds may load it."""
    state = ctx.state
    if state.versions.has_checkpoint(event.version):
        return ctx.ignore("repeat")
    ordered = state.orders.commands.get(keys.SAVE)
    command = ordered.command if ordered is not None else None
    if isinstance(command, cmd.SaveCheckpoint) and command.version == event.version:
        ctx.end_command(keys.SAVE)
    saved = {**state.versions.checkpoint_paths, event.version: event.path}
    state.versions.replace_checkpoints({v: path for v, path in saved.items() if v in event.kept})
    state.steps.trim_trained(state.versions.saved_steps)
    ctx.touch_all()


@handles(ev.CheckpointRefused, valid=accept_any)
def on_checkpoint_refused(ctx: Context, event: ev.CheckpointRefused) -> None:
    """Forget a checkpoint that one replica cannot read, and decide again without it."""
    replica = _end_pull(ctx)
    if replica is None:
        return
    replica.loading = False
    indexes.update_replica(ctx.state, replica)
    ctx.state.versions.forget_checkpoint(event.version)
    ctx.touch_all()


def order_pull(
    ctx: Context, replica: Replica, version: int, exact: bool, purpose: PullPurpose
) -> None:
    """Order a load; with `exact` the version is in reach of the replica, or is streamed."""
    state, streamed = ctx.state, purpose == PullPurpose.STREAM
    replica.loading = not streamed
    replica.progress_ns = ctx.stamped.time_ns
    evicted = exact and not streamed and version not in state.members.list_held_versions(replica)
    choice = load_sources.choose_source(state, replica, version) if evicted else None
    source = choice.source if choice is not None else None
    peer = source.name if source is not None and source.tier == load_sources.SourceTier.PEER else ""
    command = cmd.PullWeights(
        to=replica.name,
        version=version,
        exact=exact,
        purpose=purpose,
        checkpoint=state.versions.checkpoint_paths[version] if evicted and not peer else "",
        holder=peer,
        address=state.members.relays[peer].chain_address if peer else "",
    )
    timeout_ms = _time_for(max(state.versions.slow_load_ms, choice.ms if choice is not None else 0))
    ctx.issue_command(command, key=keys.pull_key(replica.name), timeout_ms=timeout_ms)
    indexes.update_replica(state, replica)


def _time_for(longest_ms: int) -> int:
    """Return the timeout in ms of a load, given the longest one."""
    return min(max(PULL_TIMEOUT_MS, LOAD_SHARE * longest_ms), LOAD_MS_MAX)


def plan_reserved_pull(ctx: Context, replica: Replica) -> None:
    """Let an empty replica fetch a version for lost work or an evaluation, before new groups."""
    state = ctx.state
    if not _can_pull(state, replica):
        return
    wanted = _find_lost_work_version(state, replica)
    if wanted >= 0 and wanted != replica.version:
        return order_pull(ctx, replica, wanted, True, PullPurpose.RESUME)
    if state.members.newest_for(replica) < 0:
        return  # its relay will return: an evaluation does not move on for that
    wanted = evaluation.version_wanted(ctx, replica)
    exact = state.evaluations.running is not None
    if (
        wanted >= 0
        and wanted != replica.version
        and (not exact or _can_load_version(state, replica, wanted))
    ):
        order_pull(ctx, replica, wanted, exact, PullPurpose.EVALUATION)


def plan_pull(ctx: Context, replica: Replica) -> None:
    """Let an empty replica pull a newer version; if it admitted, it would have been given a group.

    In flight, any replica without evaluation samples pulls it."""
    state, newest = ctx.state, ctx.state.members.newest_for(replica)
    if newest <= replica.version:
        return _plan_stream(ctx, replica)
    if _can_pull(state, replica):
        purpose = PullPurpose.START if replica.version < 0 else PullPurpose.NEWER
        order_pull(ctx, replica, newest, False, purpose)
    elif _can_pull_in_flight(state, replica) and newest in state.members.list_held_versions(
        replica
    ):
        order_pull(ctx, replica, newest, True, PullPurpose.IN_FLIGHT)


def _plan_stream(ctx: Context, replica: Replica) -> None:
    """Let a replica begin with the version that its relay is receiving, if that has none yet."""
    state, relay = ctx.state, ctx.state.members.relays.get(replica.relay)
    if (
        not state.settings.stream
        or state.versions.newest < 0
        or relay is None
        or replica.failed_loads
    ):
        return
    comes = relay.newest < 0 and relay is not master_relay(state)
    if comes and relay.name not in state.versions.failed_sources and _can_pull(state, replica):
        replica.version, replica.step = state.versions.newest, state.versions.newest_step
        replica.digest, replica.groups_taken = state.versions.newest_digest, 0
        order_pull(ctx, replica, state.versions.newest, True, PullPurpose.STREAM)
        ctx.touch_replica(replica.name)


def _can_pull_in_flight(state: State, replica: Replica) -> bool:
    if not state.settings.in_flight or not is_serving(state, replica):
        return False
    if indexes.is_streaming(state, replica.name):
        return False
    groups = (state.work.groups[state.work.trajectories[t].group] for t in replica.running)
    return all(group.purpose == Purpose.TRAIN for group in groups) and not _is_turn_awaited(
        state, replica
    )


def _can_pull(state: State, replica: Replica) -> bool:
    """Return whether a replica is alive, empty, not loading, not migrating, not about to restart.

    Two rejected loads in a row cause a restart."""
    busy = replica.running or replica.incoming or replica.outgoing or replica.loading
    given_up = replica.failed_loads >= FAILED_LOADS_MAX
    if busy or given_up or not state.members.is_actor_alive(replica.name):
        return False
    return not indexes.is_streaming(state, replica.name) and not _is_turn_awaited(state, replica)


def _is_turn_awaited(state: State, replica: Replica) -> bool:
    """Return whether a session that had its last turn here needs the loaded version for the next.

    In flight only an evaluation sample needs it."""
    if not state.settings.has_environment:
        return False
    here = (
        state.work.trajectories[t] for t in indexes_of(state).trajectories.get(replica.name, ())
    )
    return any(
        t.status in (TrajectoryStatus.WAITING, TrajectoryStatus.LOST)
        and t.version == replica.version
        and not goes_anywhere(state, t)
        for t in here
    )


def may_pull_reserved(state: State) -> list[Kind]:
    """Return the kinds of empty replicas that plan_reserved_pull may order to pull."""
    lost, index = _list_wanted_versions(state), indexes_of(state).replicas
    if not lost and not evaluation.may_want(state):
        return []
    return index.filter_kinds(
        lambda kind: not kind.loading and kind.failed_loads < FAILED_LOADS_MAX
    )


def _find_lost_work_version(state: State, replica: Replica) -> int:
    """Find a version in reach that lost work needs and no live replica has or loads; -1: none."""
    wanted = _list_wanted_versions(state)
    near = next((v for v in wanted if state.is_in_reach(replica, v)), -1)
    if near >= 0 or not state.versions.num_bytes:
        return near
    return next((v for v in wanted if _to_be_fetched(state, replica, v)), -1)


def _can_load_version(state: State, replica: Replica, version: int) -> bool:
    """Return whether the replica can load the version nearby, or is the one to fetch it."""
    return state.is_in_reach(replica, version) or _to_be_fetched(state, replica, version)


def _to_be_fetched(state: State, replica: Replica, version: int) -> bool:
    """Return whether to fetch from another machine: no replica there is free, none loads it yet."""
    index = indexes_of(state)
    if (
        version in index.fetched
        or load_sources.choose_source(state, replica, version).source is None
    ):
        return False
    near = [
        name for relay in load_sources.holders(state, version) for name in index.served_by(relay)
    ]
    return not any(_can_pull(state, state.members.replicas[name]) for name in near)


def _list_wanted_versions(state: State) -> list[int]:
    """List lost work's versions that no live replica has or loads, earliest loss first."""
    if not state.work.lost:
        return []
    return [v for v in indexes_of(state).lost.list_wanted() if not _is_served_or_loaded(state, v)]


def _is_served_or_loaded(state: State, version: int) -> bool:
    """Return whether a live replica serves the version, or is loading exactly it."""
    serving = indexes_of(state).replicas.filter_kinds(
        lambda kind: kind.version == version and kind.serving
    )
    return bool(serving) or version in indexes_of(state).fetched
