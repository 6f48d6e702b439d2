"""Migration: a replica releases its trajectories to the store, and they continue elsewhere.

Reads   TrajectoriesReleased, the plan of core/repack/packing.py
Writes  trajectory statuses and placements, replica.outgoing, replica.incoming
Emits   ReleaseTrajectories, GenerateTrajectory, AbortTrajectories

Room is reserved at the destination from the order on. The source takes and loads nothing until
every released trajectory has started elsewhere, or has ended. A source that misses the timeout is
not restarted: its work continues without the tokens that have not reached the store.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.repack import packing
from laminar.core.repack.packing import PlannedMigration
from laminar.core.repack.stragglers import find_stragglers, released_max
from laminar.core.scheduling.dispatch import lose_trajectory, place_migrated
from laminar.core.state import keys
from laminar.core.state.indexes import load_changed, update_replica
from laminar.core.state.statuses import Phase, TrajectoryStatus
from laminar.core.state.transitions import transition
from laminar.core.state.work import Trajectory
from laminar.core.validation import accept_any
from laminar.events import commands as cmd
from laminar.events import events as ev

EMPTIED_MAX = 500
"""The maximum number of replicas emptied per plan: an event may take tens of milliseconds.

A replica is left with stragglers once in minutes, so few of 10,000 are between two plans, unless
all began at once."""


def schedule_repack(ctx: Context) -> None:
    """Plan migrations now, for newer weights or after the interval, and again after an interval."""
    state = ctx.state
    if not state.settings.repack_policy or state.run.phase != Phase.RUNNING or state.run.draining:
        return
    ctx.set_timer(keys.REPACK, state.settings.repack_interval_ms)
    ctx.repack_due = True


def plan_migrations(ctx: Context) -> None:
    """Empty the replicas for which that pays; the oldest versions first."""
    state = ctx.state
    ctx.repack_due = False
    gain = state.settings.repack_policy == "gain"
    left = min(released_max(state) if gain else len(state.members.replicas), EMPTIED_MAX)
    if not left:
        return
    found = find_stragglers(state)
    for version in sorted(found):
        prefill_tokens = state.settings.repack_prefill_tokens if gain else 0
        moves = packing.plan_packing(found[version], left, prefill_tokens)
        left -= len(moves)
        for planned in moves:
            _order_release(ctx, planned)


def _order_release(ctx: Context, planned: PlannedMigration) -> None:
    """Order the source to release all that it runs, and reserve room for it."""
    state, members = ctx.state, ctx.state.members
    source, destination = (members.replicas[planned.source], members.replicas[planned.destination])
    items = []
    for trajectory_id, placement in source.running.items():
        trajectory = state.work.trajectories[trajectory_id]
        moved = transition(trajectory, "release")
        assert moved, trajectory
        progress = state.repack.progress[trajectory_id]
        progress.source, progress.destination = source.name, destination.name
        progress.migrations += 1
        source.outgoing[trajectory_id] = None
        destination.incoming[trajectory_id] = None
        items.append(cmd.PlacedTrajectory(trajectory_id=trajectory_id, placement=placement))
    ctx.issue_command(
        cmd.ReleaseTrajectories(to=source.name, items=tuple(items)),
        key=keys.release_key(source.name),
        timeout_ms=state.settings.repack_release_timeout_ms,
    )
    update_replica(state, source)
    load_changed(state, destination)


@handles(ev.TrajectoriesReleased, valid=accept_any)
def on_trajectories_released(ctx: Context, event: ev.TrajectoriesReleased) -> None:
    """Continue all released trajectories at their destination: the store has every token."""
    key = keys.release_key(ctx.stamped.peer)
    outstanding = ctx.state.orders.commands.get(key)
    if outstanding is None or outstanding.command_id != event.command_id:
        return ctx.ignore("late")
    ctx.end_command(key)
    _migrate_released(ctx, outstanding.command)


def release_expired(ctx: Context, command: cmd.ReleaseTrajectories) -> None:
    """Continue late trajectories without the tokens that their source has not released."""
    ctx.end_command(keys.release_key(command.to))
    _migrate_released(ctx, command)
    ctx.issue_command(cmd.AbortTrajectories(to=command.to, items=command.items))


def _migrate_released(ctx: Context, command: cmd.AnyCommand) -> None:
    """Place the trajectories that have not ended; without its destination one is lost work."""
    assert isinstance(command, cmd.ReleaseTrajectories)
    for item in command.items:
        trajectory = ctx.state.work.trajectories.get(item.trajectory_id)
        if trajectory is None or trajectory.placement != item.placement:
            continue
        if trajectory.status == TrajectoryStatus.RELEASING:
            _goes_on(ctx, trajectory)


def _goes_on(ctx: Context, trajectory: Trajectory) -> None:
    destination = ctx.state.members.replicas.get(
        ctx.state.repack.progress[trajectory.id].destination
    )
    if destination is None or trajectory.id not in destination.incoming:
        return lose_trajectory(ctx, trajectory.id)
    place_migrated(ctx, trajectory, destination)
