"""Replay: run the machine over a log and compare every decision and every state hash.

Reads   a log through ports.Disk, from its beginning or from a snapshot
Gives   Replay: the machine at the end, counts, and the first difference if there is one

The last event before a crash may have been written without all of its decisions (nothing was sent
of it then). The next coordinator writes the rest first, so they may continue behind its header; at
the end of the log the caller has to write them. All must be identical, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from laminar.core.machine import StateMachine
from laminar.core.rules import LogicError
from laminar.core.state.state import State, hash_state
from laminar.eventlog.reader import History, open_history
from laminar.eventlog.record import (
    HASH_FOLLOWS,
    DecisionRecord,
    EventRecord,
    LogTail,
    Position,
    Record,
    StateHashRecord,
    Takeover,
)
from laminar.eventlog.snapshot import Snapshot
from laminar.events.base import Command, Stamped
from laminar.events.codec import decode_command, decode_event, encode
from laminar.events.families import WireError
from laminar.names.ports import Disk

Observer = Callable[[Stamped, list[Command], State], None]

HASH_EVERY = 1_000
"""The events between two logged state hashes: encoding a large state takes some milliseconds."""
KEEP_EVERY = 10_000
"""The events between two states that a replay keeps: it repeats them within half a second."""


@dataclass(frozen=True)
class Difference:
    """The first disagreement of log and machine."""

    position: Position
    seq: int  #: seq of the event
    logged: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"segment {self.position.segment}, offset {self.position.offset}, event {self.seq}:\n"
            f"  logged:   {self.logged}\n  replayed: {self.replayed}"
        )


@dataclass
class Replay:
    """The result of a replay."""

    machine: StateMachine
    events: int = 0  #: events handled, excluding those of a snapshot
    decisions: int = 0
    hashes: int = 0
    difference: Difference | None = None
    #: computed hashes of events whose logged hash follows later
    digests: dict[int, str] = field(default_factory=dict)
    #: missing decisions of the last event, for the next coordinator to write
    unlogged: list[DecisionRecord] = field(default_factory=list)
    #: end of the log; None if the replay stopped earlier
    tail: LogTail | None = None


def decode_stamped(record: EventRecord) -> Stamped:
    """Decode the event of a record; raise WireError if this program does not know it."""
    return Stamped(
        seq=record.seq,
        time_ns=record.time_ns,
        peer=record.peer,
        incarnation=record.incarnation,
        peer_seq=record.peer_seq,
        event=decode_event(record.event),
    )


class LogReplay:
    """Replay that stops at the end of the log and continues when the log has grown."""

    def __init__(
        self,
        disk: Disk,
        *,
        observer: Observer | None = None,
        snapshot: Snapshot | None = None,
        keep: Callable[[State, Takeover], None] | None = None,
    ) -> None:
        """Begin at the beginning or with a snapshot.

        `keep` receives the state, and the position of its end, after each KEEP_EVERY events.
        """
        self.found = Replay(StateMachine(snapshot.decode_state() if snapshot else None))
        self._disk, self._observer, self._snapshot, self._keep = disk, observer, snapshot, keep
        self._start = snapshot.position if snapshot else None
        self._expected: list[bytes] = []  # decisions of the last event
        self._index = 0  # index of the next one to compare
        self._writer = 0  # incarnation of the coordinator that wrote these records

    def advance(self, tail: LogTail | None = None, until: int | None = None) -> Replay:
        """Handle all further records (up to event `until`); stop at the first difference.

        Raises NotInHistory, before the observer has seen anything, if the place where this replay
        began or stopped is not on the chain: of a snapshot of another history, or because a
        coordinator took the log over before that place."""
        found = self.found
        history = open_history(self._disk, tail, self._start)
        for record in history:
            if isinstance(record, EventRecord) and until is not None and record.seq > until:
                self._start = history.place
                return found
            self._take_record(history, record)
            if found.difference is not None:
                return found
        found.unlogged = _list_unlogged(found.machine, self._expected, self._index)
        found.tail = history.get_tail(found.machine.state.seq if found.events else None)
        self._start = found.tail.end
        return found

    def _take_record(self, history: History[Record], record: Record) -> None:
        found, expected = self.found, self._expected
        missing = self._index < len(expected)
        if isinstance(record, EventRecord):
            if missing:
                command = expected[self._index]
                found.difference = _describe_missing(history.position, found, command)
                return
            if self._keep is not None and found.events and found.events % KEEP_EVERY == 0:
                self._keep(found.machine.state, history.place)
            self._expected = _handle_record(found, history, record, self._observer)
            self._index = 0
        elif isinstance(record, DecisionRecord):
            if not _is_decided(found, record, expected, self._index):
                found.difference = _other_decision(
                    history.position, found, record, expected, self._index
                )
            self._index += 1
            found.decisions += 1
        elif isinstance(record, StateHashRecord):
            found.difference = _compare_hash(history, found, record, self._snapshot)
        elif record.incarnation == self._writer:  # same writer, next segment: it was whole
            if missing:
                command = expected[self._index]
                found.difference = _describe_missing(history.position, found, command)
        else:
            self._writer = record.incarnation


def replay_records(
    disk: Disk,
    tail: LogTail | None = None,
    *,
    until: int | None = None,
    observer: Observer | None = None,
    snapshot: Snapshot | None = None,
) -> Replay:
    """Run the log (from a snapshot on, up to event `until`); stop at the first difference.

    Raises NotInHistory, before the observer has seen anything, for a snapshot of another
    history."""
    return LogReplay(disk, observer=observer, snapshot=snapshot).advance(tail, until)


def _list_unlogged(
    machine: StateMachine, expected: list[bytes], index: int
) -> list[DecisionRecord]:
    """List the decisions from `index` on, as the tick would have logged them."""
    return [
        DecisionRecord(cause=machine.state.seq, index=place, command=msgspec.Raw(command))
        for place, command in enumerate(expected[index:], index)
    ]


def _handle_record(
    found: Replay, history: History[Record], record: EventRecord, observer: Observer | None
) -> list[bytes]:
    try:
        event = decode_stamped(record)
        commands = found.machine.handle_event(event)
    except (WireError, LogicError) as error:
        found.difference = Difference(history.position, record.seq, "an event", str(error))
        return []
    found.events += 1
    if observer is not None:
        observer(event, commands, found.machine.state)
    return [encode(command) for command in commands]


def _is_decided(found: Replay, record: DecisionRecord, expected: list[bytes], index: int) -> bool:
    return (
        index < len(expected)
        and record.index == index
        and record.cause == found.machine.state.seq
        and bytes(record.command) == expected[index]
    )


def _other_decision(
    position: Position, found: Replay, record: DecisionRecord, expected: list[bytes], index: int
) -> Difference:
    seq = found.machine.state.seq
    replayed = _format_command(expected[index]) if index < len(expected) else "no further decision"
    logged = _format_command(record.command)
    if record.cause != seq or record.index != index or index >= len(expected):
        logged = f"decision {record.index} of event {record.cause}: {logged}"
    return Difference(position, seq, logged, replayed)


def _compare_hash(
    history: History[Record], found: Replay, record: StateHashRecord, snapshot: Snapshot | None
) -> Difference | None:
    """Compare the hash of the present event, or of an earlier one whose hash was announced."""
    state = found.machine.state
    if snapshot is not None and record.seq <= snapshot.seq and record.seq != state.seq:
        return None  # hash of an event before this replay
    actual, of = found.digests.pop(record.seq, ""), record.seq
    if not actual:
        actual, of = hash_state(state), state.seq
    if record.seq == of and record.digest == HASH_FOLLOWS:
        found.digests[of] = actual
        return None
    found.hashes += 1
    if record.seq == of and record.digest == actual:
        return None
    logged = f"state {record.digest} after event {record.seq}"
    return Difference(history.position, state.seq, logged, f"state {actual} after event {of}")


def _describe_missing(position: Position, found: Replay, command: bytes) -> Difference:
    return Difference(
        position, found.machine.state.seq, "no such decision", _format_command(command)
    )


def _format_command(command: bytes | msgspec.Raw) -> str:
    try:
        return repr(decode_command(command))
    except WireError as error:
        return f"unreadable command ({error})"
