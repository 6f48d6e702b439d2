"""What relays report.

Reads   nothing
Gives   one frozen struct per event, each declared with who reports it and which commands it ends
"""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events.base import Event, reported_by
from laminar.events.reasons import TransferForm
from laminar.names.roles import Role


@reported_by(Role.RELAY)
class RelayReady(Event, frozen=True, kw_only=True):
    """The relay listens, for processes of its machine and for the relay before it."""

    address: str  #: host:port for the trainer and the replicas of its machine
    bulk: str  #: host:port to which another relay sends weights


@reported_by(Role.RELAY, ends=(cmd.PublishWeights,))
class WeightsPublished(Event, frozen=True, kw_only=True):
    """The relay of the trainer's machine holds a complete, digested version."""

    version: int
    step: int
    digest: str  #: xxh3_128
    num_bytes: int
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


@reported_by(Role.RELAY)
class WeightsReceived(Event, frozen=True, kw_only=True):
    """A relay has a complete version from the relay before it, and its digest is right."""

    version: int
    step: int
    digest: str  #: xxh3_128, worked out over what arrived
    kind: TransferForm
    num_bytes: int  #: on the wire
    duration_ms: int  #: from its first byte to the end of the digest
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


@reported_by(Role.RELAY, ends=(cmd.ForwardWeights,))
class RelayLinked(Event, frozen=True, kw_only=True):
    """The connection to the successor stands (or was ended, for none); it answers one command."""

    command_id: int
    successor: str  #: name of the relay; empty: none


@reported_by(Role.RELAY)
class TransferTrouble(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Something between two relays went wrong and was dealt with, or is being tried again."""

    kind: str  #: e.g. damaged-chunk, wrong-digest, refused, unreachable, stalled, slow
    relay: str  #: the other one; empty if it never said who it is
    version: int  #: -1: of none
    detail: str
    num_bytes: int = 0  #: that came within `duration_ms`, of a version that takes long
    duration_ms: int = 0
    left_bytes: int = 0  #: that have still to come
