"""Every kind of child process: killed, stopped, over its memory, with garbage on its channel, and
without its parent. A kind is one entry of KINDS."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import structlog

from laminar.actors.system import warm
from laminar.actors.system.roles import Needs
from laminar.config.tasks import EnvConfig
from laminar.coordinator import background
from laminar.coordinator.background import ChildBackground
from laminar.coordinator.strategy import StrategyWorker
from laminar.events import events as ev
from laminar.run.child_channel import MAGIC, ChildLost
from laminar.run.process_guard import adopt_orphans
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.session_process import ToolRequest
from laminar.tasks.import_check import check_import
from laminar.tasks.sandbox.sandbox import Sandbox, permit_unsafe
from laminar.training.rank_processes import RankProcesses
from tests.actors.test_warm import Machine, parent_of_orphans  # noqa: F401 - autouse
from tests.coordinator.test_strategy import question
from tests.run import child_faults
from tests.run.child_faults import WORDS, act
from tests.tasks.rewards.test_worker_pool import call, pool_of, spec_for
from tests.training.test_rank_processes import Told

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  #: of a use of a child; STOPPED_S if the child stands still
STOPPED_S = 6.0
FAULTS = ("killed", "stopped", "memory", "garbage")
#: The file of each kind with user code.
SOURCE = """
from tests.run.child_faults import WORDS, act

def compute_score(solution_str):
    return act(solution_str)

def choose(candidates, count):
    act(WORDS[count])
    return []

class Environment:
    def reset(self): pass

    def use(self, word: str):
        return act(word)
"""
Use = Callable[[str], Awaitable[Any]]
"""Has the child do what a word says, and returns what its user is told."""


def write_source(folder: Path, more: str = "") -> str:
    path = folder / "user.py"
    path.write_text(SOURCE + more)
    return str(path)


@asynccontextmanager
async def reward_worker(folder: Path) -> AsyncIterator[Use]:
    async with pool_of(spec_for(folder, SOURCE), timeout_s=LIMIT_S, max_retries=0) as pool:
        yield lambda word: pool.compute_rewards(call(word))


@asynccontextmanager
async def environment(folder: Path) -> AsyncIterator[Use]:
    pool = SessionPool(EnvConfig(path=write_source(folder), memory_mb=0))

    async def use(word: str) -> Any:
        session = await pool.open()
        await session.reset(call("x").row, 1, 60.0)
        try:
            return await session.send_request(ToolRequest("use", f'{{"word": "{word}"}}'), LIMIT_S)
        finally:
            session.kill()

    yield use
    await pool.close()


@asynccontextmanager
async def rank(folder: Path) -> AsyncIterator[Use]:
    ranks: list[RankProcesses] = []

    async def use(word: str) -> Any:
        if not ranks or ranks[-1]._error is not None:  # as after the trainer's restart
            ranks.append(Told(2).gang)
            await ranks[-1].start()
        return await ranks[-1].call_ranks(word.encode())

    yield use
    for each in ranks:
        await each.close()


@asynccontextmanager
async def warm_process(folder: Path) -> AsyncIterator[Use]:
    """Its module acts as soon as it is imported."""
    (folder / "modules").mkdir()
    machine = Machine(folder / "run", folder / "modules")
    os.environ["PYTHONPATH"] = f"{ROOT}:{machine.modules}"

    async def use(word: str) -> Any:
        source = f"from tests.run.child_faults import act\nact({word!r})\n"
        needs = Needs([machine.module(f"acts_{word}", source)], {})
        ready_s = LIMIT_S if word == "stopped" else 60.0
        process = warm.WarmProcess("torch", needs, structlog.get_logger(), ready_s=ready_s)
        machine.warm.append(process)
        return (await machine.fork(process)).pid

    yield use
    await machine.close()


@asynccontextmanager
async def strategy(folder: Path) -> AsyncIterator[Use]:
    answers = asyncio.Queue[ev.BatchProposed]()
    worker = StrategyWorker(f"{write_source(folder)}:choose", answers.put_nowait)

    async def use(word: str) -> Any:
        worker.propose_batch(msgspec.structs.replace(question(), count=WORDS.index(word)))
        try:
            return await asyncio.wait_for(answers.get(), LIMIT_S)
        finally:
            await worker.close()  # the step's deadline is the core's

    yield use


@asynccontextmanager
async def background_work(folder: Path) -> AsyncIterator[Use]:
    forked, answers = ChildBackground(structlog.get_logger()), list[Any]()

    async def use(word: str) -> Any:
        forked.run(word, 1 << 30, lambda: b"%d" % act(word), answers.append)
        while not answers:
            await asyncio.sleep(0.01)
            forked.collect_results()
        return [answers.pop(), *(reason for what, reason in forked.failed if what == word)]

    yield use
    forked.close()


@asynccontextmanager
async def isolated_import(folder: Path) -> AsyncIterator[Use]:
    yield lambda word: asyncio.to_thread(
        check_import, write_source(folder, f"\nact({word!r})"), "reward.path", LIMIT_S
    )


@asynccontextmanager
async def sandbox(folder: Path) -> AsyncIterator[Use]:
    permit_unsafe(True)
    made, source = Sandbox(seconds=LIMIT_S), Path(child_faults.__file__).read_text()
    yield lambda word: asyncio.to_thread(made.run, f"{source}\nact({word!r})")


Kind = Callable[[Path], Any]
#: What the user is told when the child is killed, stopped, over its memory, or sends garbage.
KINDS: dict[Kind, tuple[str, str, str, str]] = {
    reward_worker: ("killed by SIGKILL", "no result within", "MemoryError", "something else"),
    environment: ("killed by SIGKILL", "TimeoutError", "MemoryError", "something else"),
    rank: ("killed by SIGKILL", "silent for 2 s", "MemoryError", "something else"),
    warm_process: ("killed by SIGKILL", "did not end within", r"\d+", "something else"),
    strategy: ("killed by SIGKILL", "TimeoutError", "MemoryError", "something else"),
    background_work: ("it died", "more than 6 s", "MemoryError", "something else"),
    isolated_import: ("killed by SIGKILL", "not imported within", "None", "something else"),
    sandbox: ("killed by SIGKILL", "stopped after", "MemoryError", "ended its process"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_child_that_fails_is_named_and_replaced(
    kind: Kind, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    limit_s = STOPPED_S if fault == "stopped" else LIMIT_S
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", limit_s)
    monkeypatch.setattr(background, "DEADLINE_S", limit_s)
    monkeypatch.setattr(warm, "TRIES", 1)
    before = descendants(os.getpid())
    async with asyncio.timeout(120), kind(tmp_path) as use:
        try:
            told = repr(await use(fault))
        except Exception as error:
            told = repr(error)
        assert re.search(KINDS[kind][FAULTS.index(fault)], told), told
        await use("work")
    await asyncio.to_thread(wait_for_end, set(descendants(os.getpid())) - set(before))


DAEMON = (reward_worker, environment, strategy, isolated_import)
"""Kinds with a guard, which ends daemons of user code."""
DIES = (rank, warm_process, background_work)
"""Kinds that the kernel ends with their parent, even if they stand still."""
PARENTS = [
    *((kind, "daemon" if kind in DAEMON else "hang", False) for kind in KINDS),
    (warm_process, "work", False),  # has forked an actor
    (environment, "daemon", True),
]


@pytest.mark.parametrize(("kind", "word", "both"), PARENTS)
def test_a_child_dies_with_its_parent(kind: Kind, word: str, both: bool, tmp_path: Path) -> None:
    """`both`: its fork server is killed at the same time."""
    words = (kind.__name__, str(tmp_path), word)
    program = f"from tests.run import test_child_processes as tests; tests.own(*{words})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert owner.stdout is not None and b"begun\n" in owner.stdout
        left = wait_for_descendants(owner.pid, 1 + (word == "work"), kind in DAEMON)
        killed = [psutil.Process(owner.pid)]
        if both:
            (session,) = (p for p in left if p.children() and not p.children()[0].children())
            killed += session.parents()[:1]
        for process in [*killed, *(left if kind in DIES else ())]:
            process.suspend()  # none learns of another's end
        for process in killed:
            process.kill()
    finally:
        owner.kill()
        owner.communicate()
    wait_for_end(left)


def own(name: str, folder: str, word: str) -> None:
    """Use a child, and say so."""
    adopt_orphans()

    async def run() -> None:
        async with globals()[name](Path(folder)) as use:
            used = asyncio.ensure_future(use(word))
            await asyncio.sleep(3.0)
            print("begun", flush=True)
            await used
            await asyncio.sleep(600.0)

    asyncio.run(run())


def descendants(pid: int) -> set[psutil.Process]:
    return set(psutil.Process(pid).children(recursive=True))


def wait_for_descendants(pid: int, count: int, daemon: bool) -> set[psutil.Process]:
    deadline = time.monotonic() + 60
    while True:
        left = descendants(pid)
        if len(left) >= count and daemon == ("sleep" in [process.name() for process in left]):
            return left
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def wait_for_end(processes: set[psutil.Process]) -> None:
    deadline = time.monotonic() + 60
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


TOY = """
import subprocess
import sys

import msgspec

from laminar.run import child_channel
from laminar.run.child_channel import Ready
from laminar.run.child_process import Child, connect_user_code, spawn_child

class Numbers(msgspec.Struct, tag="numbers"):
    numbers: list[int]

class Total(msgspec.Struct, tag="total"):
    total: int

async def add(numbers, version):
    child = Child(spawn_child("toy", version, guarded=True, stderr=subprocess.PIPE), Total)
    try:
        await child.await_ready(60.0)
        return (await child.channel.request_reply(Numbers(numbers), 60.0)).total
    finally:
        await child.close()

if __name__ == "__main__":
    channel = connect_user_code(*sys.argv[1:3])
    child_channel.MAGIC = child_channel.MAGIC[:-1] + bytes([int(sys.argv[3])])
    channel.send(Ready())
    channel.serve_requests(Numbers, lambda request: Total(sum(request.numbers)))
"""


async def test_another_kind_of_child_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the version of its messages checked, and its last words in the reason."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    toy = importlib.import_module("toy")
    assert await toy.add([1, 2, 3], str(MAGIC[-1])) == 6
    with pytest.raises(ChildLost, match="package was replaced"):
        await toy.add([1], str(MAGIC[-1] + 1))
    with pytest.raises(ChildLost, match=r"^it ended with exit code 1: .* \| ValueError: invalid"):
        await toy.add([1], "no number")
