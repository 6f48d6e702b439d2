"""The real disk under the event log: short writes, failures, durability of names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log, scan_log
from laminar.eventlog.record import StateHashRecord
from laminar.eventlog.writer import LogTaken
from laminar.names.ports import DiskError
from tools.kit.logs import begin_log


def test_a_log_on_disk_is_read_back_and_taken_over(tmp_path: Path) -> None:
    disk = RealDisk.make_directory(tmp_path / "events")
    records = [StateHashRecord(seq, "ab") for seq in range(4)]
    for each in records[:2]:
        writer = begin_log(disk)
        writer.append(each)
        writer.commit()
        writer.close()
    assert disk.list_names() == ["events-00000001.log", "events-00000002.log"]
    again = RealDisk(tmp_path / "events")
    found = [each for _, each in read_log(again) if isinstance(each, StateHashRecord)]
    assert found == records[:2]


def test_read_gives_exactly_the_bytes_asked_for(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.create_file("f")
    file.append(b"0123456789")
    file.append(b"")
    file.close()
    assert disk.get_size("f") == 10
    assert disk.read("f") == b"0123456789"
    assert disk.read("f", 4) == b"456789"
    assert disk.read("f", 4, 3) == b"456"
    assert disk.read("f", 8, 30) == b"89"
    assert disk.read("f", 20) == b""


def test_create_is_exclusive(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.create_file("f").close()
    with pytest.raises(FileExistsError):
        disk.create_file("f")
    begin_log(disk).close()
    (tmp_path / "events-00000002.log").touch()
    tail = scan_log(disk)
    (tmp_path / "events-00000003.log").touch()
    with pytest.raises(LogTaken):
        begin_log(disk, tail)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    sizes: list[int] = []

    def short(fd: int, data: memoryview) -> int:
        sizes.append(real_write(fd, data[:7]))
        return sizes[-1]

    disk = RealDisk(tmp_path)
    writer = begin_log(disk)
    monkeypatch.setattr(os, "write", short)
    records = [StateHashRecord(seq, "ab") for seq in range(20)]
    for each in records:
        writer.append(each)
    writer.commit()
    assert len(sizes) > 50
    assert [each for _, each in read_log(disk)][1:] == records


def test_a_disk_that_fills_up_is_an_error_and_leaves_a_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    room = [30]

    def filling(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(fd, data[: room[0]])
        room[0] -= written
        return written

    disk = RealDisk(tmp_path)
    writer = begin_log(disk)
    monkeypatch.setattr(os, "write", filling)
    writer.append(StateHashRecord(1, "x" * 100))
    with pytest.raises(DiskError, match=r"events-00000001\.log failed: No space") as caught:
        writer.commit()
    assert caught.value.errno == errno.ENOSPC
    assert scan_log(disk).torn_bytes == 30


def test_a_write_that_takes_nothing_does_not_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealDisk(tmp_path).create_file("f")
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(DiskError, match="wrote none of 3 bytes"):
        file.append(b"abc")


def failing(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_failed_sync_is_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk(tmp_path).create_file("f")
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(DiskError, match="sync of f failed"):
        file.sync()
    with pytest.raises(DiskError, match="sync of f failed"):
        RealDisk(tmp_path).sync("f")


def test_what_a_killed_writer_left_is_synced_before_it_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path)
    old = begin_log(disk)
    old.append(StateHashRecord(1, "ab"))
    old.flush()
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    )
    begin_log(disk)
    assert synced == ["events-00000001.log", "events-00000002.log"]


def test_a_new_name_is_durable_before_the_file_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    disk = RealDisk.make_directory(tmp_path / "events")
    assert synced == [str(tmp_path)]
    synced.clear()
    disk.create_file("f")
    assert set(synced) == {str(tmp_path / "events")}


def test_older_names_are_durable_before_a_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may have left them: no gap in the numbers of segments after a power cut."""
    disk = RealDisk.make_directory(tmp_path / "events")
    disk.create_file("f").close()
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(disk.list_names()))
    disk.create_file("g")
    assert synced == [["f"], ["f", "g"]]


@pytest.mark.parametrize(
    ("nth", "message"), [(1, "creation of f failed"), (2, "directory sync of f failed")]
)
def test_a_directory_that_cannot_be_synced_is_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, message: str
) -> None:
    disk = RealDisk.make_directory(tmp_path / "events")
    syncs: list[int] = []

    def fail_nth(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == nth:
            failing()

    monkeypatch.setattr(os, "fsync", fail_nth)
    with pytest.raises(DiskError, match=message):
        disk.create_file("f")
    assert len(syncs) == nth


def test_a_failed_create_is_a_disk_error(tmp_path: Path) -> None:
    disk = RealDisk.make_directory(tmp_path / "events")
    (tmp_path / "events").rmdir()
    with pytest.raises(DiskError, match="creation of f failed"):
        disk.create_file("f")
    with pytest.raises(DiskError, match=r"creation of .*missing/events failed"):
        RealDisk.make_directory(tmp_path / "missing" / "events")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        RealDisk(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda disk: disk.read("f"), "read of f failed: No such file"),
        (lambda disk: disk.replace_file("f", "g"), "renaming of f to g failed: No such file"),
        (lambda disk: disk.remove("f"), "removal of f failed: No such file"),
    ],
)
def test_whatever_fails_is_a_disk_error(
    tmp_path: Path, call: Callable[[RealDisk], object], message: str
) -> None:
    with pytest.raises(DiskError, match=message):
        call(RealDisk.make_directory(tmp_path / "events"))


def test_renaming_and_removal_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk.make_directory(tmp_path / "events")
    disk.create_file("f").append(b"new")
    disk.create_file("g").append(b"old")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    disk.replace_file("f", "g")
    assert (disk.list_names(), disk.read("g")) == (["g"], b"new")
    disk.remove("g")
    assert disk.list_names() == [] and synced == [str(tmp_path / "events")] * 2
