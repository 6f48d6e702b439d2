"""Events that relays report.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events.base import Event, ends_commands
from laminar.events.reasons import TransferForm


class RelayReady(Event, frozen=True, kw_only=True):
    """The relay listens, for processes of its machine and for the relay before it."""

    address: str  #: host:port for the trainer and the replicas of its machine
    chain_address: str  #: host:port to which another relay sends weights


@ends_commands(cmd.PublishWeights)
class WeightsPublished(Event, frozen=True, kw_only=True):
    """The relay of the trainer's machine holds a complete, digested version."""

    version: int
    step: int
    digest: str  #: xxh3_128
    num_bytes: int
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


class WeightsReceived(Event, frozen=True, kw_only=True):
    """A relay has a complete version from the relay before it, and its digest is correct."""

    version: int
    step: int
    digest: str  #: xxh3_128, computed over the received bytes
    kind: TransferForm
    num_bytes: int  #: on the wire
    duration_ms: int  #: time from its first byte to the end of the digest
    held: tuple[int, ...]  #: versions that can be pulled now, ascending


@ends_commands(cmd.ForwardWeights)
class RelayLinked(Event, frozen=True, kw_only=True):
    """The connection to the successor is established (or closed, for none); ends one command."""

    command_id: int
    successor: str  #: name of the relay; empty: none


class TransferProblem(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A transfer between two relays failed; the fault was handled, or is being retried."""

    kind: str  #: e.g. damaged-chunk, wrong-digest, refused, unreachable, stalled, slow
    relay: str  #: the other relay; empty if it never identified itself
    version: int  #: version of the transfer; -1: none
    detail: str
    num_bytes: int = 0  #: bytes received within `duration_ms`, of a slow version
    duration_ms: int = 0
    left_bytes: int = 0  #: bytes still to come
    stalls: int = 0  #: connections to the other relay in a row that stalled without progress
