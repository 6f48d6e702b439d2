"""What a relay answers on its own machine: requests, replies, and their one codec.

Reads   bytes of an RPC body
Gives   frozen structs; RelayWireError for any other bytes

Weights never travel in these messages: they say which slot of the shared arena to write or read.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from laminar.events.base import to_kebab_case
from laminar.weights.version.manifest import Draft, Probe, TensorSpec

MESSAGE_BYTES_MAX = 15 << 20
"""A manifest of a large model has some ten thousand tensors, about a hundred bytes each."""


class RelayWireError(ValueError):
    """These bytes are no message of a relay."""


class RelayMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=to_kebab_case
):
    """Base of all messages."""


# --- requests ---------------------------------------------------------------------------------


class OpenArena(RelayMessage, frozen=True, kw_only=True):
    """A trainer says how large a version is; the relay makes its slots once, in the background."""

    version_bytes: int


class GrantSlot(RelayMessage, frozen=True, kw_only=True):
    """A trainer wants a slot to write; the same one is granted again until it is committed."""

    arena: str


class CommitSlot(RelayMessage, frozen=True, kw_only=True):
    """The slot is written. Checksums, digest and the announcement are the relay's work."""

    arena: str
    slot: int
    version: int
    step: int
    tensors: tuple[TensorSpec, ...]
    probe: Probe


class LeaseVersion(RelayMessage, frozen=True, kw_only=True):
    """A replica wants to load: this very version, or the newest that is at least it."""

    version: int
    exact: bool
    #: a relay that has it, if this one has not; then it is fetched, and waited for
    holder: str = ""
    address: str = ""  #: of the holder's bulk plane, numeric host:port
    order: int = -1  #: id of the order to load, for which it is fetched once
    stream: bool = False  #: what is here of it will do, while the rest arrives
    copy: int = -1  #: number of the copy that the reader knows: its layout is not sent again


class ReleaseLease(RelayMessage, frozen=True, kw_only=True):
    arena: str
    lease_id: int


Request = OpenArena | GrantSlot | CommitSlot | LeaseVersion | ReleaseLease


# --- replies ----------------------------------------------------------------------------------


class ArenaOpened(RelayMessage, frozen=True, kw_only=True):
    arena: str  #: its path, new for every relay process


class ArenaReplaced(RelayMessage, frozen=True, kw_only=True):
    """The request names an arena that is not this relay's: a former relay made it.

    What was granted or leased there is void, and nothing is written into it any more.
    """


class SlotGranted(RelayMessage, frozen=True, kw_only=True):
    slot: int  #: -1: none is free now


class SlotCommitted(RelayMessage, frozen=True, kw_only=True):
    """The relay has taken the slot over."""


class VersionLeased(RelayMessage, frozen=True, kw_only=True):
    lease_id: int
    slot: int
    arena: str
    manifest: bytes  #: for `manifest.decode`
    copy: int = -1  #: its number


class VersionArriving(RelayMessage, frozen=True, kw_only=True):
    """The first bytes of a version that is on its way, in reply to a stream: ask again.

    It is no lease. What was read between two replies that name the same copy was read while its
    slot was its own.
    """

    slot: int
    arena: str
    copy: int
    num_bytes: int  #: proved, from its beginning
    draft: Draft | None  #: its layout; None: the reader knows this copy


class VersionPending(RelayMessage, frozen=True, kw_only=True):
    """The version, or its first bytes, are awaited: ask again."""


class VersionUnavailable(RelayMessage, frozen=True, kw_only=True):
    held: tuple[int, ...]


class LeaseReleased(RelayMessage, frozen=True, kw_only=True):
    valid: bool  #: false: the lease was revoked, what was read since is not to be used


Reply = (
    ArenaOpened
    | ArenaReplaced
    | SlotGranted
    | SlotCommitted
    | VersionLeased
    | VersionArriving
    | VersionPending
    | VersionUnavailable
    | LeaseReleased
)

Decoded = TypeVar("Decoded")

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encode(message)


def decode_request(data: bytes) -> Request:
    return _decode_checked(_requests, data)


def decode_reply(data: bytes) -> Reply:
    return _decode_checked(_replies, data)


def _decode_checked(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes) -> Decoded:
    if len(data) > MESSAGE_BYTES_MAX:
        raise RelayWireError(f"{len(data)} bytes are over the limit of {MESSAGE_BYTES_MAX}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RelayWireError(f"no message of a relay: {error}") from error
