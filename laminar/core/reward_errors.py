"""Rewards that fail: counted by reason, the first is kept, and too many end the run.

Reads   TrajectoryRewarded, TrajectoryFailed; settings.max_error_permille
Writes  state.rewards
Emits   through lifecycle.drain: the run ends in good order, and has failed

An attempt to score an answer ends with a score, or fails: the reward function raised, hung or
gave no number, or its worker was lost. Failures of evaluations are counted, too, but judged are the
attempts of training answers, since those are trained. An answer to which the function does not
apply (it gave None) is no attempt; but where it applies to nothing for as long, the run ends, too.
"""

from __future__ import annotations

from laminar import ids
from laminar.core import lifecycle
from laminar.core.state import RUNNING, RewardErrors
from laminar.core.turn import Turn

OK, UNSCORED = "ok", "unscored"
FAILED_REASONS = {"reward-worker-lost": "worker-lost", UNSCORED: UNSCORED}
"""Of trajectory-failed: those that end an attempt to score; the others never came so far."""
WINDOW_BATCHES = 4
"""The last attempts are judged, as many as so many batches have answers: enough that one bad prompt
ends nothing, and so few that a reward which breaks late does not train many steps."""
FIRST_CHARS = 500


def count(turn: Turn, purpose: str, reason: str, detail: str) -> None:
    """The reward of one answer is known, or why there is none; too many failures end the run."""
    state = turn.state
    if state.settings.max_error_permille < 0:
        return  # a log from before there was this rule
    if state.rewards is None:
        state.rewards = RewardErrors(window=bytearray(-(-_window(turn) // 8)))
    found = state.rewards
    if reason != UNSCORED:
        found.answers += 1
    if reason not in (OK, UNSCORED):
        found.errors[reason] = found.errors.get(reason, 0) + 1
        found.first = found.first or detail[:FIRST_CHARS]
    if purpose == ids.TRAIN:
        _keep(found, reason, _window(turn))
        _judge(turn, found)


def _window(turn: Turn) -> int:
    return WINDOW_BATCHES * _least(turn)


def _least(turn: Turn) -> int:
    """Attempts before which nothing is judged: those of one batch."""
    settings = turn.state.settings
    return settings.groups_per_step * settings.group_size


def _keep(found: RewardErrors, reason: str, size: int) -> None:
    """One bit in the ring of the last `size` attempts: whether it failed."""
    if reason == UNSCORED:
        found.unscored_in_row += 1
        return
    found.unscored_in_row = 0
    byte, bit = divmod(found.attempts % size, 8)
    mask = 1 << bit
    found.failed -= bool(found.window[byte] & mask)
    found.window[byte] &= ~mask
    if reason != OK:
        found.window[byte] |= mask
        found.failed += 1
    found.attempts += 1


def _judge(turn: Turn, found: RewardErrors) -> None:
    state, permille = turn.state, turn.state.settings.max_error_permille
    if state.phase != RUNNING or state.draining:
        return
    attempts = min(found.attempts, _window(turn))
    share = f"reward.max_error_share = {permille / 1000:g}"
    if attempts >= _least(turn) and found.failed * 1000 > permille * attempts:
        first = found.first or "its reason did not arrive"
        what = f"the reward failed on {found.failed} of the last {attempts} training answers"
        lifecycle.drain(turn, f"{what}, more than {share}; the first failure: {first}")
    elif permille < 1000 and found.unscored_in_row >= _window(turn):
        what = f"no score for any of the last {found.unscored_in_row} training answers"
        lifecycle.drain(turn, f"{what}: the reward function gave None for each ({share})")
