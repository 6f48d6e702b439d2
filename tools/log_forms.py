"""A history written again: with other records, or in the form that an older schema had.

Reads   the records of a log
Gives   `write`: its segment files, every length, CRC and takeover right; `as_schema_1`, `cut`

For logs that a test needs and no coordinator of today writes. They have no SETTLED marks, as in
schema 1, which every reader takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from laminar.eventlog.record import (
    DecisionRecord,
    Header,
    Record,
    Takeover,
    encode_frame,
    segment_name,
)


def write(records: Iterable[Record]) -> dict[str, bytes]:
    """Files by name; a segment that is not in the history is an empty file."""
    files: dict[str, bytearray] = {}
    crc, number = 0, 0
    for record in records:
        if isinstance(record, Header):
            before = Takeover(number, len(files[segment_name(number)]), crc) if number else None
            while number < record.segment:
                number += 1
                files[segment_name(number)] = bytearray()
            record = msgspec.structs.replace(record, takes_over=before)
        frame, crc = encode_frame(record, crc)
        files[segment_name(number)] += frame
    return {name: bytes(data) for name, data in files.items()}


def as_schema_1(records: Iterable[Record]) -> list[Record]:
    """As it was written then: nobody completed the decisions of a coordinator that had died."""
    found: list[Record] = []
    writer, completing = 0, False
    for record in records:
        if isinstance(record, Header):
            completing = record.incarnation != writer
            writer = record.incarnation
            if completing:
                _forget_half(found)
            found.append(msgspec.structs.replace(record, schema=1))
        elif not (completing and isinstance(record, DecisionRecord)):
            completing = False
            found.append(record)
    return found


def _forget_half(records: list[Record]) -> None:
    """Of the last event's decisions, the later ones."""
    count = next((n for n, r in enumerate(reversed(records)) if not _is_decision(r)), len(records))
    del records[len(records) - (count + 1) // 2 :]


def cut(records: list[Record]) -> list[Record]:
    """The first half, which ends among the decisions of an event."""
    return records[: next(_among_decisions(records, len(records) // 2))]


def _among_decisions(records: list[Record], start: int) -> Iterator[int]:
    pairs = zip(records[start:], records[start + 1 :], strict=False)
    for place, (left, right) in enumerate(pairs, start + 1):
        if _is_decision(left) and _is_decision(right):
            yield place


def _is_decision(record: Record) -> bool:
    return isinstance(record, DecisionRecord)
