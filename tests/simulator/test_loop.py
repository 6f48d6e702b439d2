"""The event loop of a simulated process: asyncio in virtual time, and nothing of the dead runs."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tools.simulator.runtime.loop import CALLBACKS_MAX, SimLoop
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND, Scheduler


class Bench:
    """One loop over a scheduler of its own."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.turns = 0
        self.told: list[Any] = []
        self.loop = SimLoop(lambda: self.scheduler.now, self.scheduler.after, self._turned)
        self.loop.set_exception_handler(lambda loop, context: self.told.append(context))

    def _turned(self) -> None:
        self.turns += 1

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of a coroutine, after all that it left to do has been done."""
        tasks: list[asyncio.Task[Any]] = []
        self.loop.enter(lambda: tasks.append(self.loop.create_task(work())))
        while self.scheduler.step():
            pass
        return tasks[0].result()

    @property
    def now_s(self) -> float:
        return self.scheduler.now / SECOND


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_time_passes_only_where_somebody_sleeps(bench: Bench) -> None:
    async def work() -> list[tuple[str, float]]:
        seen = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, bench.now_s))

        await asyncio.gather(sleeper("late", 2.5), sleeper("early", 0.5), sleeper("never", 0))
        return seen

    assert bench.run(work) == [("never", 0.0), ("early", 0.5), ("late", 2.5)]


def test_a_broken_promise_goes_to_the_run_and_not_to_a_handler(bench: Bench) -> None:
    def broken() -> None:
        raise Violation("a_name", "what")

    bench.loop.call_soon(broken)
    with pytest.raises(Violation):
        bench.scheduler.step()


def test_nothing_of_a_dead_process_runs(bench: Bench) -> None:
    """Not even what would run at the same instant."""
    seen: list[str] = []

    async def work() -> None:
        try:
            bench.loop.closed = True
            await asyncio.sleep(0)
        finally:
            seen.append("finally")

    bench.loop.enter(bench.loop.create_task, work())
    bench.loop.call_soon(seen.append, "later")
    while bench.scheduler.step():
        pass
    assert seen == [] and bench.turns == 0
    assert len(bench.loop.tasks) == 1


def test_who_yields_for_ever_is_found(bench: Bench) -> None:
    async def work() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Violation, match=f"{CALLBACKS_MAX} callbacks"):
        bench.run(work)


def test_what_a_dead_process_still_waits_for_is_broken_off_at_once(bench: Bench) -> None:
    """Also what its `finally` blocks wait for, and the tasks that they make: nothing of it is left
    to the garbage collector."""
    reached: list[str] = []

    async def closing() -> None:
        reached.append("never")

    async def work() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            reached.append("first")
            try:
                await asyncio.sleep(5)
            finally:
                reached.append("second")
                await asyncio.wait_for(closing(), 5)

    gc.collect()  # what earlier tests left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        bench.loop.enter(lambda: bench.loop.create_task(work()))
        assert bench.scheduler.step()
        bench.loop.closed = True
        bench.loop.discard()
        gc.collect()
    assert reached == ["first", "second"]
    assert not warned and not bench.loop.tasks
