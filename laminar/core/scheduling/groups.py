"""Groups: their trajectories from generated to rewarded to ended, each exactly once.

Reads   state.work.groups, state.work.trajectories, settings
Writes  state.work, state.signals.flat_groups_in_row
Emits   ScoreTrajectories, EndTrajectories, AbortTrajectories

A group closes when every sibling is rewarded or dropped. An end is decided here, then written by
the store; the ledger is updated only when the store has answered, and counts the end as live until
then.
"""

from __future__ import annotations

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.scheduling.dispatch import leave_engine
from laminar.core.state import indexes, keys
from laminar.core.state.keys import CommandKey
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, TrajectoryStatus
from laminar.core.state.transitions import UNFINISHED, move_group, transition
from laminar.core.state.work import Group, Trajectory
from laminar.core.store_orders import END_TIMEOUT_MS
from laminar.core.validation import is_count
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import DropReason, EndKind
from laminar.names.ids import GroupId, Purpose, TrajectoryId
from laminar.names.roles import Role

SCORE_TIMEOUT_MS = 600_000
"""The timeout of a scoring replica; the reward function has its own (reward.timeout_s)."""
ENDINGS_PER_COMMAND = 2_048
"""The maximum number of ends per command, about 150 bytes each: within one message and request."""

# --- siblings ---------------------------------------------------------------------------------


def score_siblings(ctx: Context, trajectories: list[Trajectory], scorer: str) -> None:
    """Ask a replica to reward generated siblings of one group, or a host to give one its turn."""
    group = ctx.state.work.groups[trajectories[0].group]
    items = tuple(
        cmd.PlacedTrajectory(trajectory_id=t.id, placement=t.placement) for t in trajectories
    )
    for trajectory in trajectories:
        if ctx.state.settings.has_environment:
            indexes.assign_session(ctx.state, trajectory.id, scorer)
        else:
            indexes.assign_replica(ctx.state, trajectory, scorer)
        ctx.state.work.unscored.pop(trajectory.id, None)
    ctx.issue_command(
        cmd.ScoreTrajectories(
            to=scorer, group=group.id, row_index=group.row_index, purpose=group.purpose, items=items
        ),
        key=get_score_key(ctx.state, trajectories[0]),
        timeout_ms=SCORE_TIMEOUT_MS + ctx.state.settings.turn_timeout_ms,
    )


def get_score_key(state: State, trajectory: Trajectory) -> CommandKey:
    """Return the key of a scoring command: one per group if group-scored, else per sibling."""
    grouped = state.settings.reward_scope == "group"
    return keys.score_key(trajectory.group if grouped else trajectory.id)


def find_scorable(state: State, trajectory: Trajectory) -> list[Trajectory]:
    """Return the siblings that can be scored now that this one is generated (the group, or it)."""
    if state.settings.reward_scope != "group":
        return [trajectory]
    waiting = [t for t in list_members(state, trajectory.group) if t.status in UNFINISHED]
    return waiting if all(m.status == TrajectoryStatus.GENERATED for m in waiting) else []


def end_scoring(ctx: Context, trajectory: Trajectory) -> None:
    """End the scoring command when no sibling that it names is waiting for its reward."""
    state = ctx.state
    key = get_score_key(state, trajectory)
    if state.settings.reward_scope == "group" and any(
        t.status == TrajectoryStatus.GENERATED for t in list_members(state, trajectory.group)
    ):
        return
    ctx.end_command(key)


def finish_sibling(ctx: Context, group: Group) -> None:
    """Count a sibling as finished; a complete group is ready, or dropped: too small, or flat."""
    state = ctx.state
    group.unfinished -= 1
    if group.unfinished or group.status != GroupStatus.OPEN:
        return
    scored = scored_members(state, group)
    if group.purpose == Purpose.EVAL:
        end_group(ctx, group, EndKind.EVALUATED, DropReason.NONE, group.step)
    elif len(scored) < state.settings.min_scored:
        drop_group(ctx, group, DropReason.TOO_FEW_SCORED)
    elif is_flat(state, scored):
        state.signals.flat_groups_in_row += 1
        state.signals.flat_correct_in_row += all(state.work.trajectories[m].correct for m in scored)
        drop_group(ctx, group, DropReason.NO_VARIANCE)
    else:
        state.signals.flat_groups_in_row = state.signals.flat_correct_in_row = 0
        move_group(group, "complete")
        indexes.add_ready(state, group)


def is_flat(state: State, scored: list[TrajectoryId]) -> bool:
    """Return whether a filter is on and these siblings are equal in it; one alone never is."""
    metric, found = state.settings.filter_metric, [state.work.trajectories[m] for m in scored]
    if not metric or len(found) < 2:
        return False
    values = [t.correct if metric == "acc" else float_of(t.reward_bits) for t in found]
    return min(values) == max(values)


# --- endings ----------------------------------------------------------------------------------


def drop_sibling(ctx: Context, trajectory: Trajectory, reason: DropReason) -> None:
    """End an unfinished sibling as dropped; its group continues with the others."""
    group = ctx.state.work.groups[trajectory.group]
    _end_trajectories(ctx, group, [trajectory], EndKind.DROPPED, reason, -1)
    end_scoring(ctx, trajectory)
    _score_remaining(ctx, group)
    finish_sibling(ctx, group)


def drop_scored(
    ctx: Context, group: Group, members: list[TrajectoryId], reason: DropReason
) -> None:
    """End rewarded siblings of a batch as dropped, before their group ends."""
    _end_trajectories(
        ctx, group, [ctx.state.work.trajectories[m] for m in members], EndKind.DROPPED, reason, -1
    )


def _score_remaining(ctx: Context, group: Group) -> None:
    """Begin a group-scored reward that waited for the dropped sibling."""
    state = ctx.state
    waiting = [t for t in list_members(state, group.id) if t.status == TrajectoryStatus.GENERATED]
    grouped = state.settings.reward_scope == "group"
    if grouped and waiting and get_score_key(state, waiting[0]) not in state.orders.commands:
        state.work.unscored.update((t.id, None) for t in find_scorable(state, waiting[0]))


def drop_group(ctx: Context, group: Group, reason: DropReason) -> None:
    """End all open siblings as dropped; the group no longer counts as unchosen."""
    if group.purpose == Purpose.TRAIN and group.status in (GroupStatus.OPEN, GroupStatus.READY):
        remove_unchosen(ctx.state, group)
        ctx.touch_all()
    end_group(ctx, group, EndKind.DROPPED, reason, -1)


def end_group(ctx: Context, group: Group, end: EndKind, reason: DropReason, step: int) -> None:
    """Decide the end of a group and of its siblings that have not ended by themselves."""
    state = ctx.state
    indexes.remove_ready(state, group)
    move_group(group, "end")
    group.end, group.end_reason = end, reason
    open_members = [t for t in list_members(state, group.id) if t.status != TrajectoryStatus.ENDING]
    _end_trajectories(ctx, group, open_members, end, reason, step)
    ctx.end_command(keys.score_key(group.id))


def _end_trajectories(
    ctx: Context, group: Group, ended: list[Trajectory], end: EndKind, reason: DropReason, step: int
) -> None:
    state = ctx.state
    aborted: dict[str, list[Trajectory]] = {}
    for trajectory in ended:
        for name in _working_on(state, trajectory):
            aborted.setdefault(name, []).append(trajectory)
        if trajectory.status != TrajectoryStatus.REWARDED:  # no replica works on a rewarded one
            _withdraw_trajectory(ctx, trajectory)
        moved = transition(trajectory, "end")
        assert moved, (trajectory, end)
        trajectory.placement += 1  # the store refuses a replica that still works on it
        ctx.endings.append(
            cmd.TrajectoryEnding(
                trajectory_id=trajectory.id,
                group=group.id,
                sibling=trajectory.sibling,
                purpose=group.purpose,
                row_index=group.row_index,
                placement=trajectory.placement,
                end=end,
                reason=reason,
                step=step,
            )
        )
    for name, running in aborted.items():
        items = tuple(
            cmd.PlacedTrajectory(trajectory_id=t.id, placement=t.placement) for t in running
        )
        ctx.issue_command(cmd.AbortTrajectories(to=name, items=items))


def _working_on(state: State, trajectory: Trajectory) -> list[str]:
    """List the replica that generates it and the host that has its session."""
    replica, found = state.members.replicas.get(trajectory.replica), []
    if replica is not None and trajectory.id in replica.running:
        found.append(replica.name)
    host = state.work.sessions.get(trajectory.id, "")
    return [*found, host] if state.members.is_actor_alive(host) else found


def _withdraw_trajectory(ctx: Context, trajectory: Trajectory) -> None:
    """Withdraw a trajectory: stop waiting for its replica, and for a place."""
    state = ctx.state
    leave_engine(ctx, trajectory)
    if state.settings.reward_scope != "group":
        ctx.end_command(keys.score_key(trajectory.id))
    indexes.remove_lost(state, trajectory)
    state.work.unscored.pop(trajectory.id, None)
    ctx.clear_timer(keys.resume_timer(trajectory.id))
    release_session(ctx, trajectory)


def release_session(ctx: Context, trajectory: Trajectory) -> None:
    """Let another trajectory have its session, and its replica load newer weights."""
    if ctx.state.settings.has_environment:
        indexes.assign_session(ctx.state, trajectory.id, "")
        ctx.touch_all()


def send_endings(ctx: Context) -> None:
    """Send all ends of this event to the store together: one commit."""
    if not ctx.endings:
        return
    store = indexes.live_actor(ctx.state, Role.STORE)
    timeout_ms = END_TIMEOUT_MS + ctx.state.settings.disk_full_timeout_ms
    if store_orders.is_store_awaited(ctx.state):  # the timeout starts when the store is ready
        timeout_ms = 0
    for start in range(0, len(ctx.endings), ENDINGS_PER_COMMAND):
        part = tuple(ctx.endings[start : start + ENDINGS_PER_COMMAND])
        ctx.issue_command(
            cmd.EndTrajectories(to=store.name if store else "store-0", endings=part),
            key=keys.end_key(ctx.next_command_id),
            timeout_ms=timeout_ms,
        )
    ctx.endings.clear()


def _ended_counts(state: State, event: ev.TrajectoriesEnded) -> bool:
    return all(is_count(row.num_tokens) and is_count(row.tokens_lost) for row in event.ended)


@handles(ev.TrajectoriesEnded, valid=_ended_counts)
def on_trajectories_ended(ctx: Context, event: ev.TrajectoriesEnded) -> None:
    """Update the ledger with ends that the store has on disk."""
    outstanding = ctx.end_command(keys.end_key(event.command_id))
    if outstanding is None or not isinstance(outstanding.command, cmd.EndTrajectories):
        return ctx.ignore("repeat")
    rows = {row.trajectory_id: row for row in event.ended}
    for ending in outstanding.command.endings:
        row = rows.get(ending.trajectory_id)
        _close_trajectory(ctx, ending, row.num_tokens if row else 0, row.tokens_lost if row else 0)


def _close_trajectory(
    ctx: Context, ending: cmd.TrajectoryEnding, num_tokens: int, tokens_lost: int
) -> None:
    """Remove a trajectory whose end is on disk and update the ledger."""
    state = ctx.state
    trajectory = indexes.close_trajectory(state, ending.trajectory_id)
    ledger = state.work.ledger
    ledger.trajectories.record_end(ending.end, ending.reason)
    ledger.tokens.issued += num_tokens - trajectory.num_tokens + tokens_lost
    ledger.tokens.record_end(ending.end, ending.reason, num_tokens)
    if tokens_lost:
        ledger.tokens.record_end(EndKind.DROPPED, DropReason.RESTARTED, tokens_lost)
    group = state.work.groups[trajectory.group]
    if group.status != GroupStatus.ENDING:
        indexes.invalidate_lengths(state, group)
    elif not list_members(state, group.id):
        ledger.groups.record_end(group.end, group.end_reason)
        del state.work.groups[group.id]


def remove_unchosen(state: State, group: Group) -> None:
    state.work.deadlines[group.deadline] -= 1
    if not state.work.deadlines[group.deadline]:
        del state.work.deadlines[group.deadline]


def list_members(state: State, group_id: GroupId) -> list[Trajectory]:
    """List siblings that have not been closed."""
    ids_ = state.work.groups[group_id].members
    return [state.work.trajectories[m] for m in ids_ if m in state.work.trajectories]


def scored_members(state: State, group: Group) -> list[TrajectoryId]:
    """List siblings that ended with a reward; the dropped ones are not in the baseline either."""
    return [t.id for t in list_members(state, group.id) if t.status == TrajectoryStatus.REWARDED]
