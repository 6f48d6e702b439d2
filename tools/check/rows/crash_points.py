"""A coordinator whose power is cut in one disk call, and whether its successor finds everything.

Reads   a scenario, the call in which to cut, a crash mode
Gives   calls_of; Crash, whose `problem` is what a successor finds wrong, "" for nothing

The coordinator logs the events of a real run, with turns that sync and turns that do not, small
segments, often a snapshot, and ends in the call. What the crash leaves is handed to a successor. It
must know every event whose commit returned, in the state of a machine that was never stopped; no
event that was not there; and the rest of the run must lead it where it led that machine.
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

MORE = 12
"""Events that a successor adds: enough to sync, not to sync, and begin a segment."""


class Scenario(NamedTuple):
    """What the coordinators of a run do."""

    events: int  #: of the real run that the last one logs
    snapshot_every: int  #: events; segments that lie before two of them are compressed
    keep_bytes: int  #: what the segments may take, older ones are removed; 0: they stay
    killed: int = 0
    """The call in which a first coordinator's process died, while its machine went on; 0: none."""


@dataclass
class Book:
    """What is known of the run outside of the coordinators."""

    handled: int = 0  #: seq of the last event that some coordinator handled
    committed: int = 0  #: seq of the last event whose commit returned


def calls_of(scenario: Scenario) -> int:
    """How many disk calls the last coordinator makes."""
    disk = _killed(scenario, Book())
    _live(disk, scenario, Book())
    return disk.calls


class Crash:
    """A disk without power, and what its coordinators had done."""

    def __init__(self, scenario: Scenario, call: int) -> None:
        """Cut the power in a call of the last coordinator."""
        self._scenario, self._book = scenario, Book()
        self._disk = _killed(scenario, self._book)
        _cut(self._disk, scenario, call, self._book)

    def problem(self, mode: CrashMode, draw: int) -> str:
        """What a successor finds wrong with one of the disks that the crash may have left."""
        chance = random.Random(f"{self._disk.calls} {mode} {draw}")
        disk = self._disk.after_crash(mode, chance)
        try:
            machine, writer = _start(disk, self._scenario)
            found, book = _seq(machine), self._book
            if not book.committed <= found <= book.handled:
                return f"found event {found} last of {book.committed} to {book.handled}"
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
    raise ValueError(f"call {call}: there are only {disk.calls}")


# --- one coordinator --------------------------------------------------------------------------


def _live(disk: Disk, scenario: Scenario, book: Book) -> None:
    machine, writer = _start(disk, scenario)
    book.committed = _seq(machine)  # the takeover made it durable
    _go_on(machine, writer, scenario.events, book)


def _start(disk: Disk, scenario: Scenario) -> tuple[StateMachine, LogWriter]:
    """What a coordinator does first; LogicError when the log does not lead where the run did."""
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
    """Log the run up to an event."""
    for stamped, _ in real_run()[_seq(machine) : events]:
        for record in records_of(stamped, machine.handle_event(stamped)):
            writer.append(record)
        book.handled = stamped.seq
        if stamped.seq % 4:
            writer.commit()
            book.committed = stamped.seq
            writer.snapshot_if_due(machine.state, InlineBackground())
        else:  # a turn that has nothing to send
            writer.flush()


# --- what is in the log afterwards ------------------------------------------------------------


def _difference(disk: Disk, last: int) -> str:
    """How the log differs from the run up to event `last`; its beginning may be gone."""
    start = find_beginning(disk)
    found = [record for _, record in read_log(disk, start=start) if isinstance(record, EventRecord)]
    expected = [records_of(stamped, [])[0] for stamped, _ in real_run()[:last]]
    if start is not None:
        expected = expected[-len(found) :]
    if found != expected:
        return f"other events in the log than the {len(expected)} that there were: {len(found)}"
    said = _led_astray(restore_log(disk).replay, last)
    return said or ("" if start is not None else _led_astray(replay_records(disk), last))


def _led_astray(found: Replay, last: int) -> str:
    if found.difference is not None:
        return f"the replay differs: {found.difference}"
    if hash_state(found.machine.state) != digests()[last]:
        return f"after event {last} the state is not what it was"
    return ""
