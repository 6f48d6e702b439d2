"""Old segments: compressed and removed behind the snapshots, and read as if they were not."""

from __future__ import annotations

import pytest

from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import hash_state
from laminar.eventlog import compaction, record
from laminar.eventlog.compaction import compact_segments, measure_segments, read_segment
from laminar.eventlog.reader import find_beginning, read_log, read_raw_log, scan_log
from laminar.eventlog.replay import replay_records
from laminar.eventlog.restore import restore_log, take_over_log
from laminar.eventlog.snapshot import read_snapshots
from laminar.names.ports import DiskError
from tools.kit.memory_disk import MemoryDisk
from tools.kit.sim_worlds import KILLED, LoggedRun


def world_of(keep_bytes: int = 0, **sizes: int) -> LoggedRun:
    run = LoggedRun(*KILLED, num_train=20, snapshot_every=30, **sizes)
    run.coordinator.keep_bytes = keep_bytes
    return run.run()


@pytest.fixture(scope="module")
def kept() -> LoggedRun:
    """Everything is kept; what is old is compressed."""
    return world_of(segment_bytes=record.MAX_HEADER_BYTES)


@pytest.fixture(scope="module")
def short() -> LoggedRun:
    """Little is kept."""
    return world_of(segment_bytes=2_048, keep_bytes=20_000)


def copy(disk: MemoryDisk) -> MemoryDisk:
    return MemoryDisk({name: bytes(data) for name, data in disk.files.items()})


def unpacked(disk: MemoryDisk) -> MemoryDisk:
    """The same log as it was before anything was compressed."""
    numbers = record.segment_numbers(disk.list_names())
    return MemoryDisk({record.segment_name(n): read_segment(disk, n) for n in numbers})


def compressed(disk: MemoryDisk) -> list[int]:
    names = disk.list_names()
    return [n for n in record.segment_numbers(names) if record.compressed_name(n) in names]


def test_compressed_segments_read_like_any_other(kept: LoggedRun) -> None:
    """All readers, and a replay from the beginning; in much less space."""
    disk, plain = kept.disk, unpacked(kept.disk)
    assert len(compressed(disk)) > 5
    assert not {record.segment_name(n) for n in compressed(disk)} & set(disk.list_names())
    assert list(read_log(disk)) == list(read_log(plain))
    assert list(read_raw_log(disk)) == list(read_raw_log(plain))
    assert scan_log(disk) == scan_log(plain)
    found = replay_records(disk)
    assert found.difference is None and found.events == kept.state.seq
    for number in compressed(disk):
        assert measure_segments(disk)[number] < measure_segments(plain)[number]


def test_only_what_lies_before_the_older_snapshot_is_touched(kept: LoggedRun) -> None:
    older = read_snapshots(kept.disk).usable[1]
    assert max(compressed(kept.disk)) < older.position.segment


def test_one_segment_at_a_time_is_compressed(kept: LoggedRun) -> None:
    disk = unpacked(kept.disk)
    for number in range(1, 5):
        compact_segments(disk, 5, 0)
        assert compressed(disk) == list(range(1, number + 1))
    compact_segments(disk, 5, 0)
    assert compressed(disk) == [1, 2, 3, 4]


def test_a_log_that_has_not_rotated_is_not_touched(kept: LoggedRun) -> None:
    disk = MemoryDisk(
        {record.segment_name(1): kept.disk.read(record.segment_name(scan_log(kept.disk).newest))}
    )
    before = copy(disk)
    compact_segments(disk, 1, 1)
    assert disk.files == before.files and disk.calls == 0


def test_while_both_forms_are_there_the_plain_one_counts(kept: LoggedRun) -> None:
    """Killed between the renaming and the removal; the next pass does it again."""
    disk = unpacked(kept.disk)
    disk.files[record.compressed_name(1)] = bytearray(b"half written")
    assert scan_log(disk) == scan_log(unpacked(kept.disk))
    assert measure_segments(disk)[1] == disk.get_size(record.segment_name(1)) + len(b"half written")
    compact_segments(disk, 2, 0)
    assert record.segment_name(1) not in disk.list_names()
    assert list(read_log(disk)) == list(read_log(kept.disk))


def test_the_original_stays_until_the_other_form_was_read_back(
    kept: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk gives back something else than was written."""
    disk = unpacked(kept.disk)
    other = disk.read(record.segment_name(2))
    monkeypatch.setattr(compaction, "_decompress_segment", lambda *_: other)
    with pytest.raises(DiskError, match="reads back differently"):
        compact_segments(disk, 2, 0)
    assert record.segment_name(1) in disk.list_names()


def test_a_flip_in_every_byte_of_a_compressed_segment_is_found_or_harmless(kept: LoggedRun) -> None:
    """Some bits of the format mean nothing; never is another content believed."""
    records = list(read_log(kept.disk))
    name = record.compressed_name(2)
    harmless = 0
    for at in range(kept.disk.get_size(name)):
        disk = copy(kept.disk)
        disk.files[name][at] ^= 1 << at % 8
        try:
            assert list(read_log(disk)) == records
            harmless += 1
        except record.LogCorrupt as error:
            assert error.segment == 2
    assert harmless < 10


def test_a_cut_of_a_compressed_segment_is_found(kept: LoggedRun) -> None:
    name = record.compressed_name(2)
    data = kept.disk.read(name)
    for cut in range(0, len(data) - 4):  # the last four bytes are a checksum of their own
        disk = copy(kept.disk)
        disk.files[name] = bytearray(data[:cut])
        with pytest.raises(record.LogCorrupt) as caught:
            scan_log(disk)
        assert caught.value.segment == 2


def test_old_segments_are_removed_and_the_run_goes_on(short: LoggedRun) -> None:
    """Kills included: the world compares every restored state with the one it had."""
    first = record.segment_numbers(short.disk.list_names())[0]
    older = read_snapshots(short.disk).usable[1]
    assert 1 < first <= older.position.segment
    restored = restore_log(short.disk)
    assert restored.snapshot is not None and restored.replay.difference is None
    assert hash_state(restored.replay.machine.state) == hash_state(short.state)


def test_what_is_removed_is_what_is_beyond_the_limit(kept: LoggedRun) -> None:
    disk = unpacked(kept.disk)
    before = measure_segments(disk)
    limit = sum(before.values()) - before[1] - 1
    compact_segments(disk, 10, limit)
    assert min(measure_segments(disk)) == 3, "one is too few, two are enough"
    assert compressed(disk) == [3]
    compact_segments(disk, 4, 1)
    assert min(measure_segments(disk)) == 4, "what a start needs stays, whatever the limit is"


def test_both_forms_of_a_segment_are_removed(kept: LoggedRun) -> None:
    disk = unpacked(kept.disk)
    disk.files[record.compressed_name(1)] = bytearray(b"half written")
    disk.durable[record.compressed_name(1)] = 0
    compact_segments(disk, 2, 1)
    assert record.segment_numbers(disk.list_names())[0] == 2


def test_a_log_without_its_beginning_is_read_from_where_it_is_asked_to(short: LoggedRun) -> None:
    with pytest.raises(record.LogCorrupt, match="expected the file, found events-"):
        scan_log(short.disk)
    start = find_beginning(short.disk)
    first = record.segment_numbers(short.disk.list_names())[0]
    assert start is not None and start.segment >= first and start.offset == 0
    position, header = next(read_log(short.disk, start=start))
    assert position == (start.segment, 0) and header.segment == start.segment
    assert [row[:2] for row in read_raw_log(short.disk, start)] == [
        tuple(place) for place, _ in read_log(short.disk, start=start)
    ]
    found = replay_records(short.disk, snapshot=read_snapshots(short.disk).usable[-1])
    assert hash_state(found.machine.state) == hash_state(short.state)


def test_the_beginning_of_a_whole_log_is_the_beginning(kept: LoggedRun) -> None:
    assert find_beginning(kept.disk) is None
    assert find_beginning(MemoryDisk()) is None


def start_on(disk: MemoryDisk) -> None:
    take_over_log(disk, restore_log(disk), logic=LOGIC_VERSION, run="r", seed=0, config_hash="")


def test_the_beginning_is_that_of_the_history() -> None:
    """The oldest file may be one that nobody took over."""
    disk = MemoryDisk()
    start_on(disk)
    disk.create_file(record.segment_name(2)).append(b"torn")
    start_on(disk)
    del disk.files[record.segment_name(1)]
    start = find_beginning(disk)
    assert start is not None and start.segment == 3
    assert [header.takes_over.crc for _, header in read_log(disk, start=start)] == [start.crc]
    del disk.files[record.segment_name(3)]
    assert find_beginning(disk) is None


def test_a_hole_is_refused_also_where_the_beginning_is_gone(short: LoggedRun) -> None:
    disk = copy(short.disk)
    start_on(disk)
    name = record.segment_name(scan_log(disk, read_snapshots(disk).usable[0].position).newest)
    start_on(disk)
    del disk.files[name]
    with pytest.raises(record.LogCorrupt, match=rf"{name} is corrupt.*expected the file"):
        restore_log(disk)


def test_without_beginning_and_snapshot_there_is_no_start(short: LoggedRun) -> None:
    """And nothing is touched; the message says what is missing and why nothing replaces it."""
    disk = copy(short.disk)
    newest, older = read_snapshots(disk).usable
    disk.files[newest.name][-1] ^= 1
    restored = restore_log(disk)
    assert restored.snapshot == older
    disk.files[older.name][-1] ^= 1
    before = copy(disk)
    with pytest.raises(record.LogCorrupt) as caught:
        restore_log(disk)
    assert caught.value.segment == 1
    assert f"{older.name}: it is damaged" in str(caught.value)
    for name in (newest.name, older.name):
        del disk.files[name], before.files[name]
    with pytest.raises(record.LogCorrupt, match="found neither"):
        restore_log(disk)
    assert disk.files == before.files


def test_snapshots_without_any_segment_are_a_lost_log(short: LoggedRun) -> None:
    """Not an empty one: nobody begins the run again on top of it."""
    files = {n: bytes(d) for n, d in short.disk.files.items() if n.startswith("snapshot")}
    with pytest.raises(record.LogCorrupt, match="or a snapshot that replaces it"):
        restore_log(MemoryDisk(files))


def test_an_observer_gets_the_most_that_is_left(short: LoggedRun) -> None:
    """It asks for events whose segments are gone."""
    newest, older = read_snapshots(short.disk).usable
    assert restore_log(short.disk, observe_from=1).snapshot == older
    assert restore_log(short.disk, observe_from=newest.seq).snapshot == older
    assert restore_log(short.disk).snapshot == newest


def test_a_start_removes_what_a_crash_left_unfinished() -> None:
    disk = MemoryDisk({"snapshot-000000000007.bin.tmp": b"x", "events-00000001.log.zst.tmp": b"y"})
    start_on(disk)
    assert disk.list_names() == [record.segment_name(1)]


def test_a_start_that_is_not_there_is_named() -> None:
    disk = MemoryDisk()
    start_on(disk)
    with pytest.raises(
        record.LogCorrupt, match=r"events-00000003.log is corrupt.*expected the file"
    ):
        disk.files[record.segment_name(5)] = bytearray()
        list(read_log(disk, start=record.Takeover(3, 0, 0)))
