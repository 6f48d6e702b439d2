"""Where an exact version comes from: the copy that is there soonest, or none: work begins again.

Reads   state.relays, state.saved, outstanding loads
Writes  state.version_bytes, state.paces, state.failed_sources
Gives   Tier, Source, Choice; estimate_ms, again_ms, nearest; choose, what of it a replica can take

A version that work needs may be in the engine already (only its stamp changes then, and only if
the digest of both is known to be the same), in the relay of the replica's machine, in the relay of
another machine, or on disk as a checkpoint. Each takes its bytes at a measured rate, after what
waits before it. Sampling the lost tokens once more is the alternative, and takes their number at
the rate at which a sequence is sampled. The least time wins. A time that nobody has measured is
taken as the least time of its tier that is known, so that a source is tried once; if none is known
either, the order of the tiers decides. All times are whole ms, since a log replays to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from laminar.core.indexes import indexes_of, ordered_pull
from laminar.core.state import Relay, Replica, State
from laminar.events import commands as cmd

PS_PER_MS = 1_000_000_000
"""Rates are in ps per byte: 1 is 1 TB/s, and a kB/s still fits into 64 bits."""
UNKNOWN = -1
HOLDERS_MAX = 4
LOAD, DISK = "load", "disk"
"""Among the paces: of loads from the own relay, and from a checkpoint."""


class Tier(IntEnum):
    """Kinds of sources, the nearest first."""

    GPU = 0  #: the engine has these bytes
    OWN = 1  #: the relay of the replica's machine
    PEER = 2  #: the relay of another machine
    DISK = 3  #: a checkpoint


class Source(NamedTuple):
    """One copy of the version."""

    tier: Tier
    name: str  #: of the relay, or directory of the checkpoint; empty in the engine
    ps_per_byte: int = UNKNOWN  #: as measured
    waiting_bytes: int = 0  #: that it has to move before


class Choice(NamedTuple):
    """The source that is taken, and why."""

    source: Source | None  #: None: there is none, or beginning again takes less
    ms: int  #: until the version is there; UNKNOWN: nobody has measured it
    again_ms: int  #: to sample the tokens once more; UNKNOWN: no rate is known


def estimate_ms(source: Source, num_bytes: int) -> int:
    """Until the version is loaded from there; UNKNOWN without a measured rate."""
    if source.tier == Tier.GPU:
        return 0
    if source.ps_per_byte < 0:
        return UNKNOWN
    return (num_bytes + source.waiting_bytes) * source.ps_per_byte // PS_PER_MS


def again_ms(num_tokens: int, tokens_per_s: int) -> int:
    """To sample so many tokens of one sequence once more; UNKNOWN without a rate."""
    return num_tokens * 1000 // tokens_per_s if tokens_per_s > 0 else UNKNOWN


def nearest(
    sources: Iterable[Source], num_bytes: int, again: int, failed: Collection[str] = ()
) -> Choice:
    """The source that is there soonest, if that takes no longer than beginning again (ms).

    `failed`: names of sources that have failed and were not heard of since; they are left out.
    """
    able = [source for source in sources if source.name not in failed]
    times = {source: estimate_ms(source, num_bytes) for source in able}
    best = min(able, key=lambda source: (_guess(source, times), source), default=None)
    if best is None or (0 <= again < times[best]):
        return Choice(None, UNKNOWN if best is None else times[best], again)
    return Choice(best, times[best], again)


def _guess(source: Source, times: dict[Source, int]) -> int:
    """Its time; where that is unknown, the least one of its tier, else 0."""
    if times[source] >= 0:
        return times[source]
    return min((ms for s, ms in times.items() if s.tier == source.tier and ms >= 0), default=0)


# --- what a run has measured, and may choose from ---------------------------------------------


def choose(state: State, replica: Replica, version: int) -> Choice:
    """Where this replica gets this very version from.

    Another machine's relay is asked only where the size of a version is known and the own relay
    has a newer one: else the chain is about to bring it.
    """
    relay, load = state.relays.get(replica.relay), state.paces.get(LOAD, UNKNOWN)
    if relay is not None and version in relay.held:
        return Choice(Source(Tier.OWN, relay.name, load), UNKNOWN, UNKNOWN)
    sources = []
    if relay is not None and state.version_bytes and relay.newest > version:
        sources = [_peer(state, relay, name, load) for name in holders(state, version)]
    if version in state.saved:
        sources.append(Source(Tier.DISK, state.saved[version], state.paces.get(DISK, UNKNOWN)))
    return nearest(sources, state.version_bytes, UNKNOWN, state.failed_sources)


def holders(state: State, version: int) -> list[str]:
    """Relays that have it; of many the first few, so that a decision costs no more in a larger
    cluster."""
    return list(islice(indexes_of(state).held.get(version, {}), HOLDERS_MAX))


def _peer(state: State, relay: Relay, holder: str, load: int) -> Source:
    """Its bytes come over a hop, and are loaded then."""
    hop = state.paces.get(relay.name, UNKNOWN)
    pace = hop + load if hop >= 0 and load >= 0 else UNKNOWN
    return Source(Tier.PEER, holder, pace, state.version_bytes * _fetches_from(state, holder))


def _fetches_from(state: State, holder: str) -> int:
    return sum(command.holder == holder for command in fetches(state))


def fetches(state: State) -> list[cmd.PullWeights]:
    """Outstanding loads of a version that comes from another machine."""
    if not indexes_of(state).fetched:
        return []
    loading = (name for name, replica in state.replicas.items() if replica.loading)
    orders = (ordered_pull(state, name) for name in loading)
    return [order for order in orders if order is not None and order.holder]


def note_load(state: State, command: cmd.PullWeights, num_bytes: int, took_ms: int) -> None:
    """A whole version of so many bytes was loaded as ordered."""
    if command.holder or num_bytes <= 0:
        return
    state.version_bytes = num_bytes
    state.paces[DISK if command.checkpoint else LOAD] = took_ms * PS_PER_MS // num_bytes


def note_hop(state: State, relay: str, num_bytes: int, took_ms: int) -> None:
    """A relay has got so many bytes of a full version."""
    if state.version_bytes and num_bytes > 0:
        state.paces[relay] = took_ms * PS_PER_MS // num_bytes
