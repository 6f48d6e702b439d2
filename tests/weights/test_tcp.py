"""A connection's bulk bytes: they come from the slot's file."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

import msgspec
import pytest

from laminar.run.work_counter import get_work_count
from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.tcp import Connection
from laminar.weights.chain.wire import FrameHeader, FrameKind

BYTES = bytes(range(256)) * 16


class Sender:
    """One end of a connection with one chunk to send, from a file; it receives nothing."""

    def __init__(self, path: Path) -> None:
        ours, self.theirs = socket.socketpair()
        path.write_bytes(BYTES)
        self.file = path.open("r+b")
        memory = mmap.mmap(self.file.fileno(), len(BYTES), access=mmap.ACCESS_READ)
        self.connection = Connection(
            ours,
            msgspec.msgpack.Decoder(wire.FromSuccessor),
            self,  # type: ignore[arg-type]
        )
        header = FrameHeader(FrameKind.CHUNK, len(BYTES) - 256, 0, 0, 0)
        body = Region(memoryview(memory), self.file.fileno()).slice_bytes(256, len(BYTES))
        self.connection.push(header, body)


def test_what_is_sent_is_the_part_of_the_file(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "slot")
    counted = get_work_count()
    sender.connection.flush()
    assert sender.connection.idle and get_work_count() == counted + 1
    assert sender.theirs.recv(1 << 16)[wire.HEADER_BYTES :] == BYTES[256:]


def test_file_that_was_cut_short_ends_the_connection(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "slot")
    os.ftruncate(sender.file.fileno(), 100)
    with pytest.raises(OSError, match="the file of the weights was truncated"):
        sender.connection.flush()
