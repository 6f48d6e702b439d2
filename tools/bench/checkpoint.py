"""How long a checkpoint holds up training, beside one copy of the same bytes.

Usage: python tools/bench/checkpoint.py [--rounds 7] [--layers 5 --hidden 768 --vocab 65536]
       [--threads 2]
Prints one JSON line per figure; exits 1 when the ratio is above its limit.

parameters        of the model that is trained, with random weights, in millions
checkpoint_gb     parameters and both moments of AdamW
stall_s           the trainer's span "saving", in which it does nothing else: the copy, and the
                  probe, which is that of the version that the step has published before
copy_s            one copy of as many bytes into memory that is kept for it, with as many threads
stall_ratio       median over the rounds of stall / copy of the same round; at most 1.25
first_stall_s     of the first checkpoint of a process, which asks for the memory
unpublished_stall_s  of a step whose publish found no slot: the probe is made for the checkpoint

The trainer is the one of a run (laminar/actors/trainer.py), with its learner, its files and its
publisher; the store and the relay are stood in for: rows are made here, a slot is plain memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.actors.checkpoint_writer import CheckpointWriter  # noqa: E402
from laminar.actors.trainer import PROBE_TOLERANCE, Trainer, probe_sequences  # noqa: E402
from laminar.actors.weight_publisher import WeightPublisher  # noqa: E402
from laminar.config import Config, load  # noqa: E402
from laminar.events import commands as cmd  # noqa: E402
from laminar.events import events as ev  # noqa: E402
from laminar.names.ids import TrajectoryId  # noqa: E402
from laminar.storage.rules import Span  # noqa: E402
from laminar.tasks.tokenizer import load_tokenizer, tokenizer_size  # noqa: E402
from laminar.training.checkpoint import named_moments  # noqa: E402
from laminar.training.model import named_weights  # noqa: E402
from laminar.training.steps import TrainSample  # noqa: E402
from laminar.training.threaded import ThreadedFiles, ThreadedLearner  # noqa: E402
from laminar.weights import messages as m  # noqa: E402
from laminar.weights.version import manifest as mf  # noqa: E402
from laminar.weights.version.checkpoint import describe  # noqa: E402
from laminar.weights.version.tensors import write_tensors  # noqa: E402

LIMIT = 1.25
PROMPT, RESPONSE, SIBLINGS = 8, 8, 2


class Host:
    """As much of one as a trainer needs; spans are what is measured."""

    name, node, incarnation = "trainer-0", "node-0", 1
    now_ns = staticmethod(time.perf_counter_ns)

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir, self.config = run_dir, config
        self.log = structlog.get_logger()
        self.spans: dict[str, list[float]] = {}
        self.saved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def client(self, name: str) -> Any:
        return None

    def span(self, state: str, start_ns: int, end_ns: int, **facts: Any) -> None:
        self.spans.setdefault(state, []).append((end_ns - start_ns) / 1e9)

    def emit(self, event: Any, **context: Any) -> None:
        if isinstance(event, ev.CheckpointSaved):
            self.saved.set()

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(_ended)

    async def reached(self, point: str) -> None: ...

    async def acknowledged(self) -> None: ...


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        print(f"the trainer failed: {task.exception()!r}", file=sys.stderr, flush=True)
        sys.exit(1)


class Relay:
    """It gives a slot for every version while `open`, and takes what is in it."""

    def __init__(self) -> None:
        self.open = True

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, request: Any, *answers: Any, **options: Any) -> Any:
        if isinstance(request, m.OpenArena):
            return m.ArenaOpened(arena="memory")
        if isinstance(request, m.GrantSlot):
            return m.SlotGranted(slot=0 if self.open else -1)
        return m.Committed()


class Slot:
    """Memory of one version."""

    path = "memory"

    def __init__(self, learner: ThreadedLearner, nbytes: int) -> None:
        self._learner, self._view = learner, np.ones(nbytes, np.uint8)

    async def prepare(self, slot: int) -> None: ...

    async def write(self, slot: int, specs: tuple[mf.TensorSpec, ...]) -> None:
        await asyncio.to_thread(write_tensors, self._view, specs, self._learner.weights())

    def close(self) -> None: ...


class Book:
    async def enter(self, line: bytes) -> None: ...

    def close(self) -> None: ...


class BenchTrainer(Trainer):
    """Its rows are made up, and its parts are put together without a store."""

    learner: ThreadedLearner

    async def prepare(self, relay: Any) -> None:
        layout = await self.learner.load()
        specs = self._specs = mf.layout(layout.shapes, layout.engine_dtype)
        self.tolerance = PROBE_TOLERANCE[layout.engine_dtype]
        text = np.arange(1, 40, dtype="<i4").tobytes()
        self.probe_ids = probe_sequences((text,) * 32, self.config.max_model_len - 1)
        slot = Slot(self.learner, mf.check_tensors(specs))
        self.publisher = WeightPublisher(self.host, relay, lambda path: slot, specs, self._probe)
        await self.publisher.start()
        self.checkpoints = CheckpointWriter(
            self.host, self._files, specs, self._probe, self.learner.facts, self._remove_payloads
        )
        self.host.spawn(self._work(self.publisher, self.checkpoints))

    async def _fetch(self, command: Any) -> list[TrainSample]:
        rng = np.random.default_rng(command.step_index)
        step = max(command.step_index - 1, 0)
        return [
            TrainSample(
                sample_id=name,
                group_id=name.rpartition(".")[0],
                prompt_ids=np.arange(PROMPT, dtype=np.int32) + 1,
                response_ids=rng.integers(1, 200, RESPONSE).astype(np.int32),
                logprobs=np.full(RESPONSE, -5.0, np.float32),
                reward=float(sibling),
                temperature=1.0,
                truncated=False,
                spans=(Span("rollout-0", step, step, RESPONSE),),
            )
            for sibling, name in enumerate(command.trajectories)
        ]

    async def step(self, index: int) -> None:
        """One, until its checkpoint is on the disk."""
        rows = tuple(TrajectoryId(f"0.{index}.{sibling}") for sibling in range(SIBLINGS))
        command = cmd.TrainStep(
            to="trainer-0", step_index=index, version=index + 1, trajectories=rows
        )
        raw = msgspec.Raw(msgspec.msgpack.encode(command))
        order = cmd.Order(command_id=index + 1, cause=1, command=raw)
        host: Any = self.host
        host.saved.clear()
        self.handle([(order, command)])
        await host.saved.wait()


def config_of(model: Path, threads: int) -> Config:
    return load(
        [],
        [
            f"model.name={model}",
            "data.dataset=spell_backward",
            "trainer.device=cpu",
            "trainer.save_freq=1",
            f"trainer.threads={threads}",
            "algorithm.rollout_correction.mismatch_limit=1e9",
            f"rollout.group_size={SIBLINGS}",
            "optim.lr=1e-5",
        ],
    )


async def measured(
    model: Path, run_dir: Path, args: argparse.Namespace
) -> tuple[list[float], list[float], int, int]:
    """Stalls, copies, bytes, parameters. The first stall asks for the memory, the last one is of a
    step that was not published."""
    config = config_of(model, args.threads)
    host, relay = Host(run_dir, config), Relay()
    learner = ThreadedLearner(config, lambda: tokenizer_size(load_tokenizer(str(model))))
    files = ThreadedFiles(lambda: learner.learner, str(model), describe)
    made: Any = (host, learner, lambda path: None, files, Book())
    trainer = BenchTrainer(*made)
    await trainer.prepare(relay)
    assert trainer.publisher is not None
    copies, nbytes, source, target = [], 0, torch.empty(0), torch.empty(0)
    for index in range(args.rounds + 2):
        if index <= args.rounds:
            await trainer.publisher._granted.wait()
        relay.open = index < args.rounds
        await trainer.step(index)
        if not nbytes:
            parameters = dict(named_weights(learner.model))
            moments = dict(named_moments(learner.model, learner.learner.optimizer))
            nbytes = sum(t.nbytes for t in (*parameters.values(), *moments.values()))
            source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
    return host.spans["saving"], copies, nbytes, sum(t.numel() for t in parameters.values())


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "hidden", "vocab")]
        make = [sys.executable, str(ROOT / "tools/make_random_model.py"), "--out", str(model)]
        subprocess.run([*make, *sizes], check=True, stdout=subprocess.DEVNULL)
        stalls, copies, nbytes, parameters = asyncio.run(measured(model, Path(directory), args))
    middle = slice(1, args.rounds + 1)
    ratios = [stall / copy for stall, copy in zip(stalls, copies, strict=True)][middle]
    ratio = statistics.median(ratios)
    yield {"figure": "parameters", "value": round(parameters / 1e6, 1), "unit": "M"}
    yield {"figure": "checkpoint_gb", "value": round(nbytes / 1e9, 3)}
    yield seconds("stall_s", stalls[middle])
    yield seconds("copy_s", copies[middle])
    yield {
        "figure": "stall_ratio",
        "value": round(ratio, 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "limit": LIMIT,
        "ok": ratio <= LIMIT,
    }
    yield seconds("first_stall_s", stalls[:1])
    yield seconds("unpublished_stall_s", stalls[-1:])


def seconds(name: str, values: list[float]) -> dict[str, Any]:
    rounds = [round(value, 3) for value in values]
    return {"figure": name, "value": round(statistics.median(values), 3), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rounds", 7), ("layers", 5), ("hidden", 768), ("vocab", 65536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    ok = True
    for line in figures(parser.parse_args()):
        print(json.dumps(line), flush=True)
        ok &= line.get("ok", True)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
