"""The embedded engine beside vLLM, and our vLLM replica beside vLLM alone.

Usage: .venv-vllm/bin/python tools/bench/beside_vllm.py [--parts speed cost] [--rounds 5] ...
Prints one JSON line per figure; exit code 1 when a figure misses its limit.

torch_vllm_speed_ratio      tokens/s of the embedded engine / of vLLM, the quickstart's model
torch_vllm_cpu_ratio        CPU-seconds per token of the embedded engine / of vLLM, same runs
replica_bare_cpu_ratio      CPU-seconds per generated token of our vLLM replica / of a bare AsyncLLM
                            whose stream is read, a random model of 130 M parameters

On CPU, float32, one OMP thread each. Prompts of 40 tokens are all different. Both sides of a ratio
take turns in rounds, in either order, and each ratio is the median of its rounds; a round before
them warms up. CPU-seconds are those of this process and of the engine core's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: waiting threads would burn what is measured

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.config import Config, load  # noqa: E402
from laminar.engines.build import start_engine  # noqa: E402
from laminar.engines.protocol import (  # noqa: E402
    GenerateRequest,
    ReplicaEngine,
    TensorPlace,
    TokenDelta,
    WeightSource,
)
from laminar.weights.arena.arena import SHARED_MEMORY  # noqa: E402

QUICKSTART = ROOT / "configs" / "models" / "spell-0.6m"
PROMPT = 40
MASKED = 128  #: ids of the random model that no tokenizer has: a replica keeps them out
KV_BYTES = 1 << 28
CPU_RATIO_MAX = 1.10
DTYPES = {"F32": "float32", "BF16": "bfloat16"}

Generate = Callable[[list[GenerateRequest]], Awaitable[None]]


class Side(NamedTuple):
    """One of two engines that are compared."""

    generate: Generate
    cores: list[psutil.Process]  #: beside this process

    def cpu_s(self) -> float:
        return time.process_time() + sum(sum(core.cpu_times()[:2]) for core in self.cores)


class Spent(NamedTuple):
    clock_s: float
    cpu_s: float


class Replica:
    """An engine as the rollout actor has it."""

    engine: ReplicaEngine

    def __init__(self) -> None:
        self._left = 0
        self._done = asyncio.Event()

    async def start(self, config: Config, vocab: int) -> None:
        self.engine = await start_engine(config, vocab, 1, self._take)
        await self.engine.load(safetensors_source(Path(config.model.name)))

    def _take(self, deltas: list[TokenDelta]) -> None:
        self._left -= sum(delta.finish_reason is not None for delta in deltas)
        if not self._left:
            self._done.set()

    async def generate(self, requests: list[GenerateRequest]) -> None:
        self._left = len(requests)
        self._done.clear()
        for request in requests:
            await self.engine.add(request)
        await asyncio.wait_for(self._done.wait(), 300)

    def side(self) -> Side:
        llm = getattr(self.engine, "_llm", None)
        return Side(self.generate, [core_of(llm)] if llm else [])


def core_of(llm: Any) -> psutil.Process:
    return psutil.Process(llm.engine_core.resources.engine_manager.processes[0].pid)


def safetensors_source(directory: Path) -> WeightSource:
    """A checkpoint of one file, where it lies."""
    path = directory / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    places = tuple(
        TensorPlace(name, DTYPES[e["dtype"]], tuple(e["shape"]), e["data_offsets"][0])
        for name, e in header.items()
    )
    return WeightSource(str(path), 8 + size, path.stat().st_size - 8 - size, places)


def config_of(model: Path, engine: str, rows: int, tokens: int) -> Config:
    overrides = {
        "model.name": model,
        "data.dataset": "spell_backward",
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": tokens,
        "rollout.engine": engine,
        "rollout.device": "cpu",
        "rollout.dtype": "float32",
        "rollout.max_num_seqs": rows,
        "rollout.threads": 1,
        "rollout.vllm.kv_cache_bytes": KV_BYTES,
    }
    return load([], [f"{key}={value}" for key, value in overrides.items()])


def requests_of(number: int, rows: int, tokens: int, vocab: int) -> list[GenerateRequest]:
    rng = random.Random(number)
    made = []
    for row in range(rows):
        prompt = tuple(rng.randrange(vocab) for _ in range(PROMPT))
        name, seed = f"{number}.{row}", rng.getrandbits(64)
        made.append(GenerateRequest(name, prompt, (), tokens, 1.0, seed, frozenset()))
    return made


async def compare(
    one: Side, two: Side, args: argparse.Namespace, tokens: int, vocab: int
) -> list[tuple[Spent, Spent]]:
    """What each round cost; the sides take turns at being first."""
    rounds = []
    for number in range(args.rounds + 1):
        spent: dict[int, Spent] = {}
        for place in (0, 1) if number % 2 else (1, 0):
            side = (one, two)[place]
            requests = requests_of(2 * number + place, args.rows, tokens, vocab)
            clock, cpu = time.perf_counter(), side.cpu_s()
            await side.generate(requests)
            spent[place] = Spent(time.perf_counter() - clock, side.cpu_s() - cpu)
        rounds.append((spent[0], spent[1]))
    return rounds[1:]


async def speed(args: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """The embedded engine against vLLM."""
    tokens = args.tokens
    vocab = json.loads((QUICKSTART / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    replicas = [Replica(), Replica()]
    for replica, engine in zip(replicas, ("vllm", "torch"), strict=True):
        await replica.start(config_of(QUICKSTART, engine, args.rows, tokens), vocab)
    vllm, embedded = (replica.side() for replica in replicas)
    rounds = await compare(embedded, vllm, args, tokens, vocab)
    for name, index in (("torch_tokens_per_s", 0), ("vllm_tokens_per_s", 1)):
        rates = [args.rows * tokens / row[index].clock_s for row in rounds]
        yield figure(name, statistics.median(rates))
    yield figure("torch_vllm_speed_ratio", median(b.clock_s / a.clock_s for a, b in rounds))
    yield figure("torch_vllm_cpu_ratio", median(a.cpu_s / b.cpu_s for a, b in rounds))
    for replica in replicas:
        await replica.engine.close()


async def cost(args: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Our replica against vLLM alone."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        model = Path(directory)
        vocab, parameters = write_model(model)
        config = config_of(model, "vllm", args.rows, args.tokens)
        replica = Replica()
        await replica.start(config, vocab)
        bare = bare_vllm(config)
        rounds = await compare(replica.side(), bare, args, args.tokens, vocab)
        yield figure("model_parameters", parameters)
        for name, index in (("replica_cpu_ms_per_token", 0), ("bare_cpu_ms_per_token", 1)):
            per_token = [1e3 * row[index].cpu_s / (args.rows * args.tokens) for row in rounds]
            yield figure(name, statistics.median(per_token))
        ratio = median(ours.cpu_s / theirs.cpu_s for ours, theirs in rounds)
        yield figure("replica_bare_cpu_ratio", ratio, ratio <= CPU_RATIO_MAX)
        await replica.engine.close()


def write_model(directory: Path) -> tuple[int, int]:
    """(ids that may be sampled, parameters) of a random model that is saved there."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=3_072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1_024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return config.vocab_size - MASKED, sum(p.numel() for p in model.parameters())


def bare_vllm(config: Config) -> Side:
    """vLLM with our engine settings, without our worker's methods and gauges."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from laminar.engines.vllm_start import CPU_BLOCK, IN_CORE

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=config.model.name,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=config.max_model_len,
            max_num_seqs=config.rollout.max_num_seqs,
            enforce_eager=True,
            block_size=CPU_BLOCK,
            kv_cache_memory_bytes=KV_BYTES,
            logprobs_mode="processed_logprobs",
            distributed_executor_backend=IN_CORE,
            disable_log_stats=True,
        )
    )

    async def read(request: GenerateRequest) -> None:
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
        async for _ in llm.generate(prompt, params, request.request_id):
            pass

    async def generate(requests: list[GenerateRequest]) -> None:
        await asyncio.wait_for(asyncio.gather(*map(read, requests)), 300)

    return Side(generate, [core_of(llm)])


def median(values: Any) -> float:
    return statistics.median(list(values))


def figure(name: str, value: float, ok: bool = True) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "ok": ok}


PARTS = {"speed": speed, "cost": cost}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="after the one that warms up")
    parser.add_argument("--rows", type=int, default=64, help="requests of a round, all at once")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    args = parser.parse_args()
    for name, least in (("rounds", 1), ("rows", 8), ("tokens", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} = {getattr(args, name)} is too small; give at least {least}")
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here; run `make test-vllm`, then use .venv-vllm")
    return args


async def run(args: argparse.Namespace) -> bool:
    ok = True
    for part in args.parts:
        async for line in PARTS[part](args):
            print(json.dumps(line), flush=True)
            ok &= line["ok"]
    return ok


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(run(parse())) else 1)
