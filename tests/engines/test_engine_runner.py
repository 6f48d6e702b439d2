"""The engine's thread: order, coalescing, step records, failure and close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.engines import protocol
from laminar.engines.runner import EngineRunner
from tests.engines.engine_models import Output, build, collect, engine_of, request, run_all


class CountingEngine:
    """Gives each request the tokens 0, 1, 2, ... ; step `hold_at` waits until it is let go."""

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}  # id -> [next token, limit]
        self.hold_at = -1
        self._held, self._gate = threading.Event(), threading.Event()
        self.threads: set[int] = set()
        self.steps = 0
        self.fail_at = -1
        self.closed = False

    def add(self, request: protocol.GenerateRequest) -> None:
        if not request.prompt_ids:
            raise protocol.EngineError("empty prompt")
        self.running[request.request_id] = [0, request.max_new_tokens]

    def abort_request(self, request_id: str) -> bool:
        return self.running.pop(request_id, None) is not None

    async def held(self) -> None:
        """Until the engine thread is inside step `hold_at`."""
        while not self._held.is_set():
            await asyncio.sleep(0.001)

    def let_go(self) -> None:
        self._gate.set()

    def step(self) -> list[protocol.TokenDelta]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.hold_at:
            self._held.set()
            self._gate.wait(10)
        if self.steps == self.fail_at:
            raise protocol.EngineError("broken model")
        deltas = []
        for name, state in list(self.running.items()):
            state[0] += 1
            done = "length" if state[0] == state[1] else None
            deltas.append(protocol.TokenDelta(name, [state[0] - 1], [-1.0], done))
            if done:
                del self.running[name]
        return deltas

    def load_weights(self, tensors: Iterable[Any]) -> None:
        self.threads.add(threading.get_ident())

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(s) - 1) for s in sequences]

    def get_stats(self) -> protocol.EngineStats:
        return protocol.EngineStats(
            sum(s[0] for s in self.running.values()), 100, len(self.running), 0
        )

    def close(self) -> None:
        self.closed = True


class Inbox:
    """Collects deltas on the loop and lets a test wait for the end of requests."""

    def __init__(self) -> None:
        self.batches: list[list[protocol.TokenDelta]] = []
        self.outputs: dict[str, Output] = {}
        self.news = asyncio.Event()

    def __call__(self, deltas: list[protocol.TokenDelta]) -> None:
        self.batches.append(deltas)
        collect(self.outputs, deltas)
        self.news.set()

    async def finished(self, *names: str) -> None:
        while any(n not in self.outputs or not self.outputs[n].reason for n in names):
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 10)


def start(engine: Any) -> tuple[EngineRunner, Inbox]:
    inbox = Inbox()
    return EngineRunner(engine, inbox, asyncio.get_running_loop()), inbox


async def test_the_real_engine_gives_through_a_runner_what_it_gives_directly() -> None:
    model = build("qwen2")
    requests = [request(f"r{i}", (1, 2, 3 + i), seed=i, limit=15) for i in range(5)]
    expected = run_all(engine_of(model), *requests)
    runner, inbox = start(engine_of(model))
    for item in requests:
        runner.add(item)
    await inbox.finished(*(r.request_id for r in requests))
    await runner.call_engine(lambda engine: engine.load_weights(model.named_parameters()))
    assert await runner.call_engine(lambda engine: engine.compute_logprobs([[1, 2]])) == engine_of(
        model
    ).compute_logprobs([[1, 2]])
    await runner.close()
    for name, output in expected.items():
        assert inbox.outputs[name].tokens == output.tokens


async def test_all_engine_work_is_on_one_other_thread() -> None:
    engine = CountingEngine()
    runner, inbox = start(engine)
    await runner.add(request("a", (1,), limit=3))
    await inbox.finished("a")
    await runner.call_engine(lambda e: e.load_weights([]))
    await runner.close()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    assert engine.closed


async def test_deltas_of_many_steps_are_handed_over_in_one_call() -> None:
    engine = CountingEngine()
    runner, inbox = start(engine)
    await runner.add(request("a", (1,), limit=500))
    while engine.steps < 500:
        time.sleep(0.001)  # the loop is busy meanwhile
    await inbox.finished("a")
    assert inbox.outputs["a"].tokens == list(range(500))
    assert len(inbox.batches) <= 3
    await runner.close()


async def test_after_an_abort_no_delta_arrives_and_none_before_it_is_missing() -> None:
    engine = CountingEngine()
    runner, inbox = start(engine)
    await runner.add(request("a", (1,), limit=10**9))
    while engine.steps < 20:
        await asyncio.sleep(0.001)
    produced: list[int] = []

    def abort(e: Any) -> bool:
        produced.append(e.running["a"][0])
        return bool(e.abort_request("a"))

    assert await runner.call_engine(abort)
    assert inbox.outputs["a"].tokens == list(range(produced[0]))
    assert not await runner.abort_request("a")
    await asyncio.sleep(0.02)
    assert len(inbox.outputs["a"].tokens) == produced[0]
    await runner.close()


async def test_step_records_cover_every_step_once() -> None:
    engine = CountingEngine()
    engine.hold_at = 2
    runner, inbox = start(engine)
    before = time.monotonic_ns()
    await runner.add(request("a", (1,), limit=4))
    await engine.held()
    adds = [runner.add(request(name, (1,), limit=3)) for name in "bcdef"]
    engine.let_go()
    await asyncio.gather(*adds)
    await inbox.finished(*"abcdef")
    await runner.close()
    records = runner.drain_steps()
    # What was asked for during one step is all done before the next.
    assert [record.running for record in records] == [1, 1, 6, 6, 5]
    assert [record.tokens for record in records] == [1, 1, 6, 6, 5]
    times = [before, *(t for r in records for t in (r.start_ns, r.end_ns)), time.monotonic_ns()]
    assert times == sorted(times)
    assert runner.drain_steps() == []


async def test_a_refused_request_or_call_fails_alone() -> None:
    engine = CountingEngine()
    runner, inbox = start(engine)
    with pytest.raises(protocol.EngineError, match="empty prompt"):
        await runner.add(request("bad", ()))
    with pytest.raises(ZeroDivisionError):
        await runner.call_engine(lambda e: 1 // 0)
    await runner.add(request("a", (1,), limit=3))
    await inbox.finished("a")
    assert not runner.failed.done()
    await runner.close()
    assert runner.failed.result() is None


async def test_a_cancelled_waiter_harms_nobody() -> None:
    engine = CountingEngine()
    runner, inbox = start(engine)
    runner.call_engine(lambda e: e.get_stats()).cancel()
    await runner.add(request("a", (1,), limit=3))
    await inbox.finished("a")
    await runner.close()


async def test_a_failing_step_reaches_everybody_who_waits() -> None:
    engine = CountingEngine()
    engine.hold_at = engine.fail_at = 4
    runner, inbox = start(engine)
    await runner.add(request("a", (1,), limit=100))
    await engine.held()
    pending = [runner.call_engine(lambda e: e.get_stats()) for _ in range(3)]
    engine.let_go()
    with pytest.raises(protocol.EngineError, match="broken model"):
        await asyncio.wait_for(asyncio.shield(runner.failed), 10)
    assert inbox.outputs["a"].tokens == [0, 1, 2], "what was produced before is delivered"
    for future in [*pending, runner.add(request("b", (1,)))]:
        with pytest.raises(protocol.EngineError, match="has stopped"):
            await asyncio.wait_for(future, 10)
    await asyncio.wait_for(runner.close(), 10)


def written(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> protocol.WeightSource:
    """A version as it lies in a relay's memory."""
    places, data = [], bytearray()
    for name, tensor in tensors:
        places.append(protocol.TensorPlace(name, "float32", tuple(tensor.shape), len(data)))
        data += tensor.detach().numpy().tobytes()
    path.write_bytes(data)
    return protocol.WeightSource(str(path), 0, len(data), tuple(places))


def broken(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full_like(t, torch.nan)) for name, t in model.named_parameters()]


async def until_nothing_runs(runner: EngineRunner) -> None:
    async with asyncio.timeout(10):
        while (
            any((runner.get_stats().running, runner.get_stats().waiting))
            and not runner.failed.done()
        ):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
async def test_weights_that_break_a_step_in_flight_fail_their_proof_and_not_the_engine(
    on_update: protocol.KvOnUpdate, tmp_path: Path
) -> None:
    """As where nothing ran: the replica says which weights it rejects, and loads others."""
    model = build("qwen2")
    runner, inbox = start(engine_of(model))
    good = written(tmp_path / "good", model.named_parameters())
    await runner.add(request("a", (1, 2), limit=150))
    await runner.load(written(tmp_path / "broken", broken(model)), on_update)
    await until_nothing_runs(runner)
    await runner.add(request("crossed", (1, 2)))
    await until_nothing_runs(runner)
    with pytest.raises(protocol.EngineError, match="loaded weights are broken"):
        await runner.compute_logprobs([[1, 2]])
    assert not runner.failed.done()
    await runner.load(good)
    assert await runner.compute_logprobs([[1, 2]]) == engine_of(model).compute_logprobs([[1, 2]])
    await runner.add(request("b", (1, 2, 3), limit=4))
    await inbox.finished("b")
    assert "crossed" not in inbox.outputs
    await runner.close()


async def test_a_step_that_fails_with_proved_weights_is_a_failure_of_the_engine(
    tmp_path: Path,
) -> None:
    model = build("qwen2")
    real = engine_of(model)
    runner, _ = start(real)
    await runner.load(written(tmp_path / "v", model.named_parameters()), "keep")
    await runner.compute_logprobs([[1, 2]])
    await runner.call_engine(lambda _: real.load_weights(broken(model)))
    await runner.add(request("a", (1, 2)))
    with pytest.raises(protocol.EngineError, match="loaded weights are broken"):
        await asyncio.wait_for(asyncio.shield(runner.failed), 10)
    await runner.close()


async def test_close_answers_what_still_waits_and_may_be_called_again() -> None:
    engine = CountingEngine()
    engine.hold_at = 1
    runner, _ = start(engine)
    await runner.add(request("a", (1,), limit=10**9))
    await engine.held()
    closing = asyncio.ensure_future(runner.close())
    await asyncio.sleep(0)  # close has asked the thread to end
    late = runner.call_engine(lambda e: e.get_stats())
    engine.let_go()
    await asyncio.wait_for(closing, 10)
    with pytest.raises(protocol.EngineError, match="has stopped"):
        await asyncio.wait_for(late, 10)
    await asyncio.wait_for(runner.close(), 10)
    assert engine.closed
