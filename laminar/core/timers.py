"""Timers: the consequences of each timer of the state when it is due.

Reads   TimerFired, state.orders.timers, state.orders.commands
Writes  the timer that fired, and through its handler
Emits   through the modules that set it: restarts, drops, the end of the run
"""

from __future__ import annotations

from laminar.core import waits
from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.members import lifecycle, membership
from laminar.core.registry import handles
from laminar.core.repack import migration
from laminar.core.scheduling import recovery
from laminar.core.state import indexes, keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.keys import CommandKey, TimerKind, TimerName
from laminar.core.steps import batch_wait
from laminar.core.validation import accept_any
from laminar.core.versions import broadcast
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from laminar.names.roles import Role


@handles(ev.TimerFired, valid=accept_any)
def on_timer_fired(ctx: Context, event: ev.TimerFired) -> None:
    """Handle a timer; one that has been cleared meanwhile is late and ignored."""
    state = ctx.state
    if not indexes.clear_timer(state, TimerName(event.timer)):
        return ctx.ignore("late")
    kind, subject = keys.parse_timer(event.timer)
    if kind == TimerKind.START:
        lifecycle.handle_start_timeout(ctx)
    elif kind == TimerKind.WEIGHTS:
        relay = indexes.master_relay(state)
        name = relay.name if relay is not None else Role.RELAY
        fail_run(ctx, FailureKind.NOT_PUBLISHED, name, str(state.steps.completed))
    elif kind == TimerKind.BATCH_TIMEOUT:
        batch_wait.handle_batch_timeout(ctx)
    elif kind == TimerKind.REPACK:
        migration.schedule_repack(ctx)
    elif kind == TimerKind.PAUSE:
        pass  # the responses have had their time: the planner lets the run pause
    elif kind == TimerKind.RESUME:
        recovery.handle_resume_timeout(ctx, TrajectoryId(subject))
    elif kind == TimerKind.PROGRESS:
        recovery.watch_progress(ctx, subject)
    elif kind == TimerKind.REJOIN:
        membership.handle_rejoin_timeout(ctx, subject)
    elif kind == TimerKind.RECEIVE:
        broadcast.receive_expired(ctx, subject)
    else:
        _command_expired(ctx, CommandKey(subject))


def _command_expired(ctx: Context, key: CommandKey) -> None:
    """Handle a command that missed its deadline: mostly, restart its actor."""
    state = ctx.state
    command = state.orders.commands[key].command
    what = type(command).__name__
    if isinstance(command, cmd.ProposeBatch):
        state.steps.proposal_failed = True
        ctx.end_command(key)
    elif isinstance(command, cmd.StopActor):
        ctx.end_command(key)
        indexes.end_actor(state, command.to)
    elif isinstance(command, cmd.RestartActor):
        membership.restart_expired(ctx, command)
    elif isinstance(command, cmd.ForwardWeights):
        broadcast.link_expired(ctx, command.to, command.successor)
    elif isinstance(command, cmd.ReleaseTrajectories):
        migration.release_expired(ctx, command)
    elif waits.is_owner_restartable(state, command):
        ctx.restart_actor(command.to, f"{what} was not done in time")
    else:
        fail_run(ctx, FailureKind.OVERDUE, command.to, what)
