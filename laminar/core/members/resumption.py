"""Resumption of the whole run after all its processes have ended.

Reads   RunResumed
Writes  the loss of every process, times for them to come back, the settings that may be changed
Emits   the decisions that follow from the loss of all processes

The log shows the progress of the run. Everything in memory is lost: weights of relays, tokens that
had not reached the store. No prompt and no batch is blamed for these ends. Then the trainer
continues from its newest checkpoint and publishes again, and lost work resumes where a relay or a
checkpoint has its version; else it starts over.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from laminar.core.context import Context
from laminar.core.members import membership, pausing
from laminar.core.registry import handles
from laminar.core.state import keys
from laminar.core.state.indexes import end_actor, indexes_of
from laminar.core.state.keys import TimerKind
from laminar.core.state.members import ActorState
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.transitions import move_run
from laminar.core.steps import batching
from laminar.core.validation import is_count
from laminar.core.versions import broadcast, publishing
from laminar.events import events as ev
from laminar.events.base import Settings
from laminar.names.roles import ACTOR_ROLES, Role

REASON = "all processes of the run had ended"
CHANGEABLE = ("total_steps", "test_freq", "save_freq")
"""Settings that may differ after a resume. The number of replicas may change, too."""
_STEPS_DONE = (Phase.EXPORTING, Phase.FINAL_EVALUATION)


def is_run_over(state: State) -> bool:
    """Return whether the run has ended, and was neither stopped early by the user nor paused."""
    return state.run.phase == Phase.ENDED and not _was_stopped(state)


def _was_stopped(state: State) -> bool:
    """Return whether the user stopped the run, or has asked for it to end and it is about to."""
    drains = state.run.draining and not (state.run.failed or state.run.drain_failure)
    return state.run.stopped or (drains and not batching.are_steps_done(state))


def make_resume_event(
    state: State, settings: Settings, living: Collection[tuple[str, int]], *, asked: bool
) -> ev.RunResumed | None:
    """Make RunResumed, if no logged process is left, or if the user asked for it.

    `living`: name and pid of the running processes; `settings`: the present ones."""
    known = [a for a in state.members.actors.values() if a.alive]
    gone = known and not any((a.name, a.pid) in living for a in known)
    if not (gone or asked) or not state.settings.keeps_checkpoints:
        return None
    changed = {name: getattr(settings, name) for name in CHANGEABLE}
    return ev.RunResumed(asked=asked, **changed)


def _has_valid_settings(state: State, event: ev.RunResumed) -> bool:
    return all(is_count(getattr(event, name)) for name in CHANGEABLE) and event.save_freq > 0


@handles(ev.RunResumed, valid=_has_valid_settings)
def on_run_resumed(ctx: Context, event: ev.RunResumed) -> None:
    """Declare every process lost, with the time of a start to come back."""
    state = ctx.state
    over = is_run_over(state) if event.asked else state.run.phase == Phase.ENDED
    if not state.settings.keeps_checkpoints or over:
        return ctx.ignore("not-resumable")
    changed = {name: getattr(event, name) for name in CHANGEABLE}
    more_steps = event.total_steps != state.settings.total_steps
    state.settings = msgspec.structs.replace(state.settings, **changed)
    had_left = state.run.phase in (Phase.STOPPING, Phase.ENDED)  # and their work is still recorded
    lost = [actor for actor in state.members.actors.values() if actor.alive or had_left]
    if state.run.pausing or (event.asked and _was_stopped(state)):
        pausing.end_pause(ctx)
        state.run.draining = state.run.stopped = False
        state.run.failed = None
        state.signals.nonfinite_in_row = 0
        if state.run.phase not in (Phase.STARTING, Phase.RUNNING):
            _train_on(ctx)
    elif more_steps and state.run.phase in _STEPS_DONE and not batching.are_steps_done(state):
        _train_on(ctx)
    for name in _in_order(state, lost):
        _lose_actor(ctx, name)
    _set_rejoin_timers(ctx)
    ctx.touch_all()


def _train_on(ctx: Context) -> None:
    """Return the run to training; an existing export becomes an ordinary version."""
    move_run(ctx.state, "resume" if ctx.state.versions.newest >= 0 else "restart")
    publishing.forget_export(ctx)


def _in_order(state: State, lost: list[ActorState]) -> list[str]:
    """Sort lost actors by role, nodes last, since they take their processes with them.

    In chain order no relay is given another as its successor."""
    place = {name: number for number, name in enumerate(state.members.relay_chain)}
    lost.sort(key=lambda a: (-ACTOR_ROLES.index(a.role), place.get(a.name, -1)))
    return [actor.name for actor in lost]


def _lose_actor(ctx: Context, name: str) -> None:
    actor = ctx.state.members.actors[name]
    if actor.role != Role.NODE:
        return membership.actor_lost(ctx, name, REASON, blame=False)
    end_actor(ctx.state, name)
    actor.ready = False
    for key in list(indexes_of(ctx.state).commands.get(name, ())):
        ctx.end_command(key)


def _set_rejoin_timers(ctx: Context) -> None:
    """Give all actors the time of a start, also those awaited when the run was cut off.

    Lost work waits as long for its version, where a checkpoint has it."""
    state, start_ms = ctx.state, ctx.state.settings.start_timeout_ms
    if state.run.phase == Phase.STARTING or keys.START in state.orders.timers:
        ctx.set_timer(keys.START, start_ms)
    for actor in state.members.actors.values():
        if actor.role != Role.NODE and broadcast.is_needed(state, actor.role):
            ctx.set_timer(keys.rejoin_timer(actor.name), start_ms)
        else:
            ctx.clear_timer(keys.rejoin_timer(actor.name))
    for name in list(state.orders.timers):
        if keys.parse_timer(name).kind == TimerKind.RESUME:
            ctx.set_timer(name, start_ms + state.settings.resume_timeout_ms)
