"""What leaves the coordinator, and what it follows from, survives every crash.

Reads   the disk of the coordinator; how much was logged
Gives   Durability; raises Violation
"""

from __future__ import annotations

from laminar.eventlog.record import FRAME, KIND_KEY, frame_end
from laminar.sim.checks.coverage import Coverage
from laminar.sim.runtime.disk import SimDisk
from laminar.sim.runtime.violation import Violation

_EVENT, _DECISION = KIND_KEY + b"\xa5event", KIND_KEY + b"\xa8decision"


class Durability:
    """Counts records: those that a coordinator has written, and those that the disk will keep."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._must: tuple[int, int] = (0, 0)  #: events and decisions that must be on disk
        self._logged: tuple[int, int] = (0, 0)
        self._durable = [0, 0]
        self._offsets: dict[str, int] = {}  #: up to which each file was counted

    def begin(self, disk: SimDisk) -> None:
        """Another coordinator writes from now on."""
        self._offsets = {name: disk.durable_size(name) for name in disk.names()}
        self._durable, self._logged, self._must = [0, 0], (0, 0), (0, 0)

    def logged(self, decisions: int, told: bool) -> None:
        """An event with so many decisions; `told`: somebody learns of it."""
        events, before = self._logged
        self._logged = (events + 1, before + decisions)
        if told:
            self._must = self._logged

    def sent(self, disk: SimDisk) -> bool:
        """durable_before_sent; True if all that was logged is known to be durable."""
        if self.is_whole():
            return False
        self._count_new(disk)
        if not self.is_whole():
            what = f"{self._must} events and decisions were acted on, {self._durable} are durable"
            raise Violation("durable_before_sent", what)
        return self._durable[0] >= self._logged[0]

    def is_whole(self) -> bool:
        """No crash takes back what somebody has learnt of."""
        return self._durable[0] >= self._must[0] and self._durable[1] >= self._must[1]

    def _count_new(self, disk: SimDisk) -> None:
        """The records of this incarnation that have become durable."""
        for name in disk.names():
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
