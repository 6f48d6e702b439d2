"""Reads the log back: all of its history, nothing else, and a refusal where that is impossible.

Reads   segment files through ports.Disk, one whole segment at a time
Gives   records with their positions; LogTail, where a new writer goes on; LogCorrupt

The history is a chain: the newest segment with a valid header names the segment and offset that
it took over, that one names another, down to the first. Bytes behind a takeover were written by a
coordinator that had been replaced. At the end of the newest segment an unfinished write is normal
after a crash, and is left as it is. Damage looks like it, except that intact frames follow: so a
bad frame is torn only if no frame after it continues its chain. A damaged last frame cannot be
told from a torn one here; peers that were acked beyond the end can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec

from laminar.eventlog.record import (
    FRAME,
    MAX_HEADER_BYTES,
    SCHEMA_VERSION,
    DecisionRecord,
    EventRecord,
    Frames,
    Header,
    LogTail,
    Position,
    Record,
    StateHashRecord,
    Takeover,
    segment_name,
    segment_numbers,
)
from laminar.ports import Disk

_T = TypeVar("_T")
_OPENING_BYTES = FRAME.size + MAX_HEADER_BYTES
#: UnicodeDecodeError and msgpack's errors are ValueErrors; deep nesting ends in RecursionError.
_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class _Opening(msgspec.Struct, tag_field="kind", tag="header", frozen=True):
    """What a header says in every schema: enough to check and follow the chain."""

    schema: int
    segment: int
    takes_over: Takeover | None

    @property
    def seed(self) -> int:
        return self.takes_over.crc if self.takes_over else 0


class _Codec(NamedTuple, Generic[_T]):
    """How bodies become records."""

    schema: int | None  #: the only one accepted; None accepts any
    header: Callable[[bytes], _T]
    record: Callable[[bytes], _T]


_opening = msgspec.msgpack.Decoder(_Opening)
_later = msgspec.msgpack.Decoder(EventRecord | DecisionRecord | StateHashRecord)
_TYPED: _Codec[Record] = _Codec(
    SCHEMA_VERSION, msgspec.msgpack.Decoder(Header).decode, _later.decode
)


def _unpack(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
    return value


_RAW: _Codec[dict[str, Any]] = _Codec(None, _unpack, _unpack)


def read_log(disk: Disk, tail: LogTail | None = None) -> Iterator[tuple[Position, Record]]:
    """Every record of the history in order; LogCorrupt at the first that cannot be trusted.

    With a `tail` from an earlier scan it ends exactly there, whatever was written since.
    """
    return iter(_History(disk, _TYPED, tail))


def read_raw(disk: Disk) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(segment, offset, plain map) of every record, also of schemas that came after this code."""
    for position, body in _History(disk, _RAW):
        yield position.segment, position.offset, body


def scan(disk: Disk) -> LogTail:
    """Check the whole log and find its end; an empty directory is an empty history."""
    history = _History(disk, _TYPED)
    last_seq = None
    for _, record in history:
        if isinstance(record, EventRecord):
            last_seq = record.seq
    return LogTail(history.end, history.newest, last_seq, history.torn_bytes)


def _first(disk: Disk, number: int) -> tuple[Frames, _Opening | None]:
    """A cursor at the start of a segment, and its opening, or None where that is not valid."""
    data = disk.read(segment_name(number), 0, _OPENING_BYTES + 1)
    try:
        opening = _opening.decode(_first_body(data))
    except _UNDECODABLE:
        return Frames(number, data, 0), None
    frames = Frames(number, data, opening.seed)
    return frames, opening if frames.valid_at(0, opening.seed) else None


def _first_body(data: bytes) -> bytes:
    if len(data) < FRAME.size:
        return b""
    return data[FRAME.size : FRAME.size + FRAME.unpack_from(data)[0]]


def _is_other_record(frames: Frames) -> bool:
    """True if a segment, instead of being damaged, begins with a record that is no header."""
    try:
        _later.decode(_first_body(frames.data))
    except _UNDECODABLE:
        return frames.valid_at(0, frames.crc)
    return True


class _Span(NamedTuple):
    """The part of a segment that is history."""

    segment: int
    seed: int  #: CRC that its chain starts from
    end: Takeover | None  #: None: as far as its frames are valid


class _History(Generic[_T]):
    """One pass over the log; the attributes are final once the iteration has ended."""

    def __init__(self, disk: Disk, codec: _Codec[_T], tail: LogTail | None = None) -> None:
        self._disk = disk
        self._codec = codec
        self._tail = tail
        self.end: Takeover | None = None
        self.newest = 0
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[tuple[Position, _T]]:
        for span in self._spans():
            size = span.end.offset if span.end else -1
            data = self._disk.read(segment_name(span.segment), 0, size)
            frames = Frames(span.segment, data, span.seed)
            yield from self._records(frames)
            self._close(frames, span.end)

    def _records(self, frames: Frames) -> Iterator[tuple[Position, _T]]:
        segment, decode = frames.segment, self._codec.header
        for offset, body in frames:
            try:
                record = decode(body)
            except _UNDECODABLE as error:
                raise frames.corrupt("a readable record", str(error)) from error
            yield Position(segment, offset), record
            decode = self._codec.record

    def _close(self, frames: Frames, end: Takeover | None) -> None:
        """Check that the history of a segment ends where its successor says, or is merely torn."""
        if end is None:
            if frames.continued():
                raise frames.fault()
            self.torn_bytes += frames.remaining()
        elif len(frames.data) < end.offset:
            raise frames.corrupt(f"{end.offset} bytes before the takeover", f"{len(frames.data)}")
        elif frames.offset != end.offset:
            raise frames.fault()
        elif frames.crc != end.crc:
            raise frames.corrupt(f"CRC {end.crc:#010x} at the takeover", f"{frames.crc:#010x}")
        self.end = Takeover(frames.segment, frames.offset, frames.crc)

    def _spans(self) -> list[_Span]:
        """The chain of takeovers, followed from the newest segment down, oldest first."""
        if self._tail is None:
            self.newest, end = self._newest(), None
            number = self._newest_opened()
        else:
            self.newest, end = self._tail.newest, self._tail.end
            number = end.segment if end else 0
        spans = []
        while number:
            opening = self._open(number)
            spans.append(_Span(number, opening.seed, end))
            end = opening.takes_over
            number = end.segment if end else 0
        return spans[::-1]

    def _newest(self) -> int:
        """How many segments there are; LogCorrupt when a number is missing."""
        numbers = segment_numbers(self._disk.names())
        for expected, number in enumerate(numbers, 1):
            if number != expected:
                raise Frames(expected, b"", 0).corrupt("the file", f"{segment_name(number)} next")
        return len(numbers)

    def _newest_opened(self) -> int:
        """The newest segment that is more than a torn opening; 0 for none.

        A coordinator that died between creating its segment and writing the header leaves a torn
        opening, and so may the next. Since a header is durable before anything follows it, a torn
        opening holds at most one.
        """
        for number in range(self.newest, 0, -1):
            frames, opening = _first(self._disk, number)
            too_long = len(frames.data) > _OPENING_BYTES
            if opening or too_long or frames.continued() or _is_other_record(frames):
                return number
            self.torn_bytes += len(frames.data)
        return 0

    def _open(self, number: int) -> _Opening:
        """The opening of a segment that belongs to the history; LogCorrupt if it cannot."""
        frames, opening = _first(self._disk, number)
        if opening is None:
            if _is_other_record(frames):
                raise frames.corrupt("a header first", "another record")
            raise frames.fault()
        if self._codec.schema not in (None, opening.schema):
            raise frames.corrupt(
                f"schema {self._codec.schema}", f"schema {opening.schema} of another release"
            )
        if opening.segment != number:
            raise frames.corrupt(f"the header of segment {number}", f"of {opening.segment}")
        if opening.takes_over and not 0 < opening.takes_over.segment < number:
            raise frames.corrupt("a takeover of an older segment", f"{opening.takes_over.segment}")
        return opening
