"""The log writer: appends records, makes them durable once per tick, one segment at a time.

Reads   ports.Disk, and the LogTail that a scan found
Writes  segments and snapshots of the state; compacts older segments
Raises  DiskError (end the process), LogTaken (another coordinator writes), LogGrew (it wrote
        since the scan: scan again)

A coordinator that was presumed dead may wake up while its successor runs. Three rules prevent that
both count as the log, without locks. A writer first creates its segment (only one can), then checks
that its predecessor is as long as the scan saw it, makes that durable (a killed writer leaves bytes
that only the page cache holds), and last names its end in the header. Every commit looks for a
newer segment after its sync. Whatever the old writer committed before the new segment existed is
therefore seen by the successor, and later commits of the old one are refused, so nothing that was
sent or acknowledged is missing from the history. Nothing is ever truncated. A failed write or sync
is final, since a second sync may report success for pages that the kernel has already dropped.
"""

from __future__ import annotations

from functools import partial

import msgspec

from laminar.core.state.state import State
from laminar.eventlog.compaction import compact_segments
from laminar.eventlog.record import (
    MAX_HEADER_BYTES,
    SCHEMA_VERSION,
    SEGMENT_BYTES,
    LogTail,
    Record,
    SegmentHeader,
    Takeover,
    encode_frame,
    segment_name,
    segment_numbers,
)
from laminar.eventlog.snapshot import SNAPSHOT_EVERY, Snapshot, write_snapshot
from laminar.eventlog.whole_files import remove_unfinished
from laminar.names.ports import AppendFile, Background, Disk, DiskError, DiskFull

_KEPT = b"kept"


class LogTaken(Exception):
    """Another coordinator took this log over: this one must end without sending anything."""


class LogGrew(LogTaken):
    """Another coordinator wrote to the log after it was scanned.

    It has stopped writing, since a newer segment exists now: a new scan can be taken over."""


class LogWriter:
    """The growing end of the log; a flush or commit that raised is the last one it tries."""

    def __init__(
        self,
        disk: Disk,
        header: SegmentHeader,
        *,
        segment_bytes: int,
        snapshot_every: int,
        snapshot: Snapshot | None,
        keep_bytes: int,
    ) -> None:
        """Create the segment file; use `take_over`, which also writes its header."""
        if segment_bytes < MAX_HEADER_BYTES:
            raise ValueError(f"segment_bytes is {segment_bytes}: give {MAX_HEADER_BYTES} or more")
        self._disk = disk
        self._header = header
        self._segment_bytes = segment_bytes
        self._snapshot_every = snapshot_every
        self._keep_bytes = keep_bytes
        self._snapshot_seq = snapshot.seq if snapshot else 0
        self._snapshot_segment = snapshot.position.segment if snapshot else 0
        self._file = _create_segment(disk, header.segment)
        self._offset = 0  #: bytes written to the file
        self._crc = header.takes_over.crc if header.takes_over else 0
        self._pending: list[bytes] = []
        self._unsynced = False
        self._failed = False
        self._keeping = False  #: whether a snapshot is under way

    @classmethod
    def take_over(
        cls,
        disk: Disk,
        tail: LogTail,
        *,
        logic: int,
        incarnation: int,
        run: str,
        seed: int,
        config_hash: str,
        segment_bytes: int = SEGMENT_BYTES,
        snapshot_every: int = SNAPSHOT_EVERY,
        snapshot: Snapshot | None = None,
        keep_bytes: int = 0,
    ) -> LogWriter:
        """Take the log over at `tail`, in a new segment whose header is durable on return.

        A commit that ends beyond `segment_bytes` continues in another segment. `snapshot` is the
        one that the history was read from: the next is taken `snapshot_every` events after it. With
        `keep_bytes` the oldest segments are removed until all take no more, as far as no start
        needs them. Raises LogGrew when the log grew since the scan."""
        header = SegmentHeader(
            schema=SCHEMA_VERSION,
            logic=logic,
            incarnation=incarnation,
            run=run,
            seed=seed,
            config_hash=config_hash,
            segment=tail.newest + 1,
            takes_over=tail.end,
        )
        writer = cls(
            disk,
            header,
            segment_bytes=segment_bytes,
            snapshot_every=snapshot_every,
            snapshot=snapshot,
            keep_bytes=keep_bytes,
        )
        _refuse_if_grown(disk, tail)
        if tail.end:
            disk.sync(segment_name(tail.end.segment))
        writer.append(header)
        writer.commit()
        return writer

    def append(self, record: Record) -> None:
        """Buffer one record; raise ValueError (and buffer nothing) when it is too large."""
        settled = not self._pending and not self._unsynced
        frame, self._crc = encode_frame(record, self._crc, settled=settled)
        self._pending.append(frame)

    def flush(self) -> None:
        """Write buffered records without making them durable: for a tick with nothing to send."""
        self._begin_attempt()
        self._write()
        self._failed = False

    def commit(self) -> None:
        """Make everything appended durable with one write and one sync; then it may be sent.

        Raises DiskError, and LogTaken when a newer segment shows that the log has a new owner."""
        self._begin_attempt()
        self._write()
        self._sync()
        if segment_numbers(self._disk.list_names())[-1:] != [self._header.segment]:
            raise LogTaken(_describe_takeover(self._header.segment))
        if self._offset > self._segment_bytes:
            self._rotate_segment()
        self._failed = False

    def snapshot_if_due(self, state: State, background: Background) -> None:
        """Snapshot the state after the last appended event, if one is due.

        Commits first: a snapshot describes durable data only. Raises as `commit`. The snapshot is
        skipped without room for it, and if it fails in the background."""
        under_way = self._keeping and not self._failed
        if under_way or state.seq - self._snapshot_seq < self._snapshot_every:
            return
        self.commit()
        self._begin_attempt()
        end = Takeover(self._header.segment, self._offset, self._crc)
        self._keeping = True
        keep, kept = partial(self._write_snapshot, state, end), partial(self._finish_snapshot, end)
        background.run("snapshot", len(state.work.trajectories), keep, kept)
        self._snapshot_seq = state.seq
        self._failed = False

    def _write_snapshot(self, state: State, end: Takeover) -> bytes:
        try:
            write_snapshot(self._disk, state, end)
            compact_segments(self._disk, self._snapshot_segment, self._keep_bytes)
        except DiskFull:
            remove_unfinished(self._disk)  # the log needs the room
            return b""
        return _KEPT

    def _finish_snapshot(self, end: Takeover, answer: bytes | None) -> None:
        """Let the next snapshot compact the segments before this one, if it was written."""
        self._keeping = False
        if answer == _KEPT:
            self._snapshot_segment = end.segment
        elif answer is None:
            remove_unfinished(self._disk)

    def close(self) -> None:
        """Close the file; uncommitted records and a snapshot under way may be lost."""
        self._file.close()
        if self._keeping:
            remove_unfinished(self._disk)

    def _begin_attempt(self) -> None:
        """Mark the writer as failed until the caller succeeds: errors are never retried."""
        if self._failed:
            raise DiskError("an earlier write of the event log failed: end the process")
        self._failed = True

    def _write(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._file.append(data)
            self._pending.clear()
            self._offset += len(data)
            self._unsynced = True

    def _sync(self) -> None:
        if self._unsynced:
            self._file.sync()
            self._unsynced = False

    def _rotate_segment(self) -> None:
        """Continue in the next segment; the old one is durable, so its end can be named."""
        end = Takeover(self._header.segment, self._offset, self._crc)
        header = msgspec.structs.replace(self._header, segment=end.segment + 1, takes_over=end)
        file = _create_segment(self._disk, header.segment)
        self._file.close()
        self._file, self._header, self._offset = file, header, 0
        self.append(header)
        self._write()
        self._sync()


def _create_segment(disk: Disk, number: int) -> AppendFile:
    try:
        return disk.create_file(segment_name(number))
    except FileExistsError as error:
        raise LogTaken(_describe_takeover(number - 1)) from error


def _refuse_if_grown(disk: Disk, tail: LogTail) -> None:
    """Raise LogGrew if the old log grew; from the new segment on its commits are refused."""
    first = tail.end.segment if tail.end else 1
    seen = tail.torn_bytes + (tail.end.offset if tail.end else 0)
    found = sum(disk.get_size(segment_name(number)) for number in range(first, tail.newest + 1))
    if found != seen:
        raise LogGrew(
            f"the event log grew from {seen} to {found} bytes since it was read: another "
            "coordinator of this run was still alive and ends now; restart this one"
        )


def _describe_takeover(number: int) -> str:
    return (
        f"{segment_name(number)} is no longer the newest segment of the event log: another "
        "coordinator of this run took over the log; end this one"
    )
