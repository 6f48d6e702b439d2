"""Dispatch: the placement of prompts, and every change of a trajectory's place.

Reads   settings, the prompt cursor, replicas
Writes  state.work, replica.running
Emits   GenerateTrajectory, and through sessions.py StartSession

The coordinator owns the cursor and the permutation; the store only maps a row index to its payload.
A group's siblings go to one replica together, so that it computes their prompt once. With sessions
a group is admitted by a replica, whose weights bound its staleness, but none of its trajectories
has a place before its session requests a turn.
"""

from __future__ import annotations

from functools import lru_cache

from laminar.core.context import Context
from laminar.core.scheduling import sessions
from laminar.core.state import forks, indexes, keys
from laminar.core.state.lost_work import goes_anywhere
from laminar.core.state.members import Replica
from laminar.core.state.migrations import MigrationProgress
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import transition
from laminar.core.state.work import Group, Trajectory
from laminar.events import commands as cmd
from laminar.events.reasons import PullPurpose
from laminar.names import ids
from laminar.names.ids import GroupId, Purpose, TrajectoryId


@lru_cache(maxsize=2)
def permute_rows(seed: int, pass_index: int, count: int) -> tuple[int, ...]:
    """Return the row indices of one pass over the data (Fisher-Yates with hash-drawn swaps)."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = ids.hash64(seed, "permutation", pass_index, i) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return tuple(order)


def next_row(state: State) -> tuple[GroupId, int]:
    """Take the next prompt of the data: its group id and its row index."""
    if state.data.unfinished_prompts:
        group_id = next(iter(state.data.unfinished_prompts))
        return group_id, state.data.unfinished_prompts.pop(group_id)
    pass_index, position = divmod(state.data.cursor, state.data.num_train)
    state.data.cursor += 1
    seed, shuffle = forks.order_of(state, pass_index)
    row = permute_rows(seed, pass_index, state.data.num_train)[position] if shuffle else position
    return ids.train_group(pass_index, position), row


def new_group(ctx: Context, replica: Replica) -> None:
    """Start the next prompt's siblings on a replica that admits and has room for all of them."""
    state = ctx.state
    group_id, row = next_row(state)
    deadline = replica.step + state.settings.max_staleness
    replica.groups_taken += 1
    create_group(ctx, replica, group_id, row, Purpose.TRAIN, deadline, state.settings.group_size)
    state.work.deadlines[deadline] = state.work.deadlines.get(deadline, 0) + 1


def create_group(
    ctx: Context,
    replica: Replica,
    group_id: GroupId,
    row: int,
    purpose: Purpose,
    deadline: int,
    size: int,
    attempt: int = 1,
    sample: int = 0,
) -> None:
    """Create a group and place all its siblings, or start their sessions."""
    state = ctx.state
    members = [ids.make_trajectory_id(group_id, sibling) for sibling in range(size)]
    state.work.groups[group_id] = Group(
        id=group_id,
        purpose=purpose,
        row_index=row,
        step=replica.step,
        deadline=deadline,
        order=state.work.next_order,
        members=members,
        unfinished=size,
        sample=sample,
    )
    state.work.next_order += 1
    state.work.ledger.groups.issued += 1
    state.work.ledger.trajectories.issued += size
    for sibling, trajectory_id in enumerate(members):
        trajectory = state.work.trajectories[trajectory_id] = Trajectory(
            id=trajectory_id, group=group_id, sibling=sibling, attempt=attempt
        )
        if state.settings.has_environment:
            _await_session(ctx, trajectory, replica)
        else:
            _place_trajectory(ctx, trajectory, replica, begins=True)
    indexes.update_replica(state, replica)


def _await_session(ctx: Context, trajectory: Trajectory, replica: Replica) -> None:
    """Start the session of a trajectory that this replica admits, for weights as new as its."""
    trajectory.status, trajectory.step = TrajectoryStatus.WAITING, -1
    trajectory.version = replica.version
    if replica.repack is not None:
        ctx.state.repack.progress[trajectory.id] = MigrationProgress()
    indexes.assign_replica(ctx.state, trajectory, replica.name)
    sessions.start_session(ctx, trajectory)


def _place_trajectory(
    ctx: Context, trajectory: Trajectory, replica: Replica, *, begins: bool = False
) -> None:
    """Send a trajectory to a replica under its present placement number.

    With `begins`, it has no tokens of older weights."""
    state = ctx.state
    group = state.work.groups[trajectory.group]
    indexes.assign_replica(state, trajectory, replica.name)
    if begins:
        trajectory.step = replica.step
    trajectory.version = replica.version
    replica.running[trajectory.id] = trajectory.placement
    if replica.repack is not None:
        replica.repack.last_command_id = ctx.next_command_id
        state.repack.progress.setdefault(trajectory.id, MigrationProgress())
    replica.progress_ns = max(replica.progress_ns, ctx.stamped.time_ns)
    ctx.issue_command(
        cmd.GenerateTrajectory(
            to=replica.name,
            trajectory_id=trajectory.id,
            group=group.id,
            sibling=trajectory.sibling,
            purpose=group.purpose,
            row_index=group.row_index,
            attempt=trajectory.attempt,
            placement=trajectory.placement,
            version=replica.version,
            version_step=replica.step,
            seed=ids.trajectory_seed(
                state.settings.seed, group.id, trajectory.sibling, trajectory.attempt
            ),
        ),
        key=keys.generate_key(trajectory.id),
    )


def place_lost(ctx: Context, trajectory: Trajectory, replica: Replica) -> None:
    """Place lost work again; it continues from the store's tokens, or starts over."""
    state = ctx.state
    indexes.remove_lost(state, trajectory)
    ctx.clear_timer(keys.resume_timer(trajectory.id))
    moved = transition(trajectory, "dispatch")
    assert moved, trajectory
    trajectory.placement += 1
    begins = begins_again(state, trajectory, replica)
    if begins:
        trajectory.attempt += 1
        trajectory.restart = False
    if begins or trajectory.is_unsampled:
        group, begins = state.work.groups[trajectory.group], True
        group.mixed = group.mixed or trajectory.version != replica.version
    _place_trajectory(ctx, trajectory, replica, begins=begins)
    indexes.load_changed(state, replica)


def begins_again(state: State, trajectory: Trajectory, replica: Replica) -> bool:
    """Return whether lost work loses its tokens if it continues there."""
    lacks = not (trajectory.is_unsampled or can_resume_on(state, trajectory, replica))
    return trajectory.restart or lacks


def can_resume_on(state: State, trajectory: Trajectory, replica: Replica) -> bool:
    """Return whether its tokens are kept there: of the same version; in flight of any older one."""
    if state.settings.in_flight:
        return replica.version >= trajectory.version
    return replica.version == trajectory.version


def place_migrated(ctx: Context, trajectory: Trajectory, destination: Replica) -> None:
    """Place a released trajectory where room is reserved for it, under a new placement."""
    state = ctx.state
    _take_out(ctx, trajectory)
    moved = transition(trajectory, "migrate")
    assert moved, trajectory
    del destination.incoming[trajectory.id]
    state.repack.progress[trajectory.id].destination = ""
    trajectory.placement += 1
    _place_trajectory(ctx, trajectory, destination)
    indexes.load_changed(state, destination)


def end_move(ctx: Context, trajectory: Trajectory) -> None:
    """End a migration: the trajectory has started, is lost, or has ended."""
    state, progress = ctx.state, ctx.state.repack.progress.get(trajectory.id)
    if progress is None or not progress.source:
        return
    name, destination = progress.source, state.members.replicas.get(progress.destination)
    progress.source = progress.destination = ""
    indexes.invalidate_straggler(state, trajectory)
    if destination is not None and trajectory.id in destination.incoming:
        del destination.incoming[trajectory.id]
        indexes.load_changed(state, destination)
        ctx.touch_replica(destination.name)
    source = state.members.replicas.get(name)
    if source is not None and trajectory.id in source.outgoing:
        del source.outgoing[trajectory.id]
        if not source.outgoing:
            ctx.end_command(keys.release_key(name))
            indexes.update_replica(state, source)
            ctx.touch_replica(name)


def leave_engine(ctx: Context, trajectory: Trajectory) -> None:
    """Take a trajectory that has finished, was lost, or has ended from its replica."""
    _take_out(ctx, trajectory)
    end_move(ctx, trajectory)


def _take_out(ctx: Context, trajectory: Trajectory) -> None:
    ctx.end_command(keys.generate_key(trajectory.id))
    replica = ctx.state.members.replicas.get(trajectory.replica)
    if replica is not None and replica.running.get(trajectory.id) == trajectory.placement:
        del replica.running[trajectory.id]
        indexes.load_changed(ctx.state, replica)
        ctx.touch_replica(replica.name)


def lose_trajectory(ctx: Context, trajectory_id: TrajectoryId) -> None:
    """Take a trajectory from its replica; it waits for a new placement."""
    state = ctx.state
    trajectory = state.work.trajectories[trajectory_id]
    trajectory.version = newest_tokens(state, trajectory)
    leave_engine(ctx, trajectory)
    moved = transition(trajectory, "lose")
    assert moved, trajectory
    if state.members.is_actor_alive(trajectory.replica):
        placed = cmd.PlacedTrajectory(trajectory_id=trajectory_id, placement=trajectory.placement)
        ctx.issue_command(cmd.AbortTrajectories(to=trajectory.replica, items=(placed,)))
    indexes.add_lost(state, trajectory)
    if not goes_anywhere(state, trajectory):
        ctx.set_timer(keys.resume_timer(trajectory_id), state.settings.resume_timeout_ms)
    ctx.touch_all()


def newest_tokens(state: State, trajectory: Trajectory) -> int:
    """Return the newest version of which the store may have tokens of the trajectory.

    A replica that loads while it runs samples with that version before it can report it."""
    replica = state.members.replicas.get(trajectory.replica)
    if replica is None or trajectory.id not in replica.running:
        return trajectory.version
    ordered = indexes.get_pull_order(state, trajectory.replica)
    if ordered is not None and ordered.purpose == PullPurpose.IN_FLIGHT:
        return ordered.version
    return trajectory.version


def await_turn(ctx: Context, trajectory: Trajectory) -> None:
    """Queue a trajectory whose session requests a turn, as lost work."""
    state = ctx.state
    moved = transition(trajectory, "request")
    assert moved, trajectory
    indexes.add_lost(state, trajectory)
    if not goes_anywhere(state, trajectory):
        ctx.set_timer(keys.resume_timer(trajectory.id), state.settings.resume_timeout_ms)
    ctx.touch_all()
