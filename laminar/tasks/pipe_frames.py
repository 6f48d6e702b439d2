"""Framing of messages between a reward or environment process and its parent.

Reads   frames of a binary stream: a length, and that many bytes of MessagePack
Gives   LENGTH; encode_frame, read_frame
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgspec

LENGTH = struct.Struct("<I")


def encode_frame(message: Any) -> bytes:
    """Encode a message as a frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the body of the next frame; None at the end of the stream, even within a frame."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None
