"""The lock of a run directory: who may have it, who may move it, and what a process is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.launch.train import move_aside
from laminar.run.lock import RunLock, holders, lock_for_move
from laminar.storage.writer_lock import WriterLock

HOLD = """
import sys
from pathlib import Path
from laminar.run.lock import RunLock
run_dir, name, fd = sys.argv[1:]
lock = RunLock.inherit(Path(run_dir), name, int(fd) if fd else None)
print("holds", flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """Processes of the run, which live until they are ended."""
    made: list[subprocess.Popen[str]] = []

    def one(name: str, lock_fd: int | None = None) -> subprocess.Popen[str]:
        fds = () if lock_fd is None else (lock_fd,)
        argument = "" if lock_fd is None else str(lock_fd)
        pipe = subprocess.PIPE
        made.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, str(run_dir), name, argument],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                pass_fds=fds,
            )
        )
        return made[-1]

    yield one
    for process in made:
        process.kill()
        process.communicate()


def holding(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


def test_a_directory_in_use_is_not_moved_and_the_sentence_names_who_uses_it(
    run_dir: Path, start: Start
) -> None:
    """Whichever of its processes lives; how one ended does not matter, and nothing is left over."""
    first, second = holding(start("coordinator")), holding(start("node-0"))
    with pytest.raises(ConfigError) as refused:
        move_aside(run_dir)
    for words in (
        f"coordinator (pid {first.pid})",
        f"node-0 (pid {second.pid})",
        f"laminar stop {run_dir}",
    ):
        assert words in str(refused.value)
    first.kill()
    first.wait()
    with pytest.raises(ConfigError, match=rf"in use by node-0 \(pid {second.pid}\);"):
        move_aside(run_dir)
    second.communicate("")
    assert move_aside(run_dir) == run_dir.with_name("run.1")
    assert not run_dir.exists()


def test_a_process_on_another_machine_is_named_with_its_host(
    run_dir: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holding(start("node-1"))
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    (holder,) = holders(run_dir)
    assert not holder.local
    with pytest.raises(ConfigError, match=rf"node-1 \(pid {process.pid} on {os.uname().nodename}"):
        move_aside(run_dir)


def test_nobody_joins_while_the_directory_is_moved(run_dir: Path, start: Start) -> None:
    """A process that started just then finds that the directory is gone, and does not make it."""
    RunLock.join(run_dir, "train").close()
    with lock_for_move(run_dir):
        late = start("node-0")
        with pytest.raises(subprocess.TimeoutExpired):
            late.wait(1)
        run_dir.rename(run_dir.with_name("run.1"))
    _, said = late.communicate(timeout=10)
    assert late.returncode != 0
    assert f"{run_dir} is gone" in said
    assert not run_dir.exists()


def test_only_one_of_two_movers_gets_the_directory(run_dir: Path) -> None:
    with (
        lock_for_move(run_dir),
        pytest.raises(ConfigError, match="in use by"),
        lock_for_move(run_dir),
    ):
        pass


def test_a_directory_that_was_just_made_has_one_owner(run_dir: Path) -> None:
    """Two that start the same run at the same time: the second finds the lock of the first."""
    first = RunLock.create(run_dir, "train")
    with pytest.raises(ConfigError, match="in use by train"):
        RunLock.create(run_dir, "train")
    first.close()


def test_a_child_has_its_starters_share_from_its_birth(run_dir: Path, start: Start) -> None:
    """Its starter may be gone before the child has run a line."""
    lock = RunLock.create(run_dir, "train")
    child = start("coordinator", lock.fd)
    lock.close()
    with pytest.raises(ConfigError, match="in use by"):
        move_aside(run_dir)
    holding(child)
    assert [holder.name for holder in holders(run_dir)] == ["coordinator"]
    child.communicate("")
    move_aside(run_dir)


def test_a_process_is_told_that_its_directory_is_gone_or_anothers(run_dir: Path) -> None:
    lock = RunLock.create(run_dir, "node-0")
    assert lock.find_lost_reason() is None
    run_dir.rename(run_dir.with_name("run.1"))
    assert f"{run_dir} is gone" in lock.find_lost_reason()
    run_dir.mkdir()
    assert "run.lock was removed" in lock.find_lost_reason()
    other = RunLock.create(run_dir, "node-0")
    assert f"{run_dir} belongs to another run now" in lock.find_lost_reason()
    assert other.find_lost_reason() is None
    with pytest.raises(
        ConfigError, match="belongs to another run now"
    ):  # a child that is started late
        RunLock.inherit(run_dir, "rollout-0", os.dup(lock.fd))
    other.close()
    shutil.rmtree(run_dir)
    lock.close()
    assert not run_dir.exists()


def test_who_has_ended_is_not_named(run_dir: Path, start: Start) -> None:
    """Neither who left gracefully nor who was killed: the lock says it, not the file."""
    killed, left = holding(start("node-0")), holding(start("store-0"))
    killed.kill()
    killed.wait()
    left.communicate("")
    assert holders(run_dir) == []
    assert holders(run_dir / "nowhere") == []


def test_a_disk_without_room_for_the_name_stops_nobody(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = RunLock.create(run_dir, "coordinator")
    with pytest.raises(ConfigError, match=r"locks .*run\.lock, but all .* dead: `fuser -v"):
        move_aside(run_dir)
    lock.close()


def test_a_file_system_without_locks_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    for attempt in (RunLock.create, RunLock.join):
        with pytest.raises(ConfigError, match=r"without file locks.*run\.output_dir"):
            attempt(run_dir, "train")
    with pytest.raises(ConfigError, match=r"without file locks"):
        move_aside(run_dir)


def test_lock_of_a_coordinator_that_died_is_said_to_be_held_by_another_process(
    run_dir: Path, start: Start
) -> None:
    first = holding(start("coordinator"))
    first.kill()
    first.wait()
    card = run_dir / "processes" / "coordinator"
    with card.open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        said = (
            rf"served already, by coordinator \(pid {first.pid}\); that process is dead here.*fuser"
        )
        with pytest.raises(ConfigError, match=said):
            RunLock.join(run_dir, "coordinator")


def test_no_other_user_can_open_a_lock_even_one_of_an_earlier_release(run_dir: Path) -> None:
    paths = [run_dir / "run.lock", run_dir / "processes" / "coordinator"]
    paths[1].parent.mkdir()
    for path in paths:
        path.touch(0o644)
        path.chmod(0o664)
    RunLock.join(run_dir, "coordinator").close()
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_the_close_of_a_lock_on_a_failing_disk_does_not_hide_why_it_is_closed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError(5, "Input/output error")

    lock = RunLock.create(run_dir, "node-0")
    store = WriterLock(run_dir / "store.sqlite", 1)
    with pytest.raises(ValueError, match="the reason"), closing(lock), closing(store):
        monkeypatch.setattr(Path, "unlink", fail)
        monkeypatch.setattr(os, "close", fail)
        raise ValueError("the reason")
