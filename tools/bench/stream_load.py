"""What a replica saves that copies weights while they arrive and prefills behind them.

Usage: python tools/bench/stream_load.py [--rates MB/S ...] [--rounds 3] [--prompt 128]
Prints one JSON line per rate; exits 1 when a token, a log-prob or a bit of the cache of `stream`
is another one than that of `whole`.

Reads   nothing; weights of 107 M parameters (float32, 428 MB) are drawn from a seed
Gives   for each rate: `first_token_s` of both ways, from the first byte to the first token of all
        rows; `load_s` and `prefill_s`, of which `whole` consists; `saved`, by the lesser of both

whole     all bytes are here, then `load`, then the rows are added
stream    the rows are added first; the engine is told, as a replica tells it, how many bytes are
          here: when it has done with those before, looked at every 50 ms

Both use the torch engine and its thread, with one thread of torch. The bytes are written into a
file at the rate, 4 MiB at a time, by another thread, as a relay receives them. Rows are greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from laminar.actors.weight_loader import COMING_POLL_S
from laminar.engines.protocol import GenerateRequest, TensorPlace, TokenDelta, WeightSource
from laminar.engines.runner import EngineRunner
from laminar.engines.torch.engine import TorchEngine

RATES = (2000, 800, 400, 200, 100)  #: MB/s
VOCAB = 16_384
HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 640,
    "intermediate_size": 2_560,
    "num_hidden_layers": 16,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 1_024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
ROWS, TOKENS = 4, 64
CHUNK_BYTES = 4 << 20


class Result(NamedTuple):
    first_token_s: float
    load_s: float  #: of `whole`: until all was in the engine
    rows: dict[str, tuple[list[int], list[float]]]  #: tokens and log-probs
    cache: tuple[torch.Tensor, torch.Tensor]


class Arrival:
    """A version that is written into a file at a rate."""

    def __init__(self, source: WeightSource, content: mmap.mmap, rate: float) -> None:
        self.front, self._source, self._content, self._rate = 0, source, content, rate
        with Path(source.path).open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), source.nbytes)
        self._started = time.monotonic()
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        into = np.frombuffer(self._file, np.uint8)
        content = np.frombuffer(self._content, np.uint8)
        for start in range(0, self._source.nbytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, self._source.nbytes)
            time.sleep(max(0.0, self._started + end / self._rate - time.monotonic()))
            into[start:end] = content[start:end]
            self.front = end

    async def all_here(self) -> None:
        while self.front < self._source.nbytes:
            await asyncio.sleep(COMING_POLL_S)


def new_engine(max_len: int) -> TorchEngine:
    return TorchEngine(
        HF_CONFIG, max_num_seqs=ROWS, max_model_len=max_len, dtype=torch.float32, device="cpu"
    )


def write_weights(path: Path) -> WeightSource:
    """Drawn from a seed, in the order of execution."""
    torch.manual_seed(1)
    places, offset = [], 0
    with path.open("wb") as file:
        for name, target in new_engine(2)._model.weights.targets.items():
            drawn = torch.ones(target.shape)
            if "norm" not in name:
                drawn = torch.randn(target.shape) * 0.03
            places.append(TensorPlace(name, "float32", tuple(target.shape), offset))
            file.write(drawn.numpy().tobytes())
            offset += drawn.numel() * 4
    return WeightSource(str(path), 0, offset, tuple(places))


async def measure(
    way: str, source: WeightSource, content: mmap.mmap, rate: float, prompt: int
) -> Result:
    """One load and 64 tokens of each row."""
    engine = new_engine(prompt + TOKENS)
    rows: dict[str, tuple[list[int], list[float]]] = {str(i): ([], []) for i in range(ROWS)}
    first, done = asyncio.Event(), asyncio.Event()

    def take(deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            rows[delta.request_id][0].extend(delta.token_ids)
            rows[delta.request_id][1].extend(delta.logprobs)
        if all(tokens for tokens, _ in rows.values()):
            first.set()
        if all(len(tokens) == TOKENS for tokens, _ in rows.values()):
            done.set()

    runner = EngineRunner(engine, take, asyncio.get_running_loop())
    started = time.monotonic()
    arrival = Arrival(source, content, rate)
    if way == "stream":
        await runner.expect_weights()
        await add_rows(runner, prompt)
        here = 0
        while arrival.front < source.nbytes:
            if arrival.front > here:
                here = arrival.front
                await runner.arrived(source, here)
            else:
                await asyncio.sleep(COMING_POLL_S)
        await runner.arrived(source, source.nbytes)
        await runner.go_on()
    else:
        await arrival.all_here()
        await runner.load(source)
    loaded = time.monotonic()
    if way == "whole":
        await add_rows(runner, prompt)
    await first.wait()
    first_token_s = time.monotonic() - started
    await done.wait()
    cache = engine._model.cache.k.clone(), engine._model.cache.v.clone()
    await runner.close()
    return Result(first_token_s, loaded - started, rows, cache)


async def add_rows(runner: EngineRunner, prompt: int) -> None:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(0, VOCAB, (ROWS, prompt), generator=generator)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(ids),
            done_ids=(),
            max_new_tokens=TOKENS,
            temperature=0.0,
            seed=i,
            stop_ids=frozenset(),
        )
        for i, ids in enumerate(drawn.tolist())
    ]
    await asyncio.gather(*(runner.add(request) for request in requests))


def same(one: Result, other: Result) -> bool:
    return one.rows == other.rows and all(map(torch.equal, one.cache, other.cache))


def line_of(rate: int, rounds: list[tuple[Result, Result]]) -> dict[str, Any]:
    """The median round of each figure."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    lesser = [min(w.load_s, w.first_token_s - w.load_s) for w, _ in rounds]
    saved = [w.first_token_s - s.first_token_s for w, s in rounds]
    return {
        "mb_per_s": rate,
        "whole_first_token_s": median([w.first_token_s for w, _ in rounds]),
        "stream_first_token_s": median([s.first_token_s for _, s in rounds]),
        "load_s": median([w.load_s for w, _ in rounds]),
        "prefill_s": median([w.first_token_s - w.load_s for w, _ in rounds]),
        "saved": median([s / least for s, least in zip(saved, lesser, strict=True)]),
        "equal": all(same(w, s) for w, s in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="MB/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a row, to 900")
    given = parser.parse_args()
    for name in ("rounds", "prompt"):
        if (value := getattr(given, name)) <= 0:
            parser.error(f"--{name} {value} is none; give a number above 0")
    if min(given.rates) <= 0:
        parser.error(f"--rates {min(given.rates)} is none; give rates above 0")
    torch.set_num_threads(1)
    equal = True
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        made = write_weights(Path(directory, "made"))
        with Path(made.path).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        slot = Path(directory, "slot")
        slot.write_bytes(content)
        source = WeightSource(str(slot), 0, made.nbytes, made.tensors)
        for rate in given.rates:
            rounds = []
            for _ in range(given.rounds):
                whole, stream = (
                    asyncio.run(measure(way, source, content, rate * 1e6, given.prompt))
                    for way in ("whole", "stream")
                )
                rounds.append((whole, stream))
            line = line_of(rate, rounds)
            equal = equal and line["equal"]
            print(json.dumps(line), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
