"""The only decoder of events and commands.

Reads   bytes from the wire and from the log
Gives   Event, Command, Envelope; raises WireError for any bytes that are not exactly one of them,
        MessageTooLarge for a message that no peer would accept
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from laminar.events.base import Command, Event
from laminar.events.commands import ALL_COMMANDS, Envelope
from laminar.events.events import ALL_EVENTS
from laminar.events.families import MESSAGE_BYTES_MAX, Family


class MessageTooLarge(ValueError):
    """A message of ours above MESSAGE_BYTES_MAX; the text gives its name and its size."""


_INVALID = "not a Laminar message: {kind}: {error}"
_encoder = msgspec.msgpack.Encoder(order="deterministic")
decode_event = Family[Event](reduce(or_, ALL_EVENTS), _INVALID).decode
decode_command = Family[Command](reduce(or_, ALL_COMMANDS), _INVALID).decode
_decode_order = Family[Envelope](Envelope, _INVALID).decode


def encode(message: Event | Command | Envelope) -> bytes:
    """Encode as one MessagePack map; equal messages give equal bytes. Raise MessageTooLarge."""
    data = _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        name = type(message).__struct_config__.tag or "an order"
        raise MessageTooLarge(
            f"{name} has {len(data)} bytes, above the message limit ({MESSAGE_BYTES_MAX})"
        )
    return data


def decode_envelope(data: bytes) -> tuple[Envelope, Command]:
    """Decode an envelope and the command inside it."""
    order = _decode_order(data)
    return order, decode_command(order.command)
