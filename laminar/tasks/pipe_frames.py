"""Messages over the pipe or socket between a helper process of rewards or environments and its
parent: a length, and that many bytes of MessagePack.

Reads   frames of a binary stream
Gives   LENGTH; frame, the bytes of a message; read_frame, those of the next one
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgspec

LENGTH = struct.Struct("<I")


def encode_frame(message: Any) -> bytes:
    """A message as it goes over the channel."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame; None at the end of the stream, within a frame, too."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None
