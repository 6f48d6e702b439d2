"""Writing, rotation and takeovers: what is history and what is not."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.core.rules import LOGIC_VERSION
from laminar.eventlog import record as record_module
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
    Frames,
    LogOfOtherRelease,
    LogTail,
    Record,
    SegmentHeader,
    StateHashRecord,
    Takeover,
    encode_frame,
    frame_end,
    segment_name,
)
from laminar.eventlog.writer import LogTaken, LogWriter
from tools.kit.logs import begin_log
from tools.kit.memory_disk import MemoryDisk

FIRST, SECOND, THIRD = (segment_name(number) for number in (1, 2, 3))


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def event(seq: int, text: str = "payload") -> EventRecord:
    return EventRecord(seq, 1_000 * seq, "rollout-0", 3, seq, raw({"type": "noted", "text": text}))


def begin(disk: MemoryDisk, segment_bytes: int = 1 << 20) -> LogWriter:
    header = {"logic": LOGIC_VERSION, "run": "demo", "seed": 2**64 - 1, "config_hash": "00ff"}
    return begin_log(disk, **header, segment_bytes=segment_bytes)


def write(writer: LogWriter, *seqs: int) -> None:
    for seq in seqs:
        writer.append(event(seq))
    writer.commit()


def history(disk: MemoryDisk) -> list[Record]:
    return [record for _, record in read_log(disk)]


def seqs(disk: MemoryDisk) -> list[int]:
    return [record.seq for record in history(disk) if isinstance(record, EventRecord)]


def headers(disk: MemoryDisk) -> list[SegmentHeader]:
    return [record for record in history(disk) if isinstance(record, SegmentHeader)]


def test_an_empty_directory_is_an_empty_history() -> None:
    disk = MemoryDisk({"snapshot-00000001": b"not ours", "events-1.log": b"not ours either"})
    assert history(disk) == []
    assert scan_log(disk) == LogTail(None, 0, None, 0)


def test_begin_makes_its_header_durable() -> None:
    disk = MemoryDisk()
    begin(disk)
    expected = SegmentHeader(SCHEMA_VERSION, LOGIC_VERSION, 1, "demo", 2**64 - 1, "00ff", 1, None)
    assert history(disk.crash(keep_unsynced=False)) == [expected]


def test_the_frame_is_little_endian_length_chained_crc_and_a_plain_map() -> None:
    body = bytes([0x83]) + b"\xa4kind\xaastate-hash\xa3seq\x05\xa6digest\xa2ab"
    frame, crc = encode_frame(StateHashRecord(5, "ab"), 0x01020304)
    assert frame == FRAME.pack(len(body), crc) + body
    assert frame[:4] == bytes([len(body), 0, 0, 0])
    assert crc == record_module.zlib.crc32(body, 0x01020304)


@pytest.mark.parametrize(
    "record",
    [
        SegmentHeader(1, 1, 1, "r", 0, "", 2, Takeover(1, 2, 3)),
        event(1),
        DecisionRecord(1, 0, raw({})),
        StateHashRecord(1, ""),
    ],
)
def test_the_search_for_frames_relies_on_how_every_body_begins(record: Record) -> None:
    frame, _ = encode_frame(record, 0)
    assert frame[FRAME.size + 1 :].startswith(KIND_KEY)


def test_commit_is_one_append_and_one_sync_and_flush_no_sync() -> None:
    disk = MemoryDisk()
    writer = begin(disk)
    before = disk.calls
    write(writer, 1, 2, 3)
    assert disk.calls == before + 2
    writer.append(event(4))
    writer.flush()
    assert disk.calls == before + 3
    assert seqs(disk) == [1, 2, 3, 4]
    assert seqs(disk.crash(keep_unsynced=False)) == [1, 2, 3]
    writer.commit()
    assert disk.calls == before + 4
    assert seqs(disk.crash(keep_unsynced=False)) == [1, 2, 3, 4]
    writer.commit()
    assert disk.calls == before + 4


def test_rotation_goes_on_in_a_new_segment_without_a_gap() -> None:
    disk = MemoryDisk()
    writer = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    for seq in range(1, 61):
        write(writer, seq)
    assert seqs(disk.crash(keep_unsynced=False)) == list(range(1, 61))
    assert len(disk.list_names()) > 4
    assert [header.segment for header in headers(disk)] == list(
        range(1, len(disk.list_names()) + 1)
    )
    assert {header.incarnation for header in headers(disk)} == {1}
    for name in disk.list_names()[:-1]:
        assert MAX_HEADER_BYTES < disk.get_size(name) < MAX_HEADER_BYTES + 200
    tail = scan_log(disk)
    assert (tail.last_seq, tail.torn_bytes, tail.newest) == (60, 0, len(disk.list_names()))


def test_rotation_makes_the_new_header_durable_before_anything_follows() -> None:
    disk = MemoryDisk()
    writer = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    while disk.list_names() == [FIRST]:
        write(writer, 1)
    assert 0 < disk.durable[SECOND] == disk.get_size(SECOND)


def test_positions_name_where_records_begin() -> None:
    disk = MemoryDisk()
    writer = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    for seq in range(1, 21):
        write(writer, seq)
    for (segment, offset), record in read_log(disk):
        data = disk.read(segment_name(segment))
        body = data[offset + FRAME.size : frame_end(data, offset)]
        assert body == msgspec.msgpack.encode(record)


def test_the_first_frame_of_each_write_after_a_sync_is_settled() -> None:
    """And it alone: what is flushed, and what follows it, may be lost together."""
    disk = MemoryDisk()
    writer = begin(disk)
    write(writer, 1, 2)
    write(writer, 3)
    writer.append(event(4))
    writer.flush()
    write(writer, 5)
    write(writer, 6)
    data = disk.read(FIRST)
    offsets = [position.offset for position, _ in read_log(disk)]
    marked = [number for number, at in enumerate(offsets) if FRAME.unpack_from(data, at)[0] >> 31]
    assert marked == [0, 1, 3, 4, 6]


def test_the_mark_is_part_of_the_crc() -> None:
    (plain, crc), (marked, other) = (
        encode_frame(event(1), 7, settled=settled) for settled in (False, True)
    )
    assert plain[FRAME.size :] == marked[FRAME.size :] and crc != other
    assert FRAME.unpack_from(marked)[0] == FRAME.unpack_from(plain)[0] | SETTLED
    for frame in (plain, marked):
        assert Frames(1, frame, 7).is_valid_at(0, 7)
        changed = bytearray(frame)
        changed[3] ^= 0x80
        assert not Frames(1, bytes(changed), 7).is_valid_at(0, 7)


def test_a_takeover_leaves_the_torn_tail_and_ignores_it() -> None:
    disk = MemoryDisk()
    write(begin(disk), 1, 2)
    end = disk.get_size(FIRST)
    disk.files[FIRST] += encode_frame(event(3), 0)[0][:-1]
    torn = disk.read(FIRST)
    tail = scan_log(disk)
    assert tail.torn_bytes == len(torn) - end
    assert tail.end is not None and tail.end.offset == end

    write(begin(disk), 3)

    assert disk.read(FIRST) == torn
    assert headers(disk)[1].takes_over == tail.end
    assert seqs(disk) == [1, 2, 3]
    assert scan_log(disk).torn_bytes == 0


def test_a_replaced_writer_is_refused_and_its_later_bytes_are_not_history() -> None:
    disk = MemoryDisk()
    old = begin(disk)
    write(old, 1)
    new = begin(disk)
    old.append(event(2, "zombie"))
    with pytest.raises(LogTaken, match="events-00000001"):
        old.commit()
    assert b"zombie" in disk.read(FIRST)
    write(new, 2)
    assert [type(record) for record in history(disk)] == [SegmentHeader, EventRecord] * 2
    assert seqs(disk) == [1, 2]
    assert b"zombie" not in b"".join(bytes(getattr(r, "event", b"")) for r in history(disk))


def test_a_replaced_writer_cannot_rotate() -> None:
    disk = MemoryDisk()
    old = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    old.append(event(1, "x" * 2 * MAX_HEADER_BYTES))
    names = disk.list_names
    disk.list_names = lambda: [
        FIRST
    ]  # the successor's file appears just after the old writer looked
    disk.files[SECOND] = bytearray()
    with pytest.raises(LogTaken):
        old.commit()
    disk.list_names = names
    assert disk.read(SECOND) == b""


def test_no_call_is_tried_again_after_a_takeover() -> None:
    disk = MemoryDisk()
    old = begin(disk)
    begin(disk)
    with pytest.raises(LogTaken):
        write(old, 1)
    before = disk.calls
    with pytest.raises(OSError, match="an earlier write"):
        old.commit()
    with pytest.raises(OSError, match="an earlier write"):
        old.flush()
    assert disk.calls == before


def test_two_that_start_at_once_collide_on_the_segment() -> None:
    disk = MemoryDisk()
    write(begin(disk), 1)
    tail = scan_log(disk)
    begin(disk)
    with pytest.raises(LogTaken, match="another coordinator"):
        begin_log(disk, tail)
    assert seqs(disk) == [1]


def test_a_log_that_grew_since_the_scan_is_not_taken_over() -> None:
    disk = MemoryDisk()
    old = begin(disk)
    tail = scan_log(disk)
    write(old, 1)
    with pytest.raises(LogTaken, match="grew"):
        begin_log(disk, tail)
    with pytest.raises(LogTaken):
        write(old, 2)
    begin(disk)
    assert seqs(disk) == [1, 2]


def test_two_takeovers_in_a_row_after_crashes_before_the_header() -> None:
    disk = MemoryDisk()
    write(begin(disk), 1)
    disk.create_file(SECOND)
    disk.create_file(THIRD).append(b"\x40\x00\x00")
    tail = scan_log(disk)
    assert (tail.newest, tail.torn_bytes, tail.last_seq) == (3, 3, 1)
    write(begin(disk), 2)
    assert seqs(disk) == [1, 2]
    takes_over = headers(disk)[1].takes_over
    assert takes_over is not None and takes_over.segment == 1
    write(begin(disk), 3)
    assert seqs(disk) == [1, 2, 3]


def test_a_segment_that_was_passed_over_stays_out_even_if_it_is_written_later() -> None:
    disk = MemoryDisk()
    write(begin(disk), 1)
    tail = scan_log(disk)
    sleeper = MemoryDisk({FIRST: disk.read(FIRST)})
    write(begin_log(sleeper, tail), 2, 3, 4)
    disk.files[SECOND] = bytearray()
    write(begin(disk), 2)
    disk.files[SECOND] += sleeper.read(SECOND)
    assert seqs(disk) == [1, 2]


def test_a_header_that_was_never_written_leaves_an_empty_history_with_its_number_taken() -> None:
    disk = MemoryDisk({FIRST: b"\x01\x02"})
    assert scan_log(disk) == LogTail(None, 1, None, 2)
    write(begin(disk), 1)
    assert disk.list_names() == [FIRST, SECOND]
    assert seqs(disk) == [1]


def test_reading_up_to_a_tail_ignores_what_came_later() -> None:
    disk = MemoryDisk()
    writer = begin(disk)
    write(writer, 1)
    tail = scan_log(disk)
    write(writer, 2)
    begin(disk)
    assert [record for _, record in read_log(disk, tail)] == history(disk)[:2]
    assert list(read_log(disk, LogTail(None, 0, None, 0))) == []


def test_raw_reading_needs_none_of_our_types() -> None:
    disk = MemoryDisk()
    writer = begin(disk)
    writer.append(event(1))
    writer.append(DecisionRecord(1, 0, raw([1, None])))
    writer.commit()
    rows = list(read_raw_log(disk))
    assert [row[2] for row in rows] == [
        msgpack.unpackb(msgspec.msgpack.encode(record)) for record in history(disk)
    ]
    assert [row[:2] for row in rows] == [tuple(position) for position, _ in read_log(disk)]
    assert rows[1][2]["event"] == {"type": "noted", "text": "payload"}


def newer_schema() -> MemoryDisk:
    fields = {
        "kind": "header",
        "schema": 99,
        "logic": 1,
        "segment": 1,
        "takes_over": None,
        "novel": [1],
    }
    bodies = [msgpack.packb(fields), msgpack.packb({"kind": "surprise", "n": 1})]
    data, crc = b"", 0
    for body in bodies:
        crc = record_module.zlib.crc32(body, crc)
        data += FRAME.pack(len(body), crc) + body
    return MemoryDisk({FIRST: data})


def test_a_newer_schema_is_refused_by_name_but_can_be_dumped() -> None:
    with pytest.raises(LogOfOtherRelease, match="schema 99, logic version 1; this program has"):
        history(newer_schema())
    assert [row[2]["kind"] for row in read_raw_log(newer_schema())] == ["header", "surprise"]


def test_a_record_above_the_limit_is_refused_and_not_buffered() -> None:
    disk = MemoryDisk()
    writer = begin(disk)
    with pytest.raises(ValueError, match="above the log's limit"):
        writer.append(event(1, "x" * MAX_BODY_BYTES))
    write(writer, 1)
    assert seqs(disk) == [1]
    with pytest.raises(ValueError, match="shorten the run name"):
        begin_log(MemoryDisk(), run="x" * MAX_HEADER_BYTES)
    with pytest.raises(ValueError, match="segment_bytes is 10"):
        begin(MemoryDisk(), segment_bytes=10)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
counts = st.integers(0, 2**64 - 1)
records = st.one_of(
    st.builds(EventRecord, counts, counts, st.text(), counts, counts, values.map(raw)),
    st.builds(DecisionRecord, counts, counts, values.map(raw)),
    st.builds(StateHashRecord, counts, st.text()),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(records, st.sampled_from(["", "flush", "commit", "restart"]))))
def test_round_trip(steps: list[tuple[Record, str]]) -> None:
    disk = MemoryDisk()
    writer = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    for record, after in steps:
        writer.append(record)
        if after == "flush":
            writer.flush()
        elif after:
            writer.commit()
        if after == "restart":
            writer = begin(disk, segment_bytes=MAX_HEADER_BYTES)
    writer.commit()
    found = [record for record in history(disk) if not isinstance(record, SegmentHeader)]
    assert found == [record for record, _ in steps]
    assert scan_log(disk).torn_bytes == 0
