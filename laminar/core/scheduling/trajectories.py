"""Trajectories: reports of replicas about their work.

Reads   TrajectoryStarted, TokenProgress, TrajectoryFinished, TrajectoryFailed, TrajectoryRewarded
Writes  state.work, replica.tokens_total
Emits   ScoreTrajectories, and through groups and recovery the consequences of an end
"""

from __future__ import annotations

from math import isfinite

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.scheduling import dispatch, evaluation, failure_rate, groups, recovery
from laminar.core.state.indexes import invalidate_gauges, invalidate_straggler, set_length
from laminar.core.state.migrations import RepackState
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.transitions import UNFINISHED, transition
from laminar.core.state.work import Trajectory
from laminar.core.validation import accept_any, is_count
from laminar.events import events as ev
from laminar.events.reasons import DropReason, FailureReason
from laminar.names.ids import Purpose, TrajectoryId

_EXPONENT = 0x7FF << 52  #: all ones in the float64 of an infinity or a NaN


def _started_counts(state: State, event: ev.TrajectoryStarted) -> bool:
    told = (event.tokens_resumed, event.prompt_tokens)
    return not state.settings.repack_policy or all(map(is_count, told))


@handles(ev.TrajectoryStarted, valid=_started_counts, planned=False)
def on_trajectory_started(ctx: Context, event: ev.TrajectoryStarted) -> None:
    trajectory = _generated_by(ctx, event.trajectory_id, event.placement)
    if trajectory is None or not transition(trajectory, "started"):
        return ctx.ignore("old-placement")
    progress = ctx.state.repack.progress.get(trajectory.id)
    if progress is not None:
        progress.prompt_tokens, progress.sampled = event.prompt_tokens, event.tokens_resumed
        if progress.source != ctx.stamped.peer:
            dispatch.end_move(ctx, trajectory)
        invalidate_straggler(ctx.state, trajectory)


def _has_valid_gauges(state: State, event: ev.TokenProgress) -> bool:
    """Return whether the gauges are possible; an older log may have any values without repack."""
    told = (event.kv_used_tokens, event.kv_capacity_tokens, event.waiting, event.max_batch)
    return not state.settings.repack_policy or all(
        map(is_count, (*told, event.tokens_total, *event.lengths.values()))
    )


@handles(ev.TokenProgress, valid=_has_valid_gauges, planned=False)
def on_token_progress(ctx: Context, event: ev.TokenProgress) -> None:
    """Record a gauge: the last value wins; more tokens than before is progress."""
    replica = ctx.state.members.replicas.get(ctx.stamped.peer)
    if replica is None:
        return ctx.ignore("not-ready")
    if event.tokens_total != replica.tokens_total:
        replica.tokens_total = event.tokens_total
        replica.progress_ns = ctx.stamped.time_ns
    if replica.repack is not None:
        _record_gauges(replica.repack, event)
        for trajectory_id, tokens in event.lengths.items():
            if trajectory_id in replica.running:
                ctx.state.repack.progress[trajectory_id].sampled = tokens
        invalidate_gauges(ctx.state, replica)


def _record_gauges(packing: RepackState, event: ev.TokenProgress) -> None:
    """Keep the gauges for repack; they trigger no planning."""
    packing.kv_capacity = event.kv_capacity_tokens or packing.kv_capacity
    packing.max_batch = event.max_batch or packing.max_batch
    packing.kv_used, packing.waiting = event.kv_used_tokens, event.waiting
    packing.known_command_id = event.as_of


def _token_count(state: State, event: ev.TrajectoryFinished) -> bool:
    return is_count(event.num_tokens)


@handles(ev.TrajectoryFinished, valid=_token_count)
def on_trajectory_finished(ctx: Context, event: ev.TrajectoryFinished) -> None:
    """Record a durable response or turn; the reward, or the session's answer, comes next."""
    state, trajectory = ctx.state, _generated_by(ctx, event.trajectory_id, event.placement)
    trigger = "answer" if state.settings.has_environment else "finished"
    if trajectory is None or not transition(trajectory, trigger):
        return ctx.ignore("old-placement")
    dispatch.leave_engine(ctx, trajectory)
    state.work.ledger.tokens.issued += event.num_tokens - trajectory.num_tokens
    set_length(state, trajectory, event.num_tokens)
    if state.settings.repack_policy:
        state.repack.finished += 1
        state.repack.finished_tokens += event.num_tokens
    if state.settings.has_environment:
        state.work.unscored[trajectory.id] = None
    elif together := groups.find_scorable(state, trajectory):
        groups.score_siblings(ctx, together, ctx.stamped.peer)


@handles(ev.TrajectoryFailed, valid=accept_any)
def on_trajectory_failed(ctx: Context, event: ev.TrajectoryFailed) -> None:
    trajectory = _find_placed(ctx, event.trajectory_id, event.placement)
    if trajectory is None or trajectory.status not in UNFINISHED:
        return ctx.ignore("old-placement")
    purpose = ctx.state.work.groups[trajectory.group].purpose
    recovery.fail_sibling(ctx, trajectory, DropReason(event.reason))
    reason = failure_rate.FAILED_REASONS.get(event.reason)
    if reason is not None:
        failure_rate.count_reward(ctx, purpose, reason, event.detail)
    if event.reason == FailureReason.ENV_FAILED:
        failure_rate.count_env_call(ctx, event.detail or event.reason)


def _has_finite_score(state: State, event: ev.TrajectoryRewarded) -> bool:
    """Return whether the score and all further figures are finite."""
    finite = 0 <= event.reward_bits < 1 << 64 and event.reward_bits & _EXPONENT != _EXPONENT
    return finite and is_count(event.num_tokens) and all(map(isfinite, event.extras.values()))


@handles(ev.TrajectoryRewarded, valid=_has_finite_score)
def on_trajectory_rewarded(ctx: Context, event: ev.TrajectoryRewarded) -> None:
    state = ctx.state
    trajectory = _find_placed(ctx, event.trajectory_id, event.placement)
    if trajectory is None or trajectory.is_unsampled or not transition(trajectory, "rewarded"):
        return ctx.ignore("old-placement")
    trajectory.reward_bits, trajectory.correct = event.reward_bits, event.correct
    state.work.unscored.pop(trajectory.id, None)
    groups.end_scoring(ctx, trajectory)
    groups.release_session(ctx, trajectory)
    group = state.work.groups[trajectory.group]
    groups.finish_sibling(ctx, group)
    if group.purpose == Purpose.EVAL:
        evaluation.group_evaluated(ctx, group, event)
    failure_rate.count_reward(ctx, group.purpose, event.reason, event.detail)
    failure_rate.count_env_call(ctx)


def _has_valid_turn(state: State, event: ev.TurnRequested) -> bool:
    """Return whether the turn is possible: only a run with sessions has turns."""
    return state.settings.has_environment and is_count(event.turn)


@handles(ev.TurnRequested, valid=_has_valid_turn)
def on_turn_requested(ctx: Context, event: ev.TurnRequested) -> None:
    """Place the requested turn where its version is served."""
    trajectory = _find_placed(ctx, event.trajectory_id, event.placement)
    if trajectory is None or trajectory.status != TrajectoryStatus.WAITING:
        return ctx.ignore("old-placement")
    ctx.state.work.unscored.pop(trajectory.id, None)
    dispatch.await_turn(ctx, trajectory)
    groups.end_scoring(ctx, trajectory)
    if event.turn:
        failure_rate.count_env_call(ctx)


def _find_placed(ctx: Context, trajectory_id: TrajectoryId, placement: int) -> Trajectory | None:
    """Return the trajectory, if this is its present placement."""
    trajectory = ctx.state.work.trajectories.get(trajectory_id)
    if trajectory is None or trajectory.placement != placement:
        return None
    return trajectory


def _generated_by(ctx: Context, trajectory_id: TrajectoryId, placement: int) -> Trajectory | None:
    """Return the trajectory, if the sender is the replica of its present placement."""
    trajectory = _find_placed(ctx, trajectory_id, placement)
    if trajectory is None or trajectory.replica != ctx.stamped.peer:
        return None
    return trajectory
