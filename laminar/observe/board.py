"""TensorBoard files: the figures of each step as scalars.

Reads   Scalars
Writes  RUN/tensorboard/events.out.tfevents.*, a new one for each coordinator
Raises  OSError, PartlyWritten: the outlet counts lost items

The few fields are encoded here: libraries that write such files import torch, which takes seconds
and 200 MB, and their threads end at the first failed write. Readers stop at a torn record, so a
torn record is cut off before the next is written.

    record   length u64, masked CRC-32C of it, event, masked CRC-32C of that; little-endian
    Event    wall_time = 1 (double), step = 2, file_version = 3, summary = 5   (event.proto)
    Summary  value = 1: tag = 1, simple_value = 2 (float)                      (summary.proto)
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from ctypes import c_float
from pathlib import Path
from typing import NamedTuple

from laminar.observe.files import GrowingFile, cut_off
from laminar.run.directory import TENSORBOARD_DIR

NO_TAG = re.compile(r"[^-/\w.]")  #: characters that TensorBoard does not accept in a tag
POLYNOMIAL = 0x82F63B78  #: polynomial of CRC-32C, bits reversed
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  #: protobuf's wire types


class Scalars(NamedTuple):
    """The figures of one step."""

    step: int
    time_s: float  #: seconds since the epoch
    figures: dict[str, float]


class Board:
    """A file of events."""

    def __init__(self, run_dir: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(run_dir, f"{TENSORBOARD_DIR}/{name}", cut_off)
        self._begun = False

    def write(self, items: list[Scalars]) -> None:
        if not self._begun:
            self._file.write(
                [_encode_record(_encode_time(time.time()) + _encode_bytes(3, b"brain.Event:2"))]
            )
            self._begun = True
        self._file.write([_encode_record(_encode_event(item)) for item in items])


def _encode_event(item: Scalars) -> bytes:
    summary = b"".join(_encode_bytes(1, _encode_value(*figure)) for figure in item.figures.items())
    return (
        _encode_time(item.time_s)
        + _encode_key(2, VARINT)
        + _encode_varint(item.step)
        + _encode_bytes(5, summary)
    )


def _encode_time(seconds: float) -> bytes:
    return _encode_key(1, FIXED_64) + struct.pack("<d", seconds)


def _encode_value(name: str, value: float) -> bytes:
    tag = NO_TAG.sub("_", name).lstrip("/").encode()
    return (
        _encode_bytes(1, tag) + _encode_key(2, FIXED_32) + bytes(c_float(value))
    )  # too large: infinite


def _encode_bytes(field: int, content: bytes) -> bytes:
    return _encode_key(field, BYTES) + _encode_varint(len(content)) + content


def _encode_key(field: int, wire_type: int) -> bytes:
    return _encode_varint(field << 3 | wire_type)


def _encode_varint(number: int) -> bytes:
    """Encode seven bits per byte, lowest first; all bytes but the last have the high bit set."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# --- records --------------------------------------------------------------------------------------


def _encode_record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _compute_checksum(length) + event + _compute_checksum(event)


def _compute_checksum(content: bytes) -> bytes:
    """Return the CRC-32C, rotated and offset as the file format demands."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _build_crc_table() -> tuple[int, ...]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


CRC_TABLE = _build_crc_table()
