"""Read access to a run directory: its event log as records or as a replay, and its clock.

Reads   RUN/events/
Raises  ConfigError, in one sentence, for a path that does not name a run directory and for a log
        that cannot be read or trusted

Every command that analyzes a run starts here, so the same mistake gets the same message everywhere.
A running run can be read as well: the log then simply ends earlier. Where old segments were
removed, records begin with the oldest remaining segment; operations that need the whole history are
refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.eventlog.compaction import measure_segments
from laminar.eventlog.reader import NotInHistory, find_beginning, read_log, read_raw_log, scan_log
from laminar.eventlog.record import (
    DecisionRecord,
    EventRecord,
    LogRefused,
    LogTail,
    Record,
    Takeover,
    segment_numbers,
)
from laminar.eventlog.replay import LogReplay, Observer, Replay, decode_stamped, replay_records
from laminar.eventlog.snapshot import Snapshot, read_snapshots
from laminar.events.base import Command, Stamped
from laminar.events.codec import decode_command
from laminar.events.families import WireError
from laminar.names.ports import AppendFile, DiskError
from laminar.run.command_line import shell_command
from laminar.run.directory import EVENTS_DIR


class ReadOnlyDisk:
    """Implementation of ports.Disk over the files of a directory that refuses every change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def list_names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        with open(self._directory / name, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def get_size(self, name: str) -> int:
        return os.stat(self._directory / name).st_size

    def create_file(self, name: str) -> AppendFile:
        raise self._refusal(name, "created")

    def sync(self, name: str) -> None:
        raise self._refusal(name, "synced")

    def replace_file(self, old: str, new: str) -> None:
        raise self._refusal(old, "renamed")

    def remove(self, name: str) -> None:
        raise self._refusal(name, "removed")

    def _refusal(self, name: str, what: str) -> DiskError:
        path = self._directory / name
        return DiskError(f"{path} cannot be {what}: the log is open for reading")


def read_records(run_dir: Path, *, recent: bool = False) -> Iterator[Record]:
    """Yield the records in log order; with `recent`, only those after the oldest snapshot."""
    with _open_log(run_dir) as disk:
        kept = read_snapshots(disk).usable if recent else []
        for _, record in read_log(disk, start=kept[-1].position if kept else find_beginning(disk)):
            yield record


def raw_records(run_dir: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (segment, offset, plain map) of every record, even of a later schema."""
    with _open_log(run_dir) as disk:
        yield from read_raw_log(disk, find_beginning(disk))


def segments_gone(run_dir: Path) -> int:
    """Return the number of segments missing at the beginning of the log."""
    with _open_log(run_dir) as disk:
        start = find_beginning(disk)
        return start.segment - 1 if start else 0


def parse_event(record: EventRecord) -> Stamped:
    """Return the event of a record; raise ConfigError if another release wrote it."""
    try:
        return decode_stamped(record)
    except WireError as error:
        raise _other_release_error(f"event {record.seq}", error) from error


def parse_command(record: DecisionRecord) -> Command:
    """Return the command of a record; raise ConfigError if another release wrote it."""
    try:
        return decode_command(record.command)
    except WireError as error:
        raise _other_release_error(f"a decision of event {record.cause}", error) from error


def _other_release_error(what: str, error: WireError) -> ConfigError:
    return ConfigError(
        f"{what} was written by another release of Laminar ({error}):  read the log with "
        f"`{shell_command('log', 'dump', '--raw')} RUN`"
    )


def log_size(run_dir: Path) -> tuple[int, LogTail]:
    """Return the total bytes of the segment files, and the end of the history."""
    with _open_log(run_dir) as disk:
        return sum(measure_segments(disk).values()), scan_log(disk, find_beginning(disk))


def replay_log(
    run_dir: Path,
    observer: Observer | None = None,
    *,
    until: int | None = None,
    must_be_identical: bool = True,
) -> Replay:
    """Replay the whole log and pass every event to the observer.

    Raise ConfigError for a log without events or without its beginning and, with
    `must_be_identical`, for a replay that differs: figures drawn from a state that the run never
    had would be wrong.
    """
    with _open_log(run_dir) as disk:
        if find_beginning(disk):
            raise ConfigError(
                f"the log of {run_dir} has lost its beginning (coordinator.log_keep_mb removes "
                "old segments), and this command needs all of it: restore the segments from a "
                f"copy, or see what is left with `{shell_command('log', 'replay', run_dir)}` and "
                f"`{shell_command('log', 'dump', run_dir)}`"
            )
        found = replay_records(disk, until=until, observer=observer)
    if must_be_identical or found.difference is None:
        _require_identical(run_dir, found)
    return found


def replay_part(
    run_dir: Path, *, until: int | None = None, newest: bool
) -> tuple[Replay, Snapshot]:
    """Replay from the newest, or else the oldest, usable snapshot.

    Raise ConfigError when there is none (of event `until` or before).
    """
    with _open_log(run_dir) as disk:
        usable, why_not = read_snapshots(disk)
        for snapshot in usable if newest else reversed(usable):
            try:
                if until is None or snapshot.seq <= until:
                    return replay_records(disk, until=until, snapshot=snapshot), snapshot
            except NotInHistory as error:
                why_not[snapshot.name] = str(error)
        raise _no_snapshot_error(run_dir, why_not, until)


def _no_snapshot_error(run_dir: Path, why_not: dict[str, str], until: int | None) -> ConfigError:
    faults = "".join(f" ({name}: {fault})" for name, fault in why_not.items())
    which = "" if until is None else f" of event {until} or before"
    return ConfigError(
        f"{run_dir / EVENTS_DIR} holds no usable snapshot{which}{faults}: without one, a replay "
        "needs all segments"
    )


@contextmanager
def _open_log(run_dir: Path) -> Iterator[ReadOnlyDisk]:
    """Yield the log's disk; turn every fault of path or log into a one-sentence ConfigError."""
    events = run_dir / EVENTS_DIR
    if not run_dir.is_dir():
        what = "is not a directory" if run_dir.exists() else "does not exist"
        raise ConfigError(f"{run_dir} {what}: name a run directory, such as runs/quickstart")
    if not events.is_dir():
        raise ConfigError(f"{run_dir} is not a run directory: it has no directory {EVENTS_DIR}/")
    try:
        disk = ReadOnlyDisk(events)
        if not segment_numbers(disk.list_names()):
            raise ConfigError(
                f"{events} has no event log yet: wait until the coordinator has started"
            )
        yield disk
    except LogRefused as error:
        raise ConfigError(f"{events}: {error}") from error
    except NotInHistory as error:
        raise ConfigError(f"{run_dir}: the log was taken over meanwhile: {error}") from error
    except OSError as error:
        raise ConfigError(f"{events} cannot be read: {error}") from error


def log_ends_at(run_dir: Path, end: Takeover | None) -> bool:
    """Return whether the log has this place and nothing after it."""
    with _open_log(run_dir) as disk:
        try:
            return end is not None and scan_log(disk, end).end == end
        except NotInHistory:
            return False


def replay_from(
    run_dir: Path, snapshot: Snapshot | None, until: int, observer: Observer | None = None
) -> State:
    """Return the state after event `until`, by a replay from a state before it."""
    with _open_log(run_dir) as disk:
        found = replay_records(disk, until=until, snapshot=snapshot, observer=observer)
    _require_identical(run_dir, found)
    return found.machine.state


KeepState = Callable[[State, Takeover, float], None]
"""Receiver of the state at a place of the log, with the share of the log before it."""


class GrowingReplay:
    """Replay of a log that can be continued when the log has grown.

    It begins with the oldest snapshot where the beginning of the log is gone."""

    def __init__(self, run_dir: Path, observer: Observer, keep: KeepState) -> None:
        self._run_dir, self._keep, self._size, snapshot = run_dir, keep, 0, None
        with _open_log(run_dir) as self._disk:
            if find_beginning(self._disk):
                usable, why_not = read_snapshots(self._disk)
                if not usable:
                    raise _no_snapshot_error(run_dir, why_not, None)
                snapshot = usable[-1]
        self._replay = LogReplay(
            self._disk, observer=observer, snapshot=snapshot, keep=self._keep_state
        )
        self.begins_at = snapshot.seq if snapshot is not None else 0

    @property
    def state(self) -> State:
        """State after the last event."""
        return self._replay.found.machine.state

    def advance(self) -> Takeover | None:
        """Handle all further records; return the end of the log.

        Raise ConfigError for a log without events, one that does not replay, and one whose history
        no longer has the place where the replay stopped."""
        with _open_log(self._run_dir):
            self._size = sum(measure_segments(self._disk).values())
            found = self._replay.advance()
        _require_identical(self._run_dir, found)
        return found.tail.end if found.tail is not None else None

    def has_grown(self) -> bool:
        """Return whether the log has more bytes than at the last `advance`."""
        with _open_log(self._run_dir):
            return sum(measure_segments(self._disk).values()) != self._size

    def _keep_state(self, state: State, place: Takeover) -> None:
        sizes = measure_segments(self._disk)
        before = sum(size for number, size in sizes.items() if number < place.segment)
        self._keep(state, place, min((before + place.offset) / max(self._size, 1), 1.0))


def _require_identical(run_dir: Path, found: Replay) -> None:
    """Raise ConfigError for a replay that differs, and for a log without events."""
    if found.difference is not None:
        raise ConfigError(
            f"the log of {run_dir} does not replay (event {found.difference.seq}): see "
            f"`{shell_command('log', 'replay', run_dir)}`, and use the release that wrote it"
        )
    if not found.machine.started:
        raise ConfigError(f"the log of {run_dir} has no events yet: wait until the run has started")
