"""The store's database as a file, with large payloads in files beside it.

Reads   requests (`transactions`), payload files
Writes  the database and the payload files; nothing is answered before it is durable
Raises  ConfigError when the database cannot be used, and what `transactions` raises

All state is in the database, so a second store process, started while the first still lives, can
only wait for the lock. The database must lie on a local disk: SQLite's log needs shared memory
between its readers, which network file systems lack.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from laminar.config import ConfigError
from laminar.run.fail_points import FailPoints
from laminar.storage import messages as m
from laminar.storage import payload_files, schema
from laminar.storage.rows import NotTokenised
from laminar.storage.tables import Tables
from laminar.storage.transactions import NO_ROOM, Transactions, disk_error


class Database(Transactions):
    """The open store database at `path`, created when missing, and its payload files."""

    def __init__(self, path: Path) -> None:
        self._folder = payload_files.folder_of(path)
        self._fail_points = FailPoints(path.parent)
        connection = _connect(path)
        try:
            super().__init__(connection, Tables(connection, self._folder), str(path))
            payload_files.create_folder(self._folder)
            with self._transaction():  # no writer can be between a file and its row now
                payload_files.sweep(self._folder, self._tables.file_names())
        except BaseException:
            connection.close()
            raise

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        replies = super().handle_batch(requests)
        self._fail_points.reached("store-committed")
        if self._tables.unnamed:
            self._unlink()
        return replies

    def _before_commit(self) -> None:
        self._fail_points.reached("store-commit")

    def _unlink(self) -> None:
        """Files of payloads whose removal is committed, or was undone: what no row names goes."""
        with self._transaction():  # no writer can be between a file and its row now
            unnamed = {name for name in self._tables.unnamed if not self._tables.is_named(name)}
            payload_files.unlink(self._folder, unnamed)
        self._tables.unnamed.clear()


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that starts no transaction by itself."""
    try:
        db = sqlite3.connect(path, isolation_level=None)
        modes = [db.execute(pragma).fetchone() for pragma in schema.WRITER_PRAGMAS]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in NO_ROOM:
            raise disk_error(error) from error
        raise ConfigError(
            f"{path} cannot be opened as a store database ({error}): name another run directory"
        ) from error
    if modes[0] != ("wal",):
        raise ConfigError(
            f"the file system of {path} cannot hold a SQLite database with a write-ahead log: "
            "set run.output_dir to a local disk"
        )
    return db
