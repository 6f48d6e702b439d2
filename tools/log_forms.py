"""A history written again with other records.

Reads   the records of a log
Gives   `write`: its segment files, every length, CRC and takeover right

For logs that a test needs and no coordinator of today writes. They have no SETTLED marks, as in
schema 1, which every reader takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from laminar.eventlog.record import (
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
