"""Sessions: the agents or environments of trajectories, in processes of the hosts of agents.

Reads   AgentReady; live hosts, settings.max_sessions
Writes  state.work.sessions, state.work.unscored; trajectories that begin again
Emits   StartSession, AbortTrajectories

A session starts before its trajectory has a place. While it works, no replica has the trajectory;
each turn that it requests is placed as lost work is. A session ends when its trajectory is rewarded
or ends.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.state import indexes, keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.core.state.transitions import transition
from laminar.core.state.work import Trajectory
from laminar.core.validation import accept_any
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.roles import Role

SESSION_TIMEOUT_MS = 600_000
"""The timeout of a host beyond that of a turn, which the host keeps (env.turn_timeout_s)."""


@handles(ev.AgentReady, valid=accept_any)
def on_agent_ready(ctx: Context, event: ev.AgentReady) -> None:
    """Let groups start whose sessions this host can have."""
    if ctx.mark_ready():
        ctx.clear_timer(keys.progress_timer(ctx.stamped.peer))
        ctx.touch_all()


def list_hosts(state: State) -> list[str]:
    """List the hosts that can start sessions."""
    actors = state.members.actors
    names = indexes_of(state).roles.get(Role.AGENT, ())
    return [name for name in names if actors[name].alive and actors[name].ready]


def count_sessions(state: State, host: str) -> int:
    return len(indexes_of(state).sessions.get(host, ()))


def choose_host(state: State) -> str:
    """Return the host with the fewest sessions; empty if there is none."""
    return min(list_hosts(state), key=lambda name: count_sessions(state, name), default="")


def find_host(state: State, trajectory: Trajectory) -> str:
    """Return the host that has its session, else the one to have a new one; empty: none."""
    host = state.work.sessions.get(trajectory.id, "")
    return host if state.members.is_actor_alive(host) else choose_host(state)


def has_room(state: State, count: int) -> bool:
    """Return whether `count` more trajectories can have sessions, if they need any."""
    most = state.settings.max_sessions
    if not most:
        return True
    free = sum(max(0, most - count_sessions(state, name)) for name in list_hosts(state))
    return free >= count


def start_session(ctx: Context, trajectory: Trajectory) -> None:
    """Start the session of a trajectory without tokens; without a host it waits for one."""
    state = ctx.state
    group, host = state.work.groups[trajectory.group], choose_host(state)
    indexes.assign_session(state, trajectory.id, host)
    if not host:
        state.work.unscored[trajectory.id] = None
        return
    ctx.issue_command(
        cmd.StartSession(
            to=host,
            trajectory_id=trajectory.id,
            group=group.id,
            sibling=trajectory.sibling,
            purpose=group.purpose,
            row_index=group.row_index,
            attempt=trajectory.attempt,
            placement=trajectory.placement,
            version=trajectory.version,
            version_step=group.step,
        ),
        key=keys.score_key(trajectory.id),
        timeout_ms=SESSION_TIMEOUT_MS + state.settings.turn_timeout_ms,
    )


def restart_session(ctx: Context, trajectory: Trajectory) -> None:
    """Run an agent again from its row, without the tokens of its session so far."""
    state = ctx.state
    end_session(ctx, trajectory)
    indexes.remove_lost(state, trajectory)
    ctx.clear_timer(keys.resume_timer(trajectory.id))
    moved = transition(trajectory, "restart")
    assert moved, trajectory
    trajectory.placement += 1
    trajectory.attempt += 1
    trajectory.restart, trajectory.step = False, -1
    start_session(ctx, trajectory)


def end_session(ctx: Context, trajectory: Trajectory) -> None:
    """End a session that is no longer wanted, and the wait for it."""
    host = ctx.state.work.sessions.get(trajectory.id, "")
    ctx.end_command(keys.score_key(trajectory.id))
    ctx.state.work.unscored.pop(trajectory.id, None)
    indexes.assign_session(ctx.state, trajectory.id, "")
    if ctx.state.members.is_actor_alive(host):
        placed = cmd.PlacedTrajectory(trajectory_id=trajectory.id, placement=trajectory.placement)
        ctx.issue_command(cmd.AbortTrajectories(to=host, items=(placed,)))
