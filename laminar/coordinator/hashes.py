"""State hashes in the log, which a replay must reach.

Reads   the state after an event
Writes  StateHashRecord: every HASH_EVERY events or more, and at the end of the log

The hash of a large state is computed in the background: the log announces at once that the hash of
this event follows, and has it some ticks later. A hash that never arrives is left out.
"""

from __future__ import annotations

from functools import partial

from laminar.core.state.state import State, hash_state
from laminar.eventlog.record import HASH_FOLLOWS, StateHashRecord
from laminar.eventlog.replay import HASH_EVERY
from laminar.eventlog.writer import LogWriter
from laminar.names.ports import Background

HASHED_OFTEN_MAX = 4_096
"""The trajectories up to which a state hash takes 5 ms, or 5 us for each of HASH_EVERY events."""


class StateHashes:
    """Logs state hashes when they are due."""

    def __init__(self, log: LogWriter, background: Background) -> None:
        self._log, self._background = log, background
        self._under_way = False

    def log_if_due(self, state: State) -> None:
        """Log a hash every HASH_EVERY events, less often for a state that takes long to encode."""
        if state.seq % HASH_EVERY or state.seq % _get_hash_interval(state) or self._under_way:
            return
        size = len(state.work.trajectories)
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
    """Return HASH_EVERY, doubled with the size of the state, so that hashes take an equal share."""
    return HASH_EVERY << (len(state.work.trajectories) // HASHED_OFTEN_MAX).bit_length()
