"""Message families: messages of one direction, as a tagged union with one decoder and one error.

Reads   bytes of a peer
Gives   Item and Message, the bases of messages; Family; MESSAGE_BYTES_MAX
Raises  WireError, or the error of the family, for bytes that are not exactly one of its messages

A message is a MessagePack map. Its tag is made from the class name, `TrajectoryFinished` ->
`trajectory-finished`, so the same name appears in the log, the docs and the code. Unknown fields
are rejected, and the size is checked before decoding. A msgspec tagged union decodes 3.4 times as
fast as a MessagePack dict.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

MESSAGE_BYTES_MAX = 15 << 20
"""The size limit of a message: one frame and one record of the log (16 MiB), less their envelopes.

The largest messages are a batch (14 bytes per trajectory), the request to a user's batch strategy
(240 per group of 16) and the manifest of a large model (100 for each of ten thousand tensors). The
configuration is refused if the first two could exceed the limit (config/rules.py)."""
#: Exceptions of a decoder on hostile bytes; UnicodeDecodeError and msgpack's errors are ValueErrors
BAD_BYTES = (msgspec.MsgspecError, ValueError, RecursionError)

Decoded = TypeVar("Decoded")


class WireError(ValueError):
    """Bytes that are not a legal message or frame; they change nothing and are counted."""


def to_kebab_case(name: str) -> str:
    """Return the kebab-case form of a class name: `TrajectoryFinished` -> `trajectory-finished`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the items of messages."""


class Message(Item, frozen=True, kw_only=True, tag=to_kebab_case):
    """Base of messages: the field "type" holds the tag."""


class Family(Generic[Decoded]):
    """The messages of one direction, each known by its tag."""

    def __init__(
        self,
        union: Any,
        invalid: str,
        too_large: str = "message of {size} bytes is above the limit of {limit}",
        error: type[ValueError] = WireError,
    ) -> None:
        """Create the decoder of a union.

        `invalid` and `too_large` are the texts of `error`; `invalid` may contain {size}, {kind}
        (type of the decoder's exception) and {error}.
        """
        self._decoder: msgspec.msgpack.Decoder[Decoded] = msgspec.msgpack.Decoder(union)
        self._invalid, self._too_large, self._error = invalid, too_large, error

    def decode(
        self, data: bytes | bytearray | memoryview | msgspec.Raw, bytes_max: int = MESSAGE_BYTES_MAX
    ) -> Decoded:
        """Return the message; raise the error of the family for anything else."""
        if len(data) > bytes_max:
            raise self._error(self._too_large.format(size=len(data), limit=bytes_max))
        try:
            return self._decoder.decode(data)
        except BAD_BYTES as error:
            kind = type(error).__name__
            text = self._invalid.format(size=len(data), kind=kind, error=error)
            raise self._error(text) from error
