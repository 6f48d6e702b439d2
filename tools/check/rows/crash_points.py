"""Power cut of a coordinator during one disk call, and the recovery by its successor.

Reads   a scenario, the call in which to cut, a crash mode
Gives   calls_of; Crash, whose `problem` describes what the successor finds wrong, or is empty

The coordinator logs the events of a real run, with and without syncs, in small segments and with
frequent snapshots, and stops in the call. A successor then starts from the disk as the crash left
it. It must recover every event whose commit returned, and no other event than those of the run; its
state must equal that of a machine that never stopped, now and at the end of the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from laminar.core.machine import StateMachine
from laminar.core.rules import LOGIC_VERSION, LogicError
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import find_beginning, read_log
from laminar.eventlog.record import MAX_HEADER_BYTES, EventRecord, LogCorrupt
from laminar.eventlog.replay import Replay, replay_records
from laminar.eventlog.restore import restore_log, take_over_log
from laminar.eventlog.writer import LogTaken, LogWriter
from laminar.names.ports import Disk, InlineBackground
from tools.kit.logs import digests, real_run, records_of
from tools.simulator.disk import CrashMode, PowerCut, SimDisk

MORE = 12  #: events that a successor adds: enough for turns with and without sync and a new segment


class Scenario(NamedTuple):
    """Workload and log settings of the coordinators of a run."""

    events: int  #: events of the real run that the last coordinator logs
    snapshot_every: int  #: events between snapshots; segments older than two of them are compressed
    keep_bytes: int  #: size limit above which the oldest segments are removed; 0 keeps all
    killed: int = 0
    """Call in which a first coordinator's process was killed, without a power cut; 0 for none."""


@dataclass
class Book:
    """Progress of the run as known outside the coordinators."""

    handled: int = 0  #: seq of the last event that some coordinator handled
    committed: int = 0  #: seq of the last event whose commit returned


def calls_of(scenario: Scenario) -> int:
    """Count the disk calls of the last coordinator."""
    disk = _killed(scenario, Book())
    _live(disk, scenario, Book())
    return disk.calls


class Crash:
    """A disk after a power cut, and the progress of its coordinators."""

    def __init__(self, scenario: Scenario, call: int) -> None:
        """Cut the power in a call of the last coordinator."""
        self._scenario, self._book = scenario, Book()
        self._disk = _killed(scenario, self._book)
        _cut(self._disk, scenario, call, self._book)

    def problem(self, mode: CrashMode, draw: int) -> str:
        """Return what a successor finds wrong with one possible disk after the crash."""
        chance = random.Random(f"{self._disk.calls} {mode} {draw}")
        disk = self._disk.after_crash(mode, chance)
        try:
            machine, writer = _start(disk, self._scenario)
            found, book = _seq(machine), self._book
            if not book.committed <= found <= book.handled:
                return f"last event {found}, expected {book.committed} to {book.handled}"
            _go_on(machine, writer, found + MORE, Book())
            return _difference(disk, _seq(machine))
        except (LogCorrupt, LogTaken, LogicError) as error:
            return f"refused: {error}"


def _killed(scenario: Scenario, book: Book) -> SimDisk:
    disk = SimDisk()
    if not scenario.killed:
        return disk
    _cut(disk, scenario, scenario.killed, book)
    return disk.after_kill()


def _cut(disk: SimDisk, scenario: Scenario, call: int, book: Book) -> None:
    disk.plan(call, "crash")
    try:
        _live(disk, scenario, book)
    except PowerCut:
        return
    raise ValueError(f"call {call}: the run has only {disk.calls} calls")


# --- one coordinator --------------------------------------------------------------------------


def _live(disk: Disk, scenario: Scenario, book: Book) -> None:
    machine, writer = _start(disk, scenario)
    book.committed = _seq(machine)  # the takeover made it durable
    _go_on(machine, writer, scenario.events, book)


def _start(disk: Disk, scenario: Scenario) -> tuple[StateMachine, LogWriter]:
    """Restore the log and take it over; raise LogicError if the replay differs from the run."""
    restored = restore_log(disk)
    if restored.replay.difference is not None:
        raise LogicError(str(restored.replay.difference))
    writer = take_over_log(
        disk,
        restored,
        logic=LOGIC_VERSION,
        run="damage",
        seed=0,
        config_hash="0",
        segment_bytes=MAX_HEADER_BYTES,
        snapshot_every=scenario.snapshot_every,
        keep_bytes=scenario.keep_bytes,
    )
    return restored.replay.machine, writer


def _seq(machine: StateMachine) -> int:
    return machine.state.seq if machine.started else 0


def _go_on(machine: StateMachine, writer: LogWriter, events: int, book: Book) -> None:
    """Log the events of the run up to number `events`."""
    for stamped, _ in real_run()[_seq(machine) : events]:
        for record in records_of(stamped, machine.handle_event(stamped)):
            writer.append(record)
        book.handled = stamped.seq
        if stamped.seq % 4:
            writer.commit()
            book.committed = stamped.seq
            writer.snapshot_if_due(machine.state, InlineBackground())
        else:  # a turn with nothing to send needs no sync
            writer.flush()


# --- what is in the log afterwards ------------------------------------------------------------


def _difference(disk: Disk, last: int) -> str:
    """Describe how the log differs from the run up to event `last`; its start may be removed."""
    start = find_beginning(disk)
    found = [record for _, record in read_log(disk, start=start) if isinstance(record, EventRecord)]
    expected = [records_of(stamped, [])[0] for stamped, _ in real_run()[:last]]
    if start is not None:
        expected = expected[-len(found) :]
    if found != expected:
        return f"the log has {len(found)} events, which differ from the expected {len(expected)}"
    said = _led_astray(restore_log(disk).replay, last)
    return said or ("" if start is not None else _led_astray(replay_records(disk), last))


def _led_astray(found: Replay, last: int) -> str:
    if found.difference is not None:
        return f"the replay differs: {found.difference}"
    if hash_state(found.machine.state) != digests()[last]:
        return f"the state differs after event {last}"
    return ""
