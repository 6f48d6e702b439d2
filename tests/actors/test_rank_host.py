"""Ranks on the hosts of two more nodes, as rank 0 sees them: orders, results, each way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from laminar.actors import rank_link
from laminar.actors.host import Host
from laminar.actors.rank_host import RankHost
from laminar.actors.rank_link import TrainerLinks
from laminar.net.calls import RpcError
from laminar.training.rank_processes import RankError, RankProcesses
from laminar.training.ranks import RankStore
from tests.actors.parts import FakeHost, until
from tests.run.conftest import ROOT

pytestmark = pytest.mark.process
PROGRAM = ["tests.training.rank_program", ""]
SETTINGS = ("trainer.nodes=3", "trainer.ranks=2", "coordinator.lease_ms=300")
SHORT_LEASE = "coordinator.node_lease_ms=5000"  #: which a test waits for twice


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are programs of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Nodes:
    """The processes of one trainer: rank 0 here, and hosts."""

    def __init__(self, run_dir: Path, *settings: str) -> None:
        self.run_dir, self.lost, self.settings = run_dir, list[str](), (*SETTINGS, *settings)
        self.hosts: dict[str, tuple[FakeHost, RankHost]] = {}
        self.new_trainer()

    def new_trainer(self) -> None:
        self.trainer = FakeHost(self.run_dir, "trainer-0", *self.settings)
        self.links = TrainerLinks(cast(Host, self.trainer))
        self.group = RankProcesses(
            self.trainer.config, PROGRAM, lock=self.run_dir / "trainer.lock", hosts=self.links,
            lost=self.lost.append, say=self.trainer.notify_user, numbers=[1],
        )  # fmt: skip

    async def add_host(self, number: int) -> None:
        node = f"trainer-node-{number}"
        host = FakeHost(self.run_dir, f"ranks-{number}", *self.settings, node=node)
        actor = RankHost(cast(Host, host), PROGRAM)
        self.hosts[host.name] = host, actor
        await actor.start()

    async def end_host(self, name: str, *, killed: bool = False) -> None:
        """End a host and its ranks; a killed one leaves its lock file as it is."""
        host, actor = self.hosts.pop(name)
        lock = self.run_dir / f"{name}.lock"
        pids = lock.read_text() if killed else ""
        host.end()
        await actor.stop()
        if killed:
            lock.write_text(pids)

    async def close(self) -> None:
        await self.group.close()
        for name in list(self.hosts):
            await self.end_host(name)
        self.trainer.end()


@asynccontextmanager
async def nodes(run_dir: Path, *hosts: int, settings: Sequence[str] = ()) -> AsyncIterator[Nodes]:
    found = Nodes(run_dir, *settings)
    try:
        for number in hosts:
            await found.add_host(number)
        await found.group.start()
        yield found
    finally:
        await found.close()


async def test_orders_go_to_all_ranks_and_results_come_by_rank(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1, 2) as found:
        large = b"x" * (2 << 20)
        replies = await found.group.call_ranks(large)
        assert replies == [b"%d: %b" % (rank, large) for rank in (1, 2, 3, 4, 5)]
        waits = asyncio.ensure_future(found.group.call_ranks(b"wait"))
        assert len(await found.group.call_ranks(b"go")) == 5, "orders overtake one that waits"
        assert len(await waits) == 5
        with pytest.raises(OSError, match="No space left on device"):
            await found.group.call_ranks(b"disk 4")
        assert len(await found.group.call_ranks(b"again")) == 5
    assert found.lost == []


async def test_a_rank_of_another_node_reaches_the_table_of_rank_0(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1, 2) as found:
        await asyncio.to_thread(RankStore(0, found.group.submit).set, "from", b"rank 0")
        assert await found.group.call_ranks(b"store") == [b"%d: rank 0" % r for r in range(1, 6)]


async def test_the_end_of_a_rank_elsewhere_is_named_and_ends_all(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1, 2) as found:
        with pytest.raises(RankError, match=r"^rank 3 of the trainer has ended \(exit code 7\)"):
            await found.group.call_ranks(b"end 3")
        with pytest.raises(RankError, match="rank 3"):
            await found.group.call_ranks(b"more")
        assert len(found.lost) == 1
        for _, actor in found.hosts.values():
            await until(lambda: actor.ranks is None)  # noqa: B023


@pytest.mark.parametrize("killed", [True, False])
async def test_a_spare_takes_the_place_of_a_lost_host(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "WAIT_NOTE_S", 0.0)
    async with nodes(tmp_path, 1, 2, settings=[SHORT_LEASE]) as found:
        assert (tmp_path / "trainer.lock").read_text().splitlines()[1:] == ["ranks-1", "ranks-2"]
        waits = asyncio.ensure_future(found.group.call_ranks(b"wait"))
        await found.add_host(3)
        await found.end_host("ranks-1", killed=killed)
        with pytest.raises(RankError, match=r"host ranks-1 of the ranks on trainer-node-1"):
            await waits
        await found.group.close()
        found.new_trainer()
        await found.group.start()
        assert len(await found.group.call_ranks(b"order")) == 5
        text = "waiting for the ranks of the former trainer on ranks-1 to end"
        assert (text in found.trainer.announced) == killed, "its ranks may live for two leases"
        assert (tmp_path / "trainer.lock").read_text().splitlines()[1:] == ["ranks-2", "ranks-3"]


async def test_the_user_is_told_which_nodes_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "WAIT_NOTE_S", 0.0)
    found = Nodes(tmp_path)
    starting = asyncio.ensure_future(found.group.start())
    await until(lambda: bool(found.trainer.announced))
    await found.add_host(1)
    await until(lambda: len(found.trainer.announced) == 2)
    none, one = found.trainer.announced
    assert none.startswith("waiting for 2 trainer nodes in addition to the first: none is here")
    assert ": 1 is here (ranks-1); start laminar-node RUN --name trainer-node-K" in one
    await found.add_host(2)
    await starting
    await found.close()


async def test_bytes_that_are_no_poll_are_refused(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1, 2) as found:
        client = found.trainer.make_client("trainer-0")
        await client.start()
        for body in (b"", b"\x00" * 99, b"\x81"):
            with pytest.raises(RpcError, match="is not a poll of a rank host"):
                await client.call(body, 5.0)
        await client.close(0.5)
        assert len(await found.group.call_ranks(b"order")) == 5
