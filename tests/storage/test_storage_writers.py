"""Two processes of a store: one writes its database, the other waits or ends."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from laminar.names.ports import DatabaseHeld, DiskError
from laminar.storage import books
from laminar.storage.database import Database
from laminar.storage.writer_lock import Writer
from tools.kit.store_samples import append, filled, one, open_, trajectory_rows

ROOT = Path(__file__).parents[2]


def hold(path: Path) -> None:
    """A store that has written, and lives until its standard input is closed."""
    database = filled(path)
    one(database, open_("0.1.0"))
    print("holds", flush=True)
    sys.stdin.read()


@pytest.mark.process
def test_a_database_that_another_process_has_is_not_opened_before_that_has_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.sqlite"
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.storage.test_storage_writers", str(path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        with pytest.raises(DatabaseHeld, match=rf"incarnation 1 \(pid {other.pid} on "):
            Database(path, 2)
        assert [row.id for row in trajectory_rows(path)] == ["0.1.0"], "readers are not kept out"
        other.kill()
    Database(path, 2).close()


def test_a_store_of_which_a_later_one_has_had_the_database_writes_nothing(tmp_path: Path) -> None:
    """Whether it comes too late, or was cut off from a server of files that gave its lock away."""
    path = tmp_path / "store.sqlite"
    database = filled(path)
    one(database, open_("0.1.0"))
    path.with_suffix(".lock").write_bytes(msgspec.json.encode(Writer(7, "m2", 12)))
    with pytest.raises(DiskError, match=r"incarnation 7 \(pid 12 on m2\) took over from"):
        database.handle_batch([append("0.1.0", (1, 2))])
    database.close()
    with pytest.raises(DiskError, match="incarnation 7"):
        Database(path, 6)
    assert [row.num_tokens for row in trajectory_rows(path)] == [0]
    assert books.check_integrity(path) == []
    Database(path, 7).close()
    Database(path, 8).close()


def test_a_lock_whose_recorded_store_is_dead_is_said_to_be_anothers(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    lock = path.with_suffix(".lock")
    lock.write_bytes(msgspec.json.encode(Writer(7, socket.gethostname(), 3_999_999_999)))
    with lock.open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with pytest.raises(DatabaseHeld, match=f"that process is dead here.*`fuser -v {lock}`"):
            Database(path, 8)


def test_no_other_user_can_open_the_database_even_one_of_an_earlier_release(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    before = os.umask(0o002)
    try:
        for name in ("store.sqlite", "store.sqlite-shm", "store.sqlite-wal"):
            (tmp_path / name).touch()
        database = filled(path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("store.*[!s]")}
    database.close()
    names = ("store.lock", "store.sqlite", "store.sqlite-shm", "store.sqlite-wal")
    assert modes == dict.fromkeys(names, 0o600)


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
