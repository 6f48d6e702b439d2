"""Every byte cut, every byte flipped, every disk call failed: found, or never there."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec
import pytest

from laminar.core.rules import LOGIC_VERSION
from laminar.eventlog.reader import read_log, read_raw_log, scan_log
from laminar.eventlog.record import (
    FRAME,
    KIND_KEY,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    SCHEMA_VERSION,
    SETTLED,
    DecisionRecord,
    EventRecord,
    LogCorrupt,
    LogTail,
    Record,
    SegmentHeader,
    StateHashRecord,
    Takeover,
    encode_frame,
    frame_end,
    segment_name,
)
from laminar.eventlog.writer import LogWriter
from laminar.names.ports import DiskError
from tools.kit.logs import begin_log
from tools.kit.memory_disk import MemoryDisk

FIRST, SECOND, THIRD = (segment_name(number) for number in (1, 2, 3))
RECORDS = 40


def payload(number: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode({"kind": "noted", "n": number}))


def record(number: int) -> Record:
    if number % 10 == 9:
        return StateHashRecord(number, f"{number:08x}")
    if number % 2:
        return DecisionRecord(number - 1, 0, payload(number))
    return EventRecord(number, number, "rollout-0", 1, number, payload(number))


def begin(disk: MemoryDisk) -> LogWriter:
    return begin_log(disk, segment_bytes=MAX_HEADER_BYTES)


def one_segment(count: int = RECORDS) -> tuple[bytes, list[Record]]:
    header = SegmentHeader(SCHEMA_VERSION, LOGIC_VERSION, 1, "r", 0, "0", 1, None)
    records = [header, *map(record, range(count))]
    data, crc = b"", 0
    for each in records:
        frame, crc = encode_frame(each, crc, settled=True)
        data += frame
    return data, records


def three_segments() -> dict[str, bytes]:
    """Rotated at 1 KiB, then taken over; the middle segment ends in bytes that are not history."""
    disk = MemoryDisk()
    writer = begin(disk)
    for number in range(RECORDS // 2):
        writer.append(record(number))
        writer.commit()
    assert disk.list_names() == [FIRST, SECOND]
    disk.files[SECOND] += b"torn tail"
    writer = begin(disk)
    for number in range(RECORDS // 2, RECORDS // 2 + 4):
        writer.append(record(number))
        writer.commit()
    return {name: disk.read(name) for name in disk.list_names()}


def starts(data: bytes) -> list[int]:
    """Where frames begin, and the end."""
    offsets = [0]
    while offsets[-1] < len(data):
        offsets.append(frame_end(data, offsets[-1]))
    return offsets


def read(disk: MemoryDisk) -> list[Record]:
    return [each for _, each in read_log(disk)]


def test_a_cut_at_every_byte_loses_what_it_cuts_and_nothing_else() -> None:
    data, records = one_segment()
    ends = starts(data)[1:]
    for cut in range(len(data) + 1):
        disk = MemoryDisk({FIRST: data[:cut]})
        whole = sum(end <= cut for end in ends)
        assert read(disk) == records[:whole], cut
        tail = scan_log(disk)
        end = ends[whole - 1] if whole else 0
        assert tail.torn_bytes == cut - end, cut
        assert (tail.end.offset if tail.end else 0) == end, cut
        seqs = [each.seq for each in records[:whole] if isinstance(each, EventRecord)]
        assert tail.last_seq == (seqs[-1] if seqs else None)


@pytest.mark.parametrize("flip", [*(1 << bit for bit in range(8)), 0xFF])
def test_a_flip_in_every_byte_is_corruption_or_tears_only_the_last_frame(flip: int) -> None:
    data, records = one_segment(14)
    last = starts(data)[-2]
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= flip
        disk = MemoryDisk({FIRST: bytes(damaged)})
        if at < last:
            with pytest.raises(LogCorrupt) as caught:
                scan_log(disk)
            assert caught.value.segment == 1
            assert caught.value.offset == max(start for start in starts(data) if start <= at)
        else:
            assert read(disk) == records[:-1], at
            assert scan_log(disk).torn_bytes == len(data) - last


def test_a_flip_in_the_header_is_corruption_though_one_unsettled_frame_follows() -> None:
    """That frame continues the chain of the header: from its stored CRC, or from the computed."""
    opening, crc = encode_frame(header(1, None), 0)
    data = opening + encode_frame(record(0), crc)[0]
    for at in range(len(opening)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        with pytest.raises(LogCorrupt) as caught:
            scan_log(MemoryDisk({FIRST: bytes(damaged)}))
        assert (caught.value.segment, caught.value.offset) == (1, 0), at


def test_a_flip_in_every_byte_of_forty_records_is_found_where_it_is() -> None:
    data, records = one_segment()
    offsets = starts(data)
    for at in range(offsets[-2]):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        found = []
        with pytest.raises(LogCorrupt) as caught:
            found.extend(each for _, each in read_log(MemoryDisk({FIRST: bytes(damaged)})))
        assert found == records[: len(found)]
        assert caught.value.offset == max(start for start in offsets if start <= at)


@pytest.mark.parametrize("name", [FIRST, SECOND, THIRD])
def test_a_flip_in_every_byte_of_a_chain_of_segments(name: str) -> None:
    files = three_segments()
    records = read(MemoryDisk(files))
    taken_at = scan_log(MemoryDisk({key: files[key] for key in (FIRST, SECOND)})).end
    assert taken_at is not None
    ends = {FIRST: len(files[FIRST]), SECOND: taken_at.offset, THIRD: starts(files[THIRD])[-2]}
    for at in range(len(files[name])):
        damaged = bytearray(files[name])
        damaged[at] ^= 1 << at % 8
        disk = MemoryDisk({**files, name: bytes(damaged)})
        if at < ends[name]:
            with pytest.raises(LogCorrupt) as caught:
                scan_log(disk)
            assert segment_name(caught.value.segment) == name
        else:
            assert read(disk) == (records if name == SECOND else records[:-1]), at


def test_a_cut_of_a_segment_that_was_taken_over_is_corruption() -> None:
    files = three_segments()
    for cut in range(len(files[FIRST])):
        with pytest.raises(LogCorrupt) as caught:
            scan_log(MemoryDisk({**files, FIRST: files[FIRST][:cut]}))
        assert caught.value.segment == 1


def test_a_mark_before_bytes_that_are_no_value_proves_nothing() -> None:
    """Behind a torn frame: they look like a marked frame, whose body ends in the middle."""
    data, records = one_segment()
    body = b"\x83" + KIND_KEY
    like = FRAME.pack(SETTLED | len(body), 0) + body
    disk = MemoryDisk({FIRST: data + b"torn tail" + like})
    assert read(disk) == records
    assert scan_log(disk).torn_bytes == len(b"torn tail" + like)


def test_zeros_are_no_records() -> None:
    data, records = one_segment()
    disk = MemoryDisk({FIRST: data + bytes(4096)})
    assert read(disk) == records
    assert scan_log(disk).torn_bytes == 4096
    assert scan_log(MemoryDisk({FIRST: bytes(512)})) == LogTail(None, 1, None, 512)


def test_a_segment_that_lost_its_header_is_not_taken_for_a_torn_opening() -> None:
    data, _ = one_segment()
    assert len(data) > FRAME.size + MAX_HEADER_BYTES
    with pytest.raises(LogCorrupt) as caught:
        scan_log(MemoryDisk({FIRST: bytes(512) + data[512:]}))
    assert (caught.value.segment, caught.value.offset) == (1, 0)


def test_swapped_records_break_the_chain() -> None:
    data, _ = one_segment()
    at = starts(data)
    swapped = data[: at[3]] + data[at[4] : at[5]] + data[at[3] : at[4]] + data[at[5] :]
    with pytest.raises(LogCorrupt) as caught:
        scan_log(MemoryDisk({FIRST: swapped}))
    assert caught.value.offset == at[3]


def test_a_record_that_is_left_out_breaks_the_chain() -> None:
    data, _ = one_segment()
    at = starts(data)
    with pytest.raises(LogCorrupt) as caught:
        scan_log(MemoryDisk({FIRST: data[: at[3]] + data[at[4] :]}))
    assert caught.value.offset == at[3]


def test_a_length_above_the_limit_is_not_followed() -> None:
    data, _ = one_segment()
    at = starts(data)[5]
    length = frame_end(data, at) - at - FRAME.size
    damaged = data[:at] + FRAME.pack(MAX_BODY_BYTES + length, 0)[:4] + data[at + 4 :]
    with pytest.raises(LogCorrupt, match=f"a body length of 1 to {MAX_BODY_BYTES}"):
        scan_log(MemoryDisk({FIRST: damaged}))


@pytest.mark.parametrize("length", [0, MAX_BODY_BYTES + 1])
def test_a_length_outside_the_limits_is_no_frame_even_with_the_right_crc(length: int) -> None:
    data, records = one_segment(3)
    end = scan_log(MemoryDisk({FIRST: data})).end
    assert end is not None
    body = bytes(length)
    disk = MemoryDisk({FIRST: data + FRAME.pack(length, zlib.crc32(body, end.crc)) + body})
    assert read(disk) == records
    assert scan_log(disk).torn_bytes == FRAME.size + length


def test_a_missing_segment_is_named() -> None:
    files = three_segments()
    for name, number in ((FIRST, 1), (SECOND, 2)):
        left = {key: data for key, data in files.items() if key != name}
        with pytest.raises(LogCorrupt, match=rf"{name} is corrupt.*expected the file") as caught:
            scan_log(MemoryDisk(left))
        assert caught.value.segment == number


def frames(*records: Record, crc: int = 0) -> bytes:
    data = b""
    for each in records:
        frame, crc = encode_frame(each, crc, settled=True)
        data += frame
    return data


def header(segment: int, takes_over: Takeover | None) -> SegmentHeader:
    return SegmentHeader(SCHEMA_VERSION, LOGIC_VERSION, 1, "r", 0, "0", segment, takes_over)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("crc", [0, 99])
def test_the_first_record_must_be_a_header(count: int, crc: int) -> None:
    data = frames(*map(record, range(count)), crc=crc)
    with pytest.raises(LogCorrupt, match="expected a header first, found another record"):
        scan_log(MemoryDisk({FIRST: data}))
    whole, _ = one_segment()
    with pytest.raises(LogCorrupt, match="expected a header first, found another record"):
        scan_log(MemoryDisk({FIRST: whole, SECOND: data}))


def test_a_first_record_of_an_unknown_kind_is_no_torn_header() -> None:
    body = msgspec.msgpack.encode({"kind": "surprise"})
    data = FRAME.pack(len(body), zlib.crc32(body)) + body
    with pytest.raises(LogCorrupt, match="expected a header first"):
        scan_log(MemoryDisk({FIRST: data}))


def test_a_header_within_a_segment_is_refused() -> None:
    data = frames(header(1, None), record(0), header(1, None))
    with pytest.raises(LogCorrupt, match=r"expected a readable record.*'header'") as caught:
        scan_log(MemoryDisk({FIRST: data}))
    assert caught.value.offset == starts(data)[2]


def test_a_field_that_we_do_not_know_is_refused() -> None:
    opening, crc = encode_frame(header(1, None), 0)
    body = msgspec.msgpack.encode({"kind": "state-hash", "seq": 1, "digest": "", "more": 1})
    data = opening + FRAME.pack(len(body), zlib.crc32(body, crc)) + body
    with pytest.raises(LogCorrupt, match="unknown field"):
        scan_log(MemoryDisk({FIRST: data}))
    assert [row[2]["kind"] for row in read_raw_log(MemoryDisk({FIRST: data}))] == [
        "header",
        "state-hash",
    ]


def chained(change: Callable[[Takeover], Takeover], segment: int = 2) -> MemoryDisk:
    data, _ = one_segment(5)
    end = scan_log(MemoryDisk({FIRST: data})).end
    assert end is not None
    takes_over = change(end)
    second = frames(header(segment, takes_over), record(5), crc=takes_over.crc)
    return MemoryDisk({FIRST: data, SECOND: second})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda end: Takeover(1, end.offset + 1, end.crc), "bytes before the takeover"),
        (lambda end: Takeover(1, end.offset - 1, end.crc), "expected a body of"),
        (lambda end: Takeover(1, end.offset, end.crc ^ 1), "at the takeover"),
        (lambda end: Takeover(2, end.offset, end.crc), "a takeover of an older segment"),
        (lambda end: Takeover(0, end.offset, end.crc), "a takeover of an older segment"),
    ],
)
def test_a_takeover_must_name_a_real_end(
    change: Callable[[Takeover], Takeover], message: str
) -> None:
    assert len(read(chained(lambda end: end))) == 8
    with pytest.raises(LogCorrupt, match=message):
        scan_log(chained(change))


def test_a_header_of_another_segment_is_refused() -> None:
    with pytest.raises(LogCorrupt, match="expected the header of segment 2, found of 3"):
        scan_log(chained(lambda end: end, segment=3))


def scenario(disk: MemoryDisk) -> tuple[list[int], list[int]]:
    """Two incarnations that rotate; (events committed, events appended) up to the DiskError."""
    committed: list[int] = []
    appended: list[int] = []
    try:
        for first in (0, 24):
            writer = begin(disk)
            for number in range(first, first + 24, 2):
                writer.append(record(number))
                appended.append(number)
                if number % 6 == 4:
                    writer.flush()
                else:
                    writer.commit()
                    committed[:] = appended
    except DiskError:
        pass
    return committed, appended


def events(disk: MemoryDisk) -> list[int]:
    return [each.seq for each in read(disk) if isinstance(each, EventRecord)]


def test_each_disk_call_failed_in_turn_loses_nothing_that_was_committed() -> None:
    whole = MemoryDisk()
    committed, appended = scenario(whole)
    assert committed == events(whole)[: len(committed)] and len(appended) == 24
    assert whole.calls > 40
    for fail_at in range(1, whole.calls + 1):
        broken = MemoryDisk(fail_at=fail_at)
        committed, appended = scenario(broken)
        assert broken.calls == fail_at, "a call was made after the one that failed"
        for keep_unsynced in (False, True):
            disk = broken.crash(keep_unsynced)
            found = events(disk)
            assert found[: len(committed)] == committed, fail_at
            assert found == appended[: len(found)], fail_at
            writer = begin(disk)
            writer.append(record(98))
            writer.commit()
            assert events(disk) == [*found, 98]


def test_a_failed_write_or_sync_is_never_tried_again() -> None:
    for nth in (1, 2):
        disk = MemoryDisk()
        writer = begin(disk)
        disk.fail_at = disk.calls + nth
        writer.append(record(0))
        with pytest.raises(DiskError):
            writer.commit()
        calls = disk.calls
        for call in (writer.commit, writer.flush):
            with pytest.raises(DiskError, match="end the process"):
                call()
        assert disk.calls == calls
