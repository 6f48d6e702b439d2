"""Replay: a log leads to the decisions that it records, and the first that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from laminar.core.state.state import hash_state
from laminar.core.state.statuses import Phase
from laminar.eventlog import replay as replay_module
from laminar.eventlog.reader import read_log, scan_log
from laminar.eventlog.record import (
    MAX_HEADER_BYTES,
    DecisionRecord,
    EventRecord,
    Record,
    SegmentHeader,
    StateHashRecord,
)
from laminar.eventlog.replay import Replay, replay_records
from laminar.events import commands as cmd
from laminar.events.codec import decode_command, decode_event, encode
from tools.kit.logs import begin_log
from tools.kit.memory_disk import MemoryDisk
from tools.kit.sim_worlds import KILLED, LoggedRun


@pytest.fixture(scope="module")
def run() -> LoggedRun:
    """Replicas are lost on the way."""
    return LoggedRun("replica-dies", segment_bytes=1 << 20).run()


@pytest.fixture(scope="module")
def records(run: LoggedRun) -> list[Record]:
    return [record for _, record in read_log(run.disk)]


def log_of(
    records: list[Record], *, takeovers: tuple[int, ...] = (), incarnations: bool = True
) -> MemoryDisk:
    """A log of these records with valid frames; before each index in `takeovers` a new segment of
    the next coordinator (or, without `incarnations`, of the same one)."""
    disk = MemoryDisk()
    writer = begin_log(disk, incarnation=1)
    for i, record in enumerate(r for r in records if not isinstance(r, SegmentHeader)):
        if i in takeovers:
            writer.commit()
            writer = begin_log(disk, incarnation=1 + incarnations)
        writer.append(record)
    writer.commit()
    return disk


def changed(
    records: list[Record], kind: type[Record], change: Callable[[Record], Record | None]
) -> list[Record]:
    """The records, with the middle one of a kind altered (or left out: None)."""
    places = [i for i, record in enumerate(records) if isinstance(record, kind)]
    place = places[len(places) // 2]
    new = change(records[place])
    return [*records[:place], *([new] if new is not None else []), *records[place + 1 :]]


def difference(found: Replay) -> str:
    assert found.difference is not None, "the replay found nothing"
    return str(found.difference)


def test_log_of_a_tick_replays_identically(run: LoggedRun, records: list[Record]) -> None:
    """Every event, every decision, and the state at the end."""
    found = replay_records(run.disk)
    assert found.difference is None
    assert found.events == sum(isinstance(r, EventRecord) for r in records) == run.state.seq
    assert found.decisions == sum(isinstance(r, DecisionRecord) for r in records) > 100
    assert found.machine.state.run.phase == Phase.ENDED
    assert hash_state(found.machine.state) == hash_state(run.state)


def test_log_of_many_coordinators_replays_identically() -> None:
    """Some were killed between an event and its decisions."""
    world = LoggedRun(*KILLED, every_s=0.5).run()
    assert world.kills >= 5
    found = replay_records(world.disk)
    assert found.difference is None
    assert hash_state(found.machine.state) == hash_state(world.state)


def test_observer_sees_every_event_with_its_commands(run: LoggedRun) -> None:
    """What story and why are made of."""
    seen: list[tuple[int, int]] = []
    replay_records(
        run.disk, observer=lambda s, commands, state: seen.append((s.seq, len(commands)))
    )
    assert [seq for seq, _ in seen] == list(range(1, run.state.seq + 1))
    assert sum(count for _, count in seen) == replay_records(run.disk).decisions


def test_altered_decision_is_the_first_difference(records: list[Record]) -> None:
    """One command of the log names another actor; frames and checksums are in order. Both versions
    are shown, with the place and the event."""

    def alter(record: Record) -> Record:
        assert isinstance(record, DecisionRecord)
        command = msgspec.structs.replace(decode_command(record.command), to="somebody-9")
        altered.append(record.cause)
        return msgspec.structs.replace(record, command=msgspec.Raw(encode(command)))

    altered: list[int] = []
    found = replay_records(log_of(changed(records, DecisionRecord, alter)))
    assert found.difference is not None and found.difference.seq == altered[0]
    assert "somebody-9" in found.difference.logged
    assert "somebody-9" not in found.difference.replayed
    assert "segment 1, offset " in difference(found) and found.events == altered[0]


@pytest.mark.parametrize(
    ("kind", "field", "text"),
    [(DecisionRecord, "command", "unreadable command"), (EventRecord, "event", "an event")],
)
def test_unreadable_record_is_a_difference(
    kind: type[Record], field: str, text: str, records: list[Record]
) -> None:
    """A log of a newer release holds a command or an event that this one does not know."""
    odd = msgspec.Raw(msgspec.msgpack.encode({"type": "paint-moon"}))
    altered = changed(records, kind, lambda r: msgspec.structs.replace(r, **{field: odd}))
    found = difference(replay_records(log_of(altered)))
    assert text in found and "paint-moon" in found


def test_altered_event_leads_to_another_decision(records: list[Record]) -> None:
    """The first event with settings of another seed: trajectories get other seeds."""

    def alter(record: Record) -> Record:
        assert isinstance(record, EventRecord)
        event = decode_event(record.event)
        settings = msgspec.structs.replace(event.settings, seed=999)  # type: ignore[attr-defined]
        event = msgspec.structs.replace(event, settings=settings)
        return msgspec.structs.replace(record, event=msgspec.Raw(encode(event)))

    first = next(i for i, r in enumerate(records) if isinstance(r, EventRecord))
    found = replay_records(log_of([*records[:first], alter(records[first]), *records[first + 1 :]]))
    assert found.difference is not None and "GenerateTrajectory" in difference(found)


def test_last_decision_of_an_event_that_was_left_out_is_found(records: list[Record]) -> None:
    """Not at the end of the log: another event follows."""
    last = [
        i
        for i, (a, b) in enumerate(pairwise(records))
        if isinstance(a, DecisionRecord) and isinstance(b, EventRecord)
    ][10]
    found = replay_records(log_of(records[:last] + records[last + 1 :]))
    assert found.difference is not None and found.difference.logged == "no such decision"


def test_decision_that_was_added_is_found(records: list[Record]) -> None:
    place = next(
        i
        for i, (a, b) in enumerate(pairwise(records))
        if isinstance(a, DecisionRecord) and isinstance(b, EventRecord)
    )
    record = records[place]
    assert isinstance(record, DecisionRecord)
    stop = cmd.StopActor(to="trainer-0", reason="I say so")
    extra = DecisionRecord(
        cause=record.cause, index=record.index + 1, command=msgspec.Raw(encode(stop))
    )
    found = replay_records(log_of([*records[: place + 1], extra, *records[place + 1 :]]))
    assert found.difference is not None and found.difference.replayed == "no further decision"
    assert "I say so" in found.difference.logged


def test_altered_state_hash_is_found(run: LoggedRun, records: list[Record]) -> None:
    """A live process logs its state's digest now and then; a replay must reach the same ones."""
    right = StateHashRecord(seq=run.state.seq, digest=hash_state(run.state))
    assert records[-1] == right
    records = records[:-1]
    found = replay_records(log_of([*records, right]))
    assert found.difference is None and found.hashes == 1
    found = replay_records(log_of([*records, msgspec.structs.replace(right, digest="0" * 32)]))
    assert "0" * 32 in difference(found) and right.digest in difference(found)
    found = replay_records(log_of([*records, msgspec.structs.replace(right, seq=right.seq - 1)]))
    assert found.difference is not None


def test_tick_logs_state_hashes_and_they_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.coordinator.hashes.HASH_EVERY", 20)
    assert replay_module.HASH_EVERY == 1_000
    world = LoggedRun().run()
    found = replay_records(world.disk)
    assert found.difference is None and found.hashes == world.state.seq // 20 + 1  # the last one


def test_large_state_is_hashed_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding all of it costs as much as it has trajectories."""
    monkeypatch.setattr("laminar.coordinator.hashes.HASH_EVERY", 20)
    monkeypatch.setattr("laminar.coordinator.hashes.HASHED_OFTEN_MAX", 4)
    world = LoggedRun().run()
    found = replay_records(world.disk)
    assert found.difference is None and 0 < found.hashes < world.state.seq // 20


def test_missing_trailing_decisions_at_the_end_of_the_log_are_accepted(
    records: list[Record],
) -> None:
    """The coordinator was killed between writing an event and all of its decisions: nothing of it
    was sent, and its successor decides the same. What is missing is handed out."""
    cut = end_of_a_decision(records)
    found = replay_records(log_of(records[:cut]))
    assert found.difference is None
    assert found.unlogged == [records[cut]]


def end_of_a_decision(records: list[Record]) -> int:
    """Index of the last decision of an event that has several."""
    return next(
        i
        for i, (a, b) in enumerate(pairwise(records))
        if isinstance(a, DecisionRecord) and a.index >= 1 and isinstance(b, EventRecord)
    )


def without_headers(records: list[Record]) -> list[Record]:
    return [r for r in records if not isinstance(r, SegmentHeader)]


def test_missing_decisions_at_a_takeover_have_to_follow_its_header(records: list[Record]) -> None:
    """The next coordinator begins with what the last one owed; here it did, and here it did not."""
    plain = without_headers(records)
    cut = end_of_a_decision(plain)
    found = replay_records(log_of(plain, takeovers=(cut,)))
    assert found.difference is None and found.machine.state.run.phase == Phase.ENDED
    found = replay_records(log_of(plain[:cut] + plain[cut + 1 :], takeovers=(cut,)))
    assert difference(found).count("no such decision") == 1


def test_missing_decisions_at_a_rotation_are_not(records: list[Record]) -> None:
    """One coordinator went on in its next segment: it had written all of them."""
    plain = without_headers(records)
    cut = end_of_a_decision(plain)
    disk = log_of(plain[:cut] + plain[cut + 1 :], takeovers=(cut,), incarnations=False)
    assert difference(replay_records(disk)).count("no such decision") == 1


def test_rotated_log_replays(records: list[Record]) -> None:
    """Segments of a kilobyte or two."""
    disk = MemoryDisk()
    writer = begin_log(disk, segment_bytes=MAX_HEADER_BYTES)
    for record, after in zip(records[1:], [*records[2:], None], strict=True):
        writer.append(record)
        if not isinstance(after, DecisionRecord):
            writer.commit()
    assert len(disk.list_names()) > 20
    found = replay_records(disk)
    assert found.difference is None and found.machine.state.run.phase == Phase.ENDED


def test_until_stops_after_an_event(run: LoggedRun) -> None:
    """The state as it was after event 50, with the digest that the live process had then."""
    found = replay_records(run.disk, until=50)
    assert found.difference is None
    assert (found.events, found.machine.state.seq) == (50, 50)
    assert hash_state(found.machine.state) == run.digests[50]


def test_until_beyond_the_end_is_the_end(run: LoggedRun) -> None:
    assert replay_records(run.disk, until=10**9).machine.state.seq == run.state.seq


def test_tail_bounds_the_replay(run: LoggedRun) -> None:
    """A log that grows while it is read: what came after the scan is not looked at."""
    part = MemoryDisk({name: bytes(data) for name, data in run.disk.files.items()})
    tail = scan_log(part)
    name = part.list_names()[-1]
    part.files[name] += b"whatever comes later"
    assert replay_records(part, tail).machine.state.seq == run.state.seq


def test_empty_log_replays_to_nothing() -> None:
    found = replay_records(MemoryDisk())
    assert found.events == 0 and found.difference is None and not found.machine.started
