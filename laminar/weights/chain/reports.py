"""Reports of a relay's bulk plane to the relay.

Gives   SlotWanted, SlotReturned, Received, Trouble with its TransferPace, NotFetched, PeerRejected,
        NeighbourUp, NeighbourDown, PlaneFailed

Each report is a call in the plane's thread; the callback passes it to the event loop and returns at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from laminar.weights.version.manifest import Manifest


class Side(StrEnum):
    """The position of a neighbour in the chain."""

    PREDECESSOR = "predecessor"
    SUCCESSOR = "successor"


@dataclass(frozen=True, slots=True)
class SlotWanted:
    """A request for a slot for an offered version; answer with `grant_slot` when one is free.

    The plane requests a single slot at a time, and may fill it with a newer version.
    """

    version: int
    nbytes: int
    fetched: bool = False  #: exact version from outside the chain; answer with `fetch_into`


@dataclass(frozen=True, slots=True)
class SlotReturned:
    """A slot that the plane does not need any more and that holds no complete version."""

    slot: int
    fetched: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A complete, verified version in its slot.

    If a newer version was published on this machine at the same moment, `try_forget` this one and
    take the slot back.
    """

    manifest: Manifest
    slot: int
    by_delta: bool  #: at least a part of the version came as a delta
    num_bytes: int  #: bytes of the chunks and blocks received
    seconds: float  #: time from the first byte to the end of the digest
    fetched: bool = False


class TransferPace(NamedTuple):
    """The recent speed of a transfer, and the bytes left."""

    num_bytes: int  #: bytes received within `seconds`
    seconds: float
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem that was dealt with; for the log and for the coordinator."""

    kind: str  #: damaged-chunk, damaged-block, wrong-digest, wrong-layout, stalled, slow, ...
    version: int  #: version concerned, or -1
    peer: str  #: name of the neighbour
    detail: str
    pace: TransferPace | None = None  #: speed of a slow transfer
    stalls: int = 0  #: connections to a successor in a row that stalled without progress


@dataclass(frozen=True, slots=True)
class NotFetched:
    """A failed fetch of an exact version; its slot, if it had one, is returned."""

    version: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """Connections from outside this run that were rejected; rate-limited, for the log only."""

    what: str


@dataclass(frozen=True, slots=True)
class NeighbourUp:
    """A connection to a neighbour after its handshake."""

    side: Side
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NeighbourDown:
    """The loss of the connection to a neighbour that was up."""

    side: Side
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlaneFailed:
    """The end of the plane's thread by an internal error; all transfers have stopped."""

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
