"""The run as a whole: starting, running, exporting, the final evaluation, ending, stopping.

Reads   readiness of actors, completed steps, DrainRequested, ModelExported
Writes  state.run; state.versions.export
Emits   PublishWeights (version 0), ExportModel; SaveCheckpoint and StopActor through pausing.py

Each phase ends by an event that has an owner and a deadline. An unrecoverable failure ends the run
with a reason and a non-zero exit code, and the ledger still closes: leftovers are dropped as
DropReason.RUN_ENDED.
"""

from __future__ import annotations

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.failing import drain_run, fail_run
from laminar.core.members import pausing
from laminar.core.registry import handles
from laminar.core.scheduling import groups, sessions
from laminar.core.scheduling.admission import groups_wanted
from laminar.core.state import keys
from laminar.core.state.failures import Failure, FailureKind
from laminar.core.state.indexes import live_actor, master_relay, working_trainer
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase
from laminar.core.state.transitions import move_run
from laminar.core.steps import batching
from laminar.core.validation import accept_any, is_count
from laminar.core.versions import broadcast, publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import DropReason, EndKind
from laminar.names.roles import Role

DATA = "data"  #: the subject of failures of the prompts
EXPORT_TIMEOUT_MS = 1_800_000
"""The timeout for writing and reading back a large model on a shared file system."""


def plan_phase(ctx: Context) -> bool:
    """Move the run to its next phase if its condition holds; return whether it did."""
    if ctx.state.run.pausing:
        return pausing.plan_pause(ctx)
    plan = _PLANS.get(ctx.state.run.phase)
    return plan is not None and plan(ctx)


def end_failed_run(ctx: Context) -> None:
    """End the run if the event has shown that it failed, or stop it if it can be resumed.

    A pausing run that loses its processes pauses at once instead."""
    if ctx.failure is None:
        return
    failed, ctx.failure = ctx.failure, None
    if ctx.state.run.pausing and failed.kind.record.loss:
        return pausing.stop_run(ctx)
    ctx.state.run.failed = failed
    if failed.kind.record.resumable and pausing.stays_open(ctx.state, drained=False):
        return pausing.stop_run(ctx)
    _start_ending(ctx)


def end_flat_data(ctx: Context) -> None:
    """Drain the run after too many groups without variance in a row."""
    state, batches = ctx.state, ctx.state.settings.filter_batches
    limit = batches * state.settings.groups_per_step
    if (
        0 < limit <= state.signals.flat_groups_in_row
        and state.run.phase == Phase.RUNNING
        and not state.run.draining
    ):
        _drain_flat(ctx, f"algorithm.filter_groups.max_num_gen_batches = {batches} batches")


def _drain_flat(ctx: Context, limit: str) -> None:
    state, signals = ctx.state, ctx.state.signals
    what = (
        f"no two responses differ in any of the last {signals.flat_groups_in_row} groups, "
        f"{signals.flat_correct_in_row} of them all correct, by algorithm.filter_groups.metric = "
        f"{state.settings.filter_metric} ({limit}): give prompts that are neither too easy nor too "
        "hard, or set algorithm.filter_groups.enable = false"
    )
    drain_run(ctx, FailureKind.NO_VARIANCE, DATA, what)


def _in_time(state: State, event: ev.DrainRequested) -> bool:
    return is_count(event.response_timeout_ms)


@handles(ev.DrainRequested, valid=_in_time)
def on_drain_requested(ctx: Context, event: ev.DrainRequested) -> None:
    """Drain the run on Ctrl-C: no new work; complete the batch in training, export the model.

    At once, or before anything was trained, there is nothing to complete. A run that can be resumed
    then stays as it is. So does a run that is to pause (pausing.py); any other ends."""
    state = ctx.state
    if event.pause and state.settings.keeps_checkpoints:
        if not pausing.begin_pause(ctx, event.response_timeout_ms):
            ctx.ignore("run-ending")
        return
    repeat = state.run.draining and not state.run.pausing
    pausing.end_pause(ctx)
    state.run.draining = True
    if event.at_once and pausing.stays_open(state, drained=repeat):
        state.run.failed = Failure(FailureKind.STOPPED, event.reason, ctx.stamped.seq)
        pausing.stop_run(ctx)
    elif event.at_once or (state.run.phase == Phase.STARTING and not repeat):
        early = state.run.phase == Phase.STARTING
        kind = FailureKind.STOPPED_EARLY if early else FailureKind.STOPPED
        if not fail_run(ctx, kind, event.reason) and repeat:
            ctx.ignore("run-ending")
    elif repeat:
        ctx.ignore("repeat")


@handles(ev.ModelExported, valid=accept_any)
def on_model_exported(ctx: Context, event: ev.ModelExported) -> None:
    ordered = ctx.end_command(keys.EXPORT) if event.version == ctx.state.versions.export else None
    if ordered is None:
        return ctx.ignore("not-exporting")
    ctx.state.versions.export_path = event.path
    publishing.expect_version(ctx, event.version, ordered.cause)


@handles(ev.TrainingWarning, valid=accept_any)
def on_training_warning(ctx: Context, event: ev.TrainingWarning) -> None:
    """Remember a warning, so that it is given once; nothing depends on it."""
    ctx.state.signals.warnings[event.kind] = event.text


def find_missing_roles(state: State) -> list[Role]:
    """Return the roles that the start still lacks; empty: the first weights, or nothing."""
    has_trainer, has_head = live_actor(state, Role.TRAINER), master_relay(state)
    present = {
        Role.STORE: _is_role_ready(state, Role.STORE),
        Role.RELAY: has_head or (state.members.relays and not has_trainer),
        Role.TRAINER: _is_role_ready(state, Role.TRAINER),
        Role.ROLLOUT: state.members.replicas,
        Role.AGENT: not state.settings.has_environment or sessions.list_hosts(state),
    }
    return [role for role in present if not present[role]]


def handle_start_timeout(ctx: Context) -> None:
    """End the run, naming the roles that the start is missing."""
    missing = find_missing_roles(ctx.state)
    waited = ", ".join(missing) or "the first weights to be published"
    fail_run(ctx, FailureKind.NOT_STARTED, waited, f"{ctx.state.settings.start_timeout_ms} ms")


def _is_role_ready(state: State, role: Role) -> bool:
    actor = live_actor(state, role)
    return actor is not None and actor.ready


def _plan_starting(ctx: Context) -> bool:
    state = ctx.state
    if state.versions.newest >= 0:
        if broadcast.can_start(state):
            ctx.clear_timer(keys.START)
        move_run(state, "publish")
        ctx.touch_all()
        return True
    trainer = working_trainer(state)
    all_ready = _is_role_ready(state, Role.STORE) and master_relay(state) is not None
    if not all_ready or trainer is None or keys.PUBLISH in state.orders.commands:
        return False
    version, step = state.data.first_version, state.data.first_step
    state.versions.next = version + 1
    ctx.issue_command(
        cmd.PublishWeights(to=trainer.name, version=version, step=step), key=keys.PUBLISH
    )
    return True


def _plan_running(ctx: Context) -> bool:
    """Finish when the steps are done, the data has ended, or the user asked to stop."""
    state = ctx.state
    if state.steps.batch is not None:
        return False
    if state.run.draining:
        _drop_leftovers(ctx)
    elif not batching.are_steps_done(state) and not _end_data(ctx):
        return False
    elif state.steps.completed == state.data.first_step and state.signals.flat_groups_in_row:
        _drain_flat(ctx, "the data has ended, and nothing was trained")
    move_run(state, "finish")
    ctx.touch_all()
    return True


def _end_data(ctx: Context) -> bool:
    """Drop the rest when nothing is left to generate and too little for a batch."""
    state = ctx.state
    if groups_wanted(state) > 0 or state.settings.total_steps:
        return False
    if sum(state.work.deadlines.values()) > len(state.work.ready):
        return False  # some groups are unfinished
    if state.work.ready and batching.batch_size(state):
        return False
    for group_id in list(state.work.ready):
        groups.drop_group(ctx, state.work.groups[group_id], DropReason.END_OF_DATA)
    return True


def _plan_exporting(ctx: Context) -> bool:
    state, versions = ctx.state, ctx.state.versions
    if state.steps.batch is not None or _ensure_publishing(ctx):
        return False
    if versions.export < 0:
        trainer = working_trainer(state)
        if trainer is None or versions.newest < publishing.last_made(state):
            return False  # the trainer returns, or the last step's weights are on their way
        versions.export = versions.next
        versions.next += 1
        ctx.issue_command(
            cmd.ExportModel(to=trainer.name, version=versions.export, step=versions.newest_step),
            key=keys.EXPORT,
            timeout_ms=EXPORT_TIMEOUT_MS,
        )
        return True
    if versions.newest < versions.export:
        return False
    if state.data.num_eval and not state.run.draining:
        move_run(state, "evaluate")
        ctx.touch_all()
    else:
        _start_ending(ctx)
    return True


def _ensure_publishing(ctx: Context) -> bool:
    """Return whether the trainer is about to publish weights; order a republish if one is due."""
    state = ctx.state
    if keys.PUBLISH in state.orders.commands or keys.EXPORT in state.orders.commands:
        return True
    if not publishing.is_republish_due(state):
        return False
    publishing.order_republish(ctx)
    return True


def _final_evaluation(ctx: Context) -> bool:
    state = ctx.state
    if state.versions.export < 0:
        move_run(state, "repeat export")
        return True
    finished = any(
        r.final and r.version == state.versions.export for r in state.evaluations.results
    )
    if not finished and not state.run.draining:
        _ensure_publishing(ctx)  # the trainer's machine may have lost its copy
        return False
    _start_ending(ctx)
    return True


def _start_ending(ctx: Context) -> None:
    state = ctx.state
    if state.run.drain_failure:
        state.run.failed = state.run.drain_failure
    pausing.end_pause(ctx)
    move_run(state, "end")
    ctx.clear_timer(keys.BATCH_TIMEOUT)
    ctx.clear_timer(keys.START)
    if state.steps.batch is not None:  # only in a failed run: a lost trainer's batch is not trained
        ctx.end_command(keys.TRAIN)
        for group_id in state.steps.batch.groups:
            groups.end_group(
                ctx, state.work.groups[group_id], EndKind.DROPPED, DropReason.RUN_ENDED, -1
            )
        state.steps.batch = None
    _drop_leftovers(ctx)
    state.evaluations.running, state.evaluations.due = None, -1
    plan_phase(ctx)


def _drop_leftovers(ctx: Context) -> None:
    for group in list(ctx.state.work.groups.values()):
        if group.status in (GroupStatus.OPEN, GroupStatus.READY):
            groups.drop_group(ctx, group, DropReason.RUN_ENDED)
    ctx.state.evaluations.running = None


def _plan_ending(ctx: Context) -> bool:
    """Wait until the store has written every end; without a store, the ledger stays open.

    A store that is being restarted is awaited."""
    state = ctx.state
    writing = ctx.endings or any(
        isinstance(found.command, cmd.EndTrajectories)
        and keys.deadline_timer(key) in state.orders.timers
        for key, found in state.orders.commands.items()
    )
    can_write = writing and live_actor(state, Role.STORE) is not None
    if state.work.groups and (can_write or store_orders.is_store_awaited(state)):
        return False
    move_run(state, "stop")
    pausing.stop_all_actors(ctx)
    return True


def _plan_stopping(ctx: Context) -> bool:
    if any(isinstance(o.command, cmd.StopActor) for o in ctx.state.orders.commands.values()):
        return False
    move_run(ctx.state, "stopped")
    if ctx.state.run.stopped:
        return True
    for key in list(ctx.state.orders.commands):
        ctx.end_command(key)
    for name in list(ctx.state.orders.timers):
        ctx.clear_timer(name)
    return True


_PLANS = {
    Phase.STARTING: _plan_starting,
    Phase.RUNNING: _plan_running,
    Phase.EXPORTING: _plan_exporting,
    Phase.FINAL_EVALUATION: _final_evaluation,
    Phase.ENDING: _plan_ending,
    Phase.STOPPING: _plan_stopping,
}
