"""Step replay: a lost trainer returns, and repeats the steps that its checkpoint lacks.

Reads   TrainerReady, CheckpointLoaded, StepRepeated; losses of the trainer
Writes  state.steps, state.versions
Emits   LoadCheckpoint, RepeatStep, and TrainStep for the interrupted batch

The log decides which steps were trained, and a checkpoint counts only if the log has its step,
under its version, with the same trajectories: one that is ahead of the log is not loaded, and the
steps beyond are trained again. Later batches of the log are repeated in their order, not published,
and counted only once. Then the interrupted batch is ordered again, under a new number: the old one
may be published already.

A trainer with another file of the user's loss or estimator than the first one ends the run.
Without checkpoints the loss of the trainer ends the run, unless the run ends anyway.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.registry import handles
from laminar.core.state import keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import live_actor
from laminar.core.state.state import State
from laminar.core.state.steps import Batch, StepRecord
from laminar.core.steps import batching
from laminar.core.validation import accept_any
from laminar.core.versions import broadcast, publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import ids
from laminar.names.roles import Role

LOAD_TIMEOUT_MS = 1_800_000
"""The timeout for loading parameters and moments of a large model from a shared file system."""
DEATHS_MAX = 3
"""The trainers that a batch may end before the run ends, like DEATHS_MAX of recovery.py."""
NAMED_MAX = 8  #: the most groups of such a batch that are named


# --- loss and return of the trainer ---------------------------------------------------------------


def may_be_lost(state: State, name: str) -> bool:
    """Return whether this is a trainer that the run survives, for a while or to its end."""
    actor = state.members.actors.get(name)
    if actor is None or actor.role != Role.TRAINER:
        return False
    return broadcast.is_run_ending(state) or state.settings.keeps_checkpoints


def trainer_lost(ctx: Context, name: str, reason: str, *, blame: bool) -> None:
    """Give up the current work of a lost trainer.

    Weights that it has published may still arrive. Its commands are no longer outstanding after
    this. With `blame`, its batch may have ended it."""
    state = ctx.state
    if broadcast.is_run_ending(state):
        return  # the trainer is no longer needed
    state.steps.repeated = -1
    ctx.clear_timer(keys.WEIGHTS)
    ctx.clear_timer(keys.BATCH_TIMEOUT)
    if keys.EXPORT in state.orders.commands:  # the export is repeated under another number
        publishing.repeat_export(ctx)
    batch = state.steps.batch
    if blame and batch is not None and keys.TRAIN in state.orders.commands:
        batch.deaths += 1
        if batch.deaths >= DEATHS_MAX:
            deadly = _describe_fatal_batch(batch, name, reason)
            fail_run(ctx, FailureKind.BATCH_FATAL, name, deadly)


def _describe_fatal_batch(batch: Batch, name: str, reason: str) -> str:
    """Describe the batch, how it ended its trainer, and where to look."""
    step, more = batch.step_index + 1, len(batch.groups) - NAMED_MAX
    groups = ", ".join(batch.groups[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return (
        f"the batch of step {step} (groups {groups}) has ended {name} {DEATHS_MAX} times, at last: "
        f"{reason}; look at logs/latest/{name}.jsonl, and at `laminar log story` of these groups"
    )


@handles(ev.TrainerReady, valid=accept_any)
def on_trainer_ready(ctx: Context, event: ev.TrainerReady) -> None:
    """Tell a returning trainer, or the first one of a fork, which checkpoint to load.

    A trainer that is ready has the model of the configuration."""
    state, name = ctx.state, ctx.stamped.peer
    if not ctx.mark_ready():
        return
    begins, functions = state.versions.newest < 0, {f.setting: f.digest for f in event.functions}
    if begins:
        state.steps.function_digests = functions
    told = state.data.origin is not None if begins else may_be_lost(state, name)
    if live_actor(state, Role.TRAINER) is not state.members.actors[name] or not told:
        return
    other = find_other_function_reason(state.steps.function_digests, functions)
    if other and not broadcast.is_run_ending(state):
        fail_run(ctx, FailureKind.USER_MISTAKE, name, f"{name}: {other}")
        return
    confirmed = [c for c in event.checkpoints if _is_confirmed(state, c)]
    known, found = state.versions.checkpoint_paths, {c.version: c.path for c in confirmed}
    state.versions.replace_checkpoints(found)
    if found.keys() - known.keys():  # lost work of theirs can be loaded for now
        ctx.touch_all()
    newest = max(confirmed, key=lambda c: c.step, default=None)
    if newest is None and not _can_start_over(state):
        fail_run(ctx, FailureKind.NO_CHECKPOINT, name)
        return
    state.steps.repeated = newest.step if newest is not None else 0
    state.steps.trim_trained(state.versions.saved_steps)
    if newest is not None:
        ctx.issue_command(
            cmd.LoadCheckpoint(
                to=name,
                version=newest.version,
                step=newest.step,
                path=newest.path,
                kept=tuple(found),
            ),
            key=keys.LOAD,
            timeout_ms=LOAD_TIMEOUT_MS,
        )


def find_other_function_reason(then: dict[str, str], now: dict[str, str]) -> str | None:
    """Return which loss or estimator of the user has another file than then; None: none has.

    A run is trained with one file: with another, no earlier step could be repeated."""
    for setting, digest in now.items():
        if then.get(setting) != digest:
            return (
                f"{setting}: its file now has digest {digest}, but the run began with "
                f"{then.get(setting)}: restore that file, or fork the run to continue with this "
                "one (laminar fork)"
            )
    return None


def _can_start_over(state: State) -> bool:
    """Return whether every step can be repeated from the model of the configuration."""
    return state.data.origin is None and (
        not state.steps.trained or state.steps.trained[0].step_index == 0
    )


def _is_confirmed(state: State, checkpoint: ev.Checkpoint) -> bool:
    """Return whether the log has its step, under its version, made of the same trajectories."""
    return any(
        (t.step_index + 1, t.version, t.chain)
        == (checkpoint.step, checkpoint.version, checkpoint.digest)
        for t in state.steps.trained
    )


@handles(ev.CheckpointLoaded, valid=accept_any)
def on_checkpoint_loaded(ctx: Context, event: ev.CheckpointLoaded) -> None:
    outstanding = ctx.state.orders.commands.get(keys.LOAD)
    command = outstanding.command if outstanding is not None else None
    if not isinstance(command, cmd.LoadCheckpoint) or command.version != event.version:
        return ctx.ignore("not-loading")
    ctx.end_command(keys.LOAD)


@handles(ev.StepRepeated, valid=accept_any)
def on_step_repeated(ctx: Context, event: ev.StepRepeated) -> None:
    """Record a repeated step; training continues from its weights, even if they differ.

    Rounding may have made other weights of it."""
    state = ctx.state
    if keys.REPEAT not in state.orders.commands or event.step_index != state.steps.repeated:
        return ctx.ignore("not-repeating")
    ctx.end_command(keys.REPEAT)
    trained = _get_trained_step(state, state.steps.repeated)
    state.steps.repeated += 1
    if trained.digest:
        trained.digest = event.digest


def _get_trained_step(state: State, step_index: int) -> StepRecord:
    return state.steps.trained[step_index - state.steps.trained[0].step_index]


# --- orders to the trainer ------------------------------------------------------------------------


def plan_step_repeat(ctx: Context) -> bool:
    """Order a returning trainer to repeat steps of the log; return whether the state changed."""
    state, orders = ctx.state, ctx.state.orders
    if state.steps.repeated < 0 or keys.LOAD in orders.commands or keys.REPEAT in orders.commands:
        return False
    if broadcast.is_run_ending(state):
        return False
    trainer = live_actor(state, Role.TRAINER)
    assert trainer is not None, "what a lost trainer has done again is forgotten with it"
    if state.steps.repeated < state.steps.completed:
        trained = _get_trained_step(state, state.steps.repeated)
        ctx.issue_command(
            cmd.RepeatStep(
                to=trainer.name,
                step_index=trained.step_index,
                version=trained.version,
                trajectories=tuple(map(ids.TrajectoryId, trained.trajectory_ids.split(" "))),
                digest=trained.digest,
            ),
            key=keys.REPEAT,
            timeout_ms=batching.TRAIN_TIMEOUT_MS,
        )
    else:
        _resume_training(ctx)
    return True


def _resume_training(ctx: Context) -> None:
    """Continue training: the trainer has all steps of the log."""
    state = ctx.state
    state.steps.repeated = -1
    if state.steps.batch is not None:
        state.steps.batch.version = state.versions.allocate_number(state.steps.batch.step_index + 1)
        batching.order_batch(ctx, state.steps.batch)
    elif state.versions.export < 0 and publishing.has_other_bytes(state):
        made = state.versions.allocate_number(state.steps.completed)
        state.versions.owe_version(made, state.steps.completed)
    else:
        state.versions.owed = -1
        publishing.owe_republish(ctx)
