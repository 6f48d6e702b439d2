"""The store's database as a file, with large payloads in a folder next to it.

Reads   requests (`transactions`), payload files
Writes  the database and the payload files; data is durable before any reply
Raises  ConfigError if the database cannot be used, DatabaseHeld while another process of the store
        lives, and the exceptions of `transactions`

All state is in the database, which must be on a local disk: SQLite's log needs shared memory
between its readers, which network file systems lack.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from laminar.config import ConfigError
from laminar.names.ports import DiskError, is_transient
from laminar.run.fail_points import FailPoints
from laminar.run.permissions import open_private
from laminar.run.work_counter import count_work
from laminar.storage import messages as m
from laminar.storage import payload_files, schema
from laminar.storage.rows import LoadedPrompts, NotTokenised, PromptCount
from laminar.storage.tables import Tables
from laminar.storage.transactions import Transactions, disk_error
from laminar.storage.writer_lock import WriterLock


class Database(Transactions):
    """The open store database at `path`, created when missing, and its payload files."""

    def __init__(self, path: Path, incarnation: int, *, in_flight: bool = False) -> None:
        """Open the database and lock it for this process.

        `incarnation`: of this process; a later process has a higher one, the same process the
        same.
        """
        self._folder = payload_files.folder_of(path)
        self._fail_points = FailPoints(path.parent)
        self._filling = threading.Lock()
        self._changes = 0  #: rows changed so far
        with ExitStack() as opened:
            self._lock = WriterLock(path, incarnation)
            opened.callback(self._lock.close)
            connection = _open_connection(path)
            opened.callback(connection.close)
            tables = Tables(connection, self._folder)
            super().__init__(connection, tables, str(path), in_flight=in_flight)
            payload_files.create_folder(self._folder)
            with self._begin_transaction():  # no writer can be between a file and its row now
                payload_files.remove_unnamed_files(self._folder, self._tables.file_names())
            opened.pop_all()

    async def fill(self, prompts: LoadedPrompts) -> PromptCount:
        """Store the data in a thread: a million rows may take longer than a process's lease."""
        return await asyncio.to_thread(self._fill, prompts)

    def _fill(self, prompts: LoadedPrompts) -> PromptCount:
        with self._filling:
            return super()._fill(prompts)

    def close(self) -> None:
        with self._filling:
            super().close()
        self._lock.close()

    @contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        with super()._begin_transaction():
            self._lock.check_owner()
            yield

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        replies = super().handle_batch(requests)
        self._fail_points.hit_failpoint("store-committed")
        if self._tables.unnamed:
            with suppress(OSError):  # the requests are committed; the next ones find the error
                self._unlink_unnamed()
        return replies

    def _before_commit(self) -> None:
        changes, self._changes = self._changes, self._db.total_changes
        if changes != self._changes:
            count_work()
        self._fail_points.hit_failpoint("store-commit")

    def _unlink_unnamed(self) -> None:
        """Remove the payload files that no row names after a commit or rollback."""
        with self._begin_transaction():  # no writer can be between a file and its row now
            unnamed = {name for name in self._tables.unnamed if not self._tables.is_named(name)}
            payload_files.remove_files(self._folder, unnamed)
        self._tables.unnamed.clear()


def _open_connection(path: Path) -> sqlite3.Connection:
    """Open a connection that starts no transaction by itself."""
    try:
        for file in (path, *path.parent.glob(f"{path.name}-*")):  # new ones get its mode
            os.close(open_private(file))
    except OSError as error:
        raise DiskError(error.errno, f"opening {path} failed: {error.strerror}") from error
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        modes = [db.execute(pragma).fetchone() for pragma in schema.WRITER_PRAGMAS]
    except sqlite3.DatabaseError as error:
        if is_transient(found := disk_error(error)):
            raise found from error
        raise ConfigError(
            f"{path} cannot be opened as a store database ({error}): name another run directory"
        ) from error
    if modes[0] != ("wal",):
        raise ConfigError(
            f"the file system of {path} cannot hold a SQLite database with a write-ahead log: "
            "set run.output_dir to a local disk"
        )
    return db
