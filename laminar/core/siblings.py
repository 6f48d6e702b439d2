"""Siblings: from generated to rewarded to ended, each exactly once.

Reads   state.groups, state.trajectories, settings
Writes  statuses, state.ready, state.unscored, state.deadlines, the ledger
Emits   ScoreTrajectories, EndTrajectories, AbortTrajectories

A group closes when every sibling is rewarded or dropped. An end is decided here, written by the
store, and only when the store has answered do the books move: until then it counts as live.
"""

from __future__ import annotations

from laminar import ids
from laminar.core.dispatch import leave_engine
from laminar.core.lookup import add_ready, assign, close_trajectory, remove_lost, remove_ready
from laminar.core.state import Group, State, Trajectory
from laminar.core.transitions import ENDING, GENERATED, REWARDED, UNFINISHED, move
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.ids import GroupId, TrajectoryId

SCORE_TIMEOUT_MS = 600_000
"""A reward has its own time-out in the replica (reward.timeout_s); this one is for the replica."""
ENDINGS_PER_COMMAND = 2_048
"""About 150 bytes each: well inside one control message, and inside one request of the store."""
END_TIMEOUT_MS = 120_000
"""One transaction of the store; two minutes of silence mean that it hangs, or waits for a disk."""

# --- siblings ---------------------------------------------------------------------------------


def score(turn: Turn, trajectories: list[Trajectory], replica: str) -> None:
    """Ask a replica to reward generated siblings of one group."""
    group = turn.state.groups[trajectories[0].group]
    items = tuple(cmd.Placed(trajectory=t.id, placement=t.placement) for t in trajectories)
    for trajectory in trajectories:
        assign(turn.state, trajectory, replica)
        turn.state.unscored.pop(trajectory.id, None)
    turn.command(
        cmd.ScoreTrajectories(
            to=replica,
            group=group.id,
            row_index=group.row_index,
            purpose=group.purpose,
            items=items,
        ),
        key=score_key(turn.state, trajectories[0]),
        timeout_ms=SCORE_TIMEOUT_MS,
    )


def score_key(state: State, trajectory: Trajectory) -> str:
    """Group-scored rewards are one command for the group, the others one for each sibling."""
    grouped = state.settings.reward_scope == "group"
    return f"score:{trajectory.group if grouped else trajectory.id}"


def scorable(state: State, trajectory: Trajectory) -> list[Trajectory]:
    """What can be scored now that this sibling is generated (all of the group, or just it)."""
    if state.settings.reward_scope != "group":
        return [trajectory]
    waiting = [t for t in members(state, trajectory.group) if t.status in UNFINISHED]
    return waiting if all(m.status == GENERATED for m in waiting) else []


def finish_score_command(turn: Turn, trajectory: Trajectory) -> None:
    """The command ends when no sibling that it names is waiting for its reward."""
    state = turn.state
    key = score_key(state, trajectory)
    if state.settings.reward_scope == "group" and any(
        t.status == GENERATED for t in members(state, trajectory.group)
    ):
        return
    turn.done(key)


def sibling_done(turn: Turn, group: Group) -> None:
    """One sibling less is unfinished; a complete group is ready, or dropped when too small."""
    state = turn.state
    group.unfinished -= 1
    if group.unfinished or group.status != "open":
        return
    scored = scored_members(state, group)
    if group.purpose == ids.EVAL:
        end_group(turn, group, "evaluated", "", group.step)
    elif len(scored) < state.settings.min_scored:
        drop_group(turn, group, "too-few-scored")
    else:
        group.status = "ready"
        add_ready(state, group)


# --- endings ----------------------------------------------------------------------------------


def drop_sibling(turn: Turn, trajectory: Trajectory, reason: str) -> None:
    """One unfinished sibling ends as dropped; its group goes on with the others."""
    group = turn.state.groups[trajectory.group]
    _end(turn, group, [trajectory], "dropped", reason, -1)
    finish_score_command(turn, trajectory)
    _score_the_others(turn, group)
    sibling_done(turn, group)


def drop_scored(turn: Turn, group: Group, members: list[TrajectoryId], reason: str) -> None:
    """Rewarded siblings of a batch end as dropped, before their group ends."""
    _end(turn, group, [turn.state.trajectories[m] for m in members], "dropped", reason, -1)


def _score_the_others(turn: Turn, group: Group) -> None:
    """A group-scored reward that waited for the dropped sibling can begin."""
    state = turn.state
    waiting = [t for t in members(state, group.id) if t.status == GENERATED]
    grouped = state.settings.reward_scope == "group"
    if grouped and waiting and score_key(state, waiting[0]) not in state.commands:
        state.unscored.update((t.id, None) for t in scorable(state, waiting[0]))


def drop_group(turn: Turn, group: Group, reason: str) -> None:
    """Every sibling that has not ended ends as dropped; the capacity is given back."""
    if group.purpose == ids.TRAIN and group.status in ("open", "ready"):
        unchosen_less(turn.state, group)
        turn.touch_all()
    end_group(turn, group, "dropped", reason, -1)


def end_group(turn: Turn, group: Group, end: str, reason: str, step: int) -> None:
    """Decide the end of a group and of its siblings that have not ended by themselves."""
    state = turn.state
    remove_ready(state, group)
    group.status, group.end, group.end_reason = "ending", end, reason
    open_members = [t for t in members(state, group.id) if t.status != ENDING]
    _end(turn, group, open_members, end, reason, step)
    turn.done(f"score:{group.id}")


def _end(
    turn: Turn, group: Group, ended: list[Trajectory], end: str, reason: str, step: int
) -> None:
    state = turn.state
    aborted: dict[str, list[Trajectory]] = {}
    for trajectory in ended:
        replica = state.replicas.get(trajectory.replica)
        if replica is not None and trajectory.id in replica.running:
            aborted.setdefault(replica.name, []).append(trajectory)
        if trajectory.status != REWARDED:  # nobody has to do with that one any more
            _withdraw(turn, trajectory)
        moved = move(trajectory, "end")
        assert moved, (trajectory, end)
        trajectory.placement += 1  # whoever still works on it is refused by the store
        turn.endings.append(
            cmd.Ending(
                trajectory=trajectory.id,
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
        items = tuple(cmd.Placed(trajectory=t.id, placement=t.placement) for t in running)
        turn.command(cmd.AbortTrajectories(to=name, items=items))


def _withdraw(turn: Turn, trajectory: Trajectory) -> None:
    """Whoever generates or scores it is not waited for, and it waits for no place."""
    state = turn.state
    leave_engine(turn, trajectory)
    if state.settings.reward_scope != "group":
        turn.done(f"score:{trajectory.id}")
    remove_lost(state, trajectory)
    state.unscored.pop(trajectory.id, None)
    turn.clear_timer(f"resume:{trajectory.id}")


def send_endings(turn: Turn) -> None:
    """What was decided in this turn goes to the store together: one commit."""
    if not turn.endings:
        return
    store = turn.state.the("store")
    for start in range(0, len(turn.endings), ENDINGS_PER_COMMAND):
        part = tuple(turn.endings[start : start + ENDINGS_PER_COMMAND])
        turn.command(
            cmd.EndTrajectories(to=store.name if store else "store-0", endings=part),
            key=f"end:{turn.next_command_id}",
            timeout_ms=END_TIMEOUT_MS + turn.state.settings.disk_wait_ms,
        )
    turn.endings.clear()


def close(turn: Turn, ending: cmd.Ending, num_tokens: int, tokens_lost: int) -> None:
    """The store has the end on disk: the books are moved and the trajectory is forgotten."""
    state = turn.state
    trajectory = close_trajectory(state, ending.trajectory)
    ledger = state.ledger
    ledger.trajectories.end(ending.end, ending.reason)
    ledger.tokens.issued += num_tokens - trajectory.num_tokens + tokens_lost
    ledger.tokens.end(ending.end, ending.reason, num_tokens)
    if tokens_lost:
        ledger.tokens.end("dropped", "restarted", tokens_lost)
    group = state.groups[trajectory.group]
    if group.status == "ending" and not members(state, group.id):
        ledger.groups.end(group.end, group.end_reason)
        del state.groups[group.id]


def unchosen_less(state: State, group: Group) -> None:
    state.deadlines[group.deadline] -= 1
    if not state.deadlines[group.deadline]:
        del state.deadlines[group.deadline]


def members(state: State, group_id: GroupId) -> list[Trajectory]:
    """Siblings that have not been closed."""
    ids_ = state.groups[group_id].members
    return [state.trajectories[m] for m in ids_ if m in state.trajectories]


def scored_members(state: State, group: Group) -> list[TrajectoryId]:
    """Siblings that ended with a reward; the dropped ones are not in the baseline either."""
    return [t.id for t in members(state, group.id) if t.status == REWARDED]
