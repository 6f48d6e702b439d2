"""The trainer actor: consumes batches, publishes weights, exports the model.

Reads   trajectories of the store by id; TrainStep, PublishWeights, ExportModel commands
Writes  slots of the relay's arena, trainer_book.jsonl, checkpoints/, export/
Emits   TrainerReady, StepCompleted, PublishSkipped, CheckpointSaved, ModelExported

A step never waits for the relay or the disk: see weight_publisher.py and checkpoint_writer.py. The
trainer's own book is synced before a step is reported, so that what was trained can be audited
against the log and the store.
"""

from __future__ import annotations

import asyncio
import json
import math
import time

import numpy as np
import torch
import transformers

from laminar import ids
from laminar.actors.book import Book
from laminar.actors.checkpoint_writer import CheckpointWriter
from laminar.actors.clients import RelayClient, StoreClient
from laminar.actors.disk_wait import DiskWait
from laminar.actors.host import Host
from laminar.actors.weight_publisher import WeightPublisher
from laminar.engines.protocol import LENGTH
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.ids import TrajectoryId
from laminar.rundir import EXPORT_DIR, TRAINER_BOOK_FILE
from laminar.storage import messages as store
from laminar.tasks.rewards import is_right, numbers_of
from laminar.tasks.tokenizer import load_tokenizer, tokenizer_size
from laminar.training.batching import TrainSample
from laminar.training.export import export_hf
from laminar.training.learner import Learner, StepResult
from laminar.training.metrics import by_origin
from laminar.training.mismatch import Origin
from laminar.training.model import LoadedPolicy, load_policy, named_weights
from laminar.weights import manifest as mf

PROBE_SEQUENCES, PROBE_LENGTH = 4, 16
"""Enough to show a wrong tensor (every layer and the head act on each token), cheap to score."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats. Equal weights differ by some 1e-6 in float32 and some 1e-2 in bfloat16 kernels."""


class Trainer:
    """Learner, store client and relay client of one trainer process."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.config = host.config
        self.device = torch.device(_device(self.config.trainer.device))
        disk_wait_s = self.config.coordinator.disk_wait_s
        self.store = StoreClient(host.client("store-0"), disk_wait_s)
        self.jobs: asyncio.Queue[tuple[cmd.Order, Command]] = asyncio.Queue()
        self.book = Book(host.run_dir / TRAINER_BOOK_FILE)
        self._book_disk = DiskWait(host, "the trainer's book")
        self._export_disk = DiskWait(host, "the model")
        self._waiting_from_ns = time.monotonic_ns()

    async def start(self) -> None:
        config = self.config
        torch.set_num_threads(config.trainer.threads)
        transformers.utils.logging.disable_progress_bar()  # its lines would tear the live panel
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.name)
        self.size = tokenizer_size(tokenizer)
        policy = await asyncio.to_thread(self._load, config.model.name)
        reference = None
        if config.algorithm.use_kl_loss:
            reference = await asyncio.to_thread(self._load, config.model.name)
        total = config.trainer.total_training_steps
        self.learner = Learner(config, policy, reference=reference, total_steps=total)
        self.probe_ids = _probe_sequences(policy.vocab_limit)
        await self.store.start()
        self.publisher = self._make_publisher(policy)
        await self.publisher.start()
        specs = self.publisher.specs
        self.checkpoints = CheckpointWriter(self.host, policy.model, specs, self._probe)
        self.host.spawn(self._work())
        parameters = sum(t.numel() for _, t in named_weights(policy.model))
        weights_bytes = self.publisher.version_bytes
        ready = ev.TrainerReady(num_parameters=parameters, weights_bytes=weights_bytes)
        self.host.emit(ready, parameters=parameters)

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        for order in orders:
            self.jobs.put_nowait(order)

    async def stop(self) -> None:
        await self.store.close()
        if hasattr(self, "publisher"):
            await self.publisher.close()
        if hasattr(self, "checkpoints"):
            await self.checkpoints.close()
        self.book.close()

    async def _work(self) -> None:
        """One job at a time, in the order of the commands."""
        while True:
            order, command = await self.jobs.get()
            now = time.monotonic_ns()
            self.host.span("waiting", self._waiting_from_ns, now)
            if isinstance(command, cmd.TrainStep):
                await self._train(order, command)
            elif isinstance(command, cmd.PublishWeights):
                await self.publisher.publish_owed(command.version, command.step)
            elif isinstance(command, cmd.ExportModel):
                await self._export(order, command)
            self._waiting_from_ns = time.monotonic_ns()

    # --- training -----------------------------------------------------------------------------

    async def _train(self, order: cmd.Order, command: cmd.TrainStep) -> None:
        started = time.monotonic_ns()
        rows = await self.store.fetch(command.trajectories, with_prompt=False)
        samples = [_sample(row) for row in rows]
        received = time.monotonic_ns()
        self.host.span("fetching", started, received, step=command.step)
        result = await asyncio.to_thread(self.learner.train_step, samples, command.step)
        done = time.monotonic_ns()
        self.host.span("busy", received, done, step=command.step)
        await self.publisher.publish(command.version, command.step + 1, order.cause)
        line = _book_line(command, result)
        await self._book_disk.until_room(lambda: asyncio.to_thread(self.book.enter, line))
        origins = by_origin(result.mismatch, result.reward_by_version)
        metrics = result.metrics | origins | {"timing_s/step": (done - started) / 1e9}
        completed = ev.StepCompleted(
            step=command.step,
            version=command.version,
            changed=result.changed,
            reason=result.skipped_reason or "",
            num_tokens=result.num_tokens,
            digest=result.digest,
            metrics=metrics,
            left_out=_left_out(result),
        )
        self.host.emit(
            completed, event_seq=order.cause, step=command.step + 1, version=command.version
        )
        await self.checkpoints.save_if_due(command.version, command.step + 1, order.cause)

    # --- publishing ---------------------------------------------------------------------------

    def _make_publisher(self, policy: LoadedPolicy) -> WeightPublisher:
        name = self.config.weights.dtype
        dtype = name if name != "auto" else _weights_dtype(self.device)
        self.tolerance = self.config.weights.probe_tolerance or PROBE_TOLERANCE[dtype]
        relay = RelayClient(self.host.client(ids.actor_name("relay", self.host.node, 0)))
        return WeightPublisher(self.host, relay, policy.model, dtype, self._probe)

    def _probe(self) -> mf.Probe:
        """What these weights say about a few fixed sequences: an engine must say the same."""
        scores = self.learner.score(self.probe_ids)
        return mf.Probe(
            sequences=tuple(tuple(s) for s in self.probe_ids),
            logprobs=tuple(tuple(s) for s in scores),
            tolerance=self.tolerance,
        )

    # --- exporting ----------------------------------------------------------------------------

    async def _export(self, order: cmd.Order, command: cmd.ExportModel) -> None:
        """Write the model, read it back, and publish what was read: that is what is evaluated."""
        directory = self.host.run_dir / EXPORT_DIR
        started = time.monotonic_ns()
        policy = self.learner.policy
        source = self.config.model.name
        await self._export_disk.until_room(
            lambda: asyncio.to_thread(export_hf, policy.model, source, directory)
        )
        reloaded = await asyncio.to_thread(self._load, str(directory))
        policy.model.load_state_dict(reloaded.model.state_dict())
        self.host.span("exporting", started, time.monotonic_ns())
        if not await self.publisher.publish_owed(command.version, command.step):
            raise RuntimeError("no slot of the relay became free for the export")
        exported = ev.ModelExported(version=command.version, path=str(directory))
        self.host.emit(exported, event_seq=order.cause, version=command.version)

    def _load(self, name: str) -> LoadedPolicy:
        return load_policy(name, self.device, tokenizer_size=self.size)


def _book_line(command: cmd.TrainStep, result: StepResult) -> bytes:
    """What was trained."""
    line = {
        "step": command.step,
        "version": command.version,
        "changed": result.changed,
        "digest": result.digest,
        "ids": list(command.trajectories),
        "left_out": list(result.left_out),
    }
    return json.dumps(line).encode()


def _left_out(result: StepResult) -> tuple[ev.LeftOut, ...]:
    """By origin; the wire has no number that is not finite."""
    rows: dict[Origin, list[TrajectoryId]] = {}
    for sample_id, origin in result.left_out.items():
        rows.setdefault(origin, []).append(TrajectoryId(sample_id))
    return tuple(
        ev.LeftOut(
            replica=replica,
            version=version,
            diff=suspect.diff if math.isfinite(suspect.diff) else -1.0,
            limit=suspect.limit,
            trajectories=tuple(rows[replica, version]),
        )
        for (replica, version), suspect in result.suspects.items()
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _weights_dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _probe_sequences(vocab_limit: int) -> list[list[int]]:
    """Fixed token ids, spread over the vocabulary by the hash that all choices use."""
    return [
        [ids.hash64("probe", s, i) % vocab_limit for i in range(PROBE_LENGTH)]
        for s in range(PROBE_SEQUENCES)
    ]


def _sample(row: store.Trajectory) -> TrainSample:
    """A stored trajectory as the learner takes it."""
    if row.score is None or row.temperature is None or row.version_step is None:
        raise RuntimeError(f"{row.trajectory_id} is in a batch but has no reward")
    truncated = row.finish_reason == LENGTH
    return TrainSample(
        sample_id=row.trajectory_id,
        group_id=row.group_id,
        prompt_ids=np.frombuffer(row.prompt_ids, dtype="<i4"),
        response_ids=np.frombuffer(row.tokens, dtype="<i4"),
        logprobs=np.frombuffer(row.logprobs, dtype="<f4"),
        reward=row.score,
        temperature=row.temperature,
        truncated=truncated,
        correct=is_right(row.score, truncated=truncated),
        weight_version=row.weight_version or 0,
        version_step=row.version_step,
        replica=row.replica or "",
        extras=numbers_of(row.extras),
    )
