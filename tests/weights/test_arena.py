"""The arena file: its life, its checks, and that two processes see the same bytes."""

import errno
import fcntl
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from laminar.weights.arena.arena import Arena, arena_path, claim_arena, sweep_arenas
from laminar.weights.arena.region import NO_FILE, ArenaError, Region

ATTACH = """
import sys
from pathlib import Path
import numpy as np
from laminar.weights.arena.arena import Arena
arena = Arena.attach(Path(sys.argv[1]))
assert (arena.slots, arena.slot_bytes) == (3, 5000), arena.__dict__
assert np.array_equal(arena.get_slot(1), np.arange(5000) % 251)
arena.get_slot(2)[:] = 7
"""


def test_another_process_sees_and_writes_the_same_bytes(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    arena.get_slot(1)[:] = np.arange(5000) % 251
    subprocess.run([sys.executable, "-c", ATTACH, str(arena.path)], check=True, timeout=60)
    assert (arena.get_slot(2) == 7).all()
    assert not arena.get_slot(0).any()
    assert np.array_equal(arena.get_slot(1), np.arange(5000) % 251)


def test_a_region_says_where_a_slot_is_in_the_file(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    arena.get_slot(2)[:] = np.arange(5000) % 251
    region = arena.get_region(2).slice_bytes(4000, 6000)
    assert region.nbytes == 1000
    assert os.pread(region.fd, region.nbytes, region.offset) == bytes(region.view)
    assert Arena.attach(arena.path).get_region(2).fd == NO_FILE  # who only reads it sends nothing
    arena.close()
    with pytest.raises(OSError):
        os.fstat(region.fd)


def test_slots_do_not_overlap_and_are_page_aligned(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "arena", 4, 4097)
    views = [arena.get_slot(slot) for slot in range(4)]
    assert all(view.nbytes == 4097 and view.ctypes.data % 4096 == 0 for view in views)
    assert not any(np.shares_memory(a, b) for a in views for b in views if a is not b)
    for bad in (-1, 4):
        with pytest.raises(ArenaError, match=f"no slot {bad}"):
            arena.get_slot(bad)


def test_create_never_takes_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    Arena.create(path, 3, 64).get_slot(0)[:] = 9
    with pytest.raises(ArenaError, match="exists; remove it"):
        Arena.create(path, 3, 64)
    assert (Arena.attach(path).get_slot(0) == 9).all()


def test_too_little_space_names_both_sizes_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with pytest.raises(ArenaError, match=rf"needs {3 * (1 << 50) + 4096} bytes, \d+ are free"):
        Arena.create(path, 3, 1 << 50)
    assert not path.exists()


def memory_of(path: Path) -> int:
    """Bytes that the file takes."""
    return path.stat().st_blocks * 512


def test_memory_comes_slot_by_slot_when_it_is_asked_for(tmp_path: Path) -> None:
    """Whoever made the file: a slot that nobody has prepared costs nothing and waits for nobody."""
    arena = Arena.create(tmp_path / "arena", 3, 5 * 4096)
    assert memory_of(arena.path) <= 4096
    arena.populate_slot(1)
    assert 5 * 4096 <= memory_of(arena.path) <= 6 * 4096
    other = Arena.attach(arena.path)
    other.populate_slot(2)
    other.get_slot(2)[:] = 7
    assert 10 * 4096 <= memory_of(arena.path) <= 11 * 4096
    arena.populate_all()
    assert memory_of(arena.path) >= 15 * 4096
    assert (arena.get_slot(2) == 7).all()  # what was written before stays


def test_a_part_of_a_slot_has_its_memory_before_it_is_written(tmp_path: Path) -> None:
    """A chunk need not begin at a page."""
    arena = Arena.create(tmp_path / "arena", 3, 64 * 4096)
    before = memory_of(arena.path)
    chunk = arena.get_region(2).slice_bytes(10_000, 30_000)
    chunk.populate_pages()
    first, end = 10_000 // 4096, -(-30_000 // 4096)
    assert memory_of(arena.path) == before + (end - first) * 4096
    Region(memoryview(bytearray(10))).populate_pages()  # ordinary memory


def test_memory_that_something_else_took_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    arena.populate_slot(0)
    monkeypatch.setattr(
        "laminar.weights.arena.arena._populate_pages", lambda address, nbytes: errno.EFAULT
    )
    arena.populate_slot(0)  # it has its memory
    words = r"no longer has memory for its 3 slots of 5000 bytes: .*it is full.*weights\.max_bytes"
    for asking in (lambda: arena.populate_slot(1), arena.get_region(2).populate_pages):
        with pytest.raises(ArenaError, match=words):
            asking()


def test_a_kernel_that_fills_nothing_when_asked_reserves_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14; and there a failure leaves nothing."""
    monkeypatch.setattr(
        "laminar.weights.arena.arena._populate_pages", lambda address, nbytes: errno.EINVAL
    )
    arena = Arena.create(tmp_path / "arena", 3, 5000)
    assert memory_of(arena.path) >= 3 * 5000
    arena.populate_all()
    Arena.attach(arena.path).populate_slot(1)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match=r"no longer has memory .*No space left"):
        Arena.create(tmp_path / "another", 3, 64)
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (3, 0), (-1, 64)])
def test_an_empty_arena_is_refused(tmp_path: Path, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ArenaError, match="are empty"):
        Arena.create(tmp_path / "arena", slots, slot_bytes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "not an arena"),
        (8, struct.pack("<I", 1), "format 1"),
        (12, struct.pack("<I", 4), "claims 4 slots"),
        (12, struct.pack("<I", 0), "claims 0 slots"),
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
    view = arena.get_slot(0)
    arena.close()
    view[:] = 5
    assert (Arena.attach(arena.path).get_slot(0) == 5).all()
    with pytest.raises(ArenaError, match="is closed"):
        arena.get_slot(0)


CREATE_AND_WAIT = """
import sys
from pathlib import Path
from laminar.weights.arena.arena import Arena
arena = Arena.create(Path(sys.argv[1]), 3, 5000)
arena.populate_all()
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Processes that create an arena of a run below tmp_path, and live until they are ended."""
    made = []

    def start(run: str) -> subprocess.Popen[str]:
        path = arena_path(run, "1a", "node-0", str(len(made)), tmp_path)
        command = [sys.executable, "-c", CREATE_AND_WAIT, str(path)]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "made\n"
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_what_killed_processes_left_is_swept_and_what_lives_is_not(
    tmp_path: Path, create: Callable[[str], subprocess.Popen[str]]
) -> None:
    """Of every run; whether the creator lives is the lock's word, and no pid's."""
    killed, living = create("run"), create("run")
    other = create("other-run")
    (of_killed,) = tmp_path.glob(f"{_name(tmp_path, 'run', '0')}")
    reader = Arena.attach(of_killed)
    for process in (killed, other):
        process.kill()
        process.wait()
    swept = sweep_arenas(tmp_path)
    assert [each.path.name for each in swept] == sorted(
        [_name(tmp_path, "run", "0"), _name(tmp_path, "other-run", "2")]
    )
    assert all(each.num_bytes >= 3 * 5000 for each in swept)
    assert [path.name for path in tmp_path.iterdir()] == [_name(tmp_path, "run", "1")]
    reader.get_slot(2)[:] = 7  # mapped memory stays
    assert sweep_arenas(tmp_path) == []
    assert living.poll() is None


def _name(directory: Path, run: str, boot: str) -> str:
    return arena_path(run, "1a", "node-0", boot, directory).name


def test_the_lock_lasts_as_long_as_the_memory(tmp_path: Path) -> None:
    """A creator that has closed the arena may still have views of it."""
    arena = Arena.create(tmp_path / _name(tmp_path, "run", "b"), 3, 64)
    view = arena.get_slot(0)
    arena.close()
    assert sweep_arenas(tmp_path) == []
    del view
    assert [each.path for each in sweep_arenas(tmp_path)] == [arena.path]


def test_a_sweep_leaves_alone_what_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _name(tmp_path, "run", "b")
    header = struct.pack("<8sIIQ", b"LAMARENA", 1, 3, 64)
    (tmp_path / name).write_bytes(
        header + bytes(4096)
    )  # of an earlier release, which locks nothing
    (tmp_path / name.replace("run", "text")).write_text("notes")
    (tmp_path / "laminar-notes").touch()
    (tmp_path / name.replace("run", "directory")).mkdir()
    (tmp_path / name.replace("run", "link")).symlink_to(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    assert sweep_arenas(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before
    empty = tmp_path / name.replace("run", "empty")
    empty.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep_arenas(tmp_path) == []
    monkeypatch.undo()
    assert [each.path for each in sweep_arenas(tmp_path)] == [empty]


@pytest.mark.parametrize("slots", [3, 4])
def test_the_next_relay_takes_over_the_memory_of_a_dead_one(tmp_path: Path, slots: int) -> None:
    """Its trainer and readers have it mapped; one of another size is removed."""
    old = Arena.create(tmp_path / _name(tmp_path, "run", "a"), 3, 5000)
    old.trainer_slot = 2
    reader, new = Arena.attach(old.path), tmp_path / _name(tmp_path, "run", "b")
    assert claim_arena(new) == NO_FILE  # its creator lives
    old.close()
    other = tmp_path / _name(tmp_path, "other-run", "b")
    assert claim_arena(other) == NO_FILE
    arena = Arena.create(new, slots, 5000, claim_arena(new))
    assert list(tmp_path.iterdir()) == [new]
    assert sweep_arenas(tmp_path) == []
    arena.get_slot(1)[:] = 7
    assert bool((reader.get_slot(1) == 7).all()) == (slots == 3)
    assert arena.trainer_slot == (2 if slots == 3 else -1)


def test_too_little_space_names_the_processes_that_hold_removed_arenas(tmp_path: Path) -> None:
    old = Arena.create(tmp_path / _name(tmp_path, "run", "a"), 3, 5000)
    old.path.unlink()
    with pytest.raises(ArenaError, match=rf" \(pid {os.getpid()}\) still map removed arenas; give"):
        Arena.create(tmp_path / "arena", 3, 1 << 50)
    old.close()
    with pytest.raises(ArenaError, match=rf"free in {tmp_path}; give it more room"):
        Arena.create(tmp_path / "arena", 3, 1 << 50)


def test_a_creation_survives_a_sweep_that_comes_before_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the creation of the file and its lock, nobody can tell it from a dead one."""
    real, swept = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        swept.extend(sweep_arenas(tmp_path))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    arena = Arena.create(tmp_path / _name(tmp_path, "run", "b"), 3, 64)
    assert [each.path for each in swept] == [arena.path]
    arena.get_slot(1)[:] = 5
    assert (Arena.attach(arena.path).get_slot(1) == 5).all()
    assert sweep_arenas(tmp_path) == []
