"""Benchmark of a generation engine: loads, probe, mismatch with the trainer, speed.

Usage: python -m tools.bench.engines --model DIR [--engine torch|vllm] [--device cuda] ...

Reads   a model directory (tools/make/random_model.py makes one)
Writes  a version of the weights in /dev/shm, removed at the end
Gives   one JSON line per figure

start          seconds until the engine is ready, without weights
load           seconds and bytes per second of the first version and of the median of the others;
               between two versions every weight moves by --move of its tensor's standard deviation
probe          engine against trainer after each load, nats: means and the largest difference
mismatch       behaviour log-probs of sampled tokens against the trainer's scores of them:
               mean and largest difference, mean k3, share of tokens whose probabilities differ by
               more than a tenth, and by more than the cap of the importance weight
in_flight      rows whose weights change in the middle of a response, with the cache kept or
               recomputed: change as a share of the norm; mean |log-prob - the trainer's| of tokens
               sampled after it, also divided by the change; seconds of the load, and from there
               until every row has a token; tokens that were prefilled again
decode         tokens per second by number of rows, counted once every row has its first token
prefill        prompt tokens per second, of distinct prompts
long_row       seconds of a decode step with one row --times as long as the others, divided by those
               of equally long rows with as many tokens in all

Engine, trainer and weights are the product's: laminar.engines.build, laminar.training, and the
layout of a relay's slot. Engine and trainer share the device; --vllm-memory is vLLM's share of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # vLLM forks: no CUDA before it

import numpy as np

from laminar.actors.weight_loader import source_of
from laminar.config import Config, load_config
from laminar.config.algorithm_rules import weight_bounds
from laminar.engines import protocol
from laminar.engines.build import start_engine
from laminar.engines.hf_config import read_hf_config
from tools.kit.one_process import named_weights

SHARED_MEMORY = Path("/dev/shm")
DONE_S = 300.0  #: timeout of one measurement
PROBE_ROWS, PROBE_TOKENS = 8, 64
FAR = 0.1  #: difference of log-probs; the probabilities then differ by a tenth


class Driver:
    """An engine, with the arrival times of its tokens."""

    engine: protocol.ReplicaEngine

    def __init__(self, config: Config, vocab: int, seed: int) -> None:
        self.config, self.vocab = config, vocab
        self.random = np.random.default_rng(seed)
        self._requests = 0
        self._rows: dict[str, tuple[list[int], list[float]]] = {}
        self._loads: dict[str, list[tuple[int, float]]] = {}  # load and arrival time of each token
        self._wanted = 0  # tokens per row for which `until` waits
        self._reached = asyncio.Event()
        self._times: list[tuple[float, str, int]] = []
        self._left: set[str] = set()
        self._done = asyncio.Event()

    async def start(self) -> float:
        started = time.monotonic()
        self.engine = await start_engine(self.config, self.vocab, 1, self._take)
        return time.monotonic() - started

    def _take(self, deltas: list[protocol.TokenDelta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            tokens, logprobs = self._rows[delta.request_id]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            self._loads[delta.request_id] += [(delta.load, now)] * len(delta.token_ids)
            self._times.append((now, delta.request_id, len(delta.token_ids)))
            if delta.finish_reason is not None:
                self._left.discard(delta.request_id)
        if not self._left:
            self._done.set()
        if self._wanted and all(len(tokens) >= self._wanted for tokens, _ in self._rows.values()):
            self._wanted = 0
            self._reached.set()

    async def until(self, tokens: int) -> None:
        """Wait until every row has so many tokens."""
        self._reached.clear()
        self._wanted = tokens
        await asyncio.wait_for(self._reached.wait(), DONE_S)

    def since(self, load: int) -> tuple[list[int], float]:
        """Return each row's first token index after a load, and the time when all rows had one."""
        firsts = [[at for at, _ in row].index(load) for row in self._loads.values()]
        rows = zip(firsts, self._loads.values(), strict=True)
        return firsts, max(row[first][1] for first, row in rows)

    def prompts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(self.random.integers(self.vocab, size=n).tolist()) for n in lengths]

    async def run(
        self, prompts: Sequence[tuple[int, ...]], new_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens and log-probs of a response to each prompt, all of one length."""
        names = [f"r{self._requests + index}" for index in range(len(prompts))]
        self._requests += len(prompts)
        self._rows = {name: ([], []) for name in names}
        self._loads = {name: [] for name in names}
        self._times, self._left = [], set(names)
        self._done.clear()
        added = [
            self.engine.add(
                protocol.GenerateRequest(
                    name, prompt, (), new_tokens, 1.0, 1_000 + row, frozenset()
                )
            )
            for row, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        await asyncio.gather(*added)
        waits = [asyncio.ensure_future(self._done.wait()), self.engine.failed]
        await asyncio.wait(waits, timeout=DONE_S, return_when=asyncio.FIRST_COMPLETED)
        if self.engine.failed.done():
            self.engine.failed.result()
        if self._left:
            raise TimeoutError(f"{len(self._left)} of {len(names)} rows left after {DONE_S} s")
        return [self._rows[name] for name in names]

    def decode_rate(self) -> float:
        """Return the tokens per second of the latest run since every row had a token."""
        seen: set[str] = set()
        begun = next(
            index
            for index, (_, name, _) in enumerate(self._times)
            if (seen.add(name) or len(seen)) == len(self._rows)  # type: ignore[func-returns-value]
        )
        start = self._times[begun][0]
        later = [(when, count) for when, _, count in self._times[begun + 1 :] if when > start]
        return sum(count for _, count in later) / (later[-1][0] - start)


class Trainer:
    """The trainer's model, with its weights as a version in shared memory."""

    def __init__(self, config: Config, vocab: int, seed: int) -> None:
        import torch

        from laminar.training.learner import Learner
        from laminar.training.model.policy import load_policy
        from laminar.weights.version.manifest import check_tensors, make_layout

        torch.manual_seed(seed)
        self._torch = torch
        self.config = config
        self.policy = load_policy(config.model.name, config.trainer.device, tokenizer_size=vocab)
        self.learner = Learner(config, self.policy)
        self.weights = list(named_weights(self.policy.model))
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self.weights]
        self.specs = make_layout(shapes, config.weights.dtype)
        self.nbytes = check_tensors(self.specs)
        self.path = SHARED_MEMORY / f"laminar-bench-engines-{os.getpid()}"
        with self.path.open("w+b") as file:
            file.truncate(self.nbytes)
            self._memory = mmap.mmap(file.fileno(), self.nbytes)

    def publish(self, move: float) -> float:
        """Publish the next version; return the seconds of its copy into shared memory."""
        from laminar.weights.version.tensors import write_tensors

        with self._torch.no_grad():
            for _, tensor in self.weights if move else ():
                tensor.add_(self._torch.randn_like(tensor) * (move * tensor.float().std()))
        started = time.monotonic()
        view = np.frombuffer(self._memory, dtype=np.uint8)
        write_tensors(view, self.specs, self.weights)
        return time.monotonic() - started

    def copy(self) -> Any:
        """Return all weights as one vector."""
        return self._torch.cat([tensor.detach().float().flatten() for _, tensor in self.weights])

    def source(self) -> protocol.WeightSource:
        return source_of(str(self.path), 0, self.specs, self.nbytes)

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.learner.compute_logprobs(sequences)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Any:
    """Return the differences of log-probs over all tokens of all rows."""
    pairs = zip(ours, theirs, strict=True)
    return np.concatenate([np.asarray(a) - np.asarray(b) for a, b in pairs])


async def loads(driver: Driver, trainer: Trainer, versions: int, move: float) -> None:
    """Load and probe one version after the other."""
    probe = driver.prompts([PROBE_TOKENS] * PROBE_ROWS)
    seconds, published, means, largest = [], [], [], []
    for version in range(versions):
        published.append(trainer.publish(move if version else 0.0))
        started = time.monotonic()
        await driver.engine.load(trainer.source())
        seconds.append(time.monotonic() - started)
        apart = np.abs(
            difference(await driver.engine.compute_logprobs(probe), trainer.scores(probe))
        )
        means.append(float(apart.mean()))
        largest.append(float(apart.max()))
    later = statistics.median(seconds[1:])
    show("load", first_s=seconds[0], median_s=later, GB_per_s=trainer.nbytes / later / 1e9)
    show("publish", first_s=published[0], median_s=statistics.median(published[1:]))
    show(
        "probe",
        versions=versions,
        tokens=PROBE_ROWS * (PROBE_TOKENS - 1),
        mean_median=statistics.median(means),
        mean_largest=max(means),
        largest_median=statistics.median(largest),
        largest=max(largest),
    )


async def mismatch(driver: Driver, trainer: Trainer, args: argparse.Namespace) -> None:
    prompts = driver.prompts([args.prompt] * args.mismatch_rows)
    rows = await driver.run(prompts, args.new)
    sequences = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, rows, strict=True)]
    theirs = [row[args.prompt - 1 :] for row in trainer.scores(sequences)]
    apart = difference(theirs, [logprobs for _, logprobs in rows])
    _, cap = weight_bounds(trainer.config.algorithm.rollout_correction)
    show(
        "mismatch",
        tokens=len(apart),
        mean_logprob=float(np.mean([p for _, logprobs in rows for p in logprobs])),
        mean_abs=float(np.abs(apart).mean()),
        largest=float(np.abs(apart).max()),
        mean_k3=float((np.exp(apart) - 1 - apart).mean()),
        mean_ratio=float(np.exp(apart).mean()),
        share_a_tenth_off=float((np.abs(apart) > FAR).mean()),
        share_capped=float((apart > np.log(cap)).mean()),
    )


async def in_flight(driver: Driver, trainer: Trainer, args: argparse.Namespace) -> None:
    loads = args.versions
    kinds: tuple[protocol.KvOnUpdate, ...] = ("keep", "recompute")
    for kind in [kind for _ in range(args.rounds) for kind in kinds]:
        prompts = driver.prompts([args.prompt] * args.mismatch_rows)
        running = asyncio.ensure_future(driver.run(prompts, args.new))
        await driver.until(args.new // 4)
        before = trainer.copy()
        trainer.publish(args.move)
        changed = float((trainer.copy() - before).norm() / before.norm())
        started = time.monotonic()
        await driver.engine.load(trainer.source(), kind)
        loaded = time.monotonic()
        rows = await running
        loads += 1
        firsts, ready = driver.since(loads)
        sequences = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, rows, strict=True)]
        theirs = [
            row[args.prompt - 1 + first :]
            for row, first in zip(trainer.scores(sequences), firsts, strict=True)
        ]
        ours = [logprobs[first:] for (_, logprobs), first in zip(rows, firsts, strict=True)]
        mean = float(np.abs(difference(theirs, ours)).mean())
        show(
            f"in_flight_{kind}",
            change=changed,
            mean_abs=mean,
            mean_by_change=mean / changed,
            load_s=loaded - started,
            token_s=ready - loaded,
            prefilled_again=0 if kind == "keep" else sum(firsts) + args.prompt * len(rows),
        )


async def speed(driver: Driver, args: argparse.Namespace) -> None:
    for rows in args.rows:
        rates = []
        for _ in range(args.rounds + 1):  # the first round warms up, here and below
            await driver.run(driver.prompts([args.prompt] * rows), args.new)
            rates.append(driver.decode_rate())
        del rates[0]
        show("decode", rows=rows, tokens_per_s=statistics.median(rates), spread=spread(rates))
    rates = []
    for _ in range(args.rounds + 1):
        prompts = driver.prompts([args.prefill_prompt] * args.prefill_rows)
        started = time.monotonic()
        await driver.run(prompts, 1)
        rates.append(args.prefill_prompt * args.prefill_rows / (time.monotonic() - started))
    show("prefill", tokens_per_s=statistics.median(rates[1:]), spread=spread(rates[1:]))


async def long_row(driver: Driver, args: argparse.Namespace) -> None:
    """Compare one long row among short ones with equal rows of as many tokens in all."""
    tail = [args.short] * args.tail_rows
    tail[args.tail_rows // 2] *= args.times
    equal = [sum(tail) // args.tail_rows] * args.tail_rows
    steps: dict[str, list[float]] = {"tail": [], "equal": []}
    for turn in range(args.rounds + 1):
        for name, lengths in (("tail", tail), ("equal", equal)):
            await driver.run(driver.prompts(lengths), args.new)
            if turn:
                steps[name].append(len(lengths) / driver.decode_rate())
    with_tail, same = (statistics.median(steps[name]) for name in ("tail", "equal"))
    show("long_row", step_ms=1e3 * with_tail, equal_rows_ms=1e3 * same, ratio=with_tail / same)


def spread(values: Sequence[float]) -> float:
    """Return (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def show(figure: str, **values: float) -> None:
    rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
    print(json.dumps({"figure": figure} | rounded), flush=True)


async def measure(args: argparse.Namespace) -> None:
    config = load_config([], list(overrides(args)))
    vocab = int(read_hf_config(args.model)["vocab_size"])
    driver = Driver(config, vocab, args.seed)
    show("start", seconds=await driver.start())
    trainer = Trainer(config, vocab, args.seed)  # after the engine: vLLM forks before CUDA
    try:
        await loads(driver, trainer, args.versions, args.move)
        await mismatch(driver, trainer, args)
        await in_flight(driver, trainer, args)
        await speed(driver, args)
        await long_row(driver, args)
        stats = driver.engine.get_stats()
        show("cache", capacity_tokens=stats.kv_capacity_tokens)
    finally:
        trainer.close()
        await driver.engine.close()


def overrides(args: argparse.Namespace) -> Iterator[str]:
    dtype = args.dtype
    longest = max(args.prompt, args.prefill_prompt, args.short * args.times) + args.new
    yield f"model.name={args.model}"
    yield "data.dataset=spell_backward"  # required, but its prompts are not used
    yield f"data.max_prompt_length={longest - args.new}"
    yield f"data.max_response_length={args.new}"
    yield f"rollout.engine={args.engine}"
    yield f"rollout.max_num_seqs={max(*args.rows, args.mismatch_rows, args.tail_rows)}"
    yield f"rollout.device={args.device}"
    yield f"trainer.device={args.device}"
    yield f"rollout.dtype={dtype}"
    yield f"trainer.dtype={dtype}"
    yield f"weights.dtype={dtype}"
    yield "trainer.micro_batch_tokens=4096"
    yield f"rollout.vllm.gpu_memory_utilization={args.vllm_memory}"
    yield from args.set


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a response")
    parser.add_argument("--prefill-prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--prefill-rows", type=int, default=32)
    parser.add_argument("--short", type=int, default=512, help="prompt tokens of the short rows")
    parser.add_argument("--times", type=int, default=10, help="length of the long row / short")
    parser.add_argument("--tail-rows", type=int, default=32)
    parser.add_argument("--mismatch-rows", type=int, default=64)
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--move", type=float, default=1e-3, help="share of a tensor's deviation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-memory", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], help="more config settings, key=value")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(measure(parse()))
