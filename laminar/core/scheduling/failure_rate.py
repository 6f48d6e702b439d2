"""Failure rates of rewards and environments; too many failures end the run.

Reads   TrajectoryRewarded, TrajectoryFailed; settings.max_error_permille
        TurnFinished
Writes  state.signals.rewards, state.failed_calls
Emits   through failing.drain_run: the run ends gracefully, as failed

An attempt to score a response ends with a score, or fails: the reward function raised, hung or gave
no number, or its worker was lost. Failures of evaluations are counted, too, but only attempts on
training samples can end the run, since those are trained. A response to which the function does not
apply (it gave None) does not count as an attempt; but if it applies to none for as long, the run
ends, too.

An environment that fails by itself gives no score, so nothing wrong is trained; but the lost
episodes are a biased sample, so the run ends before many are lost."""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.failing import drain_run
from laminar.core.state.failures import FailureKind
from laminar.core.state.signals import RewardErrors
from laminar.core.state.statuses import Phase
from laminar.events.reasons import FailureReason, RewardOutcome
from laminar.names.ids import Purpose

UNSCORED = FailureReason.UNSCORED
FAILED_REASONS = {FailureReason.REWARD_WORKER_LOST: "worker-lost", UNSCORED: UNSCORED}
"""Reasons of trajectory-failed that end an attempt to score; the others were never scored."""
WINDOW_BATCHES = 4
"""The size of the window of attempts, in batches.

One bad prompt ends nothing, and a reward that breaks late does not train many steps."""
FIRST_CHARS = 500
REWARD, ENVIRONMENT = "reward", "environment"
"""The subjects of these failures."""
CALLS, FAILED_CALLS_MAX = 50, 10
"""The window of environment calls, and the failures in it that end the run: a fifth."""


def count_reward(ctx: Context, purpose: Purpose, reason: str, detail: str) -> None:
    """Count one reward, or why there is none; too many failures end the run."""
    state = ctx.state
    if state.signals.rewards is None:
        state.signals.rewards = RewardErrors(window=bytearray(-(-_get_window_size(ctx) // 8)))
    found = state.signals.rewards
    if reason != UNSCORED:
        found.answers += 1
    if reason not in (RewardOutcome.OK, UNSCORED):
        found.errors[reason] = found.errors.get(reason, 0) + 1
        found.first = found.first or detail[:FIRST_CHARS]
    if purpose == Purpose.TRAIN:
        _record_attempt(found, reason, _get_window_size(ctx))
        _check_reward_failures(ctx, found)


def count_env_call(ctx: Context, failed: str = "") -> None:
    """Count an environment's answer to a turn, or a failure that the policy cannot cause."""
    state, run = ctx.state, ctx.state.run
    if not state.settings.has_environment:
        return
    state.signals.failed_tool_calls = (state.signals.failed_tool_calls << 1 | bool(failed)) & (
        (1 << CALLS) - 1
    )
    count = state.signals.failed_tool_calls.bit_count()
    if not failed or count < FAILED_CALLS_MAX or run.phase != Phase.RUNNING or run.draining:
        return
    what = (
        f"the environment failed on {count} of its last {CALLS} calls, in a way that the model "
        f"cannot cause; the last time: {failed[:FIRST_CHARS]}"
    )
    drain_run(ctx, FailureKind.ENV_FAILS, ENVIRONMENT, what)


def _get_window_size(ctx: Context) -> int:
    return WINDOW_BATCHES * _get_min_attempts(ctx)


def _get_min_attempts(ctx: Context) -> int:
    """Return the attempts before which the run is not ended: those of one batch."""
    settings = ctx.state.settings
    return settings.groups_per_step * settings.group_size


def _record_attempt(found: RewardErrors, reason: str, size: int) -> None:
    """Record in the ring of the last `size` attempts whether this one failed."""
    if reason == UNSCORED:
        found.unscored_in_row += 1
        return
    found.unscored_in_row = 0
    byte, bit = divmod(found.attempts % size, 8)
    mask = 1 << bit
    found.failed -= bool(found.window[byte] & mask)
    found.window[byte] &= ~mask
    if reason != RewardOutcome.OK:
        found.window[byte] |= mask
        found.failed += 1
    found.attempts += 1


def _check_reward_failures(ctx: Context, found: RewardErrors) -> None:
    state, permille = ctx.state, ctx.state.settings.max_error_permille
    if state.run.phase != Phase.RUNNING or state.run.draining:
        return
    attempts = min(found.attempts, _get_window_size(ctx))
    share = f"reward.max_error_share = {permille / 1000:g}"
    if attempts >= _get_min_attempts(ctx) and found.failed * 1000 > permille * attempts:
        first = found.first or "its reason did not arrive"
        what = f"the reward failed on {found.failed} of the last {attempts} training responses"
        what = f"{what}, more than {share}; the first failure: {first}"
        drain_run(ctx, FailureKind.REWARD_FAILS, REWARD, what)
    elif permille < 1000 and found.unscored_in_row >= _get_window_size(ctx):
        what = f"no score for any of the last {found.unscored_in_row} training responses"
        what = f"{what}: the reward function gave None for each ({share})"
        drain_run(ctx, FailureKind.NO_SCORES, REWARD, what)
