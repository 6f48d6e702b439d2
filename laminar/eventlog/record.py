"""Log records, and their layout in a segment file.

Frame   u32 length | u32 CRC32 | body      little-endian; the body is a MessagePack map with "kind"
Mark    bit 31 of the length, SETTLED: all bytes before the frame were durable when it was written
Kinds   header (first in every segment), event, decision, state-hash

The CRC is chained: it covers every body of the segment up to and including its own, and starts
from the CRC at which the segment before was taken over. So a record that was lost, swapped or
brought in from another file breaks the chain, not only one whose bits changed.

The mark tells damage from an unfinished write. A crash may keep any sectors of unsynced data, so
intact frames behind a bad one prove nothing; a marked one does, since it was written after the bad
one had become durable. The first frame of each write that follows a sync has it, and each header,
too. The keys `kind`, `schema`, `logic`, `segment` and `takes_over` of a header keep their meaning
in every schema, which lets any version check and dump the frames of any other.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from laminar.core.rules import LOGIC_VERSION
from laminar.events.base import Stamped
from laminar.events.families import BAD_BYTES, Item

SCHEMA_VERSION = 6  #: the form of records, and of the hashed state; other forms are refused

#: Longest body: a length above this is damage, so a flipped bit cannot ask for gigabytes. Control
#: messages end at 15 MiB; the largest record holds one of them, or the resolved configuration.
MAX_BODY_BYTES = 16 << 20
#: Longest header: run name, hash and a few integers. The limit also tells a torn opening, which
#: holds at most one header, from a segment that lost its header.
MAX_HEADER_BYTES = 1024
#: Size of a segment, which is read as a whole: a bound on a reader's memory.
SEGMENT_BYTES = 64 << 20

FRAME = struct.Struct("<II")  #: body length in bytes (and SETTLED), chained CRC32
SETTLED = 1 << 31  #: the mark, part of the CRC (`seed_crc`)
#: First key of every body, which has fewer than 16 keys: one marker byte comes before it.
KIND_KEY = b"\xa4kind"

_SEGMENT_NAME = re.compile(r"events-(\d{8,})\.log(?:\.zst)?")


class Position(NamedTuple):
    """The beginning of a record."""

    segment: int  #: running number, from 1
    offset: int  #: bytes from the start of the segment file


class Takeover(Item, frozen=True):
    """The end of the history before a segment; later bytes, and segments between, are excluded."""

    segment: int
    offset: int  #: bytes
    crc: int  #: chained CRC32 at that offset


class LogRecord(Item, frozen=True, tag_field="kind"):
    """Base of records."""


class SegmentHeader(LogRecord, frozen=True, tag="header"):
    """The first record of a segment; `takes_over` is None where the history begins."""

    schema: int
    logic: int  #: version of the decision rules
    incarnation: int  #: incarnation of the writing coordinator
    run: str
    seed: int
    config_hash: str
    segment: int
    takes_over: Takeover | None


class EventRecord(LogRecord, frozen=True, tag="event"):
    """A fact and its reporter."""

    seq: int
    time_ns: int
    peer: str
    incarnation: int  #: incarnation of the peer
    peer_seq: int
    event: msgspec.Raw  #: MessagePack, as `events` encodes it

    @classmethod
    def from_stamped(cls, stamped: Stamped, body: bytes) -> EventRecord:
        """Make the record of an event with the encoding `body`."""
        return cls(
            seq=stamped.seq,
            time_ns=stamped.time_ns,
            peer=stamped.peer,
            incarnation=stamped.incarnation,
            peer_seq=stamped.peer_seq,
            event=msgspec.Raw(body),
        )


class DecisionRecord(LogRecord, frozen=True, tag="decision"):
    """A command and the event that caused it."""

    cause: int  #: seq of the event
    index: int  #: index among the commands of that event, from 0
    command: msgspec.Raw  #: MessagePack, as `events` encodes it


HASH_FOLLOWS = ""  #: the placeholder of a digest that is being computed


class StateHashRecord(LogRecord, frozen=True, tag="state-hash"):
    """The digest of the state after event `seq`, which a replay must reach.

    That of a large state is computed while the coordinator continues. Then a record with
    HASH_FOLLOWS lies behind its event, and the digest behind a later one; nowhere, if the
    coordinator ended."""

    seq: int
    digest: str


LaterRecord: TypeAlias = EventRecord | DecisionRecord | StateHashRecord  #: after the header
Record: TypeAlias = SegmentHeader | LaterRecord


class LogTail(msgspec.Struct, frozen=True):
    """The end of the history, and the data behind it."""

    end: Takeover | None  #: None: no record yet
    newest: int  #: highest segment number in the directory, 0 for none
    last_seq: int | None  #: seq of the last event; None: there was none
    torn_bytes: int  #: bytes after `end`: an unfinished write, never part of the history


class LogRefused(Exception):
    """The log cannot be continued, for the reason given; nothing was changed."""


class LogOfOtherRelease(LogRefused):
    """The log has a form, or decisions, that this program does not support."""

    def __init__(self, segment: int, schema: int, logic: int) -> None:
        super().__init__(
            f"{segment_name(segment)} was written by another release of Laminar (schema "
            f"{schema}, logic version {logic}; this program has {SCHEMA_VERSION} and "
            f"{LOGIC_VERSION}): continue with that release, or start a new run"
        )


class LogCorrupt(LogRefused):
    """The log cannot be trusted."""

    def __init__(self, segment: int, offset: int, expected: str, found: str, hint: str) -> None:
        super().__init__(
            f"{segment_name(segment)} is corrupt at offset {offset}: "
            f"expected {expected}, found {found}; {hint}"
        )
        self.segment = segment
        self.offset = offset
        self.expected = expected
        self.found = found
        self.hint = hint


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode  #: anything


def seed_crc(crc: int, settled: int) -> int:
    """Return the start value of a frame's CRC: the chain, and whether it is marked SETTLED."""
    return crc ^ (0xFFFFFFFF if settled else 0)


def encode_frame(record: Record, crc: int, *, settled: bool = False) -> tuple[bytes, int]:
    """Return the frame of a record after the chained `crc`, and the new CRC.

    Raise ValueError if it is too long."""
    body = _encode(record)
    limit = MAX_HEADER_BYTES if isinstance(record, SegmentHeader) else MAX_BODY_BYTES
    if len(body) > limit:
        raise ValueError(
            f"a {type(record).__name__} of {len(body)} bytes is above the log's limit of {limit}: "
            "shorten the run name (header) or keep the payload in the store (event, decision)"
        )
    mark = SETTLED if settled else 0
    crc = zlib.crc32(body, seed_crc(crc, mark))
    return FRAME.pack(len(body) | mark, crc) + body, crc


def frame_end(data: bytes, offset: int) -> int:
    """Return where the frame at `offset` ends, by its length."""
    word: int = FRAME.unpack_from(data, offset)[0]
    return offset + FRAME.size + (word & ~SETTLED)


def segment_name(number: int) -> str:
    return f"events-{number:08d}.log"


def compressed_name(number: int) -> str:
    return f"{segment_name(number)}.zst"


def segment_numbers(names: list[str]) -> list[int]:
    """Return the segment numbers among these file names, ascending; ignore other files."""
    return sorted({int(match[1]) for match in map(_SEGMENT_NAME.fullmatch, names) if match})


class Frames:
    """A cursor over the bytes of one segment, at the end of the valid frames."""

    def __init__(self, segment: int, data: bytes, seed: int) -> None:
        self.segment = segment
        self.data = data
        self.offset = 0
        self.crc = seed

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body of each frame, up to the first invalid one; `offset` is its beginning."""
        data, size = self.data, len(self.data)
        unpack, head, crc32 = FRAME.unpack_from, FRAME.size, zlib.crc32
        offset, crc = self.offset, self.crc
        while (start := offset + head) <= size:
            word, stored = unpack(data, offset)
            length = word & ~SETTLED
            end = start + length
            if not 0 < length <= MAX_BODY_BYTES or end > size:
                return
            body = data[start:end]
            if crc32(body, seed_crc(crc, word) if word & SETTLED else crc) != stored:
                return
            yield body
            self.offset, self.crc = offset, crc = end, stored

    def skip_to(self, until: int) -> None:
        """Move over valid frames up to the offset `until`, or to the last one that ends before."""
        before = Frames(self.segment, self.data[:until], self.crc)
        for _ in before:
            pass
        self.offset, self.crc = before.offset, before.crc

    def count_remaining(self) -> int:
        return len(self.data) - self.offset

    def is_continued(self) -> bool:
        """Return whether data after the bad frame was written after that had become durable.

        One settled frame, wherever it is, proves that. Behind a bad header, which is durable before
        anything follows, two intact neighbours do, too, or one frame that continues the chain of
        the bad one: from its stored CRC or, if that is damaged, from the computed one. A wrong
        length hides where the next frame begins, so every place that could be the start of a body
        is tried."""
        if self.count_remaining() <= FRAME.size:
            return False
        word, stored = FRAME.unpack_from(self.data, self.offset)
        start = self.offset + FRAME.size
        body = self.data[start : start + (word & ~SETTLED)]
        chains = (stored, zlib.crc32(body, seed_crc(self.crc, word & SETTLED)))
        key = self.data.find(KIND_KEY, start + FRAME.size)
        while key >= 0:
            at = key - 1 - FRAME.size
            if self._is_settled(at) or (self.offset == 0 and self._is_chained(at, chains)):
                return True
            key = self.data.find(KIND_KEY, key + 1)
        return False

    def _is_settled(self, offset: int) -> bool:
        """Return whether a marked frame begins there.

        Its CRC says nothing where the chain is broken, so its body must be one MessagePack value
        that ends where the length says."""
        word, _ = FRAME.unpack_from(self.data, offset)
        start, end = offset + FRAME.size, frame_end(self.data, offset)
        if not word & SETTLED or end - start > MAX_BODY_BYTES or end > len(self.data):
            return False
        try:
            _decode(self.data[start:end])
        except BAD_BYTES:
            return False
        return True

    def _is_chained(self, offset: int, chains: tuple[int, ...]) -> bool:
        """Return whether the frame there continues one of the chains, or is continued itself."""
        if any(self.is_valid_at(offset, chain) for chain in chains):
            return True
        return self.is_valid_at(
            frame_end(self.data, offset), FRAME.unpack_from(self.data, offset)[1]
        )

    def is_valid_at(self, offset: int, crc: int) -> bool:
        """Return whether a frame that continues the chain `crc` begins at `offset`."""
        if offset + FRAME.size > len(self.data):
            return False
        word, stored = FRAME.unpack_from(self.data, offset)
        start, end = offset + FRAME.size, frame_end(self.data, offset)
        if not 0 < end - start <= MAX_BODY_BYTES or end > len(self.data):
            return False
        return bool(zlib.crc32(self.data[start:end], seed_crc(crc, word & SETTLED)) == stored)

    def make_fault_error(self) -> LogCorrupt:
        """Describe the fault of the frame at the cursor."""
        remaining = self.count_remaining() - FRAME.size
        if remaining < 0:
            return self.make_corrupt_error(
                f"{FRAME.size} bytes of frame head", f"{self.count_remaining()} bytes"
            )
        word, stored = FRAME.unpack_from(self.data, self.offset)
        length = word & ~SETTLED
        if not 0 < length <= MAX_BODY_BYTES:
            return self.make_corrupt_error(f"a body length of 1 to {MAX_BODY_BYTES}", f"{length}")
        if length > remaining:
            return self.make_corrupt_error(f"a body of {length} bytes", f"{remaining} bytes")
        start = self.offset + FRAME.size
        body = self.data[start : start + length]
        computed = zlib.crc32(body, seed_crc(self.crc, word & SETTLED))
        return self.make_corrupt_error(
            f"CRC {computed:#010x} of the body", f"{stored:#010x} in the frame"
        )

    def make_corrupt_error(self, expected: str, found: str) -> LogCorrupt:
        hint = "restore the file from a copy, or start a new run"
        return LogCorrupt(self.segment, self.offset, expected, found, hint)
