"""Frames: the messages between the two ends of a link, and their encoding.

Reads   bytes of a peer, at most `max_bytes`
Gives   typed frames; WireError for bytes that are not a frame that this peer may send

A frame is a MessagePack map with its lower-case name under "type". Unknown fields are rejected.
Each side has a separate decoder, so a frame sent in the wrong direction is rejected like garbage.
The size is checked before decoding.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from laminar.events.families import Family, Item

FRAME_BYTES_MAX = 16 << 20  #: bytes, for any socket; a control message and its envelope fit
MAX_TEXT = 4096  #: characters of a reason or an info value
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Boot = Annotated[str, msgspec.Meta(max_length=128)]  #: empty: not welcomed yet
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Frame(Item, frozen=True, gc=False, tag=str.lower):
    """Base of all frames: a MessagePack map with the lower-case name under "type"."""


class Hello(Frame, frozen=True):
    """Client: identity. Repeated until welcomed, and whenever the server falls silent."""

    name: Name
    role: Name
    boot_id: Name
    incarnation: Count  #: 0 until a server assigned one
    first_seq: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]  #: first unacknowledged number
    info: dict[Name, Text]


class Welcome(Frame, frozen=True):
    """Server: the link is up. `last_seq` is the last processed Data of this client."""

    server_boot: Name
    incarnation: Count
    last_seq: Count


class Data(Frame, frozen=True):
    """Either side: one numbered body, with a cumulative acknowledgement."""

    boot: Boot
    seq: Count
    ack: Count
    body: bytes


class Ack(Frame, frozen=True):
    """Either side: everything up to `ack` has arrived (at a server: and is processed)."""

    boot: Boot
    ack: Count


class Gauge(Frame, frozen=True):
    """Client: a value that the next one replaces; unnumbered, never resent."""

    body: bytes


class Heartbeat(Frame, frozen=True):
    """Client: request for an Ack; the boot is empty from a client that does not join."""

    boot: Boot
    ack: Count


class Ask(Frame, frozen=True):
    """Client without a link: an event of the user, repeated until acknowledged."""

    body: bytes


class Refused(Frame, frozen=True):
    """Server: the client is refused; the reason is for the user."""

    reason: Text
    again: bool = False  #: refused for its silence; a new process may take its place


class Bye(Frame, frozen=True):
    """Client: the end of the link."""


ClientFrame: TypeAlias = Hello | Data | Ack | Gauge | Heartbeat | Bye | Ask
ServerFrame: TypeAlias = Welcome | Data | Ack | Refused

_TOO_LARGE = "a frame of {size} bytes exceeds the limit of {limit}"
_encoder = msgspec.msgpack.Encoder()
decode_client = Family[ClientFrame](ClientFrame, "invalid client frame: {error}", _TOO_LARGE).decode
decode_server = Family[ServerFrame](ServerFrame, "invalid server frame: {error}", _TOO_LARGE).decode


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)
