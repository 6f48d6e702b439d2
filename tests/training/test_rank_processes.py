"""The processes of a trainer's ranks: orders, the end of one, silence, what is left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from laminar.config import ConfigError, load_config
from laminar.training.rank_processes import RankError, RankProcesses
from laminar.training.rank_store import StoreTable
from laminar.training.ranks import RankStore
from laminar.training.trainer_state import CheckpointError

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
WORDS = [
    "model.name=m",
    "data.dataset=spell_backward",
    "coordinator.heartbeat_ms=100",
    "coordinator.lease_ms=300",
    "coordinator.node_lease_ms=2000",
]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are programs of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def rank_program(mode: str = "") -> list[str]:
    return ["tests.training.rank_program", mode]


class Told:
    """A gang, and what it says."""

    def __init__(
        self, ranks: int, *settings: str, lock: Path | None = None, mode: str = ""
    ) -> None:
        self.lost: list[str] = []
        self.said: list[str] = []
        config = load_config([], [*WORDS, f"trainer.ranks={ranks}", *settings])
        self.gang = RankProcesses(
            config, rank_program(mode), lock=lock, lost=self.lost.append, say=self.said.append
        )

    def processes(self) -> list[psutil.Process]:
        children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        found = [p for p in children if "rank_program" in " ".join(p.cmdline())]
        return sorted(found, key=lambda process: int(process.cmdline()[7]))


@asynccontextmanager
async def started(ranks: int, *settings: str, lock: Path | None = None) -> AsyncIterator[Told]:
    told = Told(ranks, *settings, lock=lock)
    try:
        await told.gang.start()
        yield told
    finally:
        await told.gang.close()
    assert not told.processes()


async def test_orders_are_begun_in_their_order_and_answered_by_rank() -> None:
    async with started(3) as told:
        waits = asyncio.ensure_future(told.gang.call_ranks(b"wait"))
        beside = asyncio.ensure_future(told.gang.call_ranks(b"beside"))
        assert await beside == [b"1: wait beside", b"2: wait beside"]
        assert not waits.done()
        large = b"x" * (1 << 20)
        assert await told.gang.call_ranks(large) == [
            b"%d: wait beside %b" % (r, large) for r in (1, 2)
        ]
        await told.gang.call_ranks(b"go")
        assert [reply[:8] for reply in await waits] == [b"1: wait ", b"2: wait "]
    assert told.lost == []


async def test_what_a_rank_raises_comes_back_as_it_is() -> None:
    async with started(3) as told:
        with pytest.raises(OSError, match="No space left on device") as raised:
            await told.gang.call_ranks(b"disk 2")
        assert raised.value.errno == 28
        assert len(await told.gang.call_ranks(b"again")) == 2, "a full disk may have room later"
        with pytest.raises(CheckpointError, match=r"^the file is cut off$"):
            await told.gang.call_ranks(b"checkpoint 1")
    assert told.lost == [], "who asked knows it"
    async with started(2) as told:
        with pytest.raises(ConfigError, match=r"^the model is another$"):
            await told.gang.call_ranks(b"config")
    async with started(3) as told:
        waits = asyncio.ensure_future(told.gang.call_ranks(b"wait 1"))
        with pytest.raises(RankError, match=r"^rank 2 of the trainer failed: ValueError: a bug$"):
            await told.gang.call_ranks(b"bug 2")
        with pytest.raises(RankError, match="rank 2"):
            await waits
        assert told.lost == ["rank 2 of the trainer failed: ValueError: a bug"]


async def test_the_end_of_one_is_the_end_of_all() -> None:
    async with started(3) as told:
        waits = asyncio.ensure_future(told.gang.call_ranks(b"wait"))
        one, two = told.processes()
        one.kill()
        with pytest.raises(
            RankError, match=r"^rank 1 of the trainer has ended \(killed by SIGKILL"
        ):
            await waits
        with pytest.raises(RankError, match="rank 1"):
            await told.gang.call_ranks(b"more")
        two.wait(60)
        assert len(told.lost) == 1
    async with started(2) as told:
        with pytest.raises(RankError, match=r"^rank 1 of the trainer has ended \(exit code 7\)$"):
            await told.gang.call_ranks(b"end")


async def test_the_failure_of_rank_0_is_told_as_its_cause() -> None:
    """A collective fails on rank 0 as soon as another rank is gone."""
    async with started(2) as told:
        (one,) = told.processes()

        async def collective(kill: bool) -> str:
            if kill:
                one.kill()
            raise RuntimeError("Connection closed by peer")

        async def good() -> str:
            return "good"

        assert await told.gang.run_on_all_ranks(b"a", good()) == ("good", [b"1: a"])
        with pytest.raises(OSError, match="No space"):
            await told.gang.run_on_all_ranks(b"disk", good())
        with pytest.raises(RankError, match=r"^rank 0 of the trainer failed: .*Connection closed"):
            await told.gang.run_on_all_ranks(b"b", collective(kill=False))
        with pytest.raises(RankError, match="rank 1 of the trainer has ended"):
            await told.gang.run_on_all_ranks(b"c", collective(kill=True))


async def test_a_rank_whose_starter_is_frozen_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link stays open; only the beats stop."""
    async with started(2) as told:
        (rank,) = told.processes()
        monkeypatch.setattr(told.gang, "_members", [])  # so that no beat is sent
        while not told.lost:
            await asyncio.sleep(0.01)
        assert told.lost[0].startswith("rank 1 of the trainer has ended") and not rank.is_running()


async def test_a_key_is_waited_for_until_a_rank_sets_it() -> None:
    table = StoreTable()
    one, two = (RankStore(rank, table.submit) for rank in (0, 1))
    found = asyncio.ensure_future(asyncio.to_thread(two.get, "key"))
    assert not one.check(["key"])
    one.set("key", b"value")
    assert await found == b"value" and two.check(["key"])
    assert [one.add("count", 2), two.add("count", 3)] == [2, 5] and one.get("count") == b"5"
    two.wait(["key", "count"])
    with pytest.raises(TimeoutError, match=r"no rank has set 'other' within 0\.01 s"):
        two.wait(["key", "other"], timedelta(seconds=0.01))


async def test_who_does_not_begin_is_named() -> None:
    told = Told(3, "coordinator.start_timeout_s=1", mode="late")
    with pytest.raises(RankError, match=r"^rank 1, 2 of the trainer has not started within 1 s"):
        await told.gang.start()
    await told.gang.close()
    assert not told.processes()


DEAD = r"former trainer \(pids 3999999998, 3999999999 on .*that process is dead here.*`fuser -v "


async def test_ranks_wait_until_those_of_the_former_trainer_are_gone(tmp_path: Path) -> None:
    lock = tmp_path / "trainer.lock"
    with lock.open("w") as former:
        former.write(f"3999999998, 3999999999 on {socket.gethostname()}")
        former.flush()
        fcntl.flock(former, fcntl.LOCK_EX)
        told = Told(2, "coordinator.start_timeout_s=1.5", lock=lock)
        with pytest.raises(RankError, match=DEAD):
            await told.gang.start()
        assert told.processes() == [] and "pids 3999999998, 3999999999 on" in told.said[0]
        await told.gang.close()
        told = Told(2, lock=lock)
        starting = asyncio.ensure_future(told.gang.start())
        while not told.said:
            await asyncio.sleep(0.01)
        assert told.processes() == []
    await starting
    assert lock.read_text() == (
        f"{os.getpid()}, {told.processes()[0].pid} on {socket.gethostname()}"
    )
    await told.gang.close()
