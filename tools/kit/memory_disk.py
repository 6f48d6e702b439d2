"""A Disk in memory that counts its calls, can fail one of them, and can lose unsynced data.

Used by the event log's tests. `files` is the content that a reader sees, `durable` the synced
length of each file.
"""

from __future__ import annotations

from laminar.names.ports import DiskError


class MemoryFile:
    def __init__(self, disk: MemoryDisk, name: str) -> None:
        self.disk = disk
        self.name = name

    def append(self, data: bytes) -> None:
        if self.disk.fails():
            self.disk.files[self.name] += data[: len(data) // 2]
            raise DiskError("append")
        self.disk.files[self.name] += data

    def sync(self) -> None:
        self.disk.sync(self.name)

    def close(self) -> None:
        pass


class MemoryDisk:
    def __init__(self, files: dict[str, bytes] | None = None, fail_at: int = 0) -> None:
        self.files = {name: bytearray(data) for name, data in (files or {}).items()}
        self.durable = {name: len(data) for name, data in self.files.items()}
        self.calls: int = 0
        self.fail_at = fail_at

    def fails(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def list_names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        return bytes(self.files[name][offset : None if size < 0 else offset + size])

    def get_size(self, name: str) -> int:
        return len(self.files[name])

    def sync(self, name: str) -> None:
        if self.fails():
            raise DiskError("sync")
        self.durable[name] = len(self.files[name])

    def create_file(self, name: str) -> MemoryFile:
        if self.fails():
            raise DiskError("create")
        if name in self.files:
            raise FileExistsError(name)
        self.files[name] = bytearray()
        self.durable[name] = 0
        return MemoryFile(self, name)

    def replace_file(self, old: str, new: str) -> None:
        if self.fails():
            raise DiskError("replace")
        self.files[new], self.durable[new] = self.files.pop(old), self.durable.pop(old)

    def remove(self, name: str) -> None:
        if self.fails():
            raise DiskError("remove")
        del self.files[name], self.durable[name]

    def crash(self, keep_unsynced: bool) -> MemoryDisk:
        """Return the disk after a crash that kept all, or none, of the unsynced data."""
        return MemoryDisk(
            {
                name: bytes(data if keep_unsynced else data[: self.durable[name]])
                for name, data in self.files.items()
            }
        )
