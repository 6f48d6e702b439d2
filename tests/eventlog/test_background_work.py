"""Hashes and snapshots that are worked out while the coordinator goes on: a hash comes later than
its event and is compared all the same; what never comes is missed by nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from laminar.core.state.state import hash_state
from laminar.core.state.statuses import Phase
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import HASH_FOLLOWS, EventRecord, Record, StateHashRecord
from laminar.eventlog.replay import replay_records
from laminar.eventlog.restore import restore_log
from laminar.eventlog.snapshot import read_snapshots
from laminar.names.ports import Disk
from tests.eventlog.test_replay import difference, log_of
from tests.eventlog.test_snapshots import begin
from tools.kit.logs import real_run
from tools.kit.memory_disk import MemoryDisk
from tools.kit.sim_worlds import KILLED, LoggedRun

TURNS = 7  #: that an answer takes


class Elsewhere:
    """Answers some turns later, as they were when the work was given."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[bytes | None], None], bytes | None]] = []
        self.turn = 0

    def can_run_inline(self, size: int) -> bool:
        return False

    def run(
        self, what: str, size: int, work: Callable[[], bytes], done: Callable[[bytes | None], None]
    ) -> None:
        self.waiting.append((self.turn + TURNS, done, self.answer(what, work)))

    def answer(self, what: str, work: Callable[[], bytes]) -> bytes | None:
        return work()

    def collect_results(self) -> None:
        self.turn += 1
        while self.waiting and self.waiting[0][0] <= self.turn:
            _, done, answer = self.waiting.pop(0)
            done(answer)


def late_run(*faults: str, background: Callable[[], Any] = Elsewhere, **sizes: int) -> LoggedRun:
    """Not yet begun."""
    run = LoggedRun(*faults, **({"snapshot_every": 23} | sizes))
    run.coordinator.background = background
    return run


@pytest.fixture(scope="module")
def late() -> LoggedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laminar.coordinator.hashes.HASH_EVERY", 20)
        patch.setattr("laminar.eventlog.snapshot.SNAPSHOTS_KEPT", 1_000)
        return late_run().run()


@pytest.fixture(scope="module")
def records(late: LoggedRun) -> list[Record]:
    return [record for _, record in read_log(late.disk)]


def hashes(records: list[Record]) -> list[tuple[int, StateHashRecord]]:
    """With the last event before each."""
    found, seq = [], 0
    for record in records:
        if isinstance(record, EventRecord):
            seq = record.seq
        elif isinstance(record, StateHashRecord):
            found.append((seq, record))
    return found


def test_hash_is_logged_later_and_compared_with_the_state_of_its_event(
    late: LoggedRun, records: list[Record]
) -> None:
    announced = [r.seq for at, r in hashes(records) if r.digest == HASH_FOLLOWS and at == r.seq]
    *others, (last, closing) = hashes(records)
    assert closing.seq == last == late.state.seq, "a coordinator that ends hashes its state itself"
    answered = {r.seq: at for at, r in others if r.digest != HASH_FOLLOWS}
    assert len(announced) > 5 and set(answered) <= set(announced)
    assert sum(at > seq for seq, at in answered.items()) > 5
    found = replay_records(late.disk)
    assert found.difference is None and found.machine.state.run.phase == Phase.ENDED
    assert found.hashes == len(answered) + 1 > 5


def test_late_hash_that_was_altered_is_a_difference(records: list[Record]) -> None:
    place = next(i for i, r in enumerate(records) if isinstance(r, StateHashRecord) and r.digest)
    right = records[place]
    assert isinstance(right, StateHashRecord)
    for wrong in ({"digest": "0" * 32}, {"seq": right.seq - 1}, {"seq": right.seq + 1}):
        other = msgspec.structs.replace(right, **wrong)
        found = replay_records(log_of([*records[:place], other, *records[place + 1 :]]))
        assert f"state {other.digest} after event {other.seq}" in difference(found)


def test_hash_that_nobody_announced_is_a_difference(records: list[Record]) -> None:
    """It could not be compared, and would say nothing."""
    first = next(i for i, r in enumerate(records) if isinstance(r, StateHashRecord))
    assert replay_records(log_of(records[:first] + records[first + 1 :])).difference is not None


def test_hash_that_never_came_is_missed_by_nobody(records: list[Record]) -> None:
    kept = [r for r in records if not (isinstance(r, StateHashRecord) and r.digest)]
    found = replay_records(log_of(kept))
    assert found.difference is None and found.hashes == 0
    assert found.machine.state.run.phase == Phase.ENDED


def test_replay_from_a_snapshot_passes_over_the_hash_of_an_event_before_it(
    late: LoggedRun, records: list[Record]
) -> None:
    """It was announced before the snapshot was taken, and came after it."""
    kept = read_snapshots(late.disk).usable
    answered = {r.seq: at for at, r in hashes(records) if r.digest}
    across = [s for s in kept if any(seq < s.seq < at for seq, at in answered.items())]
    assert across, "no hash came after a snapshot that was taken meanwhile: choose another seed"
    for snapshot in kept:
        found = replay_records(late.disk, snapshot=snapshot)
        assert found.difference is None
        assert hash_state(found.machine.state) == hash_state(late.state)


def test_coordinators_that_are_killed_before_their_answers_leave_a_log_that_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("laminar.coordinator.hashes.HASH_EVERY", 20)
    world = late_run(*KILLED).run()
    found = replay_records(world.disk)
    assert world.kills > 3 and found.difference is None and found.hashes
    assert hash_state(found.machine.state) == hash_state(world.state)


# --- snapshots ----------------------------------------------------------------------------------


class SecondFails(Elsewhere):
    """The process that takes the second snapshot dies when it has written half of it."""

    taken = 0

    def answer(self, what: str, work: Callable[[], bytes]) -> bytes | None:
        if what == "snapshot":
            SecondFails.taken += 1
            if SecondFails.taken == 2:
                self.disk.create_file("snapshot-000000000061.bin.tmp").append(b"half")
                return None
        return work()

    disk: Disk


def test_a_snapshot_that_fails_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is taken, what was half written is gone, and no segment is tidied up that the
    older snapshot needs."""
    monkeypatch.setattr(SecondFails, "taken", 0)
    world = late_run(background=SecondFails, segment_bytes=2_048, snapshot_every=30)
    monkeypatch.setattr(SecondFails, "disk", world.coordinator.disk, raising=False)
    world.run()
    assert SecondFails.taken > 5
    assert not [name for name in world.disk.list_names() if name.endswith(".tmp")]
    kept = read_snapshots(world.disk)
    assert len(kept.usable) == 2 and not kept.unusable
    for snapshot in kept.usable:
        assert hash_state(
            replay_records(world.disk, snapshot=snapshot).machine.state
        ) == hash_state(world.state)


def test_one_snapshot_is_taken_at_a_time() -> None:
    """Due again before the last one is there: it waits for that."""

    class Slow(Elsewhere):
        at_work = most = 0

        def run(
            self,
            what: str,
            size: int,
            work: Callable[[], bytes],
            done: Callable[[bytes | None], None],
        ) -> None:
            Slow.at_work += 1
            Slow.most = max(Slow.most, Slow.at_work)
            super().run(what, size, work, lambda answer: self._ended(done, answer))

        def _ended(self, done: Callable[[bytes | None], None], answer: bytes | None) -> None:
            Slow.at_work -= 1
            done(answer)

    world = late_run(background=Slow, snapshot_every=1).run()
    assert Slow.most == 1
    assert restore_log(world.disk).replay.difference is None


def test_a_log_that_is_closed_leaves_no_unfinished_snapshot() -> None:
    """The process that works on one is ended then, wherever it is."""
    disk, background = MemoryDisk(), Elsewhere()
    machine, writer = begin(disk, snapshot_every=1)
    started = real_run()[0][0]
    machine.handle_event(started)
    writer.snapshot_if_due(machine.state, background)
    half_written = disk.create_file("snapshot-000000000002.bin.tmp")
    half_written.append(b"half")
    writer.close()
    assert not [name for name in disk.list_names() if name.endswith(".tmp")]
    assert background.waiting, "nobody has heard of it"
