"""Evaluation: held-out prompts, all on one version, without stopping the rollouts.

Reads   weight versions as they are published and loaded; settings
Writes  state.evaluation, state.evaluation_due, state.evaluations
Emits   GenerateTrajectory, PinVersion

A due evaluation binds to the version that the next replica loads and pins it at the relays until it
is done, so that a lost replica's share can run again on the same weights. One version at a time; a
later due one waits, or moves on to the next version published. The last one runs on the export.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from laminar import ids
from laminar.core import held_out, siblings
from laminar.core.admission import room, serving
from laminar.core.dispatch import open_group
from laminar.core.held_out import EvaluationResult, HeldOut
from laminar.core.roster import Kind
from laminar.core.state import (
    ENDED,
    ENDING,
    FINAL_EVALUATION,
    STOPPING,
    Evaluation,
    Group,
    Replica,
    State,
)
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev


def version_published(turn: Turn, version: int, step: int, previous_step: int) -> None:
    """Decide whether this version (or the next one) is to be evaluated.

    `previous_step` is that of the version published before (-1: none). What was due at a step in
    between, whose publish was skipped, moves to this version.
    """
    state, settings = turn.state, turn.state.settings
    if not state.num_eval:
        return
    first = version == 0 and settings.val_before_train
    freq = settings.test_freq
    regular = freq > 0 and step // freq > max(previous_step, 0) // freq
    last_step = bool(settings.total_steps) and step >= settings.total_steps
    if version == state.exported or first or (regular and not last_step):
        state.evaluation_due = version


def _begin_if_due(turn: Turn, replica: Replica) -> None:
    """A due evaluation binds to the version that a serving replica has loaded for it."""
    state = turn.state
    due = state.evaluation_due
    if state.evaluation is not None or due < 0 or replica.version < due:
        return
    total = state.num_eval * _answers(state)
    state.evaluation = Evaluation(
        index=state.next_evaluation,
        version=replica.version,
        step=replica.step,
        final=replica.version == state.exported,
        queue=list(range(total)),
        total=total,
        held_out=HeldOut() if state.settings.eval_answers else None,
    )
    state.next_evaluation += 1
    state.evaluation_due = -1
    _pin(turn, replica.version)


def _answers(state: State) -> int:
    """To each held-out prompt; each is a group of its own."""
    return max(state.settings.eval_answers, 1)


def _may_evaluate(state: State) -> bool:
    """A run that ends begins nothing: its books are being closed."""
    return not state.draining and state.phase not in (ENDING, STOPPING, ENDED)


def waits(state: State) -> bool:
    """One is due, or has answers for which no replica was found yet."""
    running = state.evaluation
    return state.evaluation_due >= 0 or (running is not None and bool(running.queue))


def version_wanted(turn: Turn, replica: Replica) -> int:
    """The version that an empty replica should load for an evaluation; -1: none that it can.

    A due one needs somebody to pull; a running one only if its work has no live replica left.
    """
    state = turn.state
    evaluation = state.evaluation
    if not _may_evaluate(state) or not waits(state):
        return -1
    if evaluation is None:
        due = state.evaluation_due
        somebody_pulls = bool(state.lookup.roster.of(lambda kind: kind.loading))
        return -1 if somebody_pulls or state.newest_for(replica) < due else due
    if not evaluation.queue:
        return -1
    helped = _is_helped(state, evaluation)
    if helped and not (evaluation.final and state.phase == FINAL_EVALUATION):
        return -1
    if not helped and not _in_reach(state, evaluation.version):
        _move_on(turn)
        return version_wanted(turn, replica)
    return evaluation.version if state.in_reach(replica, evaluation.version) else -1


def _is_helped(state: State, evaluation: Evaluation) -> bool:
    """Some live replica has its version."""
    return bool(state.lookup.roster.of(lambda kind: kind.version == evaluation.version))


def may_begin(state: State) -> list[Kind]:
    """Kinds of replicas of which each would begin the one that is due."""
    due = state.evaluation_due
    if state.evaluation is not None or due < 0 or not _may_evaluate(state):
        return []
    return state.lookup.roster.of(lambda kind: kind.serving and kind.version >= due)


def may_help(state: State) -> Collection[Kind]:
    """Kinds of replicas of which each that has room takes work of the one that runs."""
    evaluation = state.evaluation
    if evaluation is None or not evaluation.queue or not _may_evaluate(state):
        return []
    return state.lookup.roster.able(evaluation.version)


def may_want(state: State) -> bool:
    """Whether an empty replica may be told to load a version for an evaluation."""
    if not _may_evaluate(state) or not waits(state):
        return False
    evaluation, roster = state.evaluation, state.lookup.roster
    if evaluation is None:
        behind = roster.of(lambda kind: kind.behind or kind.version >= state.evaluation_due)
        return bool(behind) and not roster.of(lambda kind: kind.loading)
    if not evaluation.queue:
        return False
    final = evaluation.final and state.phase == FINAL_EVALUATION
    return final or not _is_helped(state, evaluation)


def _in_reach(state: State, version: int) -> bool:
    """Some live replica can load it."""
    if version in state.saved:
        return bool(state.lookup.roster.kinds)
    relays = state.lookup.held.get(version, {})
    return any(map(state.actor_alive, chain.from_iterable(map(state.lookup.served_by, relays))))


def _move_on(turn: Turn) -> None:
    """It was evicted before it was pinned, or went with a machine, and there is no checkpoint of
    it: evaluate the newest instead."""
    state = turn.state
    state.evaluation, state.evaluation_due = None, state.newest
    for group in list(state.groups.values()):
        if group.purpose == ids.EVAL and group.status == "open":
            siblings.drop_group(turn, group, "version-gone")
    _pin(turn, -1)
    turn.touch_all()


def plan_evaluation(turn: Turn, replica: Replica) -> None:
    """Evaluation work goes first on a replica that serves its version."""
    state = turn.state
    if not waits(state):
        return  # asked of every replica after every change: mostly there is none
    if not serving(state, replica) or not _may_evaluate(state):
        return
    _begin_if_due(turn, replica)
    evaluation = state.evaluation
    if evaluation is None:
        return
    while evaluation.queue and room(replica) > 0 and replica.version == evaluation.version:
        position = evaluation.queue.pop(0)
        attempt = evaluation.attempts.get(position, 0) + 1
        evaluation.attempts[position] = attempt
        group_id = ids.eval_group(evaluation.index, position)
        if attempt > 1:  # the store has a row of that name that ended as dropped
            group_id = ids.GroupId(f"{group_id}-{attempt}")
        row, sample = divmod(position, _answers(turn.state))
        open_group(turn, replica, group_id, row, ids.EVAL, -1, 1, attempt, sample)


def group_evaluated(turn: Turn, group: Group, event: ev.TrajectoryRewarded) -> None:
    """One held-out answer is scored."""
    evaluation = _running(turn, group)
    evaluation.correct += event.correct
    if evaluation.held_out is not None:
        held_out.count(evaluation.held_out, group.row_index, event)
    _one_done(turn, evaluation)


def group_lost(turn: Turn, group: Group) -> None:
    """A lost evaluation answer runs again, whole, on the same version."""
    position = group.row_index * _answers(turn.state) + group.sample
    _running(turn, group).queue.append(position)
    turn.touch_all()


def group_given_up(turn: Turn, group: Group) -> None:
    """It was lost too often: the evaluation ends without it."""
    evaluation = _running(turn, group)
    if evaluation.held_out is not None:
        evaluation.held_out.missing += 1
    _one_done(turn, evaluation)


def _running(turn: Turn, group: Group) -> Evaluation:
    evaluation = turn.state.evaluation
    assert evaluation is not None, group
    return evaluation


def _one_done(turn: Turn, evaluation: Evaluation) -> None:
    evaluation.done += 1
    if evaluation.done == evaluation.total:
        _finish(turn, evaluation)


def _finish(turn: Turn, evaluation: Evaluation) -> None:
    state, held = turn.state, evaluation.held_out
    state.evaluations.append(
        EvaluationResult(
            index=evaluation.index,
            version=evaluation.version,
            step=evaluation.step,
            final=evaluation.final,
            total=evaluation.total,
            correct=evaluation.correct,
            figures=held_out.figures(held, _answers(state)) if held is not None else None,
        )
    )
    state.evaluation = None
    _pin(turn, -1)
    turn.touch_all()


def _pin(turn: Turn, version: int) -> None:
    """At every relay: a lost share may be run again on any machine."""
    for name in turn.state.relays:
        turn.command(cmd.PinVersion(to=name, version=version))
