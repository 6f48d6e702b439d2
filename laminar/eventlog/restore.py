"""Start-up: restore the state that the log describes, and take the log over.

Reads   snapshots and segments through ports.Disk
Writes  (take_over_log only) a new segment; removes files that no coordinator can use any more
Raises  LogRefused when no state can be restored; LogTaken, DiskError as the writer

The state comes from the newest snapshot of the history, and the events after it; else from the
older one; else from the whole log. Nothing is written before the history has been read and
replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.eventlog.reader import NotInHistory, scan_log
from laminar.eventlog.record import SEGMENT_BYTES, LogCorrupt, LogTail, segment_numbers
from laminar.eventlog.replay import Observer, Replay, replay_records
from laminar.eventlog.snapshot import SNAPSHOT_EVERY, Snapshot, SnapshotFiles, read_snapshots
from laminar.eventlog.whole_files import remove_unfinished
from laminar.eventlog.writer import LogWriter
from laminar.names.ports import Disk


@dataclass(frozen=True)
class RestoredRun:
    """The restored state and log of a new coordinator."""

    replay: Replay  #: check its difference first
    tail: LogTail
    snapshot: Snapshot | None  #: snapshot that the replay began with
    unusable: dict[str, str]  #: reason for rejecting it, by snapshot file

    @property
    def incarnation(self) -> int:
        """The number of the coordinator that takes over, unique through its segment."""
        return self.tail.newest + 1


def restore_log(
    disk: Disk, observer: Observer | None = None, *, observe_from: int | None = None
) -> RestoredRun:
    """Replay from the newest usable snapshot; `observer` sees the events after it.

    With `observe_from` the observer is to see that event and all that follow: a later snapshot is
    then used only if no other source goes back so far."""
    found = read_snapshots(disk)
    whole = _is_log_whole(disk, found)
    for snapshot in _to_try(found.usable, observe_from, whole):
        try:
            return _replay_from(disk, observer, snapshot, found.unusable)
        except NotInHistory as error:
            found.unusable[snapshot.name] = str(error)
    if whole:
        return _replay_from(disk, observer, None, found.unusable)
    why = "; ".join(f"{name}: {fault}" for name, fault in found.unusable.items())
    hint = "restore the segments from a copy, or start a new run"
    raise LogCorrupt(1, 0, "the file or a snapshot that replaces it", why or "neither", hint)


def _replay_from(
    disk: Disk, observer: Observer | None, snapshot: Snapshot | None, unusable: dict[str, str]
) -> RestoredRun:
    replayed = replay_records(disk, observer=observer, snapshot=snapshot)
    tail = replayed.tail  # None: it stopped at a difference
    if tail is None:
        tail = scan_log(disk, snapshot.position if snapshot else None)
    return RestoredRun(replayed, tail, snapshot, unusable)


def _to_try(usable: list[Snapshot], observe_from: int | None, whole: bool) -> list[Snapshot]:
    """Order snapshots: the newest first; those too late for the observer last, oldest first."""
    early = [s for s in usable if observe_from is None or s.seq < observe_from]
    return early if whole else [*early, *(s for s in reversed(usable) if s not in early)]


def _is_log_whole(disk: Disk, found: SnapshotFiles) -> bool:
    """Return whether the first segment exists, or never did."""
    numbers = segment_numbers(disk.list_names())
    return numbers[0] == 1 if numbers else found == ([], {})


def take_over_log(
    disk: Disk,
    restored: RestoredRun,
    *,
    logic: int,
    run: str,
    seed: int,
    config_hash: str,
    segment_bytes: int = SEGMENT_BYTES,
    snapshot_every: int = SNAPSHOT_EVERY,
    keep_bytes: int = 0,
) -> LogWriter:
    """Begin a segment after the restored history, and write its last missing decisions."""
    writer = LogWriter.take_over(
        disk,
        restored.tail,
        logic=logic,
        incarnation=restored.incarnation,
        run=run,
        seed=seed,
        config_hash=config_hash,
        segment_bytes=segment_bytes,
        snapshot_every=snapshot_every,
        keep_bytes=keep_bytes,
        snapshot=restored.snapshot,
    )
    remove_unfinished(disk)
    for name in restored.unusable:
        disk.remove(name)
    for record in restored.replay.unlogged:
        writer.append(record)
    writer.commit()
    return writer
