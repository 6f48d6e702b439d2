"""The state: everything the coordinator knows, as plain data.

Reads   nothing
Gives   State, the list of its records; `hash_state`, the hash of its content; `encode`, `decode`

No floats, no sets, no clocks, no objects that cannot be encoded: the whole state is one MessagePack
value, and a replay must reach the same hash. Dicts are used as ordered sets (value None) where a
decision iterates over them.

A value that equals its default is left out of the encoding, so that a field which a later release
adds changes nothing for a run that does not use it. msgspec compares by identity, which is the same
only for values that exist once: None, False and True, integers from -5 to 256, the empty string and
tuple; and empty dicts and lists, which it inspects. Other defaults need `encode_default`. A struct
that grows beyond 15 fields gets a longer header, which changes every hash.
"""

from __future__ import annotations

import msgspec
import xxhash

from laminar.core.state.data import Data
from laminar.core.state.evaluations import Evaluations
from laminar.core.state.keys import Orders
from laminar.core.state.members import Members, Replica
from laminar.core.state.migrations import Repack
from laminar.core.state.run import Run
from laminar.core.state.signals import Signals
from laminar.core.state.steps import Steps
from laminar.core.state.versions import Versions
from laminar.core.state.work import Work
from laminar.events.base import Settings


class State(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """The fold of the event log, with a record for each concept."""

    settings: Settings
    logic: int
    time_ns: int = 0
    seq: int = 0
    members: Members = msgspec.field(default_factory=Members)
    data: Data = msgspec.field(default_factory=Data)
    work: Work = msgspec.field(default_factory=Work)
    steps: Steps = msgspec.field(default_factory=Steps)
    versions: Versions = msgspec.field(default_factory=Versions)
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    run: Run = msgspec.field(default_factory=Run)
    orders: Orders = msgspec.field(default_factory=Orders)
    signals: Signals = msgspec.field(default_factory=Signals)
    repack: Repack = msgspec.field(default_factory=Repack)

    def is_in_reach(self, replica: Replica, version: int) -> bool:
        """Return whether this replica can load exactly this version, from its relay or the disk."""
        held = self.members.list_held_versions(replica)
        return self.versions.has_checkpoint(version) or version in held


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """Encode as one MessagePack value; equal bytes mean equal decisions from here on."""
    return _encoder.encode(state)


def decode(data: bytes | msgspec.Raw) -> State:
    """Decode the result of `encode`; raise msgspec.MsgspecError for anything else."""
    return _decoder.decode(data)


def hash_state(state: State) -> str:
    """Return xxh3_128 of the encoding; dict order counts, since decisions iterate over some."""
    return xxhash.xxh3_128_hexdigest(encode(state))
