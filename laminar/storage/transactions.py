"""Requests to the store as SQLite transactions: all of a batch commit together, or none.

Reads   typed requests (`messages`), the tables (`tables`)
Writes  the tables; every reply follows its commit
Raises  ConfigError if the database has another format or other data; ports.DiskError if a write
        fails. Nothing of it is left: unless the file is damaged, it can be retried, since the next
        transaction writes the same pages of SQLite's log again, also those that a sync lost

Requests that arrived together share one transaction and one sync (group commit). Each is a
savepoint in it, so that a bad one does not affect the others. The caller provides the connection:
database.py to a file, the simulator in memory.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from laminar.config import ConfigError
from laminar.names.ids import Purpose
from laminar.names.ports import DiskError, DiskFull
from laminar.storage import messages as m
from laminar.storage import schema
from laminar.storage.handlers import Handlers
from laminar.storage.rows import DamageError, LoadedPrompts, NotTokenised, PromptCount, PromptKey
from laminar.storage.tables import Tables

_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_TRANSIENT = {
    sqlite3.SQLITE_IOERR: errno.EIO,  # also the form of EDQUOT and ESTALE
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
"""Primary codes of SQLite that may end by themselves, as errors of the system."""


class Transactions:
    """The store over an open connection, which starts no transaction by itself."""

    def __init__(
        self, connection: sqlite3.Connection, tables: Tables, name: str, *, in_flight: bool = False
    ) -> None:
        """Create missing tables. `name`: for messages; `in_flight`: see Handlers."""
        self._db = connection
        self._tables = tables
        self._handlers = Handlers(tables, in_flight=in_flight)
        with self._begin_transaction():
            self._create_or_check(name)

    def close(self) -> None:
        self._db.close()

    async def fill(self, prompts: LoadedPrompts) -> PromptCount:
        """Store the data of a run once (`load_prompts`); return its size."""
        return self._fill(prompts)

    def _fill(self, prompts: LoadedPrompts) -> PromptCount:
        self.load_prompts(prompts.train, prompts.held_out, prompts.digest)
        return self.prompt_count()

    def load_prompts(
        self, train: Sequence[m.PromptPayload], held_out: Sequence[m.PromptPayload], digest: str
    ) -> None:
        """Store the data once; the same digest again changes nothing, another one is an error.

        The row index of a prompt is its position in its list. `digest` identifies the data as a
        whole.
        """
        if not digest:
            raise ValueError("the digest of the data is empty")
        with self._begin_transaction():
            stored = self._tables.get_meta()["data_digest"]
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
        self._tables.add_prompts(Purpose.TRAIN, _encode_prompts(train, Purpose.TRAIN))
        self._tables.add_prompts(Purpose.EVAL, _encode_prompts(held_out, Purpose.EVAL))
        self._tables.set_meta(
            {
                "data_digest": digest,
                "train_prompts": str(len(train)),
                "eval_prompts": str(len(held_out)),
                "prompts_digest": self._tables.prompts_digest(),
            }
        )

    def prompt_count(self) -> PromptCount:
        with disk_errors():
            meta = self._tables.get_meta()
        counts = int(meta["train_prompts"]), int(meta["eval_prompts"])
        return PromptCount(*counts, meta["data_digest"])

    def save_prompt_ids(self, ids: Mapping[PromptKey, bytes]) -> None:
        """Save token ids (int32 little-endian) of prompts that had none; durable on return."""
        with self._begin_transaction():
            self._tables.add_prompt_ids(ids)

    def handle_batch(self, requests: Sequence[m.Request]) -> list[m.Reply | NotTokenised]:
        """Answer requests in order; all changes are durable on return.

        A request that needs missing token ids is left undone and answered with NotTokenised.
        """
        with self._begin_transaction():
            replies = [self._handle_request(request) for request in requests]
            self._before_commit()
        return replies

    def _before_commit(self) -> None:
        """Run after a batch is answered and before it is committed."""

    def _handle_request(self, request: m.Request) -> m.Reply | NotTokenised:
        self._db.execute("SAVEPOINT request")
        try:
            return self._handlers.answer_request(request)
        except DamageError as error:
            self._db.execute("ROLLBACK TO request")
            return m.ErrorReply(reason=str(error))
        except NotTokenised as missing:
            return missing
        finally:
            if self._db.in_transaction:  # a failed write may have ended the whole transaction
                self._db.execute("RELEASE request")

    @contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        with disk_errors():
            if self._db.in_transaction:  # a rollback failed, too
                self._db.execute("ROLLBACK")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _create_or_check(self, name: str) -> None:
        known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        if known is None:
            for statement in schema.TABLES:
                self._db.execute(statement)
            self._tables.set_meta(schema.META)
        meta = self._tables.get_meta()
        if meta.keys() != schema.META.keys() or meta["format"] != schema.FORMAT:
            raise ConfigError(
                f"{name} has format {meta.get('format')!r} with keys {sorted(meta)}, this version "
                f"reads format {schema.FORMAT!r}: restore the file or start another run"
            )


@contextmanager
def disk_errors() -> Iterator[None]:
    """Convert SQLite exceptions to those of the store's ports."""
    try:
        yield
    except sqlite3.Error as error:
        raise disk_error(error) from error


def disk_error(error: sqlite3.Error) -> DiskError:
    """Return DiskFull if the disk was full, else DiskError; ports.is_transient tells of both."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in _NO_ROOM:
        return DiskFull(errno.ENOSPC, str(error))
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return DiskError(_TRANSIENT.get(code & 0xFF, errno.EBADMSG), f"{name}: {error}")


def _encode_prompts(prompts: Sequence[m.PromptPayload], purpose: str) -> Iterator[bytes]:
    for index, prompt in enumerate(prompts):
        try:
            payload = m.encode_prompt(prompt)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{purpose} prompt {index} cannot be stored as MessagePack ({error}): keep only "
                "text, numbers, lists and maps in its columns"
            ) from error
        if (size := len(payload) - len(prompt.prompt_ids)) > m.PROMPT_LIMIT:  # as in data/prompts
            raise ConfigError(
                f"{purpose} prompt {index} has {size} bytes with its columns, over the limit of "
                f"{m.PROMPT_LIMIT}: drop the large columns"
            )
        yield payload
