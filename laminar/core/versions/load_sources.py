"""Sources of an exact version: the replica loads the copy that arrives first.

Reads   state.members.relays, state.versions.checkpoint_paths, outstanding loads
Writes  state.versions.num_bytes, state.versions.ps_per_byte, state.versions.failed_sources
Gives   SourceTier, LoadSource, SourceChoice; estimate_ms, choose_nearest; list_sources and
        choose_source, the copies that a replica can load; list_fetches

A version that work needs may be in the relay of the replica's machine, in the relay of another
machine, or on disk as a checkpoint. The load time follows from the measured rate and from the queue
of the source, and the least time wins. An unmeasured time is assumed to be the least known one of
its tier, so that a source is tried once; if none is known either, the order of the tiers decides.
All times are whole ms, since a log replays to them.

An engine that has these bytes already loads nothing, which it sees by their digest. Sampling again
is not a source: the state does not know how many tokens a lost response had, and a fresh draw in
place of a long response makes the data shorter. It happens when recovery.resume_timeout_ms is over
(core/scheduling/recovery.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events.reasons import PullPurpose

PS_PER_MS = 1_000_000_000
"""The unit of rates, ps per byte: 1 is 1 TB/s, and a kB/s still fits into 64 bits."""
UNKNOWN = -1
"""A rate or a time that is not measured."""
HOLDERS_MAX = 4
LOAD, DISK = "load", "disk"
"""Keys of state.versions.ps_per_byte: loads from the replica's own relay, and from a checkpoint."""


class SourceTier(IntEnum):
    """The kinds of sources, nearest first."""

    OWN = 1  #: the relay of the replica's machine
    PEER = 2  #: the relay of another machine
    DISK = 3  #: a checkpoint


class LoadSource(NamedTuple):
    """A copy of the version."""

    tier: SourceTier
    name: str  #: name of the relay, or directory of the checkpoint
    ps_per_byte: int = UNKNOWN
    waiting_bytes: int = 0  #: bytes queued before


class SourceChoice(NamedTuple):
    """The chosen source."""

    source: LoadSource | None  #: None: no source
    ms: int  #: time until the version is loaded; UNKNOWN without a measured rate


def estimate_ms(source: LoadSource, num_bytes: int) -> int:
    """Estimate the time of a load from this source; UNKNOWN without a measured rate."""
    if source.ps_per_byte < 0:
        return UNKNOWN
    return (num_bytes + source.waiting_bytes) * source.ps_per_byte // PS_PER_MS


def choose_nearest(
    sources: Iterable[LoadSource], num_bytes: int, failed: Collection[str] = ()
) -> SourceChoice:
    """Return the source with the shortest time.

    `failed`: names of sources that have failed and not responded since; they are left out."""
    able = [source for source in sources if source.name not in failed]
    times = {source: estimate_ms(source, num_bytes) for source in able}
    best = min(
        able, key=lambda source: (_estimate_or_guess_ms(source, times), source), default=None
    )
    return SourceChoice(best, UNKNOWN if best is None else times[best])


def _estimate_or_guess_ms(source: LoadSource, times: dict[LoadSource, int]) -> int:
    """Estimate the load time; fall back to the fastest in the same tier, then 0."""
    if times[source] >= 0:
        return times[source]
    return min((ms for s, ms in times.items() if s.tier == source.tier and ms >= 0), default=0)


# --- measured rates and available sources ---------------------------------------------------------


def choose_source(state: State, replica: Replica, version: int) -> SourceChoice:
    """Choose where this replica loads exactly this version from."""
    return choose_nearest(
        list_sources(state, replica, version),
        state.versions.num_bytes,
        state.versions.failed_sources,
    )


def list_sources(state: State, replica: Replica, version: int) -> list[LoadSource]:
    """List the copies that this replica can load, including those of failed relays.

    Another machine's relay is listed only if the size of a version is known and the own relay has a
    newer one: else the chain is about to bring it."""
    versions = state.versions
    relay, load = (state.members.relays.get(replica.relay), versions.ps_per_byte.get(LOAD, UNKNOWN))
    if relay is not None and version in relay.held:
        return [LoadSource(SourceTier.OWN, relay.name, load)]
    found = []
    if relay is not None and versions.num_bytes and relay.newest > version:
        waiting = _count_waiting_bytes(state, replica)
        hop = versions.ps_per_byte.get(relay.name, UNKNOWN)
        pace = hop + load if hop >= 0 and load >= 0 else UNKNOWN  # over a hop, then into the engine
        found = [
            LoadSource(SourceTier.PEER, name, pace, waiting.get(name, 0))
            for name in holders(state, version)
        ]
    if versions.has_checkpoint(version):
        found.append(
            LoadSource(
                SourceTier.DISK,
                versions.checkpoint_paths[version],
                versions.ps_per_byte.get(DISK, UNKNOWN),
            )
        )
    return found


def holders(state: State, version: int) -> list[str]:
    """List the first few relays that have it, so that a decision costs the same in any cluster."""
    return list(islice(indexes_of(state).held.get(version, {}), HOLDERS_MAX))


def _count_waiting_bytes(state: State, replica: Replica) -> dict[str, int]:
    """Return the bytes that each holder was ordered earlier to give to other replicas."""
    own = state.orders.commands.get(keys.pull_key(replica.name))  # set when a choice is repeated
    waiting: dict[str, int] = {}
    for order in list_fetches(state):
        number = state.orders.commands[keys.pull_key(order.to)].command_id
        if own is None or number < own.command_id:
            waiting[order.holder] = waiting.get(order.holder, 0) + state.versions.num_bytes
    return waiting


def list_fetches(state: State) -> list[cmd.PullWeights]:
    """List outstanding loads of a version that comes from another machine."""
    orders = indexes_of(state).from_afar
    return [orders[name] for name in sorted(orders)]


def is_plain_load(command: cmd.PullWeights) -> bool:
    """Return whether the load time is that of a whole version which was here when it began."""
    return not command.holder and command.purpose != PullPurpose.STREAM


def record_load(state: State, command: cmd.PullWeights, num_bytes: int, took_ms: int) -> None:
    """Record the rate of a completed load of a whole version."""
    if not is_plain_load(command) or num_bytes <= 0:
        return
    state.versions.num_bytes = num_bytes
    state.versions.ps_per_byte[DISK if command.checkpoint else LOAD] = (
        took_ms * PS_PER_MS // num_bytes
    )


def record_hop(state: State, relay: str, num_bytes: int, took_ms: int) -> None:
    """Record the rate at which a relay has received a full version."""
    if state.versions.num_bytes and num_bytes > 0:
        state.versions.ps_per_byte[relay] = took_ms * PS_PER_MS // num_bytes
