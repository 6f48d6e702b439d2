"""The shared memory of one machine's weight plane: one file of equal slots that all map.

Reads   a path below /dev/shm (or another directory), the number of slots and their size
Writes  that file: one page of header, then the slots
Gives   Arena, arena_path, sweep_arenas; ArenaError with one sentence for a user

The file is filled with pages once, at the start of the run, because the first touch of a page costs
about nine times the copy of its bytes. multiprocessing.SharedMemory is not used: its tracker
unlinks the memory when any process that attached to it ends.

The creator holds an exclusive lock on the file for as long as it lives. A file that nobody has
locked was left by a killed process, and whoever finds it may remove it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from laminar.ids import hash64
from laminar.weights.region import NO_FILE, Region

SHARED_MEMORY = Path("/dev/shm")
_MAGIC = b"LAMARENA"
_HEADER = struct.Struct("<8sIIQ")  # magic, format, number of slots, bytes of a slot
_FORMAT = 2  # 2: locked by its creator
_NAME = re.compile(r"laminar-.+-[0-9a-f]{16}-[0-9a-f]{16}")
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_POPULATE_BYTES = 16 << 20
"""Filled in one call: Python's other threads stand still during it, and have heartbeats to send."""


class ArenaError(RuntimeError):
    """The arena cannot be made or mapped; one sentence with the path, the reason and the fix."""


def arena_path(run_dir: Path, node: str, boot_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """One file name per run directory, node and relay process.

    A relay that starts again makes another file: readers of the former one keep what they have
    mapped, and nothing is written there any more. The directory's full path is in the name as a
    hash, since two users may both have a "run".
    """
    where = hash64(str(run_dir.resolve()), node)
    return directory / f"laminar-{run_dir.name}-{where:016x}-{hash64(boot_id):016x}"


@dataclass(frozen=True)
class Swept:
    """An arena whose creator is dead, removed."""

    path: Path
    num_bytes: int  #: of memory that it took


def sweep_arenas(directory: Path = SHARED_MEMORY) -> list[Swept]:
    """Remove what killed relays of this user have left behind, of whichever run; what that was.

    Files that are locked (their creator lives), of other users, of another format or not ours by
    their name are left alone. Processes that have a removed file mapped keep it.
    """
    if not directory.is_dir():
        return []
    found = [path for path in sorted(directory.iterdir()) if _NAME.fullmatch(path.name)]
    swept = (_sweep(path) for path in found)
    return [each for each in swept if each is not None]


def _sweep(path: Path) -> Swept | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it went away, or is another user's
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and status.st_nlink
        if not ours or (status.st_size and not _is_arena(fd)):  # empty: killed at its creation
            return None
        path.unlink()
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
    return Swept(path, status.st_blocks * 512)


class Arena:
    """A mapped arena. Creator and attached processes see the same bytes; all may write."""

    def __init__(
        self, path: Path, memory: mmap.mmap, slots: int, slot_bytes: int, fd: int = NO_FILE
    ) -> None:
        """Use `create` or `attach`."""
        self.path = path
        self._fd = fd  #: of the creator alone, who sends from it
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, dtype=np.uint8)

    @classmethod
    def create(cls, path: Path, slots: int, slot_bytes: int) -> Arena:
        """Make the file (mode 0600), fill it with pages and map it.

        ArenaError if the file exists or there is too little space; then nothing is left behind.
        """
        if slots < 1 or slot_bytes < 1:
            raise ArenaError(f"arena {path}: {slots} slots of {slot_bytes} bytes hold nothing")
        fd = _create_locked(path)
        try:
            total = _file_bytes(slots, slot_bytes)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _FORMAT, slots, slot_bytes), 0)
            _allocate(fd, path, total)
            memory = _map(fd, path, total)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(path, memory, slots, slot_bytes, fd)

    @classmethod
    def attach(cls, path: Path) -> Arena:
        """Map an arena that another process made; ArenaError if the file is not one."""
        fd = _open(path, os.O_RDWR)
        try:
            slots, slot_bytes = _read_header(fd, path)
            memory = _map(fd, path, _file_bytes(slots, slot_bytes))
        finally:
            os.close(fd)
        return cls(path, memory, slots, slot_bytes)

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Writable view, uint8 [slot_bytes]; its start is aligned to a page."""
        if self._bytes is None:
            raise ArenaError(f"arena {self.path} is closed")
        start = self.offset(index)
        return self._bytes[start : start + self.slot_bytes]

    def region(self, index: int) -> Region:
        """The same bytes, and where they are in the file (only of an arena that was created)."""
        return Region(self.slot(index).data, self._fd, self.offset(index))

    def offset(self, index: int) -> int:
        """Where a slot begins in the file, in bytes."""
        if not 0 <= index < self.slots:
            raise ArenaError(f"arena {self.path} has {self.slots} slots, there is no slot {index}")
        return _PAGE + index * _page_aligned(self.slot_bytes)

    def close(self) -> None:
        """Let go of the memory and the file; nothing may be sent from it any more.

        The memory is unmapped when the last view of it is gone, never before.
        """
        self._bytes = None
        if self._fd != NO_FILE:
            os.close(self._fd)
            self._fd = NO_FILE

    @staticmethod
    def unlink(path: Path) -> bool:
        """Remove the file; False if there was none. Processes that have it mapped keep it."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise ArenaError(
            f"arena {path} exists; remove it if the run that made it is over"
        ) from None
    except OSError as error:
        raise ArenaError(f"arena {path} cannot be opened: {error.strerror}") from error


def _create_locked(path: Path) -> int:
    """A new file with our lock on it; a sweep that came between the two took the name away."""
    while True:
        fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _allocate(fd: int, path: Path, total: int) -> None:
    """Reserve all of the file now; a page that is missing later would be a SIGBUS."""
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    message = (
        f"arena {path} needs {total} bytes, {free} are free in {path.parent}; give it more room "
        "(containers limit /dev/shm) or publish in a smaller weights.dtype"
    )
    if total > free:
        raise ArenaError(message)
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        raise ArenaError(f"{message}: {error.strerror}") from error


def _map(fd: int, path: Path, total: int) -> mmap.mmap:
    """Map the file and put all its pages into this process's page table."""
    memory = mmap.mmap(fd, total)
    try:
        for start in range(0, total, _POPULATE_BYTES):
            memory.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, total - start))
    except OSError as error:
        # An older kernel does not know the advice; then the first copy is slow, and only it.
        if error.errno != errno.EINVAL:
            raise ArenaError(f"arena {path} cannot be mapped: {error.strerror}") from error
    return memory


def _is_arena(fd: int) -> bool:
    """Of this format, if only begun."""
    data = os.pread(fd, _HEADER.size, 0)
    return len(data) == _HEADER.size and _HEADER.unpack(data)[:2] == (_MAGIC, _FORMAT)


def _read_header(fd: int, path: Path) -> tuple[int, int]:
    """(slots, slot_bytes), checked against the size of the file."""
    data = os.pread(fd, _HEADER.size, 0)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ArenaError(f"{path} is not an arena, or its creator has not finished it")
    _, layout, slots, slot_bytes = _HEADER.unpack(data)
    if layout != _FORMAT:
        raise ArenaError(f"arena {path} has format {layout}, this program knows {_FORMAT}")
    wanted, found = _file_bytes(slots, slot_bytes), os.fstat(fd).st_size
    if slots < 1 or slot_bytes < 1 or wanted != found:
        raise ArenaError(
            f"arena {path} says {slots} slots of {slot_bytes} bytes, but has {found} bytes"
        )
    return slots, slot_bytes


def _file_bytes(slots: int, slot_bytes: int) -> int:
    return _PAGE + slots * _page_aligned(slot_bytes)


def _page_aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
