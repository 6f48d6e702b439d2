"""Snapshots: what is kept, what is trusted, and that snapshot + tail is the full replay."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from laminar.core.machine import StateMachine
from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import NotInHistory, read_log, scan_log
from laminar.eventlog.record import FRAME, MAX_HEADER_BYTES, EventRecord, Takeover, segment_name
from laminar.eventlog.replay import Replay, decode_stamped, replay_records
from laminar.eventlog.restore import restore_log, take_over_log
from laminar.eventlog.snapshot import SNAPSHOTS_KEPT, Snapshot, read_snapshots
from laminar.eventlog.writer import LogWriter
from laminar.events.base import Command, Stamped
from laminar.names.ports import DiskError, DiskFull, InlineBackground
from tools.kit.logs import begin_log, log_event
from tools.kit.memory_disk import MemoryDisk, MemoryFile
from tools.kit.sim_worlds import KILLED, LoggedRun
from tools.simulator.disk import SimDisk

SEED = 4  #: some 300 events
EVERY = 30  #: events between two snapshots
Seen = list[tuple[int, list[Command]]]


#: A segment every few events, and a snapshot now and then.
ROTATING = {"segment_bytes": MAX_HEADER_BYTES, "snapshot_every": EVERY}


@dataclass
class Run:
    world: LoggedRun
    taken: dict[str, bytes]  #: every snapshot file there ever was

    def log(self, *names: str) -> MemoryDisk:
        """The whole log, uncompressed as it was written, with these snapshots."""
        files = {n: bytes(d) for n, d in self.world.disk.files.items() if n.startswith("events")}
        return MemoryDisk(files | {name: self.taken[name] for name in names})


@pytest.fixture(scope="module")
def run() -> Run:
    """Killed several times on the way; no segment is touched afterwards."""
    taken: dict[str, bytes] = {}
    replace = SimDisk.replace_file

    def remember(disk: SimDisk, old: str, new: str) -> None:
        replace(disk, old, new)
        if new.startswith("snapshot"):
            taken[new] = disk.read(new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimDisk, "replace_file", remember)
        patch.setattr("laminar.eventlog.writer.compact_segments", lambda *_: None)
        world = LoggedRun(*KILLED, **ROTATING).run()
    return Run(world, taken)


def seen_by(disk: MemoryDisk, snapshot: Snapshot | None = None) -> tuple[Replay, Seen]:
    """A replay, and what an observer saw: number and commands of each event."""
    seen: Seen = []

    def observe(stamped: Stamped, commands: list[Command], state: object) -> None:
        seen.append((stamped.seq, commands))

    return replay_records(disk, observer=observe, snapshot=snapshot), seen


def test_every_snapshot_and_its_tail_equal_the_full_replay(run: Run) -> None:
    """Same state, same decisions, every logged one compared; over segments and takeovers."""
    full, all_seen = seen_by(run.log())
    assert full.difference is None and run.world.kills > 3 and len(run.taken) > 5
    for name in run.taken:
        disk = run.log(name)
        (snapshot,) = read_snapshots(disk).usable
        found, seen = seen_by(disk, snapshot)
        assert found.difference is None, found.difference
        assert hash_state(found.machine.state) == hash_state(full.machine.state)
        assert seen == all_seen[snapshot.seq :]
        assert found.events == full.events - snapshot.seq
        assert found.decisions == sum(len(commands) for _, commands in seen)


def test_snapshot_holds_the_state_that_the_live_process_had(run: Run) -> None:
    for name in run.taken:
        (snapshot,) = read_snapshots(run.log(name)).usable
        assert (
            hash_state(snapshot.decode_state())
            == snapshot.digest
            == run.world.digests[snapshot.seq]
        )
        assert snapshot.name == name == f"snapshot-{snapshot.seq:012d}.bin"


def test_without_room_for_a_snapshot_the_log_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is left, since the log needs the room; the next one is taken in its time."""
    append, full = MemoryFile.append, [True]

    def limited(file: MemoryFile, data: bytes) -> None:
        if file.name.endswith(".tmp") and full[0]:
            append(file, data[:1])
            raise DiskFull(28, "No space left on device")
        append(file, data)

    monkeypatch.setattr(MemoryFile, "append", limited)
    disk, every = MemoryDisk(), events_of(run)
    drive(disk, every[: 3 * EVERY])
    assert not read_snapshots(disk).usable
    assert not [name for name in disk.list_names() if name.endswith(".tmp")]
    full[0] = False
    drive(disk, every)
    assert len(read_snapshots(disk).usable) == SNAPSHOTS_KEPT


def test_two_snapshots_are_kept(run: Run) -> None:
    """The newest; at least so many events lie between them as were asked for."""
    kept = read_snapshots(run.world.disk)
    assert [s.name for s in kept.usable] == sorted(run.taken)[: -SNAPSHOTS_KEPT - 1 : -1]
    assert kept.unusable == {}
    assert kept.usable[0].seq - kept.usable[1].seq >= EVERY


def test_restore_starts_at_the_newest_snapshot(run: Run) -> None:
    seen: list[int] = []
    restored = restore_log(run.world.disk, lambda stamped, *_: seen.append(stamped.seq))
    newest = read_snapshots(run.world.disk).usable[0]
    assert restored.snapshot == newest and restored.unusable == {}
    assert seen == list(range(newest.seq + 1, run.world.state.seq + 1))
    assert hash_state(restored.replay.machine.state) == hash_state(run.world.state)
    assert restored.tail.end == scan_log(run.log()).end


def test_an_observer_that_needs_more_gets_an_older_snapshot_or_the_whole_log(run: Run) -> None:
    newest, older = read_snapshots(run.world.disk).usable
    assert restore_log(run.world.disk, observe_from=newest.seq + 1).snapshot == newest
    assert restore_log(run.world.disk, observe_from=newest.seq).snapshot == older
    assert restore_log(run.world.disk, observe_from=older.seq).snapshot is None
    assert restore_log(run.world.disk, observe_from=0).replay.events == run.world.state.seq


def with_state(snapshot: Snapshot, **fields: object) -> Snapshot:
    state = msgspec.msgpack.decode(snapshot.state) | fields
    return msgspec.structs.replace(snapshot, state=msgspec.Raw(msgspec.msgpack.encode(state)))


def with_rule(snapshot: Snapshot, name: str) -> Snapshot:
    settings = msgspec.msgpack.decode(snapshot.state)["settings"]
    return with_state(snapshot, settings=settings | {"rules": [name]})


def packed(snapshot: object) -> bytes:
    body = msgspec.msgpack.encode(snapshot)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: packed(s)[:-1], "it is damaged"),
        (lambda s: b"", "it is damaged"),
        (lambda s: packed(s) + b"\x00", "it is damaged"),
        (lambda s: packed({"novel": 1}), "it was written by another release: "),
        (lambda s: packed(msgspec.structs.replace(s, schema=99)), "it has schema 99"),
        (lambda s: packed(msgspec.structs.replace(s, logic=99)), "it is of logic version 99"),
        (lambda s: packed(with_rule(s, "odd")), "it is of the decision rule 'odd'"),
        (lambda s: packed(msgspec.structs.replace(s, seq=7)), "it is of event 7"),
        (lambda s: packed(with_state(s, run={"phase": 3})), "it was written by another release: "),
        (
            lambda s: packed(with_state(s, run={"phase": "odd"})),
            "it was written by another release: ",
        ),
        (
            lambda s: packed(with_state(s, versions={"export_path": "odd"})),
            "its state has another structure",
        ),
        (
            lambda s: packed(with_state(s, run={"phase": b"\xff"})),
            "it was written by another release: ",
        ),
    ],
)
def test_an_odd_snapshot_is_passed_over_with_its_reason(
    run: Run, change: Callable[[Snapshot], bytes], reason: str
) -> None:
    """The older one is used; and a coordinator that takes over removes the odd one."""
    name, older = sorted(run.taken)[-1], sorted(run.taken)[-2]
    disk = run.log(name, older)
    disk.files[name][:] = change(read_snapshots(disk).usable[0])
    restored = restore_log(disk)
    assert restored.unusable[name].startswith(reason)
    assert restored.snapshot is not None and restored.snapshot.name == older
    assert hash_state(restored.replay.machine.state) == hash_state(run.world.state)
    begin(disk)
    assert [n for n in disk.list_names() if n.startswith("snapshot")] == [older]


def test_a_flip_in_every_byte_of_a_snapshot_makes_it_unusable(run: Run) -> None:
    name = sorted(run.taken)[0]
    data = run.taken[name]
    for at in range(0, len(data), 1 + len(data) // 2_000):
        damaged = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        assert read_snapshots(MemoryDisk({name: damaged})).unusable == {name: "it is damaged"}


@pytest.mark.parametrize(
    ("segment", "offset", "crc"),
    [(0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 1 << 20, 0), (1, 0, 0), (-1, 0, 0), (1 << 20, 0, 0)],
)
def test_a_position_that_is_not_on_the_chain_is_not_used(
    run: Run, segment: int, offset: int, crc: int
) -> None:
    """Another place, another checksum there, or a log that ends before it: the whole log is used;
    what the snapshot says is not believed."""
    name = sorted(run.taken)[3]
    disk = run.log(name)
    (right,) = read_snapshots(disk).usable
    place = right.position
    wrong = Takeover(place.segment + segment, place.offset + offset, place.crc ^ crc)
    snapshot = msgspec.structs.replace(right, position=wrong)
    with pytest.raises(NotInHistory):
        replay_records(disk, snapshot=snapshot)
    disk.files[name][:] = packed(snapshot)
    restored = restore_log(disk)
    assert restored.snapshot is None and list(restored.unusable) == [name]
    assert restored.replay.events == run.world.state.seq


@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_a_snapshot_beyond_the_end_of_the_log_is_not_used(run: Run, cut: int) -> None:
    """The disk lost what it had said to be durable. The history then goes on from an earlier place,
    and passes the snapshot by."""
    name = sorted(run.taken)[3]
    disk = run.log(name)
    (snapshot,) = read_snapshots(disk).usable
    place = snapshot.position
    for number in range(place.segment + 1, scan_log(disk).newest + 1):
        del disk.files[segment_name(number)]
    last = segment_name(place.segment)
    disk.files[last] = disk.files[last][: max(place.offset - cut, 0)]
    kept = disk.files[name]
    for _ in range(3):
        disk.files[name], disk.durable[name] = kept, len(kept)
        restored = restore_log(disk)
        assert restored.snapshot is None and "the history" in restored.unusable[name]
        begin(disk)
        assert read_snapshots(disk) == ([], {})


def begin(disk: MemoryDisk, **sizes: int) -> tuple[StateMachine, LogWriter]:
    restored = restore_log(disk)
    assert restored.replay.difference is None
    writer = take_over_log(
        disk, restored, logic=LOGIC_VERSION, run="r", seed=0, config_hash="", **sizes
    )
    return restored.replay.machine, writer


SIZES = {"segment_bytes": MAX_HEADER_BYTES, "snapshot_every": 8, "keep_bytes": 9_000}
EVENTS = 50


def drive(disk: MemoryDisk, events: list[Stamped]) -> int:
    """A coordinator that lives through the events which its log does not hold yet, or until the
    disk fails: the last event that it committed."""
    committed = 0
    try:
        machine, writer = begin(disk, **SIZES)
        committed = machine.state.seq if machine.started else 0
        for event in events[committed:]:
            log_event(writer, event, machine.handle_event(event))
            writer.commit()
            committed = event.seq
            writer.snapshot_if_due(machine.state, InlineBackground())
    except DiskError:
        pass
    return committed


@pytest.fixture(scope="module")
def events(run: Run) -> list[Stamped]:
    return events_of(run)[:EVENTS]


def events_of(run: Run) -> list[Stamped]:
    records = [record for _, record in read_log(run.log())]
    return [decode_stamped(record) for record in records if isinstance(record, EventRecord)]


def test_each_disk_call_failed_in_turn_leaves_a_log_that_can_be_restored(
    run: Run, events: list[Stamped]
) -> None:
    """While it writes records, rotates, takes a snapshot, compresses and removes: what was
    committed is there, no snapshot is damaged, and the next one goes on to the same end."""
    whole = MemoryDisk()
    assert drive(whole, events) == EVENTS
    assert segment_name(1) not in whole.list_names() and any(
        ".zst" in n for n in whole.list_names()
    )
    for fail_at in range(1, whole.calls + 1):
        broken = MemoryDisk(fail_at=fail_at)
        committed = drive(broken, events)
        assert broken.calls == fail_at, "a call was made after the one that failed"
        for keep_unsynced in (False, True):
            disk = broken.crash(keep_unsynced)
            restored = restore_log(disk)
            assert restored.unusable == {} and restored.replay.difference is None
            machine = restored.replay.machine
            seq = machine.state.seq if machine.started else 0
            assert committed <= seq <= committed + 1
            assert drive(disk, events) == EVENTS
            assert not [name for name in disk.list_names() if name.endswith(".tmp")]
            found = restore_log(disk).replay
            assert hash_state(found.machine.state) == run.world.digests[EVENTS]


def test_a_failed_snapshot_is_never_tried_again(events: list[Stamped]) -> None:
    disk = MemoryDisk()
    machine, writer = begin(disk, snapshot_every=1)
    log_event(writer, events[0], machine.handle_event(events[0]))
    writer.commit()
    disk.fail_at = disk.calls + 1
    with pytest.raises(DiskError, match="create"):
        writer.snapshot_if_due(machine.state, InlineBackground())
    for call in (
        lambda: writer.snapshot_if_due(machine.state, InlineBackground()),
        writer.commit,
        writer.flush,
    ):
        with pytest.raises(DiskError, match="an earlier write"):
            call()


def test_a_snapshot_commits_what_it_describes(events: list[Stamped]) -> None:
    disk = MemoryDisk()
    machine, writer = begin(disk, snapshot_every=1)
    log_event(writer, events[0], machine.handle_event(events[0]))
    writer.snapshot_if_due(machine.state, InlineBackground())
    restored = restore_log(disk.crash(keep_unsynced=False))
    assert restored.snapshot is not None and restored.snapshot.seq == 1
    assert restored.tail.end == restored.snapshot.position


def test_two_that_write_one_snapshot_do_not_mix(events: list[Stamped]) -> None:
    disk = MemoryDisk()
    machine, writer = begin(disk, snapshot_every=1)
    log_event(writer, events[0], machine.handle_event(events[0]))
    disk.create_file("snapshot-000000000001.bin.tmp")
    with pytest.raises(DiskError, match="another coordinator of this run is writing it"):
        writer.snapshot_if_due(machine.state, InlineBackground())


def test_what_a_coordinator_owed_is_written_by_the_next(events: list[Stamped]) -> None:
    """Killed behind an event and the first of its decisions; and the next one, too, before it had
    written the others."""
    owed = next(event for event in events if event.seq > 10 and commands_of(events, event) > 2)
    disk = MemoryDisk()
    machine, writer = begin(disk)
    for event in events[: owed.seq - 1]:
        log_event(writer, event, machine.handle_event(event))
    commands = machine.handle_event(owed)
    log_event(writer, owed, commands[:1])
    writer.commit()
    unlogged = restore_log(disk).replay.unlogged
    assert [record.index for record in unlogged] == list(range(1, len(commands)))
    begin_log(disk)
    assert restore_log(disk).replay.unlogged == unlogged
    begin(disk)
    assert restore_log(disk).replay.unlogged == []
    tail = [record for _, record in read_log(disk)][-len(unlogged) :]
    assert tail == unlogged


def commands_of(events: list[Stamped], last: Stamped) -> int:
    machine = StateMachine()
    return [len(machine.handle_event(event)) for event in events[: last.seq]][-1]
