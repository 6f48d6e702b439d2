"""Reads the log back: its complete history, or a refusal.

Reads   segments through ports.Disk, one at a time and as a whole, compressed or not
Gives   History, records and their positions; LogTail, where a new writer continues
Raises  LogCorrupt; LogOfOtherRelease (not `read_raw_log`); NotInHistory, before the first record,
        for a start that is not on the chain

The history is a chain: the newest segment with a valid header names the segment and offset that it
took over, that one names another, down to the first. Bytes behind a takeover were written by a
coordinator that had been replaced. At the end of the newest segment an unfinished write is normal
after a crash, and is left as it is: whole frames may follow its first hole. Damage looks the same,
except that a frame follows that was written after a sync (`Frames.is_continued`). A damaged last
write cannot be told from a torn one here; peers that were acked beyond the end can tell.

Reading may start at the position of a snapshot. Older segments are then not read, and need not
exist; the segment of the start does, so its chain proves the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec

from laminar.core.rules import is_known_logic
from laminar.eventlog.compaction import read_segment
from laminar.eventlog.record import (
    FRAME,
    MAX_HEADER_BYTES,
    SCHEMA_VERSION,
    EventRecord,
    Frames,
    LaterRecord,
    LogOfOtherRelease,
    LogTail,
    Position,
    Record,
    SegmentHeader,
    Takeover,
    frame_end,
    segment_name,
    segment_numbers,
)
from laminar.events.families import BAD_BYTES
from laminar.names.ports import Disk

_T = TypeVar("_T")
_OPENING_BYTES = FRAME.size + MAX_HEADER_BYTES


class _Opening(msgspec.Struct, tag_field="kind", tag="header", frozen=True):
    """The header fields of every schema: enough to check and follow the chain."""

    schema: int
    logic: int
    segment: int
    takes_over: Takeover | None

    @property
    def seed(self) -> int:
        return self.takes_over.crc if self.takes_over else 0


class NotInHistory(Exception):
    """The log is intact, but the requested part does not belong to its history."""


class _Decoders(NamedTuple, Generic[_T]):
    """Decoders from the bodies of a segment to records."""

    header: Callable[[bytes], _T]
    later: Callable[[bytes], _T]
    any_release: bool  #: whether they decode the records of every release


_opening = msgspec.msgpack.Decoder(_Opening)
_TYPED: _Decoders[Record] = _Decoders(
    msgspec.msgpack.Decoder(SegmentHeader).decode,
    msgspec.msgpack.Decoder(LaterRecord).decode,
    False,
)


def _unpack_body(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    return value


_RAW: _Decoders[dict[str, Any]] = _Decoders(_unpack_body, _unpack_body, True)


def read_log(
    disk: Disk, tail: LogTail | None = None, start: Takeover | None = None
) -> Iterator[tuple[Position, Record]]:
    """Yield every record of the history in order; raise LogCorrupt at the first invalid one.

    With a `tail` from an earlier scan it ends exactly there, ignoring later records. With a `start`
    it begins exactly there."""
    history = open_history(disk, tail, start)
    for record in history:
        yield history.position, record


def open_history(
    disk: Disk, tail: LogTail | None = None, start: Takeover | None = None
) -> History[Record]:
    """Return the history as an iterator that knows its position, and its tail at the end."""
    return History(disk, _TYPED, tail, start)


def read_raw_log(
    disk: Disk, start: Takeover | None = None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (segment, offset, plain map) of every record, also of another release."""
    history = History(disk, _RAW, start=start)
    for body in history:
        yield *history.position, body


def find_beginning(disk: Disk) -> Takeover | None:
    """Return the beginning of the oldest existing segment; None: nothing is removed."""
    numbers = segment_numbers(disk.list_names())
    if numbers[:1] in ([], [1]):
        return None
    chain = History(disk, _RAW, start=Takeover(numbers[0], 0, 0)).follow_chain()
    return Takeover(chain[0].segment, 0, chain[0].seed) if chain else None


def scan_log(disk: Disk, start: Takeover | None = None) -> LogTail:
    """Check the log (from `start`) and find its end; an empty directory is an empty history."""
    history = open_history(disk, start=start)
    last_seq = None
    for record in history:
        if isinstance(record, EventRecord):
            last_seq = record.seq
    return history.get_tail(last_seq)


def _read_opening(disk: Disk, number: int) -> tuple[Frames, _Opening | None]:
    """Return a cursor at the start of a segment, and its opening, or None if it is invalid."""
    data = read_segment(disk, number, _OPENING_BYTES + 1)
    try:
        opening = _opening.decode(_first_body(data))
    except BAD_BYTES:
        return Frames(number, data, 0), None
    frames = Frames(number, data, opening.seed)
    return frames, opening if frames.is_valid_at(0, opening.seed) else None


def _first_body(data: bytes) -> bytes:
    if len(data) < FRAME.size:
        return b""
    return data[FRAME.size : frame_end(data, 0)]


def _is_other_record(frames: Frames) -> bool:
    """Return whether a segment, instead of being damaged, begins with a non-header record."""
    try:
        _TYPED.later(_first_body(frames.data))
    except BAD_BYTES:
        return frames.is_valid_at(0, frames.crc)
    return True


class _Span(NamedTuple):
    """The part of a segment that belongs to the history."""

    segment: int
    schema: int
    logic: int
    seed: int  #: CRC at the start of its chain
    end: Takeover | None  #: None: up to the last valid frame

    def has_place(self, place: Takeover) -> bool:
        return place.segment == self.segment and (not self.end or place.offset <= self.end.offset)


def _is_readable(span: _Span) -> bool:
    return span.schema == SCHEMA_VERSION and is_known_logic(span.logic)


class History(Generic[_T]):
    """An iteration over the log."""

    def __init__(
        self,
        disk: Disk,
        decoders: _Decoders[_T],
        tail: LogTail | None = None,
        start: Takeover | None = None,
    ) -> None:
        self._disk = disk
        self._decoders = decoders
        self._tail = tail
        self._start = start
        self._oldest = start.segment if start else 1  #: number of the first segment to read
        self._frames = Frames(self._oldest, b"", 0)  #: frames of the present segment
        self._end: Takeover | None = None
        self._newest = 0
        self._torn_bytes = 0

    @property
    def position(self) -> Position:
        """The position of the last record of the iteration."""
        return Position(self._frames.segment, self._frames.offset)

    @property
    def place(self) -> Takeover:
        """The place before the last record of the iteration."""
        return Takeover(self._frames.segment, self._frames.offset, self._frames.crc)

    def get_tail(self, last_seq: int | None) -> LogTail:
        """Return the end of the history after iteration; `last_seq` is that of its last event."""
        return LogTail(self._end, self._newest, last_seq, self._torn_bytes)

    def __iter__(self) -> Iterator[_T]:
        chain = self.follow_chain()
        if self._start and not (chain and chain[0].has_place(self._start)):
            raise NotInHistory("the history does not contain it")
        for span in chain:
            size = span.end.offset if span.end else -1
            if not (self._decoders.any_release or _is_readable(span)):
                raise LogOfOtherRelease(span.segment, span.schema, span.logic)
            data = read_segment(self._disk, span.segment, size)
            self._frames = frames = Frames(span.segment, data, span.seed)
            if self._start and self._start.segment == span.segment:
                self._skip_to_start(frames, self._start)
            yield from self._iter_records(frames)
            self._check_segment_end(frames, span.end)

    def _skip_to_start(self, frames: Frames, start: Takeover) -> None:
        frames.skip_to(start.offset)
        if (frames.offset, frames.crc) != (start.offset, start.crc):
            raise NotInHistory(f"the history differs at {start.segment}:{start.offset}")

    def _iter_records(self, frames: Frames) -> Iterator[_T]:
        decoders = self._decoders
        decode = decoders.later if frames.offset else decoders.header
        for body in frames:
            try:
                record = decode(body)
            except BAD_BYTES as error:
                raise frames.make_corrupt_error("a readable record", str(error)) from error
            yield record
            decode = decoders.later

    def _check_segment_end(self, frames: Frames, end: Takeover | None) -> None:
        """Check that a segment's history ends where its successor says, or is merely torn."""
        if end is None:
            if frames.is_continued():
                raise frames.make_fault_error()
            self._torn_bytes += frames.count_remaining()
        elif len(frames.data) < end.offset:
            raise frames.make_corrupt_error(
                f"{end.offset} bytes before the takeover", f"{len(frames.data)}"
            )
        elif frames.offset != end.offset:
            raise frames.make_fault_error()
        elif frames.crc != end.crc:
            raise frames.make_corrupt_error(
                f"CRC {end.crc:#010x} at the takeover", f"{frames.crc:#010x}"
            )
        self._end = Takeover(frames.segment, frames.offset, frames.crc)

    def follow_chain(self) -> list[_Span]:
        """Return the spans of the history from the start to the newest segment."""
        if self._tail is None:
            self._newest, end = self._find_highest(), None
            number = self._newest_opened()
        else:
            self._newest, end = self._tail.newest, self._tail.end
            number = end.segment if end else 0
        spans = []
        while number >= self._oldest:
            opening = self._require_opening(number)
            spans.append(_Span(number, opening.schema, opening.logic, opening.seed, end))
            end = opening.takes_over
            number = end.segment if end else 0
        return spans[::-1]

    def _find_highest(self) -> int:
        """Return the highest segment number; raise LogCorrupt if one is missing before it."""
        numbers = [n for n in segment_numbers(self._disk.list_names()) if n >= self._oldest]
        for expected, number in enumerate(numbers, self._oldest):
            if number != expected:
                raise Frames(expected, b"", 0).make_corrupt_error(
                    "the file", f"{segment_name(number)} next"
                )
        return numbers[-1] if numbers else 0

    def _newest_opened(self) -> int:
        """Return the newest segment that is more than a torn opening; 0 for none.

        A coordinator that died between creating its segment and writing the header leaves a torn
        opening, and so may the next. Since a header is durable before anything follows it, a torn
        opening holds at most one."""
        for number in range(self._newest, self._oldest - 1, -1):
            frames, opening = _read_opening(self._disk, number)
            too_long = len(frames.data) > _OPENING_BYTES
            if opening or too_long or frames.is_continued() or _is_other_record(frames):
                return number
            self._torn_bytes += len(frames.data)
        return 0

    def _require_opening(self, number: int) -> _Opening:
        """Return the opening of a segment of the history; raise LogCorrupt if it is invalid."""
        frames, opening = _read_opening(self._disk, number)
        if opening is None:
            if _is_other_record(frames):
                raise frames.make_corrupt_error("a header first", "another record")
            raise frames.make_fault_error()
        if opening.segment != number:
            raise frames.make_corrupt_error(
                f"the header of segment {number}", f"of {opening.segment}"
            )
        if opening.takes_over and not 0 < opening.takes_over.segment < number:
            raise frames.make_corrupt_error(
                "a takeover of an older segment", f"{opening.takes_over.segment}"
            )
        return opening
