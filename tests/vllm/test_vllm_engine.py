"""vLLM behind the seam does what the embedded engine does: tokens, loads, moves, ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.config import ConfigError
from laminar.engines.protocol import LENGTH, STOP, EngineError
from laminar.engines.vllm import engine
from tests.vllm.replica import (
    LIMIT,
    PROMPT,
    Replica,
    alive,
    config_of,
    greedy,
    model_of,
    shared_memory,
    tensors_of,
    write_version,
)

pytestmark = pytest.mark.vllm


def distribution(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [len(ids), LIMIT] of the next token."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :, :LIMIT].float()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize(
    ("tied", "ranks"),
    [pytest.param(True, 1, marks=pytest.mark.vllm_ci), (False, 1), (True, 2), (False, 2)],
)
async def test_after_each_load_greedy_output_is_that_of_the_loaded_weights(
    tmp_path: Path, tied: bool, ranks: int
) -> None:
    """Back and forth: a head that is still packed from the weights before passes a single load."""
    models = [model_of(seed, tied=tied) for seed in (1, 2)]
    config = config_of(tmp_path, models[0], f"rollout.vllm.tensor_parallel_size={ranks}")
    replica = await Replica.start(tmp_path, config)
    for number, model in enumerate([*models, models[0]]):
        await replica.load(tensors_of(model))
        await replica.generate(f"r{number}", limit=60)
        await replica.ended(f"r{number}")
        expected = greedy(model, 60)
        assert replica.tokens[f"r{number}"] == expected
        assert len(set(expected)) > 3, "a degenerate model proves nothing"
        scores = (await replica.engine.compute_logprobs([[*PROMPT, *expected]]))[0]
        rows = distribution(model, [*PROMPT, *expected])
        wanted = [rows[i, t].item() for i, t in enumerate([*PROMPT, *expected][1:])]
        assert scores == pytest.approx(wanted, abs=1e-3)
    await replica.engine.close()


async def test_samples_have_the_log_probs_of_the_tempered_softmax_and_no_masked_id(
    tmp_path: Path,
) -> None:
    model = model_of(3)
    with torch.no_grad():  # ids that the tokenizer does not have would be the likeliest
        model.get_input_embeddings().weight[LIMIT:] *= 8
    replica = await Replica.start(tmp_path, config_of(tmp_path, model))
    await replica.load(tensors_of(model))
    names = [f"r{i}" for i in range(8)]
    for name in names:
        await replica.generate(name, temperature=1.3, limit=80)
    await replica.ended(*names)
    for name in names:
        tokens = replica.tokens[name]
        assert max(tokens) < LIMIT and replica.reasons[name] == LENGTH and len(tokens) == 80
        rows = distribution(model, [*PROMPT, *tokens], 1.3)[len(PROMPT) - 1 :]
        wanted = [rows[i, t].item() for i, t in enumerate(tokens)]
        assert replica.logprobs[name] == pytest.approx(wanted, abs=1e-3)
    assert len({tuple(replica.tokens[name]) for name in names}) == len(names)
    stats = replica.engine.get_stats()
    assert (stats.running, stats.waiting, stats.kv_used_tokens) == (0, 0, 0)
    assert stats.kv_capacity_tokens > 1_000
    records = replica.engine.drain_steps()
    assert sum(r.tokens for r in records) == 8 * 80 and max(r.running for r in records) == 8
    await replica.engine.close()


async def test_gauges_say_what_a_cache_that_is_too_small_costs(tmp_path: Path) -> None:
    """Four sequences of six blocks each, in ten blocks: some wait, some are thrown out."""
    model = model_of(1)
    config = config_of(tmp_path, model, "rollout.vllm.kv_cache_bytes=327680")
    replica = await Replica.start(tmp_path, config)
    await replica.load(tensors_of(model))
    prompt = PROMPT * 6
    names = [f"r{i}" for i in range(4)]
    for name in names:
        await replica.generate(name, prompt=prompt, limit=128)
    await replica.until("r0", 64)
    stats = replica.engine.get_stats()
    assert (stats.running + stats.waiting, stats.kv_capacity_tokens) == (4, 320)
    assert 0 < stats.kv_used_tokens <= 320
    await replica.ended(*names)
    assert {tuple(replica.tokens[name]) for name in names} == {tuple(greedy(model, 128, prompt))}
    stats = replica.engine.get_stats()
    assert stats.preempted > 0
    assert stats.prefix_cache_queries > stats.prefix_cache_hits > 0
    await replica.engine.close()


@pytest.mark.vllm_ci
async def test_what_is_aborted_here_goes_on_there(tmp_path: Path) -> None:
    """Token for token as if nothing had happened, and nothing of it arrives any more."""
    model = model_of(1)
    config = config_of(tmp_path, model)
    here, there = [await Replica.start(tmp_path, config) for _ in range(2)]
    for replica in (here, there):
        await replica.load(tensors_of(model))
    await here.generate("a@1")
    await here.until("a@1", 20)
    assert await here.engine.abort_request("a@1")
    done = tuple(here.tokens["a@1"])
    assert 20 <= len(done) < 100
    assert not await here.engine.abort_request("a@1")
    await asyncio.sleep(0.3)
    assert tuple(here.tokens["a@1"]) == done and "a@1" not in here.reasons
    await there.generate("a@2", done=done)
    await there.ended("a@2")
    assert [*done, *there.tokens["a@2"]] == greedy(model, 100)
    await here.engine.close()
    await there.engine.close()


@pytest.mark.parametrize("moves", [10, 50])
async def test_moves_change_no_token(tmp_path: Path, moves: int) -> None:
    """Beside others that move, at any time, also before the first token."""
    model = model_of(1)
    config = config_of(tmp_path, model)
    replicas = [await Replica.start(tmp_path, config) for _ in range(2)]
    for replica in replicas:
        await replica.load(tensors_of(model))
    rng, moved, number = random.Random(moves), 0, 0
    while moved < moves:
        prompts = [tuple(rng.choices(range(LIMIT), k=rng.choice([1, 7, 30]))) for _ in range(4)]
        lives = [_life(replicas, f"t{number + i}", p, rng) for i, p in enumerate(prompts)]
        number += len(lives)
        for prompt, (tokens, logprobs, times) in zip(
            prompts, await asyncio.gather(*lives), strict=True
        ):
            assert tokens == greedy(model, 100, prompt)
            rows = distribution(model, [*prompt, *tokens])[len(prompt) - 1 :]
            wanted = [rows[i, t].item() for i, t in enumerate(tokens)]
            assert logprobs == pytest.approx(wanted, abs=1e-4)
            moved += times
    for replica in replicas:
        await replica.engine.close()


async def _life(
    replicas: list[Replica], name: str, prompt: tuple[int, ...], rng: random.Random
) -> tuple[list[int], list[float], int]:
    """Tokens, log-probs and moves of a response that goes to the other replica again and again."""
    tokens: list[int] = []
    logprobs: list[float] = []
    place, moves = rng.randrange(2), 0
    while True:
        here, request = replicas[place], f"{name}@{moves}"
        await here.generate(request, prompt=prompt, done=tuple(tokens))
        await here.until(request, rng.choice([0, 1, 15, 40]))
        aborted = await here.engine.abort_request(request)
        tokens += here.tokens.get(request, [])
        logprobs += here.logprobs.get(request, [])
        if not aborted:
            return tokens, logprobs, moves
        place, moves = 1 - place, moves + 1


async def test_a_stop_id_ends_a_response_and_is_part_of_it(tmp_path: Path) -> None:
    model = model_of(1)
    replica = await Replica.start(tmp_path, config_of(tmp_path, model))
    await replica.load(tensors_of(model))
    expected = greedy(model, 40)
    stop = expected[25]
    await replica.generate("a", stop=frozenset({stop}), limit=40)
    await replica.ended("a")
    assert replica.tokens["a"] == expected[: expected.index(stop) + 1]
    assert replica.reasons["a"] == STOP
    await replica.engine.close()


async def test_what_cannot_be_done_is_refused_alone(tmp_path: Path) -> None:
    """A version without a tensor leaves the engine without weights, and the next load mends it."""
    model = model_of(1)
    tensors = tensors_of(model)
    replica = await Replica.start(tmp_path, config_of(tmp_path, model))
    with pytest.raises(EngineError, match="no weights"):
        await replica.generate("early")
    short = {n: t for n, t in tensors.items() if "layers.1.mlp.down_proj" not in n}
    with pytest.raises(
        EngineError, match=r"the version lacks model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        await replica.load(short)
    with pytest.raises(EngineError, match="no weights"):
        await replica.generate("after")
    with pytest.raises(EngineError, match="novel"):
        await replica.load({**tensors, "novel": torch.zeros(3)})
    await replica.load(tensors)
    with pytest.raises(EngineError, match="token id 121"):
        await replica.generate("strange", prompt=(1, 121))
    with pytest.raises(EngineError, match="max_model_len = 192"):
        await replica.generate("long", prompt=(1,) * 64, limit=129)
    await replica.generate("good", limit=128)
    with pytest.raises(EngineError, match="already running"):
        await replica.generate("good")
    with pytest.raises(EngineError, match="1 sequences are running"):
        await replica.load(tensors)
    await replica.ended("good")
    assert replica.tokens["good"] == greedy(model, 128)
    assert not replica.engine.failed.done()
    await replica.engine.close()
    assert replica.engine.failed.result() is None


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.vllm_ci), 2])
async def test_a_core_that_is_killed_is_noticed_and_named(tmp_path: Path, ranks: int) -> None:
    """And leaves nothing in shared memory, which its ranks have, however the engine ends."""
    model = model_of(1)
    config = config_of(tmp_path, model, f"rollout.vllm.tensor_parallel_size={ranks}")
    replica = await Replica.start(tmp_path, config)
    await replica.load(tensors_of(model))
    await replica.generate("a", limit=128)
    await replica.until("a", 5)
    shared = shared_memory(replica.core_pid())
    assert bool(shared) == (ranks > 1)
    killed = time.monotonic()
    os.kill(replica.core_pid(), signal.SIGKILL)
    with pytest.raises(EngineError, match=r"engine core has died, killed by SIGKILL \(the"):
        await asyncio.wait_for(asyncio.shield(replica.engine.failed), 5.0)
    print(f"noticed after {time.monotonic() - killed:.2f} s")
    for call in (replica.generate("b"), replica.load(tensors_of(model))):
        with pytest.raises(EngineError, match="has stopped"):
            await call
    await asyncio.wait_for(replica.engine.close(), 20.0)
    deadline = time.monotonic() + 10
    while any(path.exists() for path in shared) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not [path for path in shared if path.exists()]


async def test_what_the_core_fails_at_is_named(tmp_path: Path) -> None:
    """Out of memory, say: the call ends with the reason, and the core lives."""
    model = model_of(1)
    replica = await Replica.start(tmp_path, config_of(tmp_path, model))
    source = write_version(tmp_path / "v", tensors_of(model))
    with pytest.raises(EngineError, match=r"core failed at a weight load: .*unsupported operand"):
        await replica.engine.load(dataclasses.replace(source, nbytes="a lot"))  # type: ignore[arg-type]
    await replica.load(tensors_of(model))
    await replica.generate("a", limit=20)
    await replica.ended("a")
    assert replica.tokens["a"] == greedy(model, 20)
    await replica.engine.close()


async def test_a_core_that_stands_still_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With work to do, and in the middle of a call: vLLM's own health check stays green."""
    monkeypatch.setattr(engine, "STALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(engine, "RPC_TIMEOUT_S", 2.0)
    monkeypatch.setattr(engine, "LOAD_TIMEOUT_S", 2.0)
    model = model_of(1)
    config = config_of(tmp_path, model)
    working, loading = [await Replica.start(tmp_path, config) for _ in range(2)]
    await working.load(tensors_of(model))
    await working.generate("a", limit=128)
    await working.until("a", 5)
    for replica in (working, loading):
        os.kill(replica.core_pid(), signal.SIGSTOP)
    with pytest.raises(EngineError, match="did not answer a pause within 2 s"):
        await loading.load(tensors_of(model))
    with pytest.raises(EngineError, match=r"finished no step for \d+ s, with 1 requests"):
        await asyncio.wait_for(asyncio.shield(working.engine.failed), 10.0)
    for replica in (working, loading):
        await asyncio.wait_for(replica.engine.close(), 20.0)


def test_the_core_ends_with_its_replica(tmp_path: Path) -> None:
    """Also when the replica had no time to say so."""
    script = f"""
import asyncio, pathlib
from tests.vllm.replica import Replica, config_of, model_of
async def main():
    directory = pathlib.Path({str(tmp_path)!r})
    replica = await Replica.start(directory, config_of(directory, model_of(1)))
    print("core", replica.core_pid(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    replica = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    core = next(int(line.split()[1]) for line in replica.stdout if line.startswith("core "))
    assert alive(core)
    replica.kill()
    replica.wait()
    deadline = time.monotonic() + 10
    while alive(core) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(core)


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({}, ["kv_cache_bytes=4096"], "kv_cache_bytes = 4096 cannot hold one sequence"),
        (
            {},
            ["extra={max_log_len=1}"],
            "max_log_len is not an argument of vLLM; the nearest is max_model_len",
        ),
        ({}, ["extra={max_num_seqs=1}"], "is set by other keys of rollout"),
        ({}, ["extra={quantization='none'}"], "Unknown quantization method: none"),
        ({}, ["tensor_parallel_size=3"], r"heads \(2\) must be divisible by .*size \(3\)"),
        ({"architectures": ["Foo"]}, [], r"architectures \['Foo'\] are not supported for now$"),
        ({"model_type": "foo"}, [], "has model type `foo` but Transformers does not recognize"),
    ],
)
async def test_a_mistake_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    """Of vLLM's own words, which go on for pages, the one that says what is wrong."""
    settings = [f"rollout.vllm.{override}" for override in overrides]
    config = config_of(tmp_path, model_of(1), *settings)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        await Replica.start(tmp_path, config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.long
async def test_three_hundred_loads_leave_memory_flat(tmp_path: Path) -> None:
    models = [tensors_of(model_of(seed)) for seed in (1, 2)]
    replica = await Replica.start(tmp_path, config_of(tmp_path, model_of(1)))
    pid = replica.core_pid()

    def resident() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for number in range(20):
        await replica.load(models[number % 2])
    before = resident()
    for number in range(300):
        await replica.load(models[number % 2])
    assert resident() - before < 16 << 20
    await replica.engine.close()
