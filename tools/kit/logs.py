"""Event logs for tests, written with short calls as a coordinator writes them.

Reads   events with their decisions, as tools.kit.world.World keeps them
Gives   Log, begin_log, records_of, log_event, write_log, rewritten; real_run and its digests
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from laminar.coordinator.system import RealDisk
from laminar.core.machine import StateMachine
from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import scan_log
from laminar.eventlog.record import (
    DecisionRecord,
    EventRecord,
    LogTail,
    Record,
    SegmentHeader,
    StateHashRecord,
    Takeover,
    encode_frame,
    segment_name,
)
from laminar.eventlog.writer import LogWriter
from laminar.events.base import Command, Stamped
from laminar.events.codec import encode
from laminar.names.ports import Disk
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

Log: TypeAlias = list[tuple[Stamped, list[Command]]]


def begin_log(disk: Disk, tail: LogTail | None = None, **changes: Any) -> LogWriter:
    """Return the next writer of a log after `tail` (default: all of it) with these arguments."""
    tail = scan_log(disk) if tail is None else tail
    values: dict[str, Any] = {
        "logic": LOGIC_VERSION,
        "incarnation": tail.newest + 1,
        "run": "r",
        "seed": 0,
        "config_hash": "",
    }
    return LogWriter.take_over(disk, tail, **(values | changes))


def records_of(stamped: Stamped, commands: list[Command]) -> list[Record]:
    """Return the records that a coordinator logs for one event."""
    decisions = [
        DecisionRecord(cause=stamped.seq, index=index, command=msgspec.Raw(encode(command)))
        for index, command in enumerate(commands)
    ]
    return [EventRecord.from_stamped(stamped, encode(stamped.event)), *decisions]


def log_event(writer: LogWriter, stamped: Stamped, commands: list[Command]) -> None:
    for record in records_of(stamped, commands):
        writer.append(record)


def write_log(run_dir: Path, log: Log, hash_every: int = 50) -> None:
    """Write the whole log of a run, with a state hash after every `hash_every` events."""
    machine, writer = StateMachine(), begin_log(RealDisk.make_directory(run_dir / "events"))
    for stamped, commands in log:
        machine.handle_event(stamped)
        log_event(writer, stamped, commands)
        if stamped.seq % hash_every == 0:
            writer.append(StateHashRecord(seq=stamped.seq, digest=hash_state(machine.state)))
        writer.commit()
    writer.close()


def rewritten(records: Iterable[Record]) -> dict[str, bytes]:
    """Return the segment files of an altered history, with valid lengths, CRCs and takeovers.

    For logs that a coordinator never writes. A segment without records is an empty file."""
    files: dict[str, bytearray] = {}
    crc, number = 0, 0
    for record in records:
        if isinstance(record, SegmentHeader):
            before = Takeover(number, len(files[segment_name(number)]), crc) if number else None
            while number < record.segment:
                number += 1
                files[segment_name(number)] = bytearray()
            record = msgspec.structs.replace(record, takes_over=before)
        frame, crc = encode_frame(record, crc, settled=isinstance(record, SegmentHeader))
        files[segment_name(number)] += frame
    return {name: bytes(data) for name, data in files.items()}


@functools.cache
def real_run() -> Log:
    """Return a log in which replicas are lost, events repeated and publishes skipped."""
    faults = Faults(lose_every_s=6, repeat_event=0.2, skip_publish=0.2, fail_sibling=0.05)
    return World(settings(total_steps=12), num_train=80, num_eval=5, faults=faults).run().log


@functools.cache
def digests() -> list[str]:
    """Return the state hash after each event (index: its seq) of an uninterrupted machine."""
    machine, found = StateMachine(), [""]
    for stamped, _ in real_run():
        machine.handle_event(stamped)
        found.append(hash_state(machine.state))
    return found
