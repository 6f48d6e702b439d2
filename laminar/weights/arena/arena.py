"""The shared memory of one machine's weight plane: one file of equal slots that all map.

Reads   a path below /dev/shm (or another directory), the number of slots and their size
Writes  that file: one page of header, then the slots
Gives   Arena, arena_path, sweep_arenas
Raises  ArenaError with one sentence for a user

The first touch of a page costs about nine times the copy of its bytes, so nothing waits for the
memory of all slots: a file is made without pages, `fill_all` gives them to slot after slot in the
background, and who is about to write asks for those that it needs (`prepare`, Region.prepare),
which is also where it learns that there are no more. A page that is missing when it is written
would be a SIGBUS.

multiprocessing.SharedMemory is not used: its tracker unlinks the memory when any process that
attached to it ends.

The creator holds an exclusive lock on the file for as long as it lives. A file that is not
locked was left by a killed process, and a process that finds it may remove it.
"""

from __future__ import annotations

import ctypes
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

from laminar.names.ids import hash64
from laminar.weights.arena.region import NO_FILE, ArenaError, Region

SHARED_MEMORY = Path("/dev/shm")
_MAGIC = b"LAMARENA"
_HEADER = struct.Struct("<8sIIQ")  # magic, format, number of slots, bytes of a slot
_FORMAT = 2  # 2: locked by its creator
_NAME = re.compile(r"laminar-.+-[0-9a-f]{16}-[0-9a-f]{16}")
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_POPULATE_BYTES = 16 << 20
"""Filled in one call, some milliseconds: then it is looked whether the arena is closed."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def arena_path(
    run: str, run_id: str, node: str, boot_id: str, directory: Path = SHARED_MEMORY
) -> Path:
    """One file name per run, node and relay process.

    A relay that starts again makes another file: readers of the former one keep what they have
    mapped, and nothing is written there any more. The run's identity is in the name, with the node,
    as a hash, since two users may both have a "run".
    """
    where = hash64(run_id, node)
    return directory / f"laminar-{run}-{where:016x}-{hash64(boot_id):016x}"


@dataclass(frozen=True)
class RemovedArena:
    """An arena whose creator is dead, removed."""

    path: Path
    num_bytes: int  #: of memory that it took


def sweep_arenas(directory: Path = SHARED_MEMORY) -> list[RemovedArena]:
    """Remove what killed relays of this user have left behind, of whichever run; what that was.

    Files that are locked (their creator lives), of other users, of another format or not ours by
    their name are left alone. Processes that have a removed file mapped keep it.
    """
    if not directory.is_dir():
        return []
    found = [path for path in sorted(directory.iterdir()) if _NAME.fullmatch(path.name)]
    swept = (_sweep_arena(path) for path in found)
    return [each for each in swept if each is not None]


def _sweep_arena(path: Path) -> RemovedArena | None:
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
    return RemovedArena(path, status.st_blocks * 512)


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
        self._filled = [0] * slots  #: leading bytes of each that have their memory

    @classmethod
    def create(cls, path: Path, slots: int, slot_bytes: int) -> Arena:
        """Make the file (mode 0600) and map it; its memory comes later, see `prepare`.

        ArenaError if the file exists or there is too little space now; then nothing is left behind.
        """
        if slots < 1 or slot_bytes < 1:
            raise ArenaError(f"arena {path}: {slots} slots of {slot_bytes} bytes hold nothing")
        fd = _create_locked(path)
        try:
            total = _file_bytes(slots, slot_bytes)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _FORMAT, slots, slot_bytes), 0)
            _check_space(fd, path, total)
            os.truncate(fd, total)
            arena = cls(path, mmap.mmap(fd, total), slots, slot_bytes, fd)
            arena._reserve_where_needed()
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return arena

    @classmethod
    def attach(cls, path: Path) -> Arena:
        """Map an arena that another process made; ArenaError if the file is not one."""
        fd = _open(path, os.O_RDWR)
        try:
            slots, slot_bytes = _read_header(fd, path)
            memory = mmap.mmap(fd, _file_bytes(slots, slot_bytes))
        finally:
            os.close(fd)
        return cls(path, memory, slots, slot_bytes)

    # --- memory -------------------------------------------------------------------------------

    def populate_slot(self, index: int) -> None:
        """Have memory behind a whole slot, before it is written by this process.

        Takes a second for some gigabytes the first time, and nothing later; other threads go on.
        ArenaError if there is not enough, or when the arena is closed meanwhile.
        """
        start = self.get_slot_offset(index)
        while (done := self._filled[index]) < self.slot_bytes:
            size = min(_POPULATE_BYTES, self.slot_bytes - done)
            self._populate_range(start + done, size)
            self._filled[index] = done + size

    def populate_all(self) -> None:
        """The same for slot after slot, in the order in which they are granted first."""
        for index in range(self.slots):
            self.populate_slot(index)

    def _populate_missing(self, offset: int, nbytes: int) -> None:
        """Have memory behind some bytes of the file, which are in one slot."""
        index, start = divmod(offset - _PAGE, _page_aligned(self.slot_bytes))
        if start + nbytes > self._filled[index]:
            self._populate_range(offset, nbytes)

    def _populate_range(self, offset: int, nbytes: int) -> None:
        data, start = self._bytes, offset // _PAGE * _PAGE
        if data is None:
            raise ArenaError(f"arena {self.path} is closed")
        error = _populate_pages(data.ctypes.data + start, offset + nbytes - start)
        if error not in (0, errno.EINVAL):
            full = error == errno.EFAULT  # what would be a SIGBUS
            raise self._make_shortage_error("it is full" if full else os.strerror(error))

    def _reserve_where_needed(self) -> None:
        """A kernel before Linux 5.14 fills no pages when asked: there all are reserved at once."""
        assert self._bytes is not None
        if _populate_pages(self._bytes.ctypes.data, _PAGE) != errno.EINVAL:
            return
        try:
            os.posix_fallocate(self._fd, 0, self._bytes.nbytes)
        except OSError as error:
            raise self._make_shortage_error(str(error.strerror)) from error

    def _make_shortage_error(self, reason: str) -> ArenaError:
        return ArenaError(
            f"arena {self.path} has no memory for all of its {self.slots} slots of "
            f"{self.slot_bytes} bytes any more: something else took it from {self.path.parent} "
            f"({reason}); make room there, or set weights.max_bytes"
        )

    # --- slots --------------------------------------------------------------------------------

    def get_slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Writable view, uint8 [slot_bytes]; its start is aligned to a page."""
        if self._bytes is None:
            raise ArenaError(f"arena {self.path} is closed")
        start = self.get_slot_offset(index)
        return self._bytes[start : start + self.slot_bytes]

    def get_region(self, index: int) -> Region:
        """The same bytes, and where they are in the file (only of an arena that was created)."""
        return Region(
            self.get_slot(index).data, self._fd, self.get_slot_offset(index), self._populate_missing
        )

    def get_slot_offset(self, index: int) -> int:
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


def _check_space(fd: int, path: Path, total: int) -> None:
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    if total > free:
        raise ArenaError(
            f"arena {path} needs {total} bytes, {free} are free in {path.parent}; give it more "
            "room (containers limit /dev/shm) or publish in a smaller weights.dtype"
        )


def _populate_pages(address: int, nbytes: int) -> int:
    """Fill the pages of a mapping; 0 or the error. Not by mmap.madvise, which keeps Python's other
    threads from running, and they have bytes to move."""
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()


def _is_arena(fd: int) -> bool:
    """Whether the file has this format, if only begun."""
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
