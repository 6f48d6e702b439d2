"""Evaluation on held-out prompts, all on one version, without stopping the rollouts.

Reads   weight versions as they are published and loaded; settings
Writes  state.evaluations.running, state.evaluations.due, state.evaluations.results
Emits   GenerateTrajectory, PinVersion

A due evaluation binds to the version that the next replica loads and pins it at the relays until it
is done, so that a lost replica's samples can run again on the same weights. One version at a time;
a later due one waits, or moves to the next version published. The last one runs on the export.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from laminar.core.context import Context
from laminar.core.scheduling import groups
from laminar.core.scheduling.admission import has_room, is_serving
from laminar.core.scheduling.dispatch import create_group
from laminar.core.state import evaluation_scores
from laminar.core.state.evaluation_scores import EvaluationResult
from laminar.core.state.evaluations import Evaluation
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase
from laminar.core.state.work import Group
from laminar.core.versions import load_sources, pinning
from laminar.events import events as ev
from laminar.events.reasons import DropReason
from laminar.names import ids
from laminar.names.ids import Purpose


def schedule_evaluation(ctx: Context, version: int, step: int, previous_step: int) -> None:
    """Decide whether this version (or the next one) is to be evaluated.

    `previous_step` is that of the version published before (-1: none). An evaluation due at a step
    in between, whose publish was skipped, moves to this version."""
    state, settings = ctx.state, ctx.state.settings
    if not state.data.num_eval:
        return
    first = version == state.data.first_version and settings.val_before_train
    freq = settings.test_freq
    regular = freq > 0 and step // freq > max(previous_step, state.data.first_step) // freq
    last_step = bool(settings.total_steps) and step >= settings.total_steps
    if version == state.versions.export or first or (regular and not last_step):
        state.evaluations.due = version


def _start_if_due(ctx: Context, replica: Replica) -> None:
    """Bind a due evaluation to the version of a serving replica that has loaded it."""
    state = ctx.state
    due = state.evaluations.due
    if state.evaluations.running is not None or due < 0 or replica.version < due:
        return
    if state.settings.in_flight and not has_room(state, replica, 1):
        return  # without an evaluation sample the replica would load newer weights
    total = state.data.num_eval * state.settings.eval_answers
    state.evaluations.running = Evaluation(
        index=state.evaluations.next_index,
        version=replica.version,
        step=replica.step,
        final=replica.version == state.versions.export,
        queue=list(range(total)),
        total=total,
    )
    state.evaluations.next_index += 1
    state.evaluations.due = -1
    _pin_everywhere(ctx)


def _may_evaluate(state: State) -> bool:
    """Return whether evaluations may begin; when a run ends, its ledger is being closed."""
    run = state.run
    return not run.draining and run.phase not in (Phase.ENDING, Phase.STOPPING, Phase.ENDED)


def is_evaluation_waiting(state: State) -> bool:
    """Return whether an evaluation is due, or has samples without a replica."""
    running = state.evaluations.running
    return state.evaluations.due >= 0 or (running is not None and bool(running.queue))


def version_wanted(ctx: Context, replica: Replica) -> int:
    """Return the version that an empty replica should load for an evaluation; -1: none.

    A due one needs one replica to pull it; a running one only if no live replica has its
    version."""
    state = ctx.state
    evaluation = state.evaluations.running
    if not _may_evaluate(state) or not is_evaluation_waiting(state):
        return -1
    if evaluation is None:
        due = state.evaluations.due
        one_pulls = bool(indexes_of(state).replicas.filter_kinds(lambda kind: kind.loading))
        return -1 if one_pulls or state.members.newest_for(replica) < due else due
    if not evaluation.queue:
        return -1
    helped = _is_helped(state, evaluation)
    if helped and not (evaluation.final and state.run.phase == Phase.FINAL_EVALUATION):
        return -1
    if not helped and _is_gone(state, replica, evaluation.version):
        _move_on(ctx)
        return version_wanted(ctx, replica)
    return evaluation.version


def _is_helped(state: State, evaluation: Evaluation) -> bool:
    """Return whether a live replica has the version of the evaluation."""
    return bool(
        indexes_of(state).replicas.filter_kinds(lambda kind: kind.version == evaluation.version)
    )


def find_starting_kinds(state: State) -> list[Kind]:
    """Return the kinds of replicas that could begin the due evaluation."""
    due = state.evaluations.due
    if state.evaluations.running is not None or due < 0 or not _may_evaluate(state):
        return []
    return indexes_of(state).replicas.filter_kinds(
        lambda kind: kind.serving and kind.version >= due
    )


def may_help(state: State) -> Collection[Kind]:
    """Return the kinds of replicas of which each with room takes samples of the evaluation."""
    evaluation = state.evaluations.running
    if evaluation is None or not evaluation.queue or not _may_evaluate(state):
        return []
    return indexes_of(state).replicas.find_able_kinds(evaluation.version)


def may_want(state: State) -> bool:
    """Return whether an empty replica may be ordered to load a version for an evaluation."""
    if not _may_evaluate(state) or not is_evaluation_waiting(state):
        return False
    evaluation, index = state.evaluations.running, indexes_of(state).replicas
    if evaluation is None:
        behind = index.filter_kinds(
            lambda kind: kind.behind or kind.version >= state.evaluations.due
        )
        return bool(behind) and not index.filter_kinds(lambda kind: kind.loading)
    if not evaluation.queue:
        return False
    final = evaluation.final and state.run.phase == Phase.FINAL_EVALUATION
    return final or not _is_helped(state, evaluation)


def _is_in_reach(state: State, version: int) -> bool:
    """Return whether a live replica can load the version from its relay, or from a checkpoint."""
    if state.versions.has_checkpoint(version):
        return bool(indexes_of(state).replicas.kinds)
    relays = indexes_of(state).held.get(version, {})
    return any(
        map(
            state.members.is_actor_alive,
            chain.from_iterable(map(indexes_of(state).served_by, relays)),
        )
    )


def _is_gone(state: State, replica: Replica, version: int) -> bool:
    """Return whether no replica can load the version; the newest comes to every machine."""
    if version == state.versions.newest or _is_in_reach(state, version):
        return False
    return load_sources.choose_source(state, replica, version).source is None


def _move_on(ctx: Context) -> None:
    """Evaluate the newest version instead of one that no replica can load any more.

    The version was evicted before it was pinned, or was lost with a machine. The newest comes to
    every machine."""
    state = ctx.state
    state.evaluations.running, state.evaluations.due = None, state.versions.newest
    for group in list(state.work.groups.values()):
        if group.purpose == Purpose.EVAL and group.status == GroupStatus.OPEN:
            groups.drop_group(ctx, group, DropReason.VERSION_MISSING)
    _pin_everywhere(ctx)
    ctx.touch_all()


def plan_unserved(ctx: Context) -> None:
    """Move an in-flight evaluation to the newest version if no replica can serve its own.

    In flight, replicas are busy with newer weights, and none may be empty to load the older
    version."""
    state, evaluation = ctx.state, ctx.state.evaluations.running
    if not state.settings.in_flight or evaluation is None or not evaluation.queue:
        return
    if evaluation.version == state.versions.newest or not _may_evaluate(state):
        return
    index = indexes_of(state).replicas
    none_is_empty = next(index.iter_empty(index.kinds), None) is None
    busy = none_is_empty and any(kind.serving for kind in index.kinds)
    loads = evaluation.version in indexes_of(state).fetched
    if busy and not loads and not _is_helped(state, evaluation):
        _move_on(ctx)


def plan_evaluation(ctx: Context, replica: Replica) -> None:
    """Place evaluation samples first on a replica that serves their version."""
    state = ctx.state
    if not is_evaluation_waiting(state):
        return  # called for every replica after every change: mostly none waits
    if not is_serving(state, replica) or not _may_evaluate(state):
        return
    _start_if_due(ctx, replica)
    evaluation = state.evaluations.running
    if evaluation is None:
        return
    while (
        evaluation.queue and replica.version == evaluation.version and has_room(state, replica, 1)
    ):
        position = evaluation.queue.pop(0)
        attempt = evaluation.attempts.get(position, 0) + 1
        evaluation.attempts[position] = attempt
        group_id = ids.eval_group(evaluation.index, position)
        if attempt > 1:  # the store has a row of that name that ended as dropped
            group_id = ids.GroupId(f"{group_id}-{attempt}")
        row, sample = divmod(position, state.settings.eval_answers)
        create_group(ctx, replica, group_id, row, Purpose.EVAL, -1, 1, attempt, sample)


def group_evaluated(ctx: Context, group: Group, event: ev.TrajectoryRewarded) -> None:
    """Record a scored evaluation sample."""
    evaluation = _get_running_evaluation(ctx, group)
    evaluation.correct += event.correct
    evaluation_scores.count_sample(evaluation.counts, group.row_index, event)
    _one_done(ctx, evaluation)


def group_lost(ctx: Context, group: Group) -> None:
    """Queue a lost evaluation sample to run again, from its prompt, on the same version."""
    position = group.row_index * ctx.state.settings.eval_answers + group.sample
    _get_running_evaluation(ctx, group).queue.append(position)
    ctx.touch_all()


def group_given_up(ctx: Context, group: Group) -> None:
    """Count an evaluation sample that was lost too often as missing."""
    evaluation = _get_running_evaluation(ctx, group)
    evaluation.counts.missing += 1
    _one_done(ctx, evaluation)


def _get_running_evaluation(ctx: Context, group: Group) -> Evaluation:
    evaluation = ctx.state.evaluations.running
    assert evaluation is not None, group
    return evaluation


def _one_done(ctx: Context, evaluation: Evaluation) -> None:
    evaluation.done += 1
    if evaluation.done == evaluation.total:
        _finish_evaluation(ctx, evaluation)


def _finish_evaluation(ctx: Context, evaluation: Evaluation) -> None:
    state = ctx.state
    state.evaluations.results.append(
        EvaluationResult(
            index=evaluation.index,
            version=evaluation.version,
            step=evaluation.step,
            final=evaluation.final,
            total=evaluation.total,
            correct=evaluation.correct,
            figures=evaluation_scores.compute_statistics(
                evaluation.counts, state.settings.eval_answers
            ),
        )
    )
    state.evaluations.running = None
    _pin_everywhere(ctx)
    ctx.touch_all()


def _pin_everywhere(ctx: Context) -> None:
    """Pin the version at every relay: lost samples may run again on any machine."""
    for name in ctx.state.members.relays:
        pinning.send_pin(ctx, name)
