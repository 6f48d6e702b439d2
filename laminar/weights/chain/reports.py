"""What a relay's bulk plane tells the relay.

Gives   SlotWanted, SlotReturned, Received, Trouble with its Pace, NotFetched, StrangerRefused,
        NeighbourUp, NeighbourDown, PlaneFailed; Status

Reports are made in the plane's thread, one call each; its receiver hands them to the event
loop and returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from laminar.weights.version.manifest import Manifest


class Side(StrEnum):
    """Which neighbour."""

    PREDECESSOR = "predecessor"
    SUCCESSOR = "successor"


@dataclass(frozen=True, slots=True)
class SlotWanted:
    """A version of `nbytes` is offered; answer with `grant`, whenever a slot is free.

    One slot is asked for at a time. It may be filled by a newer version than this one.
    """

    version: int
    nbytes: int
    fetched: bool = False  #: an exact version from beside the chain; `fetch_into` is the answer


@dataclass(frozen=True, slots=True)
class SlotReturned:
    """The plane does not need this slot any more; it holds no complete version."""

    slot: int
    fetched: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """The slot holds a complete, verified version.

    If a newer one was published on this machine in the same moment, this one is of no use: `forget`
    it and take the slot back.
    """

    manifest: Manifest
    slot: int
    by_delta: bool  #: at least a part of it came as a delta
    num_bytes: int  #: of chunks and blocks that came for it
    seconds: float  #: from the first of them to the end of the digest
    fetched: bool = False


class TransferPace(NamedTuple):
    """How quickly a version has come of late, and how much of it has still to come."""

    num_bytes: int  #: that came within `seconds`
    seconds: float
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something went wrong and was dealt with; for the log and for the coordinator."""

    kind: str  #: damaged-chunk, damaged-block, wrong-digest, wrong-layout, stalled, slow, ...
    version: int  #: -1: of none
    peer: str  #: name of the neighbour
    detail: str
    pace: TransferPace | None = None  #: of a version that takes long


@dataclass(frozen=True, slots=True)
class NotFetched:
    """An exact version does not come from this relay; its slot, if it had one, is returned."""

    version: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """Somebody who is not of this run connected; told seldom, and for the log alone."""

    what: str


@dataclass(frozen=True, slots=True)
class NeighbourUp:
    """Connected, and both sides know who the other is."""

    side: Side
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NeighbourDown:
    """The connection to a neighbour that was up is gone."""

    side: Side
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlaneFailed:
    """The plane's thread ended by a fault of its own; nothing moves any more."""

    reason: str


Report: TypeAlias = (
    SlotWanted
    | SlotReturned
    | Received
    | Trouble
    | NotFetched
    | PeerRejected
    | NeighbourUp
    | NeighbourDown
    | PlaneFailed
)


@dataclass(frozen=True, slots=True)
class Status:
    """A moment of the plane. Bytes are those of the wire, headers included."""

    held: tuple[int, ...]  #: complete versions, ascending
    receiving: int  #: version; -1: none
    chunks_here: int  #: watermark of `receiving`
    chunks_total: int
    sending: int  #: version; -1: none
    predecessor: str  #: name; empty: none
    successor: str
    bytes_received: int
    bytes_sent: int
    refused: dict[str, int]  #: connections that were ended for what they sent, by reason
    damaged: int  #: chunks and blocks that were asked for again
