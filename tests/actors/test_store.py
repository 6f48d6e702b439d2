"""The store tokenises a prompt when it is first needed, once, and only what needs it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest_asyncio

from laminar.actors.host import Host
from laminar.actors.service_clients import StoreClient
from laminar.actors.store import Store
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import DropReason, EndKind
from laminar.names.ids import GroupId, Purpose, TrajectoryId
from laminar.run.directory import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.rows import LoadedPrompts, PromptKey
from tests.actors.parts import DEADLINE_S, FakeHost, until

ROWS = 4


def ids(row_index: int) -> bytes:
    return bytes([row_index + 1, 0, 0, 0])


class SlowPrompts:
    """Rows without token ids, and a tokenizer that waits to be let."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def load(self) -> LoadedPrompts:
        rows = [
            m.PromptPayload(prompt=str(n), ground_truth=n, columns={}, data_source="d")
            for n in range(ROWS)
        ]
        return LoadedPrompts(rows, rows[:1], 0, "d")

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        assert all(m.decode_prompt(p).ground_truth == key.row_index for key, p in prompts.items())
        self.asked.append([key.row_index for key in prompts])
        await self.let.wait()
        if self.error is not None:
            raise self.error
        return {key: ids(key.row_index) for key in prompts}


class Run:
    """A store and a replica beside it."""

    def __init__(self, directory: Path) -> None:
        self.prompts = SlowPrompts()
        self.directory = directory
        self.host = FakeHost(directory, "store-0")
        database = partial(Database, directory / STORE_FILE, 1)
        self.store = Store(cast("Host", self.host), database, self.prompts)
        self.client = StoreClient(FakeHost(directory, "rollout-0").make_client("store-0"), 0.0)

    async def open(self, *rows: int, placement: int = 1) -> list[bytes]:
        items = tuple(
            m.OpenItem(
                trajectory_id=f"0.{row}.0",
                group_id=f"0.{row}",
                sibling=0,
                purpose="train",
                row_index=row,
                attempt=1,
                placement=placement,
                weight_version=0,
                version_step=0,
                replica="rollout-0",
                temperature=1.0,
            )
            for row in rows
        )
        reply = await self.client.send_request(m.Open(items=items), m.OpenReply)
        return [result.prompt_ids for result in reply.results]


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    await made.store.start()
    await made.client.start()
    async with asyncio.timeout(DEADLINE_S):
        yield made
    await made.client.close(0.0)
    await made.store.stop()
    made.host.end()


async def test_a_prompt_is_tokenised_once_and_what_needs_none_is_answered_meanwhile(
    run: Run,
) -> None:
    assert run.prompts.asked == []
    opening = asyncio.create_task(run.open(1, 2))
    await until(lambda: bool(run.prompts.asked))
    other = StoreClient(FakeHost(run.directory, "trainer-0").make_client("store-0"), 0.0)
    await other.start()
    await other.send_request(m.Stats(), m.StatsReply)
    assert not opening.done()
    run.prompts.let.set()
    assert await opening == [ids(1), ids(2)]
    assert await run.open(2, 3, placement=2) == [ids(2), ids(3)]
    (row,) = await other.fetch(["0.2.0"], with_prompt=False)
    assert row.prompt_ids == ids(2)
    sampled = await other.send_request(m.SamplePrompts(count=ROWS), m.SamplePromptsReply)
    assert sampled.prompts == tuple(ids(n) for n in range(ROWS))
    assert run.prompts.asked == [[1, 2], [3], [0]]
    await other.close(0.0)


async def test_another_store_process_does_not_tokenise_again(run: Run) -> None:
    run.prompts.let.set()
    await run.open(1)
    await run.store.stop()
    again = Run(run.directory)
    await again.store.start()
    await again.client.start()
    assert await again.open(1, placement=2) == [ids(1)]
    assert again.prompts.asked == []
    await again.client.close(0.0)
    await again.store.stop()


async def test_ends_that_another_process_was_to_write_come_before_the_data(run: Run) -> None:
    """They are sent as soon as the coordinator accepts the new process; the ends of the old one
    that were written are written again, to the same effect."""
    run.prompts.let.set()
    await run.open(1)
    ended = cmd.EndTrajectories(
        to="store-0",
        endings=(
            cmd.TrajectoryEnding(
                trajectory_id=TrajectoryId("0.1.0"),
                group=GroupId("0.1"),
                sibling=0,
                purpose=Purpose.TRAIN,
                row_index=1,
                placement=2,
                end=EndKind.DROPPED,
                reason=DropReason.RUN_ENDED,
                step=-1,
            ),
        ),
    )
    order = cmd.Envelope(command_id=7, cause=1, command=msgspec.Raw(b""))
    run.store.handle_orders([(order, ended)])
    first = await run.host.wait(ev.TrajectoriesEnded)
    await run.store.stop()
    again = Run(run.directory)
    again.store.handle_orders([(order, ended)])
    assert again.host.all(ev.TrajectoriesEnded) == []
    await again.store.start()
    assert await again.host.wait(ev.TrajectoriesEnded) == first
    await again.store.stop()
    again.host.end()


async def test_a_prompt_that_cannot_be_tokenised_ends_the_process_with_its_reason(run: Run) -> None:
    run.prompts.error = ConfigError("the prompt of row 1 has no tokens; drop the row")
    run.prompts.let.set()
    opening = asyncio.create_task(run.open(1))
    await until(lambda: bool(run.host.failures))
    assert "row 1 has no tokens" in run.host.failures[0]
    opening.cancel()


async def test_a_store_begins_when_the_one_before_it_has_let_go_of_the_database(
    tmp_path: Path,
) -> None:
    """It says once what it waits for."""
    before = Database(tmp_path / STORE_FILE, 1)
    later = Run(tmp_path)
    begin = asyncio.create_task(later.store.start())
    await until(lambda: bool(later.host.announced))
    (said,) = later.host.announced
    assert "incarnation 1" in said and "waiting" in said and not begin.done()
    before.close()
    await begin
    assert len(later.host.announced) == 1 and later.host.all(ev.DataLoaded)
    await later.store.stop()
    later.host.end()
