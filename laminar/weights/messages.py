"""Messages between a relay and the processes of its machine: requests, replies and their codec.

Reads   bytes of an RPC body
Gives   frozen structs; RelayWireError for any other bytes

Weights never travel in these messages, which only name the slot of the arena to write or read.
"""

from __future__ import annotations

import msgspec

from laminar.events.families import Family, Message
from laminar.weights.version.manifest import Manifest, Probe, TensorSpec


class RelayWireError(ValueError):
    """Bytes that are not a relay message."""


# --- requests ---------------------------------------------------------------------------------


class OpenArena(Message, frozen=True, kw_only=True):
    """A trainer's request to create slots for versions of this size, once, in the background."""

    version_bytes: int


class GrantSlot(Message, frozen=True, kw_only=True):
    """A trainer's request for a slot to write; repeats return the same slot until it commits."""

    arena: str


class CommitSlot(Message, frozen=True, kw_only=True):
    """A trainer's report of a written slot; the relay then hashes and announces the version."""

    arena: str
    slot: int
    version: int
    step: int
    tensors: tuple[TensorSpec, ...]
    probe: Probe


class LeaseVersion(Message, frozen=True, kw_only=True):
    """A replica's request to read exactly `version`, or the newest version that is at least it."""

    version: int
    exact: bool
    #: relay to fetch the version from if this one does not hold it
    holder: str = ""
    address: str = ""  #: numeric host:port of the holder's bulk plane
    order: int = -1  #: id of the load order, which fetches the version at most once
    stream: bool = False  #: the bytes present so far suffice while the rest arrives
    copy: int = -1  #: number of the copy whose layout the reader already has


class ReleaseLease(Message, frozen=True, kw_only=True):
    arena: str
    lease_id: int


Request = OpenArena | GrantSlot | CommitSlot | LeaseVersion | ReleaseLease


# --- replies ----------------------------------------------------------------------------------


class ArenaOpened(Message, frozen=True, kw_only=True):
    arena: str  #: path of the arena, new for every relay process


class ArenaReplaced(Message, frozen=True, kw_only=True):
    """A reply to a request that names the arena of a former relay process.

    Grants and leases in that arena are void; this process may have taken its memory over.
    """


class SlotGranted(Message, frozen=True, kw_only=True):
    slot: int  #: index, or -1 if none is free now


class SlotCommitted(Message, frozen=True, kw_only=True):
    """A confirmation that the relay now owns the slot."""


class VersionLeased(Message, frozen=True, kw_only=True):
    lease_id: int
    slot: int
    arena: str
    manifest: bytes  #: encoded manifest (version/manifest.py)
    copy: int = -1  #: number of the copy


class VersionArriving(Message, frozen=True, kw_only=True):
    """The leading bytes of a version in transfer, in reply to a `stream` request; ask again.

    This is not a lease: bytes are valid if read between two replies that name the same copy,
    because the slot held that copy throughout.
    """

    slot: int
    arena: str
    copy: int
    num_bytes: int  #: leading bytes that are verified
    manifest: Manifest | None  #: None if the reader knows this copy


class VersionPending(Message, frozen=True, kw_only=True):
    """A reply while the version, or its first bytes, have not arrived; ask again."""


class VersionUnavailable(Message, frozen=True, kw_only=True):
    held: tuple[int, ...]


class LeaseReleased(Message, frozen=True, kw_only=True):
    valid: bool  #: false if the lease was revoked; discard what was read since


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

_encode = msgspec.msgpack.Encoder().encode
_ERROR = (
    "not a message of a relay: {error}",
    "{size} bytes are over the limit of {limit}",
    RelayWireError,
)
decode_request = Family[Request](Request, *_ERROR).decode
decode_reply = Family[Reply](Reply, *_ERROR).decode


def encode(message: Request | Reply) -> bytes:
    return _encode(message)
