"""The arena file: its life, its checks, and that two processes see the same bytes."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laminar.weights.arena import Arena, ArenaError, arena_path, remove_arenas
from laminar.weights.region import NO_FILE

ATTACH = """
import sys
from pathlib import Path
import numpy as np
from laminar.weights.arena import Arena
arena = Arena.attach(Path(sys.argv[1]))
assert (arena.slots, arena.slot_bytes) == (3, 5000), arena.__dict__
assert np.array_equal(arena.slot(1), np.arange(5000) % 251)
arena.slot(2)[:] = 7
"""


def test_another_process_sees_and_writes_the_same_bytes(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    arena.slot(1)[:] = np.arange(5000) % 251
    subprocess.run([sys.executable, "-c", ATTACH, str(arena.path)], check=True, timeout=60)
    assert (arena.slot(2) == 7).all()
    assert not arena.slot(0).any()
    assert np.array_equal(arena.slot(1), np.arange(5000) % 251)


def test_attaching_does_not_change_the_bytes(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 10_000)
    for slot in range(3):
        arena.slot(slot)[:] = slot + 1
    other = Arena.attach(arena.path)
    assert [set(other.slot(slot).tolist()) for slot in range(3)] == [{1}, {2}, {3}]


def test_file_is_private_and_complete(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    status = arena.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size >= 3 * 5000


def test_a_region_says_where_a_slot_is_in_the_file(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    arena.slot(2)[:] = np.arange(5000) % 251
    region = arena.region(2).part(4000, 6000)
    assert region.nbytes == 1000
    assert os.pread(region.fd, region.nbytes, region.offset) == bytes(region.view)
    assert Arena.attach(arena.path).region(2).fd == NO_FILE  # who only reads it sends nothing
    arena.close()
    with pytest.raises(OSError):
        os.fstat(region.fd)


def test_slots_do_not_overlap_and_are_page_aligned(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 4, 4097)
    views = [arena.slot(slot) for slot in range(4)]
    assert all(view.nbytes == 4097 and view.ctypes.data % 4096 == 0 for view in views)
    assert not any(np.shares_memory(a, b) for a in views for b in views if a is not b)
    for bad in (-1, 4):
        with pytest.raises(ArenaError, match=f"no slot {bad}"):
            arena.slot(bad)


def test_create_never_takes_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    Arena.create(path, 3, 64).slot(0)[:] = 9
    with pytest.raises(ArenaError, match="exists; remove it"):
        Arena.create(path, 3, 64)
    assert (Arena.attach(path).slot(0) == 9).all()


def test_stale_file_is_unlinked_and_its_readers_keep_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    old = Arena.create(path, 3, 64)
    old.slot(0)[:] = 9
    assert Arena.unlink(path)
    assert not Arena.unlink(path)
    new = Arena.create(path, 3, 64)
    assert (old.slot(0) == 9).all()
    assert not new.slot(0).any()


def test_too_little_space_names_both_sizes_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with pytest.raises(ArenaError, match=rf"needs {3 * (1 << 50) + 4096} bytes, \d+ are free"):
        Arena.create(path, 3, 1 << 50)
    assert not path.exists()


def test_a_failed_reservation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match=r"needs 16384 bytes.*No space left"):
        Arena.create(tmp_path / "arena", 3, 64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (3, 0), (-1, 64)])
def test_an_empty_arena_is_refused(tmp_path: Path, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ArenaError, match="hold nothing"):
        Arena.create(tmp_path / "arena", slots, slot_bytes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "not an arena"),
        (8, struct.pack("<I", 2), "format 2"),
        (12, struct.pack("<I", 4), "says 4 slots"),
        (12, struct.pack("<I", 0), "says 0 slots"),
        (16, struct.pack("<Q", 5000), "of 5000 bytes"),
        (16, struct.pack("<Q", (1 << 64) - 1), "but has 16384 bytes"),
    ],
)
def test_attach_checks_the_header(tmp_path: Path, offset: int, data: bytes, message: str) -> None:
    path = tmp_path / "arena"
    Arena.create(path, 3, 64)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(ArenaError, match=message):
        Arena.attach(path)


def test_attach_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with pytest.raises(ArenaError, match="cannot be opened: No such file"):
        Arena.attach(path)
    path.write_bytes(b"")
    with pytest.raises(ArenaError, match="not an arena"):
        Arena.attach(path)
    Arena.create(tmp_path / "real", 3, 64)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ArenaError, match="cannot be opened"):
        Arena.attach(tmp_path / "link")


def test_views_outlive_close_and_no_slot_is_given_after_it(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 64)
    view = arena.slot(0)
    arena.close()
    view[:] = 5
    assert (Arena.attach(arena.path).slot(0) == 5).all()
    with pytest.raises(ArenaError, match="is closed"):
        arena.slot(0)


def test_close_unmaps_when_no_view_is_left(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena-to-unmap", 3, 64)
    assert "arena-to-unmap" in Path("/proc/self/maps").read_text()
    arena.close()
    assert "arena-to-unmap" not in Path("/proc/self/maps").read_text()


def test_path_is_one_per_run_directory_node_and_process(tmp_path: Path) -> None:
    path = arena_path(tmp_path / "a" / "run", "node-0", "b1")
    assert path.parent == Path("/dev/shm")
    assert path.name.startswith("laminar-run-")
    assert path == arena_path(tmp_path / "a" / "x" / ".." / "run", "node-0", "b1")
    others = {
        arena_path(tmp_path / "b" / "run", "node-0", "b1"),
        arena_path(tmp_path / "a" / "run", "node-1", "b1"),
        arena_path(tmp_path / "a" / "run", "node-0", "b2"),
    }
    assert len(others | {path}) == 4
    assert arena_path(tmp_path / "run", "node-0", "b1", tmp_path).parent == tmp_path


def test_what_killed_relays_left_is_removed_and_nobody_elses(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = [arena_path(run, "node-1", boot, tmp_path) for boot in ("b1", "b2")]
    others = [
        arena_path(run, "node-10", "b1", tmp_path),
        arena_path(tmp_path / "x" / "run", "node-1", "b1", tmp_path),
    ]
    for path in (*mine, *others):
        Arena.create(path, 3, 64)
    reader = Arena.attach(mine[0])
    assert sorted(remove_arenas(run, "node-1", tmp_path)) == sorted(mine)
    assert [path.exists() for path in (*mine, *others)] == [False, False, True, True]
    reader.slot(2)[:] = 7  # mapped memory stays
