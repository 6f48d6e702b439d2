"""A full disk: what must be on it waits and says so, resumes when there is room, ends when there is
none for too long; everything else goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from laminar.actors.disk_full_retry import QUIET_S, DiskFullRetry, DiskStayedFull
from laminar.actors.host import Host
from laminar.actors.service_clients import StoreClient
from laminar.actors.store import Store
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import ids
from laminar.names.ports import DiskError
from laminar.run.directory import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.durable_lines import DurableLines
from laminar.storage.rows import LoadedPrompts, PromptKey
from laminar.storage.transactions import disk_error
from tests.actors.parts import DEADLINE_S, FakeHost

FULL = OSError(errno.ENOSPC, "No space left on device")
ITEM = {"trajectory_id": "0.0.0", "group_id": "0.0", "sibling": 0, "purpose": "train"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def now_ns(self) -> int:
        return int(self.now * 1e9)


def waiting(tmp_path: Path, *settings: str) -> tuple[DiskFullRetry, FakeHost, Clock]:
    host, clock = FakeHost(tmp_path, "store-0", *settings), Clock()
    host.now_ns = clock.now_ns  # type: ignore[method-assign]
    return DiskFullRetry(host, "the store"), host, clock


def test_a_wait_is_told_at_its_beginning_and_its_end(tmp_path: Path) -> None:
    wait, host, clock = waiting(tmp_path)
    assert wait.handle_failure(FULL) > 0
    clock.now = 6.0
    wait.handle_failure(FULL)
    wait.record_success()
    wait.record_success()
    begin, end = host.announced
    assert "the store cannot be written, the disk is full" in begin and "300 s" in begin
    assert end == "the store: there is free space again, after 6.0 s"


def test_a_disk_that_takes_one_write_and_refuses_the_next_is_told_now_and_then(
    tmp_path: Path,
) -> None:
    wait, host, clock = waiting(tmp_path)
    for _ in range(100):
        wait.handle_failure(FULL)
        wait.record_success()
        clock.now += QUIET_S / 50
    assert len(host.announced) == 2 * 2


def test_a_disk_that_stays_full_ends_the_wait(tmp_path: Path) -> None:
    """At the limit, not before it, with tries up to the last moment."""
    wait, host, clock = waiting(tmp_path, "coordinator.disk_full_timeout_s=20")
    with pytest.raises(DiskStayedFull, match=r"could not be written for 20 s"):
        for _ in range(100):
            clock.now += wait.handle_failure(FULL)
    assert clock.now == 20.0
    assert "could not be written for 20 s" in host.announced[-1]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "none"), DiskError(errno.EBADMSG, "malformed"), ConfigError("key")],
)
def test_what_no_room_would_mend_is_not_waited_for(tmp_path: Path, error: Exception) -> None:
    wait, host, _ = waiting(tmp_path)
    with pytest.raises(type(error)):
        wait.handle_failure(error)
    assert not host.announced


TRANSIENT = [errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("number", TRANSIENT)
def test_a_file_server_that_restarts_is_waited_for_as_a_full_disk_is(
    tmp_path: Path, number: int
) -> None:
    wait, host, clock = waiting(tmp_path)
    assert wait.handle_failure(OSError(number, os.strerror(number))) > 0
    clock.now = 12.0
    wait.record_success()
    state = "is full" if number == errno.EDQUOT else "fails"
    begin, end = host.announced
    assert f"the disk {state} ([Errno {number}]" in begin and "300 s" in begin
    assert end.endswith("again, after 12.0 s")


async def test_a_write_is_tried_until_there_is_room(tmp_path: Path) -> None:
    wait, host, _ = waiting(tmp_path)
    failures = [FULL, FULL]

    async def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    assert await wait.until_room(write) == "written"
    assert len(host.announced) == 2


# --- the trainer's book -------------------------------------------------------------------------


async def test_a_line_of_the_book_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes a part of it: the part is taken back, and the line can be tried again."""
    book, write, full = DurableLines(tmp_path / "book.jsonl"), os.write, [False]

    def limited(fd: int, data: Any) -> int:
        if not full[0]:
            return write(fd, data)
        if len(data) <= 5:
            raise FULL
        return write(fd, bytes(data)[:-5])

    monkeypatch.setattr("laminar.storage.durable_lines.os.write", limited)
    await book.enter(b'{"step": 0}')
    full[0] = True
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            await book.enter(b'{"step": 1}')
    full[0] = False
    await book.enter(b'{"step": 1}')
    book.close()
    text = (tmp_path / "book.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1]


# --- the store ----------------------------------------------------------------------------------


class Disk:
    """Room for the store: SQLite's own limit on pages."""

    def __init__(self, database: Database) -> None:
        self._db = database._db

    def fill(self) -> None:
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        self._db.execute(f"PRAGMA max_page_count={pages}")

    def free(self) -> None:
        self._db.execute("PRAGMA max_page_count=1000000")


class OnePrompt:
    """The data of a run: one row, tokenised at its start."""

    async def load(self) -> LoadedPrompts:
        prompt = m.PromptPayload(
            prompt="p", ground_truth="g", columns={}, data_source="d", prompt_ids=b"\1\0\0\0"
        )
        return LoadedPrompts([prompt], [], 0, "d")

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        raise AssertionError("all token ids are known")


def database_of(store: Store) -> Database:
    assert isinstance(store.database, Database)
    return store.database


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    host = FakeHost(tmp_path, "store-0")
    made = Store(cast("Host", host), partial(Database, tmp_path / STORE_FILE, 1), OnePrompt())
    await made.start()
    yield made
    await made.stop()
    host.end()


async def ask(store: Store, name: str) -> StoreClient:
    host = FakeHost(store.host.run_dir, name)
    client = StoreClient(host.make_client("store-0"), 0.0)
    await client.start()
    return client


def opening() -> m.Open:
    item = m.OpenItem(
        **ITEM,  # type: ignore[arg-type]
        row_index=0,
        attempt=1,
        placement=1,
        weight_version=0,
        version_step=0,
        replica="rollout-0",
        temperature=1.0,
    )
    return m.Open(items=(item,))


def tokens(count: int) -> m.Append:
    chunk = m.AppendItem(
        trajectory_id="0.0.0",
        placement=1,
        offset=0,
        tokens=b"\1\0\0\0" * count,
        logprobs=b"\0\0\0\0" * count,
        weight_version=0,
        version_step=0,
    )
    return m.Append(items=(chunk,))


async def test_the_store_waits_for_room_and_answers_who_only_reads(store: Store) -> None:
    """What a replica hands over and what the coordinator ends waits, in order; a trainer gets its
    batch meanwhile. Nothing is lost and nothing fails."""
    host, disk = cast("FakeHost", store.host), Disk(database_of(store))
    replica, trainer = await ask(store, "rollout-0"), await ask(store, "trainer-0")
    async with asyncio.timeout(DEADLINE_S):
        await replica.send_request(opening(), m.OpenReply)
        disk.fill()
        appending = asyncio.create_task(replica.send_request(tokens(2000), m.AppendReply))
        finish = m.FinishItem(
            trajectory_id="0.0.0", placement=1, finish_reason="stop", num_tokens=2000
        )
        finishing = asyncio.create_task(
            replica.send_request(m.Finish(items=(finish,)), m.FinishReply)
        )
        while not host.announced:
            await asyncio.sleep(0.01)
        (row,) = await trainer.fetch(["0.0.0"], with_prompt=False)
        assert row.tokens == b""
        assert not appending.done() and not finishing.done() and not host.failures
        disk.free()
        (result,) = (await appending).results
        assert result.answer == "ok"
        (result,) = (await finishing).results
        assert result.answer == "ok"
        (row,) = await trainer.fetch(["0.0.0"], with_prompt=False)
        assert len(row.tokens) == 2000 * 4
    assert [text.partition(":")[0] for text in host.announced][-1] == "the store"
    await replica.close()
    await trainer.close()


@pytest.mark.parametrize("writes", [True, False])
async def test_the_store_waits_while_its_disk_fails_also_with_reads(
    store: Store, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """SQLite reports EDQUOT and ESTALE as IOERR; the name of the code is told."""
    host, database = cast("FakeHost", store.host), database_of(store)
    trainer, broken = await ask(store, "trainer-0"), [False]

    def fail(requests: Any) -> Any:
        if not broken[0]:
            return handle(requests)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        error.sqlite_errorname = "SQLITE_IOERR_WRITE"
        raise disk_error(error)

    handle = database.handle_batch
    monkeypatch.setattr(database, "handle_batch", fail)
    async with asyncio.timeout(DEADLINE_S):
        await trainer.send_request(opening(), m.OpenReply)
        broken[0] = True
        request: Any = trainer.fetch(["0.0.0"], with_prompt=False)
        if writes:
            request.close()
            request = trainer.send_request(tokens(2), m.AppendReply)
        asking = asyncio.create_task(request)
        while not host.announced:
            await asyncio.sleep(0.01)
        assert not asking.done() and "SQLITE_IOERR_WRITE" in host.announced[0]
        broken[0] = False
        await asking
        assert len(host.announced) == 2 and not host.failures
    await trainer.close()


async def test_ends_are_written_when_there_is_room(store: Store) -> None:
    host, disk = cast("FakeHost", store.host), Disk(database_of(store))
    endings = tuple(
        cmd.TrajectoryEnding(
            trajectory_id=ids.TrajectoryId(f"0.{n}.0"),
            group=ids.GroupId(f"0.{n}"),
            sibling=0,
            purpose="train",
            row_index=0,
            placement=1,
            end="dropped",
            reason="run-ended",
            step=-1,
        )
        for n in range(500)
    )
    disk.fill()
    command = cmd.EndTrajectories(to="store-0", endings=endings)
    order = cmd.Envelope(command_id=7, cause=1, command=cast("Any", b""))
    store.handle_orders([(order, command)])
    async with asyncio.timeout(DEADLINE_S):
        while not host.announced:
            await asyncio.sleep(0.01)
        assert not host.all(ev.TrajectoriesEnded)
        disk.free()
        ended = await host.wait(ev.TrajectoriesEnded)
    assert len(ended.ended) == 500 and not host.failures


async def test_a_store_whose_disk_stays_full_says_why_it_ends(store: Store) -> None:
    host, disk = cast("FakeHost", store.host), Disk(database_of(store))
    store._disk._limit_s = 0.0
    replica = await ask(store, "rollout-0")
    async with asyncio.timeout(DEADLINE_S):
        await replica.send_request(opening(), m.OpenReply)
        disk.fill()
        asking = asyncio.create_task(replica.send_request(tokens(2000), m.AppendReply))
        while not host.failures:
            await asyncio.sleep(0.01)
    assert "could not be written for 0 s" in host.failures[0]
    asking.cancel()
    await replica.close(0.0)
