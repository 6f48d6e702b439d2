"""Snapshots: the state at a place of the log, so that a start need not read all that came before.

Reads / writes   snapshot-000000050000.bin (the number is that of the last event in it)
Gives            snapshots(disk): those that can be used, and what is wrong with the others
Raises           DiskError while writing: end the process

File    u32 length | u32 CRC32 | body      as a frame of the log; the body is one Snapshot

A snapshot saves time and is never needed as long as the log is whole, so whatever is odd about one
makes it unusable and nothing else: it is passed over, with the reason. It names the schema and the
logic of its state, and belongs to the history only if its position lies on the chain (the reader
checks that). Two are kept: the newest, and one to fall back on.
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
"""Events between two snapshots: a start replays at most so many, which takes about a second."""
SNAPSHOTS_KEPT = 2

_NAME = re.compile(r"snapshot-(\d{12,})\.bin")


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state after event `seq`; all decisions of that event lie before `position`."""

    schema: int  #: of the log
    logic: int  #: version of the decisions
    position: Takeover  #: the end of the history that is in the state
    seq: int
    digest: str  #: of the state
    state: msgspec.Raw  #: MessagePack, as core/state/state.py encodes it

    @property
    def name(self) -> str:
        """The name of its file."""
        return _format_name(self.seq)

    def decode_state(self) -> State:
        """The state, a new one with every call; msgspec.MsgspecError for another release's."""
        return decode(self.state)


class SnapshotFiles(NamedTuple):
    """What a directory holds."""

    usable: list[Snapshot]  #: newest first; whether they belong to the history is the reader's
    unusable: dict[str, str]  #: file name -> why


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def write_snapshot(disk: Disk, state: State, position: Takeover) -> None:
    """Keep the state that the history up to `position` leads to, and remove the oldest file."""
    snapshot = Snapshot(
        schema=SCHEMA_VERSION,
        logic=state.logic,
        position=position,
        seq=state.seq,
        digest=hash_state(state),
        state=msgspec.Raw(encode(state)),
    )
    body = _encode(snapshot)
    write_whole(disk, _format_name(state.seq), FRAME.pack(len(body), zlib.crc32(body)) + body)
    for seq in _list_numbers(disk)[SNAPSHOTS_KEPT:]:
        disk.remove(_format_name(seq))


def read_snapshots(disk: Disk) -> SnapshotFiles:
    """Read every snapshot file."""
    found = SnapshotFiles([], {})
    for seq in _list_numbers(disk):
        read = _parse_snapshot(disk.read(_format_name(seq)), seq)
        if isinstance(read, Snapshot):
            found.usable.append(read)
        else:
            found.unusable[_format_name(seq)] = read
    return found


def _format_name(seq: int) -> str:
    return f"snapshot-{seq:012d}.bin"


def _list_numbers(disk: Disk) -> list[int]:
    """The numbers of the snapshot files, highest first."""
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, disk.list_names()) if m), reverse=True)


def _parse_snapshot(data: bytes, seq: int) -> Snapshot | str:
    """The snapshot, or why this program cannot go on from it."""
    body = data[FRAME.size :]
    if data[: FRAME.size] != FRAME.pack(len(body), zlib.crc32(body)):
        return "it is damaged"
    try:
        snapshot = _decode(body)
        if snapshot.schema != SCHEMA_VERSION:
            return f"it is of schema {snapshot.schema}, this release reads {SCHEMA_VERSION}"
        restored = snapshot.decode_state()
        if reason := find_unsupported_reason(snapshot.logic, restored.settings):
            return f"it is of {reason}"
        if snapshot.seq != seq:
            return f"it is of event {snapshot.seq}"
        if hash_state(restored) != snapshot.digest:
            return "its state has another form in this release"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"it is of another release: {error}"
    return snapshot
