"""The emulated engine has the face of an engine, and takes the time of one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from laminar.config import Config, load_config
from laminar.engines import protocol
from laminar.engines.emulated.engine import EmulatedEngine, fingerprint_weights, make_fake_logprobs
from laminar.engines.emulated.fake_tokens import END_ID
from laminar.engines.emulated.timing import ResponseLengths

LIMIT = 60


def config(*settings: str) -> Config:
    fast = ["emulation.step_us=1000", "emulation.sequence_us=0", "emulation.median_response=20"]
    return load_config(
        [], ["rollout.engine=emulated", f"data.max_response_length={LIMIT}", *fast, *settings]
    )


def request(seed: int, name: str = "", done: tuple[int, ...] = ()) -> protocol.GenerateRequest:
    return protocol.GenerateRequest(
        name or f"0.0.{seed}@0", (1, 2), done, LIMIT, 1.0, seed, frozenset({END_ID})
    )


def source(path: Path, content: bytes) -> protocol.WeightSource:
    path.write_bytes(b"head" + content)
    return protocol.WeightSource(str(path), 4, len(content), ())


class Bench:
    """An engine and what came out of it."""

    def __init__(self, *settings: str) -> None:
        self.engine = EmulatedEngine(config(*settings), self._take)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.loads: dict[str, list[int]] = {}  #: of each token

    def _take(self, deltas: list[protocol.TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "nothing follows a reason"
            assert len(delta.token_ids) == len(delta.logprobs)
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            loads = self.loads.setdefault(delta.request_id, [])
            loads += [delta.load] * len(delta.token_ids)
            if delta.finish_reason:
                self.reasons[delta.request_id] = delta.finish_reason

    async def ended(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.reasons) < count:
                await asyncio.sleep(0.002)


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    made = Bench()
    await made.engine.load(source(tmp_path / "v0", b"weights"))
    return made


async def test_responses_have_the_lengths_of_their_seeds_and_take_their_time(bench: Bench) -> None:
    begun = time.monotonic()
    for seed in range(40):
        await bench.engine.add(request(seed))
    await bench.ended(40)
    lengths = ResponseLengths(median=20, limit=LIMIT)
    for seed in range(40):
        tokens, length = bench.tokens[f"0.0.{seed}@0"], lengths.draw_length(seed)
        assert len(tokens) == length
        assert (bench.reasons[f"0.0.{seed}@0"] == protocol.LENGTH) == (length == LIMIT)
        assert (tokens[-1] == END_ID) == (length < LIMIT)
    assert time.monotonic() - begun >= LIMIT * 1e-3
    steps = bench.engine.drain_steps()
    assert sum(step.tokens for step in steps) == sum(map(len, bench.tokens.values()))
    assert all(step.start_ns <= step.end_ns for step in steps)


async def test_what_waits_for_a_slot_is_said(tmp_path: Path) -> None:
    bench = Bench("rollout.max_num_seqs=8", "emulation.step_us=200000")
    await bench.engine.load(source(tmp_path / "v0", b"weights"))
    for seed in range(12):
        await bench.engine.add(request(seed))
    async with asyncio.timeout(10):
        while bench.engine.get_stats().running < 8:  # until the next step begins
            await asyncio.sleep(0.02)
    assert bench.engine.get_stats().waiting == 4
    await bench.engine.close()


async def test_a_response_that_moves_goes_on_with_the_same_tokens(bench: Bench) -> None:
    seed = next(s for s in range(100) if ResponseLengths(20, LIMIT).draw_length(s) == LIMIT)
    await bench.engine.add(request(seed, "whole"))
    await bench.engine.add(request(seed, "first"))
    await asyncio.sleep(0.02)
    assert await bench.engine.abort_request("first")
    begun = tuple(bench.tokens["first"])
    assert 0 < len(begun) < LIMIT
    assert not await bench.engine.abort_request("first")
    await bench.engine.add(request(seed, "rest", begun))
    await bench.ended(2)
    assert [*begun, *bench.tokens["rest"]] == bench.tokens["whole"]
    assert tuple(bench.tokens["first"]) == begun, "nothing follows an abort"


async def test_what_it_says_of_a_probe_depends_on_every_byte_of_its_weights(tmp_path: Path) -> None:
    bench, weights = Bench(), bytes(1000)
    with pytest.raises(protocol.EngineError, match="no weights"):
        await bench.engine.add(request(1))
    await bench.engine.load(source(tmp_path / "v0", weights))
    scores = await bench.engine.compute_logprobs([[5, 6, 7]])
    assert scores == make_fake_logprobs(
        fingerprint_weights(np.frombuffer(weights, np.uint8)), [[5, 6, 7]]
    )
    await bench.engine.load(source(tmp_path / "v1", weights[:-1] + b"x"))
    assert await bench.engine.compute_logprobs([[5, 6, 7]]) != scores
    with pytest.raises(protocol.EngineError, match="cannot be read"):
        await bench.engine.load(protocol.WeightSource(str(tmp_path / "gone"), 0, 4, ()))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
async def test_in_flight_a_sequence_goes_on_with_the_new_weights(
    bench: Bench, tmp_path: Path, on_update: protocol.KvOnUpdate
) -> None:
    """No token is lost or given twice, and none is said to be of weights that it is not of; while
    weights are loaded nothing is sampled."""
    seed = next(s for s in range(100) if ResponseLengths(20, LIMIT).draw_length(s) == LIMIT)
    await bench.engine.add(request(seed, "whole"))
    await bench.ended(1)
    await bench.engine.add(request(seed, "flies"))
    async with asyncio.timeout(10):
        while len(bench.tokens.get("flies", ())) < 2:
            await asyncio.sleep(0.001)
            bench.engine.get_stats()
    loading = bench.engine.load(source(tmp_path / "v1", b"other"), on_update)
    before = len(bench.tokens["flies"])
    bench.engine.get_stats()
    assert len(bench.tokens["flies"]) == before
    await loading
    await bench.ended(2)
    assert bench.tokens["flies"] == bench.tokens["whole"]
    loads = bench.loads["flies"]
    assert loads == [1] * before + [2] * (LIMIT - before) and before < LIMIT


async def test_a_load_in_flight_that_fails_leaves_nothing_that_runs(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.engine.add(request(1))
    with pytest.raises(protocol.EngineError, match="cannot be read"):
        await bench.engine.load(protocol.WeightSource(str(tmp_path / "gone"), 0, 4, ()), "keep")
    assert (bench.engine.get_stats().running, bench.engine.get_stats().waiting) == (0, 0)
    with pytest.raises(protocol.EngineError, match="no weights"):
        await bench.engine.add(request(2))


async def test_weights_are_not_loaded_while_a_sequence_runs(bench: Bench, tmp_path: Path) -> None:
    await bench.engine.add(request(1))
    with pytest.raises(protocol.EngineError, match="while a sequence runs"):
        await bench.engine.load(source(tmp_path / "v1", b"other"))
    await bench.engine.close()
    assert await bench.engine.failed is None
