"""Stopping a run that stays open, to be resumed: at once, or by a pause.

Reads   DrainRequested, through lifecycle.py; completed steps, checkpoints
Writes  state.run
Emits   SaveCheckpoint, StopActor

A pause completes and saves the step in training if there is one and the trainer works, so no step
is trained twice when the run resumes. Then responses are finished whose weights no checkpoint has,
since they could only start over, for as long as the request allows. An impossible step does not
delay a pause: its requester ends the processes soon.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of, working_trainer
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.transitions import move_run
from laminar.core.steps import batching
from laminar.core.versions import broadcast, publishing
from laminar.events import commands as cmd

RESUMABLE_PHASES = (Phase.RUNNING, Phase.EXPORTING, Phase.FINAL_EVALUATION)
"""Phases in which every resumable run can be stopped at once."""
STOP_TIMEOUT_MS = 20_000
"""The timeout of a stop, which flushes a few buffers; after this the node ends the process."""
SAVE_TIMEOUT_MS = 1_800_000
"""The timeout for saving a large model with its optimizer on a shared file system."""


def stays_open(state: State, *, drained: bool) -> bool:
    """Return whether the run can be resumed later if all its processes end now."""
    if not state.settings.keeps_checkpoints:
        return False
    if state.run.phase != Phase.ENDING:
        return state.run.phase in RESUMABLE_PHASES
    return drained and not (state.run.failed or batching.are_steps_done(state))


def stop_run(ctx: Context) -> None:
    """Order all processes to end; the ledger stays open. Without a failure the run is paused."""
    state = ctx.state
    end_pause(ctx)
    state.run.stopped = True
    move_run(state, "stop now")
    stop_all_actors(ctx)


def stop_all_actors(ctx: Context) -> None:
    """Order every process to end."""
    state = ctx.state
    reason = "the run is paused" if state.run.paused else state.run.failure or "the run is complete"
    for actor in state.members.actors.values():
        if actor.alive:
            ctx.issue_command(
                cmd.StopActor(to=actor.name, reason=reason, paused=state.run.paused),
                key=keys.stop_key(actor.name),
                timeout_ms=STOP_TIMEOUT_MS,
            )


def begin_pause(ctx: Context, response_timeout_ms: int) -> bool:
    """Stop giving out new work; return False if the run is already ending or pausing."""
    state = ctx.state
    if state.run.draining or broadcast.is_run_ending(state):
        return False
    state.run.draining = state.run.pausing = True
    if response_timeout_ms:
        ctx.set_timer(keys.PAUSE, response_timeout_ms)
    return True


def end_pause(ctx: Context) -> None:
    """Clear the pause once it took effect or was superseded."""
    ctx.state.run.pausing = False
    ctx.clear_timer(keys.PAUSE)


def plan_pause(ctx: Context) -> bool:
    """Pause as soon as the last step is saved, or cannot be; return whether the run has."""
    state, orders = ctx.state, ctx.state.orders
    trainer = working_trainer(state)
    if trainer is not None and (state.steps.batch is not None or keys.SAVE in orders.commands):
        return False
    version = _find_unsaved_version(state)
    if trainer is None or version < 0:
        if trainer is not None and keys.PAUSE in orders.timers and _would_lose_responses(state):
            return False
        stop_run(ctx)
        return True
    ctx.issue_command(
        cmd.SaveCheckpoint(to=trainer.name, version=version, step=state.steps.completed),
        key=keys.SAVE,
        timeout_ms=SAVE_TIMEOUT_MS,
    )
    return False


def _would_lose_responses(state: State) -> bool:
    """Return whether a replica samples with weights that will be unavailable later.

    The initial weights are published again as long as no step has made others."""
    if not state.steps.trained:
        return False
    return any(
        not state.versions.has_checkpoint(version)
        for version in indexes_of(state).replicas.list_busy_versions()
    )


def _find_unsaved_version(state: State) -> int:
    """Find the version of the last step if no checkpoint has it and the trainer does; else -1."""
    if not state.steps.trained or state.versions.export >= 0:
        return -1
    version = state.steps.trained[-1].version
    saved = state.steps.completed in state.versions.saved_steps
    return -1 if saved or publishing.last_made(state) != version else version
