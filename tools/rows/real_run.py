"""A real small run for the tests of the event log: its events, decisions, records and states.

Reads   the simulated actors of the core's tests
Gives   real_run, records_of, digests, take_over
"""

from __future__ import annotations

import functools

import msgspec

from laminar.core.machine import LOGIC_VERSION, Machine
from laminar.core.state import digest
from laminar.eventlog.record import DecisionRecord, EventRecord, LogTail, Record
from laminar.eventlog.writer import LogWriter
from laminar.events.base import Command, Stamped
from laminar.events.codec import encode
from laminar.ports import Disk
from tests.core.world import World
from tests.core.world_parts import Faults, settings


@functools.cache
def real_run() -> list[tuple[Stamped, list[Command]]]:
    """Each event with its decisions; replicas are lost, events repeated, publishes skipped."""
    faults = Faults(lose_every_s=6, repeat_event=0.2, skip_publish=0.2, fail_sibling=0.05)
    return World(settings(total_steps=12), num_train=80, num_eval=5, faults=faults).run().log


@functools.cache
def digests() -> list[str]:
    """Of the state after each event (index: its seq) of a machine that is never stopped."""
    machine, found = Machine(), [""]
    for stamped, _ in real_run():
        machine.handle(stamped)
        found.append(digest(machine.state))
    return found


def records_of(stamped: Stamped, commands: list[Command]) -> list[Record]:
    """What a coordinator logs of one event."""
    event = EventRecord(
        seq=stamped.seq,
        time_ns=stamped.time_ns,
        peer=stamped.peer,
        incarnation=stamped.incarnation,
        peer_seq=stamped.peer_seq,
        event=msgspec.Raw(encode(stamped.event)),
    )
    decisions = [
        DecisionRecord(cause=stamped.seq, index=index, command=msgspec.Raw(encode(command)))
        for index, command in enumerate(commands)
    ]
    return [event, *decisions]


def take_over(disk: Disk, tail: LogTail, segment_bytes: int) -> LogWriter:
    """The log's next writer, as a coordinator begins it."""
    return LogWriter.begin(
        disk,
        tail,
        logic=LOGIC_VERSION,
        incarnation=tail.newest + 1,
        run="damage",
        seed=0,
        config_hash="0",
        segment_bytes=segment_bytes,
    )
