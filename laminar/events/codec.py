"""The only decoder of events and commands: MessagePack maps, tagged unions, one error type.

Reads   bytes from the wire and from the log
Gives   Event, Command, Envelope; raises WireError for any bytes that are not exactly one of them,
        MessageTooLarge for a message that no peer would accept

A msgspec tagged union decodes 3.4 times as fast as a MessagePack dict. Hostile bytes make it raise
UnicodeDecodeError and RecursionError in addition to its own errors; all become WireError here.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from laminar.events.base import Command, Event, WireError
from laminar.events.commands import ALL_COMMANDS, Envelope
from laminar.events.events import ALL_EVENTS

MESSAGE_BYTES_MAX = 15 << 20
"""The size limit of a message: one frame and one record of the log (16 MiB), less their envelopes.

The largest messages are a batch (14 bytes per trajectory) and the request to a user's batch
strategy (240 per group of 16). The configuration is refused if they could exceed the limit
(config/rules.py)."""


class MessageTooLarge(ValueError):
    """A message of ours above MESSAGE_BYTES_MAX; the text gives its name and its size."""


def _make_union(types: tuple[type, ...]) -> Any:
    return reduce(or_, types)


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(_make_union(ALL_EVENTS))
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(
    _make_union(ALL_COMMANDS)
)
_order_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(message: Event | Command | Envelope) -> bytes:
    """Encode as one MessagePack map; equal messages give equal bytes. Raise MessageTooLarge."""
    data = _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        name = type(message).__struct_config__.tag or "an order"
        raise MessageTooLarge(
            f"{name} has {len(data)} bytes, above the message limit ({MESSAGE_BYTES_MAX})"
        )
    return data


def decode_event(data: bytes | msgspec.Raw) -> Event:
    event: Event = _decode(_event_decoder, data)
    return event


def decode_command(data: bytes | msgspec.Raw) -> Command:
    command: Command = _decode(_command_decoder, data)
    return command


def decode_envelope(data: bytes) -> tuple[Envelope, Command]:
    """Decode an envelope and the command inside it."""
    order: Envelope = _decode(_order_decoder, data)
    return order, decode_command(order.command)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"message of {len(data)} bytes is above the limit of {MESSAGE_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a Laminar message: {type(error).__name__}: {error}") from None
