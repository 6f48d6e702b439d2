"""Wire protocol between two neighbouring relays: frames, messages and their encoding.

Reads   headers and message bodies of a neighbour
Gives   Header, typed messages; BadBytes, with a reason that can be counted, for anything else

A frame is a header of fixed size and a body. The body of a message is a MessagePack map with its
name under "type", that of a chunk raw bytes of a slot, and that of a block a piece of a delta. The
predecessor connects and sends Hello. The successor proves its membership of the run and asks for
the same (Challenge), the predecessor sends its Proof, and the successor sends Welcome with its
versions. It may answer Hello or Proof with PeerRefused instead. Then the predecessor sends an Offer
of a version, the successor answers with Want and the chunks that it has (nothing is sent before, so
a successor without a free slot simply answers later), and chunks or blocks follow. Resend requests
a chunk again. VersionDone ends the version; Decline refuses it for good.

A relay may also fetch an exact version from any other. It says so in its Hello and proves itself as
a predecessor does; then the roles are reversed: the called relay sends Offer (or Decline), and the
caller sends Want, for some chunks at a time.

The checksum in the header is that of the body. A chunk's checksum is computed where the chunk was
written and forwarded unchanged, so damage anywhere on the way shows at the next relay. Sizes are
checked before anything is allocated or decoded.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
import xxhash

from laminar.events.families import Family, Item, Message, WireError
from laminar.weights.version.manifest import MANIFEST_BYTES_MAX, Manifest

MAGIC = b"LMRW"
WIRE_VERSION = 1
HANDSHAKE_BYTES_MAX = 4096  #: maximum size of a message from an unauthenticated peer
MESSAGE_BYTES_MAX = MANIFEST_BYTES_MAX
CHUNK_BYTES_MAX = 64 << 20
"""Maximum size of a chunk; chunks have 1 to 4 MiB unless configured otherwise."""
BLOCK_BYTES_MAX = 16 << 20
"""Maximum size of the span that a delta block covers; its payload is never longer."""

_HEADER = struct.Struct("<4sBBHIIQQ")  # magic, wire, kind, 0, length, position, version, sum
HEADER_BYTES = _HEADER.size

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
HeldVersions = Annotated[dict[Natural, Digest], msgspec.Meta(max_length=64)]


class BadBytes(ValueError):
    """Invalid input from a neighbour, which ends its connection."""

    def __init__(self, reason: str, detail: str) -> None:
        """Create the error; `reason` is a short name for counters."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class FrameKind(IntEnum):
    """The kind of a frame's body."""

    MESSAGE = 1
    CHUNK = 2
    BLOCK = 3


_KINDS = {int(kind): kind for kind in FrameKind}  #: lookup table, cheaper than FrameKind(number)
_BODY_BYTES_MAX = {FrameKind.CHUNK: CHUNK_BYTES_MAX, FrameKind.BLOCK: BLOCK_BYTES_MAX}


class FrameHeader(NamedTuple):
    """The header of a frame; `position` and `version` are zero for a message."""

    kind: FrameKind
    length: int  #: bytes of the body
    position: int  #: index of the chunk in the version, or of the block in the delta
    version: int
    checksum: int  #: xxh3_64 of the body


class ChainHello(Message, frozen=True, kw_only=True):
    """Predecessor: identifies itself; another run, or a chain that is over, is refused."""

    run: Name
    name: Name
    incarnation: Natural
    chain: Natural  #: number of the coordinator's order; a higher one displaces a lower
    nonce: Nonce
    #: exact version to fetch outside the chain; None: the called relay is the successor
    fetch: Natural | None = None


class Challenge(Message, frozen=True, kw_only=True):
    """Successor: identifies and proves itself (handshake.py), and asks for the same."""

    name: Name
    incarnation: Natural
    nonce: Nonce
    proof: Mac


class Proof(Message, frozen=True, kw_only=True):
    """Predecessor: proves that it belongs to the run."""

    proof: Mac


class ChainWelcome(Message, frozen=True, kw_only=True):
    """Successor: accepts the predecessor and lists the versions that it has."""

    held: HeldVersions  #: complete versions and their digests
    partial: tuple[Natural, ...]  #: incomplete versions


class PeerRefused(Message, frozen=True, kw_only=True):
    """Successor: refuses the peer; the connection ends."""

    reason: Text


class Base(Item, frozen=True, kw_only=True):
    """The base version of a delta."""

    version: Natural
    digest: Digest


class Offer(Message, frozen=True, kw_only=True):
    """Predecessor: offers the next version, replacing an offer that was not answered yet."""

    number: Natural  #: running number of a relay's offers
    manifest: Manifest
    base: Base | None  #: base of the delta, if the version can be sent as one


class Want(Message, frozen=True, kw_only=True):
    """Successor: has a slot for the offered version and requests its missing chunks."""

    offer: Natural  #: number of the offer; answers to replaced offers are ignored
    have: bytes  #: one bit per chunk, in the bit order of numpy.packbits
    from_block: Natural | None  #: first delta block to send; None: send chunks


class Resend(Message, frozen=True, kw_only=True):
    """Successor: requests a chunk again that arrived damaged."""

    version: Natural
    position: Natural


class VersionDone(Message, frozen=True, kw_only=True):
    """Successor: holds this version, complete and verified."""

    version: Natural
    digest: Digest


class Decline(Message, frozen=True, kw_only=True):
    """Successor: refuses this version for good."""

    version: Natural
    reason: Text


FromPredecessor: TypeAlias = ChainHello | Proof | Offer
FromSuccessor: TypeAlias = (
    Challenge | ChainWelcome | PeerRefused | Want | Resend | VersionDone | Decline
)
FromHolder: TypeAlias = Offer | Decline | PeerRefused

Decoded = TypeVar("Decoded")

_encode = msgspec.msgpack.Encoder().encode
_INVALID = "{kind}: {error}"
predecessor_decoder = Family[FromPredecessor](FromPredecessor, _INVALID)
successor_decoder = Family[FromSuccessor](FromSuccessor, _INVALID)
holder_decoder = Family[FromHolder](FromHolder, _INVALID)


def pack_header(header: FrameHeader) -> bytes:
    """Encode a header in HEADER_BYTES bytes."""
    kind, length, position, version, checksum = header
    return _HEADER.pack(MAGIC, WIRE_VERSION, kind, 0, length, position, version, checksum)


def unpack_header(data: bytes | bytearray, message_bytes_max: int) -> FrameHeader:
    """Decode HEADER_BYTES bytes; raise BadBytes for an invalid header or length."""
    magic, wire_version, number, _, length, position, version, checksum = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BadBytes("not-a-relay", f"a frame starts with {magic!r}")
    if wire_version != WIRE_VERSION:
        raise BadBytes("wire-version", f"{wire_version}, this program speaks {WIRE_VERSION}")
    kind = _KINDS.get(number)
    if kind is None:
        raise BadBytes("unknown-kind", str(number))
    limit = _BODY_BYTES_MAX.get(kind, message_bytes_max)
    if length > limit:
        raise BadBytes("bad-length", f"{length} bytes of kind {number}, at most {limit}")
    return FrameHeader(kind, length, position, version, checksum)


def encode(message: FromPredecessor | FromSuccessor) -> bytes:
    """Encode a message as header and body."""
    body = _encode(message)
    header = FrameHeader(FrameKind.MESSAGE, len(body), 0, 0, xxhash.xxh3_64_intdigest(body))
    return pack_header(header) + body


def decode(decoder: Family[Decoded], header: FrameHeader, body: bytearray) -> Decoded:
    """Decode a message that `decoder` accepts from this side; raise BadBytes otherwise."""
    if xxhash.xxh3_64_intdigest(body) != header.checksum:
        raise BadBytes("damaged-message", f"{len(body)} bytes do not match their checksum")
    try:
        return decoder.decode(body, MESSAGE_BYTES_MAX)
    except WireError as error:
        raise BadBytes("not-a-message", str(error)[:500]) from None
