"""The store: a synchronous SQLite database that answers batches of requests.

Reads   typed requests (`messages`), the tables (`tables`), payload files
Writes  the database and the payload files beside it; nothing is answered before it is durable
Raises  ConfigError when the database cannot be used; ports.DiskError when a write fails. For want
        of room (DiskFull) nothing of it is left, and it can be tried again; else the process must
        end: after a failed sync it is unknown what is on the disk

`handle_batch` is the whole interface of a running store: what arrived together is one transaction,
one sync (group commit), and each request is a savepoint in it, so that a bad one takes nothing of
the others with it. All state is in the database, so a second store process, started while the first
still lives, can only wait for the lock. The database must lie on a local disk: SQLite's log needs
shared memory between its readers, which network file systems lack.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from laminar.config import ConfigError
from laminar.fail_points import FailPoints
from laminar.ids import Purpose
from laminar.ports import DiskError, DiskFull
from laminar.storage import messages as m
from laminar.storage import payload_files, schema
from laminar.storage.handlers import Handlers
from laminar.storage.rows import DamageError, NotTokenised, PromptCount, PromptKey
from laminar.storage.tables import Tables

PROMPT_LIMIT = 2 * 2**20  #: bytes of one prompt payload: with MAX_TOKENS it fits one message
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


class Database:
    """The open store database at `path`, created when missing, and its payload files."""

    def __init__(self, path: Path) -> None:
        self._folder = payload_files.folder_of(path)
        self._fail_points = FailPoints(path.parent)
        self._db = _connect(path)
        self._tables = Tables(self._db, self._folder)
        self._handlers = Handlers(self._tables)
        try:
            with self._transaction():
                self._create_or_check(path)
            payload_files.create_folder(self._folder)
            with self._transaction():  # no writer can be between a file and its row now
                payload_files.sweep(self._folder, self._tables.file_names())
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def load_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        """Store the data once; the same digest again changes nothing, another one is an error.

        The row index of a prompt is its position in its list. `digest` names the data as a whole.
        """
        if not digest:
            raise ValueError("the digest of the data is empty")
        with self._transaction():
            stored = self._tables.meta()["data_digest"]
            if not stored:
                self._store_prompts(train, held_out, digest)
            elif stored != digest:
                raise ConfigError(
                    f"the store was filled from data with digest {stored}, but the data now has "
                    f"digest {digest}: restore the data settings of this run or start another run"
                )

    def _store_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        self._tables.add_prompts(Purpose.TRAIN, _encoded(train, Purpose.TRAIN))
        self._tables.add_prompts(Purpose.EVAL, _encoded(held_out, Purpose.EVAL))
        self._tables.set_meta(
            {
                "data_digest": digest,
                "train_prompts": str(len(train)),
                "eval_prompts": str(len(held_out)),
                "prompts_digest": self._tables.prompts_digest(),
            }
        )

    def prompt_count(self) -> PromptCount:
        with _disk_errors():
            meta = self._tables.meta()
        counts = int(meta["train_prompts"]), int(meta["eval_prompts"])
        return PromptCount(*counts, meta["data_digest"])

    def keep_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        """Token ids (int32 little-endian) of prompts that had none; on return they are on disk."""
        with self._transaction():
            self._tables.add_prompt_ids(ids)

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        """Answer requests in order; on return all that they changed is on the disk. What needs
        token ids that are not kept yet is left undone."""
        with self._transaction():
            replies = [self._handle(request) for request in requests]
            self._fail_points.reached("store-commit")
        self._fail_points.reached("store-committed")
        if self._tables.unnamed:
            self._unlink()
        return replies

    def _unlink(self) -> None:
        """Files of payloads whose removal is committed, or was undone: what no row names goes."""
        with self._transaction():  # no writer can be between a file and its row now
            unnamed = {name for name in self._tables.unnamed if not self._tables.is_named(name)}
            payload_files.unlink(self._folder, unnamed)
        self._tables.unnamed.clear()

    def _handle(self, request: m.Request) -> m.Reply | NotTokenised:
        self._db.execute("SAVEPOINT request")
        try:
            return self._handlers.answer(request)
        except DamageError as error:
            self._db.execute("ROLLBACK TO request")
            return m.ErrorReply(reason=str(error))
        except NotTokenised as missing:
            return missing
        finally:
            if self._db.in_transaction:  # a failed write may have ended the whole transaction
                self._db.execute("RELEASE request")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _disk_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _create_or_check(self, path: Path) -> None:
        known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        if known is None:
            for statement in schema.TABLES:
                self._db.execute(statement)
            self._tables.set_meta(schema.META)
        self._tables.add_what_is_missing()
        meta = self._tables.meta()
        if meta.keys() != schema.META.keys() or meta["format"] != schema.FORMAT:
            raise ConfigError(
                f"{path} has format {meta.get('format')!r} with keys {sorted(meta)}, this version "
                f"reads format {schema.FORMAT!r}: restore the file or start another run"
            )


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _disk_error(error) from error


def _disk_error(error: sqlite3.Error) -> DiskError:
    if getattr(error, "sqlite_errorcode", 0) in _NO_ROOM:
        return DiskFull(errno.ENOSPC, str(error))
    return DiskError(errno.EIO, f"{type(error).__name__}: {error}")


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that starts no transaction by itself."""
    try:
        db = sqlite3.connect(path, isolation_level=None)
        modes = [db.execute(pragma).fetchone() for pragma in schema.WRITER_PRAGMAS]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in _NO_ROOM:
            raise _disk_error(error) from error
        raise ConfigError(
            f"{path} cannot be opened as a store database ({error}): name another run directory"
        ) from error
    if modes[0] != ("wal",):
        raise ConfigError(
            f"the file system of {path} cannot hold a SQLite database with a write-ahead log: "
            "set run.output_dir to a local disk"
        )
    return db


def _encoded(prompts: Sequence[m.PromptPayload], purpose: str) -> Iterator[bytes]:
    for index, prompt in enumerate(prompts):
        try:
            payload = m.encode_prompt(prompt)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{purpose} prompt {index} cannot be stored as MessagePack ({error}): keep only "
                "text, numbers, lists and maps in its columns"
            ) from error
        if len(payload) > PROMPT_LIMIT:
            raise ConfigError(
                f"{purpose} prompt {index} has {len(payload)} bytes with its columns, over the "
                f"limit of {PROMPT_LIMIT}: drop the large columns"
            )
        yield payload
