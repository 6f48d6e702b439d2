"""Checks of durability: no crash loses what the coordinator sent or what was reported to it.

Reads   the disk of the coordinator; how much was logged; events as they are handled, the store's
        rows
Gives   Durability; raises Violation

Records that others act on are on disk before anything is sent. A reported response, reward or end
is in the store by then, and stays there.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.state.scores import bits_of
from laminar.eventlog.record import FRAME, KIND_KEY, frame_end
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.storage import rules
from laminar.storage.rules import Row
from tools.simulator.coverage import Coverage
from tools.simulator.disk import SimDisk
from tools.simulator.runtime.violation import Violation

_EVENT, _DECISION = KIND_KEY + b"\xa5event", KIND_KEY + b"\xa8decision"


class Durability:
    """Counts of log records: those that a coordinator has written, and those that are durable."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._must: tuple[int, int] = (0, 0)  #: events and decisions that must be on disk
        self._logged: tuple[int, int] = (0, 0)
        self._durable = [0, 0]
        self._offsets: dict[str, int] = {}  #: bytes already counted, by file

    def begin(self, disk: SimDisk) -> None:
        """Start counting for a new coordinator."""
        self._offsets = {name: disk.durable_size(name) for name in disk.list_names()}
        self._durable, self._logged, self._must = [0, 0], (0, 0), (0, 0)

    def logged(self, decisions: int, told: bool) -> None:
        """Count an event and its decisions; `told`: another process learns of it."""
        events, before = self._logged
        self._logged = (events + 1, before + decisions)
        if told:
            self._must = self._logged

    def sent(self, disk: SimDisk) -> bool:
        """Check durable_before_sent; return True if all that was logged is known to be durable."""
        if self.is_whole():
            return False
        self._count_new(disk)
        if not self.is_whole():
            what = f"{self._must} events and decisions were acted on, {self._durable} are durable"
            raise Violation("durable_before_sent", what)
        return self._durable[0] >= self._logged[0]

    def is_whole(self) -> bool:
        """Return whether everything that another process learned of is durable."""
        return self._durable[0] >= self._must[0] and self._durable[1] >= self._must[1]

    def _count_new(self, disk: SimDisk) -> None:
        """Count the records of this incarnation that have become durable."""
        for name in disk.list_names():
            size, offset = disk.durable_size(name), self._offsets.get(name, 0)
            if name.endswith(".log") and size > offset:
                if not offset:
                    self._coverage.hit("log:rotated")
                self._offsets[name] = offset + self._count(disk.read(name, offset, size - offset))

    def _count(self, data: bytes) -> int:
        offset, durable = 0, self._durable
        while offset + FRAME.size <= len(data):
            end = frame_end(data, offset)
            if end > len(data):
                break
            start = offset + FRAME.size + 1
            if data.startswith(_EVENT, start):
                durable[0] += 1
            elif data.startswith(_DECISION, start):
                durable[1] += 1
            offset = end
        return offset


def reported_is_stored(event: Event, rows: Mapping[str, Row], environment: bool) -> None:
    """Check reported_is_stored: a reported response is whole, its reward equal, its end final.

    `environment`: the run has one, and responses have turns.
    """
    if isinstance(event, ev.TrajectoryFinished):
        row = rows.get(event.trajectory_id)
        if row is None or not _has_turn(event, row, environment):
            _differs(event, event.trajectory_id, row)
    elif isinstance(event, ev.TrajectoryRewarded):
        row = rows.get(event.trajectory_id)
        if row is None or row.reward_bits is None or row.reward_reason != event.reason:
            return _differs(event, event.trajectory_id, row)
        if bits_of(rules.decode_reward(row.reward_bits) or 0.0) != event.reward_bits:
            _differs(event, event.trajectory_id, row)
    elif isinstance(event, ev.TrajectoriesEnded):
        for ended in event.ended:
            row = rows.get(ended.trajectory_id)
            if row is None or row.end is None or row.num_tokens != ended.num_tokens:
                _differs(event, ended.trajectory_id, row)


def _has_turn(event: ev.TrajectoryFinished, row: Row, environment: bool) -> bool:
    """Return whether the store has the reported turn (others may follow it), or the whole response.

    A trajectory placed again after a turn may repeat tokens: a late report then refers to tokens
    that are lost. A complete response is never lost.
    """
    if environment and row.placement > event.placement:
        return row.num_tokens + row.tokens_lost >= event.num_tokens
    if row.turns:
        return row.num_tokens >= event.num_tokens
    return row.status != "open" and row.num_tokens == event.num_tokens


def _differs(event: Event, trajectory_id: str, row: Row | None) -> None:
    raise Violation("reported_is_stored", f"{event}, but the store has {row}", trajectory_id)
