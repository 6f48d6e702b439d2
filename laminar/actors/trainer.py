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
import time
from collections.abc import Sequence

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

PROBE_SEQUENCES, PROBE_LENGTH, PROBE_PROMPTS = 8, 32, 32
"""Enough tokens for a steady mean (every layer and the head act on each), cheap to score."""
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats per token on average; what was measured is in docs/weights.md."""
PROBE_OUTLIER = 10.0
"""How many times the tolerance one token may be off."""


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
        await self.store.start()
        self.publisher = self._make_publisher(policy)
        await self.publisher.start()
        self.probe_ids = probe_sequences(await self._prompts(), config.max_model_len - 1)
        specs = self.publisher.specs
        self.checkpoints = CheckpointWriter(self.host, policy.model, specs, self._probe)
        self.host.spawn(self._work())
        parameters = sum(t.numel() for _, t in named_weights(policy.model))
        weights_bytes = self.publisher.version_bytes
        ready = ev.TrainerReady(num_parameters=parameters, weights_bytes=weights_bytes)
        self.host.emit(ready, parameters=parameters)

    async def _prompts(self) -> tuple[bytes, ...]:
        """Some of the run's. The store may take long to read them: coordinator.start_timeout_s is
        the deadline of both."""
        while True:
            try:
                sample = store.SamplePrompts(count=PROBE_PROMPTS)
                return (await self.store.ask(sample, store.SamplePromptsReply)).prompts
            except TimeoutError:
                self.host.log.warning("no-prompts", reason="the store has not read the data yet")

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        for order in orders:
            self.jobs.put_nowait(order)

    async def stop(self) -> None:
        closing = [self.store.close()]
        if hasattr(self, "publisher"):
            closing.append(self.publisher.close())
        await asyncio.gather(*closing)  # each may wait for a server that ends as well
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
        """What these weights say about text of the run's prompts: an engine must say the same."""
        return probe_of(self.learner, self.probe_ids, self.tolerance)

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
    """By origin."""
    rows: dict[Origin, list[TrajectoryId]] = {}
    for sample_id, origin in result.left_out.items():
        rows.setdefault(origin, []).append(TrajectoryId(sample_id))
    return tuple(
        ev.LeftOut(
            replica=replica,
            version=version,
            diff=suspect.diff,
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


def probe_of(learner: Learner, sequences: Sequence[Sequence[int]], tolerance: float) -> mf.Probe:
    """The scores of the learner's weights; `tolerance`: nats per token on average."""
    return mf.Probe(
        sequences=tuple(tuple(s) for s in sequences),
        logprobs=tuple(tuple(s) for s in learner.score(sequences)),
        tolerance=tolerance * PROBE_OUTLIER,
        mean_tolerance=tolerance,
    )


def probe_sequences(prompts: Sequence[bytes], longest: int) -> list[list[int]]:
    """Text that the run is about: its prompts one after the other, cut into equal pieces.

    As often as it takes: a piece needs two tokens, and there may be one prompt of one.
    """
    text = [token for ids in prompts for token in np.frombuffer(ids, "<i4").tolist()] or [0]
    length = min(PROBE_LENGTH, longest)
    text *= -(-2 // len(text))
    starts = range(0, min(len(text), PROBE_SEQUENCES * length), length)
    pieces = [text[start : start + length] for start in starts]
    return [piece for piece in pieces if len(piece) > 1]


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
