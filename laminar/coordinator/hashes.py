"""State hashes in the log: what a replay has to reach.

Reads   the state after an event
Writes  StateHashRecord: every so many events, and at the end of the log

The hash of a large state is worked out in the background: the log says at once that one of this
event follows, and has it some turns later. One that never comes is left out.
"""

from __future__ import annotations

from functools import partial

from laminar.core.state.state import State, hash_state
from laminar.eventlog.record import HASH_FOLLOWS, StateHashRecord
from laminar.eventlog.replay import HASH_EVERY
from laminar.eventlog.writer import LogWriter
from laminar.names.ports import Background

HASHED_OFTEN_MAX = 4_096
"""Trajectories: up to here a state hash takes 5 ms, which is 5 us for each of HASH_EVERY events."""


class StateHashes:
    """Decides when one is due, and logs it."""

    def __init__(self, log: LogWriter, background: Background) -> None:
        self._log, self._background = log, background
        self._under_way = False

    def log_if_due(self, state: State) -> None:
        """Every HASH_EVERY events, more rarely with a state that takes long to encode."""
        if state.seq % HASH_EVERY or state.seq % _get_hash_interval(state) or self._under_way:
            return
        size = len(state.trajectories)
        if not self._background.can_run_inline(size):
            self._log.append(StateHashRecord(seq=state.seq, digest=HASH_FOLLOWS))
        self._under_way = True
        answered = partial(self._append_hash, state.seq)
        self._background.run("state-hash", size, lambda: hash_state(state).encode(), answered)

    def _append_hash(self, seq: int, found: bytes | None) -> None:
        self._under_way = False
        if found is not None:
            self._log.append(StateHashRecord(seq=seq, digest=found.decode()))

    def log_final_hash(self, state: State) -> None:
        self._log.append(StateHashRecord(seq=state.seq, digest=hash_state(state)))


def _get_hash_interval(state: State) -> int:
    """HASH_EVERY, doubled with the state: that keeps the share of the time that hashes take."""
    return HASH_EVERY << (len(state.trajectories) // HASHED_OFTEN_MAX).bit_length()
