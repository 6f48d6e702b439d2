"""Learning signals: whether rewards, tools, groups and gradients are of use.

Reads   nothing
Gives   Signals and its part RewardErrors
"""

from __future__ import annotations

import msgspec


class RewardErrors(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts of scored and failed attempts (core/scheduling/failure_rate.py)."""

    window: bytearray  #: ring with a bit for each of the last attempts: whether it failed
    attempts: int = 0  #: attempts at training samples; the next has bit `attempts` modulo the ring
    failed: int = 0  #: failed attempts in the ring
    unscored_in_row: int = 0  #: training samples without a score since the last attempt
    answers: int = 0  #: samples scored or failed, including evaluations
    errors: dict[str, int] = {}  #: failures of them, by reason
    first: str = ""  #: first error text


class Signals(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts that tell whether the run can learn."""

    rewards: RewardErrors | None = None  #: counts of scoring; None: nothing was scored yet
    #: last calls of environments, the newest one as the lowest bit: whether it failed
    failed_tool_calls: int = 0
    flat_groups_in_row: int = 0  #: groups dropped for no variance since one was kept
    flat_correct_in_row: int = 0  #: flat groups whose siblings are all correct
    nonfinite_in_row: int = 0  #: updates without a finite gradient since weights changed
    warnings: dict[str, str] = {}  #: warnings about training, text by kind, in order of arrival
