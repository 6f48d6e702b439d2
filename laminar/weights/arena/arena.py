"""The shared memory of a machine's weight plane: a file of equal slots that all processes map.

Reads   a path below /dev/shm (or another directory), the number of slots and their size
Writes  that file: one page of header, then the slots
Gives   Arena, arena_path, sweep_arenas, claim_arena
Raises  ArenaError with one sentence for a user

The first touch of a page costs about nine times the copy of its bytes, so nothing waits for the
memory of all slots. The file is created without pages, and `populate_all` allocates them slot by
slot in the background. A writer first allocates the pages that it needs (`populate_slot`,
`Region.populate_pages`) and gets an error there if memory has run out; writing to a missing page
would raise SIGBUS.

multiprocessing.SharedMemory is not used: its tracker unlinks the memory when any process that
attached to it ends.

The creator holds an exclusive lock on the file for as long as it lives. A file that is not
locked was left by a killed process. The next relay of its run and node takes it over: the processes
that map it hold its memory, and /dev/shm may lack room for a second arena. Any other process that
finds it may remove it.
"""

from __future__ import annotations

import contextlib
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
from laminar.run.renames import rename
from laminar.weights.arena.region import NO_FILE, ArenaError, ArenaTooLargeError, Region

SHARED_MEMORY = Path("/dev/shm")
_MAGIC = b"LAMARENA"
_HEADER = struct.Struct("<8sIIQ")  # magic, format, number of slots, bytes of a slot
_WRITING = struct.Struct("<I")  # follows: 1 + the slot last granted to a trainer, or 0
_FORMAT = 2  # 2: locked by its creator
_NAME = re.compile(r"laminar-.+-[0-9a-f]{16}-[0-9a-f]{16}")
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_POPULATE_BYTES = 16 << 20
"""Bytes populated per call, some milliseconds; between calls, closing of the arena is checked."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def arena_path(
    run: str, run_id: str, node: str, boot_id: str, directory: Path = SHARED_MEMORY
) -> Path:
    """Return the arena's file path, unique per run, node and relay process.

    A restarted relay renames the file of its predecessor, which voids the leases and grants in it.
    The name contains a hash of the run's identity and the node, since two users may both have a
    "run".
    """
    where = hash64(run_id, node)
    return directory / f"laminar-{run}-{where:016x}-{hash64(boot_id):016x}"


@dataclass(frozen=True)
class RemovedArena:
    """A removed arena, whose creator had died."""

    path: Path
    num_bytes: int  #: memory that the arena occupied


def sweep_arenas(directory: Path = SHARED_MEMORY) -> list[RemovedArena]:
    """Remove the arenas that killed relays of this user left behind in any run; return them.

    Skipped are files that are locked (their creator lives), belong to other users, or have another
    format or name. Processes that have a removed file mapped keep it.
    """
    if not directory.is_dir():
        return []
    found = [path for path in sorted(directory.iterdir()) if _NAME.fullmatch(path.name)]
    swept = (_sweep_arena(path) for path in found)
    return [each for each in swept if each is not None]


def claim_arena(path: Path) -> int:
    """Rename the arena of a dead relay of the same run and node to `path`.

    Returns its locked descriptor, for `Arena.create`; NO_FILE if there is none.
    """
    former = path.name.rpartition("-")[0] + "-"
    for found in path.parent.iterdir() if path.parent.is_dir() else ():
        if found.name.startswith(former) and (fd := _lock_stale(found)) != NO_FILE:
            rename(found, path, durable=False)
            return fd
    return NO_FILE


def _sweep_arena(path: Path) -> RemovedArena | None:
    if (fd := _lock_stale(path)) == NO_FILE:
        return None
    removed = RemovedArena(path, os.fstat(fd).st_blocks * 512)
    path.unlink()
    os.close(fd)
    return removed


def _lock_stale(path: Path) -> int:
    """Lock an arena of this user whose creator is dead, and return its descriptor, or NO_FILE."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed meanwhile, or another user's
        return NO_FILE
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and status.st_nlink
        if ours and (not status.st_size or _is_arena(fd)):  # empty: killed at its creation
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return NO_FILE


def _list_mappers(directory: Path) -> list[str]:
    """Return the processes that keep removed arenas of this directory mapped."""
    found = []
    removed = re.compile(rf" {re.escape(str(directory))}/{_NAME.pattern} \(deleted\)$", re.M)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if removed.search((process / "maps").read_text()):
                found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name})")
    return found


class Arena:
    """A mapped arena; its creator and all attached processes may read and write its bytes."""

    def __init__(
        self, path: Path, memory: mmap.mmap, slots: int, slot_bytes: int, fd: int = NO_FILE
    ) -> None:
        """Use `create` or `attach`."""
        self.path = path
        self._fd = fd  #: open only in the creator, which sends from the file
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, dtype=np.uint8)
        self._filled = [0] * slots  #: number of leading bytes per slot that have pages

    @classmethod
    def create(cls, path: Path, slots: int, slot_bytes: int, former: int = NO_FILE) -> Arena:
        """Create and map the file (mode 0600), without its pages (see `populate_slot`).

        `former`: descriptor of a claimed arena, which is used if its slots are equal, else removed.
        Raises ArenaError, and leaves nothing behind, if the file exists or there is too little
        space.
        """
        if slots < 1 or slot_bytes < 1:
            raise ArenaError(f"arena {path}: {slots} slots of {slot_bytes} bytes are empty")
        total = _file_bytes(slots, slot_bytes)
        header = _HEADER.pack(_MAGIC, _FORMAT, slots, slot_bytes)
        equal = former != NO_FILE and os.pread(former, _HEADER.size, 0) == header
        if former != NO_FILE and not equal:
            path.unlink(missing_ok=True)
            os.close(former)
        fd = former if equal else _create_locked(path)
        try:
            if not equal:
                os.pwrite(fd, header, 0)
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
        """Map an arena that another process created; raise ArenaError for any other file."""
        fd = _open(path, os.O_RDWR)
        try:
            slots, slot_bytes = _read_header(fd, path)
            memory = mmap.mmap(fd, _file_bytes(slots, slot_bytes))
        finally:
            os.close(fd)
        return cls(path, memory, slots, slot_bytes)

    # --- memory -------------------------------------------------------------------------------

    def populate_slot(self, index: int) -> None:
        """Allocate all pages of a slot before this process writes it.

        Takes a second for some gigabytes the first time, then nothing; other threads keep running.
        Raises ArenaError if memory runs out or the arena is closed meanwhile.
        """
        start = self.get_slot_offset(index)
        while (done := self._filled[index]) < self.slot_bytes:
            size = min(_POPULATE_BYTES, self.slot_bytes - done)
            self._populate_range(start + done, size)
            self._filled[index] = done + size

    def populate_all(self) -> None:
        """Populate all slots, in the order in which they are first granted."""
        for index in range(self.slots):
            self.populate_slot(index)

    def _populate_missing(self, offset: int, nbytes: int) -> None:
        """Allocate the missing pages of a range of the file that lies within one slot."""
        index, start = divmod(offset - _PAGE, _page_aligned(self.slot_bytes))
        if start + nbytes > self._filled[index]:
            self._populate_range(offset, nbytes)

    def _populate_range(self, offset: int, nbytes: int) -> None:
        data, start = self._bytes, offset // _PAGE * _PAGE
        if data is None:
            raise ArenaError(f"arena {self.path} is closed")
        error = _populate_pages(data.ctypes.data + start, offset + nbytes - start)
        if error not in (0, errno.EINVAL):
            full = error == errno.EFAULT  # a write would raise SIGBUS
            raise self._make_shortage_error("it is full" if full else os.strerror(error))

    def _reserve_where_needed(self) -> None:
        """Reserve all pages at once on kernels before 5.14, which lack MADV_POPULATE_WRITE."""
        assert self._bytes is not None
        if _populate_pages(self._bytes.ctypes.data, _PAGE) != errno.EINVAL:
            return
        try:
            os.posix_fallocate(self._fd, 0, self._bytes.nbytes)
        except OSError as error:
            raise self._make_shortage_error(str(error.strerror)) from error

    def _make_shortage_error(self, reason: str) -> ArenaError:
        return ArenaError(
            f"arena {self.path} no longer has memory for its {self.slots} slots of "
            f"{self.slot_bytes} bytes: something else has used up {self.path.parent} "
            f"({reason}); free some there, or set weights.max_bytes"
        )

    # --- slots --------------------------------------------------------------------------------

    @property
    def trainer_slot(self) -> int:
        """The slot last granted to a trainer, also by the former relay, or -1; kept in the file."""
        return int(_WRITING.unpack(os.pread(self._fd, _WRITING.size, _HEADER.size))[0]) - 1

    @trainer_slot.setter
    def trainer_slot(self, slot: int) -> None:
        os.pwrite(self._fd, _WRITING.pack(slot + 1), _HEADER.size)

    def get_slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Return a writable view of a slot, uint8 [slot_bytes], aligned to a page."""
        if self._bytes is None:
            raise ArenaError(f"arena {self.path} is closed")
        start = self.get_slot_offset(index)
        return self._bytes[start : start + self.slot_bytes]

    def get_region(self, index: int) -> Region:
        """Return a slot's bytes with their place in the file (only in the arena's creator)."""
        return Region(
            self.get_slot(index).data, self._fd, self.get_slot_offset(index), self._populate_missing
        )

    def get_slot_offset(self, index: int) -> int:
        """Return the byte offset of a slot in the file."""
        if not 0 <= index < self.slots:
            raise ArenaError(f"arena {self.path} has {self.slots} slots, but no slot {index}")
        return _PAGE + index * _page_aligned(self.slot_bytes)

    def close(self) -> None:
        """Release the memory and the file; nothing may be sent from it any more.

        The memory is unmapped once its last view is gone.
        """
        self._bytes = None
        if self._fd != NO_FILE:
            os.close(self._fd)
            self._fd = NO_FILE


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
    """Create a file and lock it; start over if a sweep removed it between the two steps."""
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
        mappers = ", ".join(_list_mappers(path.parent))
        held = f", {mappers} still map removed arenas" if mappers else ""
        too_large = total > space.f_blocks * space.f_frsize
        raise (ArenaTooLargeError if too_large else ArenaError)(
            f"arena {path} needs {total} bytes, {free} are free in {path.parent}{held}; give it "
            "more room (containers limit /dev/shm) or publish in a smaller weights.dtype"
        )


def _populate_pages(address: int, nbytes: int) -> int:
    """Allocate the pages of a mapping; return 0 or the errno.

    mmap.madvise would hold the GIL and so stop the threads that transfer bytes.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()


def _is_arena(fd: int) -> bool:
    """Return whether the file has an arena's header, even if it is unfinished."""
    data = os.pread(fd, _HEADER.size, 0)
    return len(data) == _HEADER.size and _HEADER.unpack(data)[:2] == (_MAGIC, _FORMAT)


def _read_header(fd: int, path: Path) -> tuple[int, int]:
    """Return (slots, slot_bytes), checked against the size of the file."""
    data = os.pread(fd, _HEADER.size, 0)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ArenaError(f"{path} is not an arena, or its creator has not finished it")
    _, layout, slots, slot_bytes = _HEADER.unpack(data)
    if layout != _FORMAT:
        raise ArenaError(f"arena {path} has format {layout}, this program reads {_FORMAT}")
    wanted, found = _file_bytes(slots, slot_bytes), os.fstat(fd).st_size
    if slots < 1 or slot_bytes < 1 or wanted != found:
        raise ArenaError(
            f"arena {path} claims {slots} slots of {slot_bytes} bytes, but has {found} bytes"
        )
    return slots, slot_bytes


def _file_bytes(slots: int, slot_bytes: int) -> int:
    return _PAGE + slots * _page_aligned(slot_bytes)


def _page_aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
