"""Stalls: the process that holds a run up is restarted once; then the run ends, to be resumed.

Reads   RunStalled, WorkProgress
Writes  state.run.stalled, state.steps.work_count
Emits   RestartActor, which has the process write its stacks first

A second stall at the same process before another step is completed ends the run, as does one at a
process that cannot be restarted. Time is measured outside (coordinator/stalls.py).
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.registry import handles
from laminar.core.state.failures import FailureKind
from laminar.core.state.state import State
from laminar.core.steps import step_replay
from laminar.core.validation import accept_any, is_count
from laminar.events import events as ev
from laminar.names.roles import Role


@handles(ev.RunStalled, valid=accept_any)
def on_run_stalled(ctx: Context, event: ev.RunStalled) -> None:
    """Restart the owner of the awaited event, or end the run."""
    state, owner = ctx.state, event.owner
    actor = state.members.actors.get(owner)
    if actor is not None and actor.incarnation != event.owner_incarnation:
        return ctx.ignore("old-incarnation")
    why = (
        f"{event.waiter} waits for {event.awaited} from {owner} ({event.what}), and nothing has "
        f"moved for {event.idle_ms / 1000:.0f} s (coordinator.stall_timeout_s)"
    )
    completed = state.steps.completed
    if _is_restartable(state, owner) and state.run.stalled.get(owner) != completed:
        state.run.stalled[owner] = completed
        ctx.restart_actor(owner, why, again=True)
    elif not fail_run(ctx, FailureKind.STALLED, owner, why):
        ctx.ignore("run-ending")


def _is_restartable(state: State, name: str) -> bool:
    """Return whether the node of a process can restart it, and the run continues then."""
    actor = state.members.actors.get(name)
    if actor is None or not actor.alive or actor.role == Role.NODE:
        return False
    lasting = actor.role != Role.TRAINER or step_replay.may_be_lost(state, name)
    return lasting and state.members.is_actor_alive(actor.node)


def _is_possible(state: State, event: ev.WorkProgress) -> bool:
    return is_count(event.count)


@handles(ev.WorkProgress, valid=_is_possible, planned=False)
def on_work_progress(ctx: Context, event: ev.WorkProgress) -> None:
    """Record a gauge, which shows that its process works."""
    if event.count == ctx.state.steps.work_count:
        return ctx.ignore("repeat")
    ctx.state.steps.work_count = event.count
