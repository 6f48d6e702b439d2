"""What two neighbouring relays say to each other, and its bytes.

Reads   headers and message bodies of a neighbour
Gives   Header, typed messages; BadBytes, with a reason that can be counted, for anything else

A frame is a header of fixed size and a body. A message's body is a MessagePack map, with its name
under "type"; the body of a chunk is raw bytes of a slot, that of a block a piece of a delta. The
predecessor connects and says Hello; the successor proves that it is of the run and asks the same
(Challenge), the predecessor does (Proof), and the successor answers Welcome with what it holds.
Both may be answered by Refused. Then the predecessor Offers a version, the successor Wants it and
says what it has of it (nothing is sent before, so a successor without a free slot simply answers
later), and chunks or blocks follow. Chunks may still be asked for Again. Done ends the version,
Decline refuses it finally.

A relay may also fetch an exact version from any other: it says so in its Hello, proves itself as a
predecessor does, and from then on the two have changed sides: the one that was called Offers the
version (or Declines), the caller Wants it, some chunks at a time.

The checksum in the header is that of the body. A chunk's was made by the relay on the machine where
the chunk was written and travels unchanged, so that damage anywhere on the way shows at the next
relay. Sizes are checked before anything is allocated or decoded.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash

from laminar.events.base import to_kebab_case
from laminar.weights.version.manifest import MANIFEST_BYTES_MAX, Draft

MAGIC = b"LMRW"
WIRE_VERSION = 1
HANDSHAKE_BYTES_MAX = 4096
"""The longest message from someone who has not said who they are."""
MESSAGE_BYTES_MAX = MANIFEST_BYTES_MAX
CHUNK_BYTES_MAX = 64 << 20
"""Chunks are 1 to 4 MiB unless a user wants otherwise."""
BLOCK_BYTES_MAX = 16 << 20
"""What a block of a delta stands for; in itself it is never longer."""

_HEADER = struct.Struct("<4sBBHIIQQ")  # magic, wire, kind, 0, length, position, version, sum
HEADER_BYTES = _HEADER.size

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]  #: empty: not known yet
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
HeldVersions = Annotated[dict[Natural, Digest], msgspec.Meta(max_length=64)]


class BadBytes(ValueError):
    """A neighbour sent what it must not send: its connection ends."""

    def __init__(self, reason: str, detail: str) -> None:
        """`reason`: a short name under which it is counted."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class FrameKind(IntEnum):
    """What the body of a frame is."""

    MESSAGE = 1
    CHUNK = 2
    BLOCK = 3


_KINDS = {int(kind): kind for kind in FrameKind}  #: cheaper than Kind(number)
_BODY_BYTES_MAX = {FrameKind.CHUNK: CHUNK_BYTES_MAX, FrameKind.BLOCK: BLOCK_BYTES_MAX}


class Header(NamedTuple):
    """The header of one frame. `position` and `version` are zero for a message."""

    kind: FrameKind
    length: int  #: bytes of the body
    position: int  #: of the chunk in the version, of the block in the delta; from 0
    version: int
    checksum: int  #: xxh3_64 of the body


class ChainMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=to_kebab_case
):
    """Base of all messages."""


class Hello(ChainMessage, frozen=True, kw_only=True):
    """Predecessor: who I am. Another run, or a chain that is over, is refused."""

    run: Name
    name: Name
    incarnation: Natural
    chain: Natural  #: number of the order that made us neighbours; a higher one displaces a lower
    nonce: Nonce
    #: an exact version that I take from you, beside the chain; None: you are my successor
    fetch: Natural | None = None


class Challenge(ChainMessage, frozen=True, kw_only=True):
    """Successor: who I am, and my proof (handshake.py); now prove who you are."""

    name: Name
    incarnation: Natural
    nonce: Nonce
    proof: Mac


class Proof(ChainMessage, frozen=True, kw_only=True):
    """Predecessor: I am of this run."""

    proof: Mac


class Welcome(ChainMessage, frozen=True, kw_only=True):
    """Successor: I take versions from you; this is what I have."""

    held: HeldVersions  #: complete versions and their digests
    partial: tuple[Natural, ...]  #: versions of which something is here


class PeerRefused(ChainMessage, frozen=True, kw_only=True):
    """Successor: I take nothing from you; the connection ends."""

    reason: Text


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a delta is against."""

    version: Natural
    digest: Digest


class Offer(ChainMessage, frozen=True, kw_only=True):
    """Predecessor: the next version. Replaces an offer that was not answered yet."""

    number: Natural  #: counts the offers of a relay
    draft: Draft
    checksums: bytes  #: uint64 little-endian per chunk; empty: each comes with its chunk
    digest: Digest
    base: Base | None  #: not None: I can send it as a delta

    def unpack_checksums(self) -> list[int]:
        """xxh3_64 of each chunk; empty: each comes with its chunk."""
        checksums: list[int] = np.frombuffer(self.checksums, "<u8").tolist()
        return checksums


class ShareStarted(ChainMessage, frozen=True, kw_only=True):
    """Successor: a share of this version was written here; it needs no slot."""

    version: Natural


class Want(ChainMessage, frozen=True, kw_only=True):
    """Successor: I have a slot for what you offered: send what I lack of it."""

    offer: Natural  #: its number; the answer to an offer that was replaced means nothing
    have: bytes  #: one bit per chunk, in the bit order of numpy.packbits
    from_block: Natural | None  #: send the delta from this block on; None: send chunks


class Resend(ChainMessage, frozen=True, kw_only=True):
    """Successor: this chunk came damaged."""

    version: Natural
    position: Natural


class Seal(ChainMessage, frozen=True, kw_only=True):
    """Predecessor: the digest that was not known when the version was offered."""

    version: Natural
    digest: Digest


class VersionDone(ChainMessage, frozen=True, kw_only=True):
    """Successor: I hold this version, complete and verified."""

    version: Natural
    digest: Digest


class Decline(ChainMessage, frozen=True, kw_only=True):
    """Successor: I will not take this version from you."""

    version: Natural
    reason: Text


FromPredecessor: TypeAlias = Hello | Proof | Offer | Seal
FromSuccessor: TypeAlias = (
    Challenge | Welcome | PeerRefused | ShareStarted | Want | Resend | VersionDone | Decline
)
FromHolder: TypeAlias = Offer | Decline | PeerRefused

Decoded = TypeVar("Decoded")

_encode = msgspec.msgpack.Encoder().encode
predecessor_decoder: msgspec.msgpack.Decoder[FromPredecessor] = msgspec.msgpack.Decoder(
    FromPredecessor
)
successor_decoder: msgspec.msgpack.Decoder[FromSuccessor] = msgspec.msgpack.Decoder(FromSuccessor)
holder_decoder: msgspec.msgpack.Decoder[FromHolder] = msgspec.msgpack.Decoder(FromHolder)


def pack_header(header: Header) -> bytes:
    """HEADER_BYTES bytes."""
    kind, length, position, version, checksum = header
    return _HEADER.pack(MAGIC, WIRE_VERSION, kind, 0, length, position, version, checksum)


def unpack_header(data: bytes | bytearray, message_bytes_max: int) -> Header:
    """The header in these HEADER_BYTES bytes; BadBytes if it is none, or announces too much."""
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
    return Header(kind, length, position, version, checksum)


def encode(message: FromPredecessor | FromSuccessor) -> bytes:
    """Header and body of a message."""
    body = _encode(message)
    header = Header(FrameKind.MESSAGE, len(body), 0, 0, xxhash.xxh3_64_intdigest(body))
    return pack_header(header) + body


def decode(decoder: msgspec.msgpack.Decoder[Decoded], header: Header, body: bytearray) -> Decoded:
    """The message in a body; `decoder` says who may have sent it. BadBytes for anything else."""
    if xxhash.xxh3_64_intdigest(body) != header.checksum:
        raise BadBytes("damaged-message", f"{len(body)} bytes do not have their checksum")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBytes("not-a-message", f"{type(error).__name__}: {error}"[:500]) from None
