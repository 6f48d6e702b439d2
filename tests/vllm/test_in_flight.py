"""vLLM takes new weights while sequences run: each token is sampled, and recorded, by the weights
of its load, on a cache that was kept or made again; no new prompt finds blocks of older weights."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.engines.protocol import EngineError, KvOnUpdate
from laminar.engines.vllm.requests import parts_of
from tests.vllm.replica import LIMIT, PROMPT, Replica, config_of, model_of, tensors_of
from tools.kit.plain_forward import sampled_logprobs

pytestmark = pytest.mark.vllm

LONG = tuple((7 * i) % 100 for i in range(64))  #: two blocks of the cache
IN_FLIGHT = "rollout.weight_update=in-flight"
BOTH: tuple[KvOnUpdate, ...] = ("keep", "recompute")


class Flight:
    """A replica that never drains, and the model of each of its loads."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.engine = replica, replica.engine
        self.models: dict[int, Any] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}

    @classmethod
    async def start(cls, directory: Path, model: Any) -> Flight:
        flight = cls(await Replica.start(directory, config_of(directory, model, IN_FLIGHT)))
        await flight.load(model)
        return flight

    async def load(self, model: Any, on_update: KvOnUpdate | None = None) -> None:
        self.models[len(self.models) + 1] = model
        await self.replica.load(tensors_of(model), on_update)

    async def add(self, name: str, prompt: tuple[int, ...] = PROMPT, limit: int = 100) -> None:
        self.prompts[name] = prompt
        await self.replica.generate(name, prompt=prompt, limit=limit, temperature=1.0)

    def worst(self, name: str, on_update: KvOnUpdate) -> float:
        """The largest difference to the log-probs of plain forward passes."""
        replica = self.replica
        tokens, loads = replica.tokens[name], replica.loads[name]
        assert loads == sorted(loads)
        expected = sampled_logprobs(
            self.models, self.prompts[name], tokens, loads, on_update, limit=LIMIT
        )
        return max(abs(a - b) for a, b in zip(replica.logprobs[name], expected, strict=True))


@pytest.mark.parametrize(
    ("on_update", "changes"),
    [
        pytest.param("recompute", 4, marks=pytest.mark.vllm_ci),
        ("keep", 5),
        *(pytest.param(on_update, 50, marks=pytest.mark.long) for on_update in BOTH),
    ],
)
async def test_what_is_recorded_is_what_was_sampled_from(
    tmp_path: Path, on_update: KvOnUpdate, changes: int
) -> None:
    """Every change meets eight answers under way, each with the tokens of several loads."""
    models = [model_of(seed) for seed in (1, 2, 3)]
    flight = await Flight.start(tmp_path, models[0])
    names = (f"r{i}" for i in itertools.count())
    under_way = [next(names) for _ in range(8)]
    for name in under_way:
        await flight.add(name)
    for change in range(changes):
        under_way = [n for n in under_way if n not in flight.replica.reasons]
        while len(under_way) < 8:
            under_way.append(next(names))
            await flight.add(under_way[-1])
        newest = under_way[-1]
        await flight.replica.until(newest, len(flight.replica.tokens.get(newest, ())) + 12)
        await flight.load(models[(change + 1) % 3], on_update)
    await flight.replica.ended(*flight.prompts)
    assert max(flight.worst(name, on_update) for name in flight.prompts) < 1e-3
    loads = flight.replica.loads
    assert {load for name in loads for load in loads[name]} == set(flight.models)
    assert sum(len(set(loads[name])) > 2 for name in loads) > len(loads) / 3
    other = "keep" if on_update == "recompute" else "recompute"
    assert max(flight.worst(name, other) for name in flight.prompts) > 0.1, "too much alike"
    await flight.engine.close()


@pytest.mark.vllm_ci
async def test_kept_no_new_prompt_finds_blocks_of_older_weights(tmp_path: Path) -> None:
    """Not even one that was added before the load and had no token yet; those of one load do."""
    models = [model_of(seed) for seed in (1, 2)]
    flight = await Flight.start(tmp_path, models[0])
    for row in range(16):
        await flight.add(f"old-{row}", LONG)
    await flight.replica.until("old-15", 5)
    for row in range(3):  # all slots are taken
        await flight.add(f"waits-{row}", LONG)
    await asyncio.gather(flight.load(models[1], "keep"), flight.add("during", LONG))
    stats = flight.engine.get_stats()
    await flight.replica.ended(*flight.prompts)
    late = [name for name in flight.prompts if min(flight.replica.loads[name]) == 2]
    assert {"during", "waits-1", "waits-2"} <= set(late)
    assert max(flight.worst(name, "recompute") for name in late) < 1e-3
    assert max(flight.worst(name, "keep") for name in flight.prompts) < 1e-3
    assert flight.engine.get_stats().prefix_cache_hits <= stats.prefix_cache_hits + 64 * (
        len(late) - 1
    )
    for load in range(3, 6):
        await flight.load(models[load % 2], "keep")
        hits = flight.engine.get_stats().prefix_cache_hits
        for name in (f"first-{load}", f"second-{load}"):
            found = flight.engine.get_stats().prefix_cache_hits
            await flight.add(name, LONG, 10)
            await flight.replica.ended(name)
            assert flight.worst(name, "recompute") < 1e-3
            if name.startswith("first"):
                assert flight.engine.get_stats().prefix_cache_hits == found == hits
        assert flight.engine.get_stats().prefix_cache_hits > hits, "the engine has no prefix cache"
    await flight.engine.close()


@pytest.mark.parametrize("on_update", BOTH)
async def test_weights_are_proved_while_every_slot_is_taken(
    tmp_path: Path, on_update: KvOnUpdate
) -> None:
    models = [model_of(seed) for seed in (1, 2)]
    flight = await Flight.start(tmp_path, models[0])
    for row in range(16):
        await flight.add(f"r{row}", limit=120)
    await flight.replica.until("r15", 5)
    await flight.load(models[1], on_update)
    scores = await flight.engine.compute_logprobs([LONG, PROMPT])
    assert not flight.replica.reasons, "all had ended before the scores came"
    for ids, row in zip((LONG, PROMPT), scores, strict=True):
        loads = [2] * (len(ids) - 1)
        wanted = sampled_logprobs(flight.models, ids[:1], ids[1:], loads, "keep", limit=LIMIT)
        assert row == pytest.approx(wanted, abs=1e-3)
    await flight.replica.ended(*flight.prompts)
    assert max(flight.worst(name, on_update) for name in flight.prompts) < 1e-3
    await flight.engine.close()


async def test_a_clear_that_cleared_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model_of(seed) for seed in (1, 2)]
    flight = await Flight.start(tmp_path, models[0])
    await flight.add("a")
    await flight.replica.until("a", 5)
    pause = flight.engine._llm.pause_generation
    with monkeypatch.context() as patched:
        patched.setattr(
            flight.engine._llm,
            "pause_generation",
            lambda mode, clear_cache: pause(mode=mode, clear_cache=False),
        )
        with pytest.raises(EngineError, match="kept cached keys and values"):
            await flight.load(models[1], "recompute")
    assert not await flight.engine.abort_request("a"), "it went on with weights that are not proved"
    with pytest.raises(EngineError, match="no weights"):
        await flight.add("b")
    await flight.load(models[1], "recompute")
    await flight.add("c", limit=20)
    await flight.replica.ended("c")
    assert flight.worst("c", "recompute") < 1e-3
    await flight.engine.close()


async def test_after_a_load_that_fails_nothing_runs_until_another(tmp_path: Path) -> None:
    model = model_of(1)
    flight = await Flight.start(tmp_path, model)
    await flight.add("a")
    await flight.replica.until("a", 5)
    short = {n: t for n, t in tensors_of(model).items() if "layers.1.mlp.down_proj" not in n}
    with pytest.raises(EngineError, match="the version lacks model"):
        await flight.replica.load(short, "keep")
    assert not await flight.engine.abort_request("a")
    flight.models[2] = None
    await flight.load(model, "keep")
    await flight.add("b", limit=20)
    await flight.replica.ended("b")
    assert flight.worst("b", "keep") < 1e-3
    await flight.engine.close()


@pytest.mark.parametrize("on_update", BOTH)
async def test_broken_weights_fail_their_proof_and_not_the_engine(
    tmp_path: Path, on_update: KvOnUpdate
) -> None:
    """What is sampled with them before the proof has no log-prob that is a number."""
    model = model_of(1)
    flight = await Flight.start(tmp_path, model)
    await flight.add("a")
    await flight.replica.until("a", 5)
    broken = {n: torch.full_like(tensor, torch.nan) for n, tensor in tensors_of(model).items()}
    await flight.replica.load(broken, on_update)
    async with asyncio.timeout(60):
        while "a" in flight.engine._running and not flight.engine.failed.done():
            await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="loaded weights are broken"):
        await flight.engine.compute_logprobs([PROMPT])
    assert not flight.engine.failed.done()
    flight.models[2] = None
    await flight.load(model)
    await flight.add("b", limit=20)
    await flight.replica.ended("b")
    assert flight.worst("b", "recompute") < 1e-3
    await flight.engine.close()


@pytest.mark.vllm_ci
def test_tokens_that_come_together_are_told_apart_by_their_load() -> None:
    starts = [("1", 0), ("2", 5), ("4", 9)]
    assert parts_of(starts, 3, 12) == [(1, 3, 5), (2, 5, 9), (4, 9, 12)]
    assert parts_of(starts[:2], 5, 7) == [(2, 5, 7)]
    assert parts_of(starts[:1], 4, 4) == [(1, 4, 4)]
