"""Snapshots: the state at a position of the log, so that a start reads only later records.

Reads / writes   snapshot-000000050000.bin (the number is that of the last event in it)
Gives            read_snapshots(disk): usable snapshots, and the faults of the others
Raises           DiskError while writing: end the process

File    u32 length | u32 CRC32 | body      as a frame of the log; the body is one Snapshot

A snapshot saves time and is never needed as long as the log is whole, so any fault only makes it
unusable: it is skipped, with the reason. It names the schema and the logic of its state, and
belongs to the history only if its position lies on the chain (the reader checks that). Two are
kept: the newest, and one to fall back on.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

import msgspec

from laminar.core.rules import find_unsupported_reason
from laminar.core.state.state import State, decode, encode, hash_state
from laminar.eventlog.record import FRAME, SCHEMA_VERSION, Takeover
from laminar.eventlog.whole_files import write_whole
from laminar.names.ports import Disk

SNAPSHOT_EVERY = 50_000
"""The events between two snapshots, and the most that a start replays, in about a second."""
SNAPSHOTS_KEPT = 2

_NAME = re.compile(r"snapshot-(\d{12,})\.bin")


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state after event `seq`; all decisions of that event lie before `position`."""

    schema: int  #: schema of the log
    logic: int  #: version of the decision rules
    position: Takeover  #: end of the history that the state covers
    seq: int
    digest: str  #: digest of the state
    state: msgspec.Raw  #: MessagePack, as core/state/state.py encodes it

    @property
    def name(self) -> str:
        """The name of its file."""
        return format_name(self.seq)

    def decode_state(self) -> State:
        """Decode a new copy of the state; raise msgspec.MsgspecError for another release's."""
        return decode(self.state)


class SnapshotFiles(NamedTuple):
    """The snapshots of a directory."""

    usable: list[Snapshot]  #: newest first; the reader checks whether they belong to the history
    unusable: dict[str, str]  #: reason by file name


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def write_snapshot(disk: Disk, state: State, position: Takeover) -> None:
    """Write the state of the history up to `position`, and remove the oldest file."""
    write_whole(disk, format_name(state.seq), encode_snapshot(state, position))
    for seq in _list_numbers(disk)[SNAPSHOTS_KEPT:]:
        disk.remove(format_name(seq))


def encode_snapshot(state: State, position: Takeover) -> bytes:
    """Return the file of a snapshot."""
    snapshot = Snapshot(
        schema=SCHEMA_VERSION,
        logic=state.logic,
        position=position,
        seq=state.seq,
        digest=hash_state(state),
        state=msgspec.Raw(encode(state)),
    )
    body = _encode(snapshot)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def read_snapshots(disk: Disk) -> SnapshotFiles:
    """Read every snapshot file."""
    found = SnapshotFiles([], {})
    for seq in _list_numbers(disk):
        read = parse_snapshot(disk.read(format_name(seq)), seq)
        if isinstance(read, Snapshot):
            found.usable.append(read)
        else:
            found.unusable[format_name(seq)] = read
    return found


def format_name(seq: int) -> str:
    """Return the name of the file of a snapshot after this event."""
    return f"snapshot-{seq:012d}.bin"


def _list_numbers(disk: Disk) -> list[int]:
    """List the numbers of the snapshot files, highest first."""
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, disk.list_names()) if m), reverse=True)


def parse_snapshot(data: bytes, seq: int) -> Snapshot | str:
    """Return the snapshot, or why this program cannot continue from it."""
    body = data[FRAME.size :]
    if data[: FRAME.size] != FRAME.pack(len(body), zlib.crc32(body)):
        return "it is damaged"
    try:
        snapshot = _decode(body)
        if snapshot.schema != SCHEMA_VERSION:
            return f"it has schema {snapshot.schema}, this release reads {SCHEMA_VERSION}"
        restored = snapshot.decode_state()
        if reason := find_unsupported_reason(snapshot.logic, restored.settings):
            return f"it is of {reason}"
        if snapshot.seq != seq:
            return f"it is of event {snapshot.seq}"
        if hash_state(restored) != snapshot.digest:
            return "its state has another structure in this release"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"it was written by another release: {error}"
    return snapshot
