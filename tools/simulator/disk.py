"""Disk in memory that loses what was not synced: calls can be cut short, fail or find it full.

Reads   a plan: the number of a call and how it fails
Gives   ports.Disk; after a crash or a kill, the disk that the next process finds
Raises  PowerCut (the machine is off), DiskError (the call failed), as planned

The model is what POSIX promises and no more. Bytes are volatile until their file is synced, names
until their directory is: `replace_file` and `remove` are two calls each, the change and the
directory's sync; `create_file` syncs it before as well, for the names that a killed process left. A
crash keeps any selection of volatile sectors and names; what was synced stays. Every call that
writes is counted, so a test can cut each one in turn.

A cut call has its whole effect, but only in the volatile part; the crash mode then says how much
of it happened. So a cut before call n is a cut in call n - 1 that keeps all.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, get_args

from laminar.names.ports import DiskError

Fault = Literal["crash", "eio", "enospc"]
CrashMode = Literal["none", "all", "prefix", "torn", "reordered"]
"""Part of the volatile data that a crash keeps:

none, all   literally
prefix      everything up to some byte or name, in the order in which it was written
torn        everything but one sector, which is zeros, or where its file ends
reordered   any sectors and names; a lost sector is zeros, or beyond the end of its file"""
CRASH_MODES: tuple[CrashMode, ...] = get_args(CrashMode)

SECTOR_BYTES = 512  #: unit that a disk writes as a whole or not at all


class PowerCut(Exception):
    """Loss of the machine's power in this call or an earlier one: the disk refuses all calls."""


class _Content:
    """Content of a file: bytes, of which the first `synced` survive every crash."""

    __slots__ = ("data", "synced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = len(data)

    def sectors(self) -> list[tuple[int, int]]:
        """Return [start, end) of the volatile part of each sector."""
        size = len(self.data)
        aligned = range(self.synced // SECTOR_BYTES * SECTOR_BYTES, size, SECTOR_BYTES)
        return [(max(at, self.synced), min(at + SECTOR_BYTES, size)) for at in aligned]


@dataclass(slots=True)
class _Write:
    """Append to a content, up to byte `end`, not synced at that time."""

    content: _Content
    start: int
    end: int

    @property
    def durable(self) -> bool:
        return self.end <= self.content.synced


@dataclass(slots=True)
class _Naming:
    """Change of the directory: `old` is gone, `new` names the content."""

    old: str | None
    new: str | None
    content: _Content
    durable: bool = False

    def apply(self, names: dict[str, _Content]) -> None:
        if self.old is not None:
            names.pop(self.old, None)
        if self.new is not None:
            names[self.new] = self.content


_Change: TypeAlias = _Write | _Naming


class SimFile:
    """Open file; like a descriptor it belongs to the content, whatever its name is by now."""

    def __init__(self, disk: SimDisk, content: _Content) -> None:
        self._disk = disk
        self._content = content

    def append(self, data: bytes) -> None:
        self._disk.append_to(self._content, data)

    def sync(self) -> None:
        self._disk.sync_content(self._content)

    def close(self) -> None:
        """Close without making anything durable."""


class SimDisk:
    """ports.Disk in memory; `files` exist from the start, durable."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.calls = 0  #: writing calls so far, including those that failed
        self._names = {name: _Content(data) for name, data in (files or {}).items()}
        self._durable_names = dict(self._names)
        self._volatile: deque[_Change] = deque()  #: oldest first; the oldest is never durable
        self._plan: dict[int, Fault] = {}
        self._off = False

    def plan(self, call: int, what: Fault) -> None:
        """Plan the failure of one call: the `call`-th from 1 on, as `calls` counts.

        crash: PowerCut, and so in every later call. eio: DiskError, and nothing was done. enospc:
        the same, except that an append leaves half of its bytes.
        """
        self._plan[call] = what

    # --- ports.Disk ---------------------------------------------------------------------------

    def list_names(self) -> list[str]:
        self._refuse_if_off()
        return sorted(self._names)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        with memoryview(self._open(name).data) as data:
            return bytes(data[offset : None if size < 0 else offset + size])

    def get_size(self, name: str) -> int:
        return len(self._open(name).data)

    def create_file(self, name: str) -> SimFile:
        """Create a file in three calls; raise FileExistsError if it exists."""
        self._sync_names()
        fault = self._count()
        if name in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        content = _Content()
        self._name(_Naming(None, name, content), fault)
        return SimFile(self, content)

    def sync(self, name: str) -> None:
        self.sync_content(self._open(name))

    def replace_file(self, old: str, new: str) -> None:
        """Rename a file in two calls."""
        fault = self._count()
        self._name(_Naming(old, new, self._to_rename(old)), fault)

    def remove(self, name: str) -> None:
        """Remove a file in two calls."""
        fault = self._count()
        self._name(_Naming(name, None, self._to_rename(name)), fault)

    # --- effects ------------------------------------------------------------------------------

    def append_to(self, content: _Content, data: bytes) -> None:
        """Append as SimFile.append does."""
        fault = self._count()
        if fault == "eio":
            self._fail(fault)
        start = len(content.data)
        content.data += data[: len(data) // 2] if fault == "enospc" else data
        last = self._volatile[-1] if self._volatile else None
        if isinstance(last, _Write) and last.content is content and last.end == start:
            last.end = len(content.data)
        else:
            self._volatile.append(_Write(content, start, len(content.data)))
        self._fail(fault)

    def sync_content(self, content: _Content) -> None:
        """Sync as SimFile.sync does."""
        self._fail(self._count())
        content.synced = len(content.data)
        self._forget_durable()

    def _name(self, naming: _Naming, fault: Fault | None) -> None:
        """Change the directory, the first call, and sync it, the second."""
        if fault in (None, "crash"):
            naming.apply(self._names)
            self._volatile.append(naming)
        self._fail(fault)
        self._sync_names()

    def _sync_names(self) -> None:
        self._fail(self._count())
        self._durable_names = dict(self._names)
        for change in self._volatile:
            if isinstance(change, _Naming):
                change.durable = True
        self._forget_durable()

    def _forget_durable(self) -> None:
        while self._volatile and self._volatile[0].durable:
            self._volatile.popleft()

    def _count(self) -> Fault | None:
        """Count one more call, and return how it is to fail."""
        self._refuse_if_off()
        self.calls += 1
        return self._plan.get(self.calls)

    def _fail(self, fault: Fault | None) -> None:
        if fault == "crash":
            self._off = True
            self._refuse_if_off()
        elif fault is not None:
            _raise(errno.EIO if fault == "eio" else errno.ENOSPC, f"call {self.calls} failed")

    def _refuse_if_off(self) -> None:
        if self._off:
            raise PowerCut(f"no power since call {self.calls}")

    def _open(self, name: str) -> _Content:
        self._refuse_if_off()
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._names[name]

    def _to_rename(self, name: str) -> _Content:
        if name not in self._names:
            _raise(errno.ENOENT, f"there is no {name}")
        return self._names[name]

    # --- what is left -------------------------------------------------------------------------

    def durable_size(self, name: str) -> int:
        """Return the bytes of a file that survive every crash; 0 if its name may not."""
        content = self._names[name]
        return content.synced if self._durable_names.get(name) is content else 0

    def after_kill(self) -> SimDisk:
        """Return the disk after its process alone died: volatile bytes stay, and stay volatile.

        The files that the dead process had open refuse all calls.
        """
        heir = SimDisk()
        heir._names, heir._durable_names = self._names, self._durable_names
        heir._volatile, self._off = self._volatile, True
        return heir

    def after_crash(self, mode: CrashMode, chance: random.Random) -> SimDisk:
        """Return a disk as a power cut leaves it; this one is unchanged, so others can be drawn."""
        changes = [change for change in self._volatile if not change.durable]
        names = dict(self._durable_names)
        namings, images = _survivors(changes, mode, chance)
        for naming in namings:
            naming.apply(names)
        return SimDisk(
            {
                name: bytes(images.get(content, content.data[: content.synced]))
                for name, content in names.items()
            }
        )


_Images: TypeAlias = dict[_Content, bytearray]


def _survivors(
    changes: list[_Change], mode: CrashMode, chance: random.Random
) -> tuple[list[_Naming], _Images]:
    """Return the volatile names that a crash keeps, and what it leaves of each volatile content."""
    if mode == "none":
        return [], {}
    if mode == "prefix":
        return _prefix(changes, chance)
    namings = [change for change in changes if isinstance(change, _Naming)]
    images = {c.content: bytearray(c.content.data) for c in changes if isinstance(c, _Write)}
    if mode == "torn" and images:
        _tear(*chance.choice(list(images.items())), chance)
    elif mode == "reordered":
        namings = [naming for naming in namings if chance.random() < 0.5]
        for content, image in images.items():
            _scatter(content, image, chance)
    return namings, images


def _prefix(changes: list[_Change], chance: random.Random) -> tuple[list[_Naming], _Images]:
    namings: list[_Naming] = []
    images: _Images = {}
    last = chance.randint(0, len(changes))
    for number, change in enumerate(changes[: last + 1]):
        if isinstance(change, _Write):
            start = max(change.start, change.content.synced)
            end = change.end if number < last else chance.randint(start, change.end)
            images[change.content] = change.content.data[:end]
        elif number < last:
            namings.append(change)
    return namings, images


def _tear(content: _Content, image: bytearray, chance: random.Random) -> None:
    start, end = chance.choice(content.sectors())
    if chance.random() < 0.5:
        image[start:end] = bytes(end - start)
    else:
        del image[start:]


def _scatter(content: _Content, image: bytearray, chance: random.Random) -> None:
    sectors = content.sectors()
    lost = [sector for sector in sectors if chance.random() < 0.5]
    for start, end in lost:
        image[start:end] = bytes(end - start)
    if chance.random() < 0.5:  # the file's length was not kept beyond its last sector
        while sectors and sectors[-1] in lost:
            del image[sectors.pop()[0] :]


def _raise(number: int, what: str) -> NoReturn:
    raise DiskError(number, f"{what}: {os.strerror(number)}")
