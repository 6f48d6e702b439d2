"""The trainer actor: consumes batches, publishes weights, exports the model.

Reads   trajectories of the store by id; TrainStep, PublishWeights, ExportModel, SaveCheckpoint,
        LoadCheckpoint and RepeatStep commands
Writes  slots of the relay's arena, its book, checkpoints/, export/, all through ports
Emits   TrainerReady, StepCompleted, PublishSkipped, CheckpointSaved, ModelExported,
        CheckpointLoaded, StepRepeated

A step never waits for the relay or the disk: see weight_publisher.py and checkpoint_writer.py. The
trainer's own book is synced before a step is reported, so that an audit can compare what was
trained with the log and the store. A restarted trainer has the initial model of the run and reports
the existing checkpoints; the coordinator orders which to load and which steps to repeat.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from laminar.actors.batch_fetch import fetch_batch
from laminar.actors.checkpoint_writer import CheckpointWriter
from laminar.actors.disk_full_retry import DiskFullRetry, DiskStayedFull
from laminar.actors.model_files import ModelFiles, save_model
from laminar.actors.service_clients import RelayClient, StoreClient
from laminar.actors.weight_publisher import Attach, WeightPublisher
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import ids
from laminar.names.ids import TrajectoryId
from laminar.net.calls import RpcError
from laminar.run.directory import EXPORT_DIR, REFUSED_DIR
from laminar.storage import messages as store
from laminar.storage.contents import digest_batch
from laminar.training.steps import ModelLayout, Origin, StepResult, TrainSample, iter_contents
from laminar.training.trainer_state import CheckpointError, LearnerFacts, ResumeState
from laminar.weights.version import manifest as mf

if TYPE_CHECKING:
    from laminar.actors.host import Host

PROBE_SEQUENCES, PROBE_LENGTH, PROBE_PROMPTS = 8, 32, 32
"""Enough tokens for a steady mean (every layer and the head act on each), cheap to score."""
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats per token on average; measurements are in docs/weights.md."""
NO_PROBE = mf.Probe(sequences=((0, 0),), logprobs=((0.0,),), tolerance=1.0, mean_tolerance=1.0)
"""The probe of weights that are not published."""
ROUNDING = (
    "torch",
    "threads",
    "nodes",
    "ranks",
    "shard",
    "micro_batch_tokens",
    "logit_chunk_tokens",
    "functions",
    "prompts_once",
)
"""The facts of a checkpoint that determine whether a repeated step gives the same bytes."""
PROBE_OUTLIER = 10.0  #: factor by which a single token may exceed the tolerance


class TrainerModel(Protocol):
    """The model that is trained, and its optimizer."""

    async def load(self) -> ModelLayout:
        """Read the model; ConfigError."""

    async def check_weights(self, dtype: str | None) -> int:
        """Compare tensors with the model's files, without `dtype` not their values; ConfigError."""

    async def train_step(self, samples: Sequence[TrainSample], step: int) -> StepResult:
        """Consume one batch as training step `step` (from 0)."""

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of tokens 1..L-1 of each sequence with the present weights, nats."""

    async def reload_weights(self, directory: Path) -> None:
        """Replace the weights with those of an exported model."""

    def collect_facts(self) -> LearnerFacts:
        """Return the facts about the learner that a checkpoint records."""

    async def restore_checkpoint(self, directory: Path) -> ResumeState:
        """Restore a checkpoint; CheckpointError: damaged, ConfigError: another model's; OSError."""

    async def close(self) -> None:
        """End its other processes."""


class TrainingRecord(Protocol):
    """The record of what was trained, for audits of the run."""

    async def enter(self, line: bytes) -> None:
        """Append a line, durable on return; OSError: nothing of the line is left."""

    def close(self) -> None: ...


class Trainer:
    """Learner, store client and relay client of one trainer process."""

    def __init__(
        self,
        host: Host,
        learner: TrainerModel,
        attach: Attach,
        files: ModelFiles,
        book: TrainingRecord,
    ) -> None:
        """Create the actor; `attach`: maps its relay's arena, `files`: of the learner's model."""
        self.host, self.config = host, host.config
        self.learner, self.book = learner, book
        self._attach, self._files = attach, files
        disk_full_timeout_s = self.config.coordinator.disk_full_timeout_s
        self.store = StoreClient(host.make_client("store-0"), disk_full_timeout_s)
        self.jobs: asyncio.Queue[tuple[cmd.Envelope, Command]] = asyncio.Queue()
        self.publisher: WeightPublisher | None = None
        self.checkpoints: CheckpointWriter | None = None
        self._book_disk = DiskFullRetry(host, "the trainer's book")
        self._export_disk = DiskFullRetry(host, "the model")
        self._probed: mf.Probe | None = None  #: probe of the present weights, once computed
        self._waiting_from_ns = host.now_ns()

    async def start(self) -> None:
        layout = await self.learner.load()
        wanted = self.config.weights.dtype
        dtype = layout.engine_dtype if wanted == "auto" else wanted
        self.tolerance = self.config.weights.probe_tolerance or PROBE_TOLERANCE[dtype]
        specs = self._specs = mf.make_layout(layout.shapes, dtype)
        await self.store.start()
        relay = RelayClient(self.host.make_client(ids.actor_name("relay", self.host.node, 0)))
        self.publisher = WeightPublisher(self.host, relay, self._attach, specs, self._measure_probe)
        await self.publisher.start()
        self.probe_ids = probe_sequences(
            await self._sample_prompts(), self.config.max_model_len - 1
        )
        self.checkpoints = CheckpointWriter(
            self.host,
            self._files,
            specs,
            self._measure_probe,
            self.learner.collect_facts,
            self._remove_payloads,
        )
        self.host.spawn(self._run_jobs(self.publisher, self.checkpoints))
        parameters = sum(math.prod(shape) for _, shape in layout.shapes)
        found = await self.checkpoints.find_checkpoints()
        await check_weights(self.host, self.learner, None if found else dtype)
        ready = ev.TrainerReady(
            num_parameters=parameters,
            weights_bytes=mf.check_tensors(specs),
            checkpoints=tuple(map(self._describe_checkpoint, found, found.values())),
            functions=tuple(
                ev.TrainFunction(setting=setting, digest=digest)
                for setting, digest in self.learner.collect_facts().functions.items()
            ),
        )
        self.host.emit(ready, parameters=parameters, checkpoints=len(found), rows=layout.rows)

    def _describe_checkpoint(self, directory: Path, resume: ResumeState) -> ev.Checkpoint:
        return ev.Checkpoint(
            version=resume.version,
            step=resume.step,
            path=str(directory.relative_to(self.host.run_dir)),
            digest=resume.digest,
        )

    async def _sample_prompts(self) -> tuple[bytes, ...]:
        """Return some prompts of the run, waiting for the store to read them.

        coordinator.start_timeout_s is the deadline of both.
        """
        while True:
            try:
                sample = store.SamplePrompts(count=PROBE_PROMPTS)
                return (await self.store.send_request(sample, store.SamplePromptsReply)).prompts
            except TimeoutError:
                self.host.log.warning("no-prompts", reason="the store has not read the data yet")

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        for order in orders:
            self.jobs.put_nowait(order)

    async def stop(self) -> None:
        closing = [self.store.close()]
        if self.publisher is not None:
            closing.append(self.publisher.close())
        await asyncio.gather(*closing)  # each may wait for a server that is ending too
        if self.checkpoints is not None:
            await self.checkpoints.close()
        await self.learner.close()
        self.book.close()

    async def _run_jobs(self, publisher: WeightPublisher, checkpoints: CheckpointWriter) -> None:
        """Run one job at a time, in the order of the commands."""
        while True:
            order, command = await self.jobs.get()
            self.host.record_span("waiting", self._waiting_from_ns, self.host.now_ns())
            async with checkpoints.job_lock:
                self._probed = None  # each job may change the weights before it needs a probe
                if isinstance(command, cmd.TrainStep):
                    result, contents, seconds = await self._train_step(command)
                    checkpoints.record_batch(command.trajectories)
                    done = command.version, command.step_index + 1, order.cause
                    await publisher.publish_or_skip(*done)
                    await self.host.hit_failpoint("trainer-copy")
                    line = _book_line(command, result, contents, self.host.incarnation)
                    await self._report_step(order, command, result, line, seconds)
                    await checkpoints.save_if_due(*done)
                elif isinstance(command, cmd.PublishWeights):
                    await publisher.publish_owed(command.version, command.step)
                elif isinstance(command, cmd.ExportModel):
                    await self._export_model(order, command, publisher)
                elif isinstance(command, cmd.SaveCheckpoint):
                    await checkpoints.save(command.version, command.step, order.cause)
                elif isinstance(command, cmd.LoadCheckpoint):
                    await self._load_checkpoint(order, command, checkpoints)
                elif isinstance(command, cmd.RepeatStep):
                    await self._repeat_step(order, command, checkpoints)
            self._waiting_from_ns = self.host.now_ns()

    # --- training -----------------------------------------------------------------------------

    async def _train_step(self, command: cmd.TrainStep) -> tuple[StepResult, str, float]:
        """Train a batch; return the result, the digest of its content, and the seconds it took."""
        started = self.host.now_ns()
        await self.host.hit_failpoint("trainer-fetch")
        samples = await fetch_batch(self.store, command)
        received = self.host.now_ns()
        self.host.record_span("fetching", started, received, step=command.step_index)
        contents = digest_batch(iter_contents(samples))
        step = asyncio.ensure_future(self.learner.train_step(samples, command.step_index))
        await asyncio.sleep(0)  # it begins
        await self.host.hit_failpoint("trainer-step")
        result = await step
        await self.host.hit_failpoint("trainer-optimizer")
        done = self.host.now_ns()
        self.host.record_span("busy", received, done, step=command.step_index)
        return result, contents, (done - started) / 1e9

    async def _report_step(
        self,
        order: cmd.Envelope,
        command: cmd.TrainStep,
        result: StepResult,
        line: bytes,
        seconds: float,
    ) -> None:
        """Write a step into the book, then report it to the coordinator."""
        await self._book_disk.until_room(lambda: self.book.enter(line))
        await self.host.hit_failpoint("trainer-book")
        completed = ev.StepCompleted(
            step_index=command.step_index,
            version=command.version,
            changed=result.changed,
            reason=result.skipped_reason or "",
            num_tokens=result.num_tokens,
            digest=result.digest,
            metrics=result.metrics | {"timing_s/step": seconds},
            left_out=_left_out(result),
            nonfinite_updates=result.nonfinite_updates,
        )
        self.host.emit(
            completed, event_seq=order.cause, step=command.step_index + 1, version=command.version
        )

    async def _measure_probe(self) -> mf.Probe:
        """Return the log-probs of these weights for prompts of the run, which engines must match.

        The version and the checkpoint of a step have the same weights, which are scored once.
        """
        if self._probed is None:
            scores = await self.learner.compute_logprobs(self.probe_ids)
            self._probed = make_probe(self.probe_ids, scores, self.tolerance)
        return self._probed

    async def _remove_payloads(self, before_step: int) -> None:
        """Remove payloads beyond store.payload_gb; no earlier step can have to be repeated."""
        keep_gb = self.config.store.payload_gb
        if not keep_gb:
            return
        try:
            removed = await self.store.remove_payloads(before_step, int(keep_gb * 1e9))
        except (RpcError, TimeoutError) as error:  # the next checkpoint does it
            self.host.log.warning("payloads-not-removed", reason=str(error))
        else:
            self.host.log.info("payloads-removed", before_step=before_step, removed=removed)

    # --- recovery -----------------------------------------------------------------------------

    async def _load_checkpoint(
        self, order: cmd.Envelope, command: cmd.LoadCheckpoint, checkpoints: CheckpointWriter
    ) -> None:
        """Restore a checkpoint; set a damaged one aside, so that a restart uses an older."""
        await self.host.hit_failpoint("trainer-load")
        path, started = self.host.run_dir / command.path, self.host.now_ns()
        disk = DiskFullRetry(self.host, f"checkpoint {command.path}", "read")
        try:
            resume = await disk.until_room(lambda: self.learner.restore_checkpoint(path))
        except (CheckpointError, DiskStayedFull) as error:
            with suppress(OSError):
                await self._files.rename(path, self.host.run_dir / REFUSED_DIR / path.name)
            raise CheckpointError(str(error)) from error
        present = self.learner.collect_facts()
        differ = [n for n in ROUNDING if getattr(resume.learner, n) != getattr(present, n)]
        if differ:
            self.host.log.warning("rounding-may-differ", path=command.path, reason=differ)
        await checkpoints.resume_from(resume, command.kept)
        self.host.record_span("loading", started, self.host.now_ns(), step=command.step)
        loaded = ev.CheckpointLoaded(version=command.version, step=command.step)
        self.host.emit(loaded, event_seq=order.cause, path=command.path)

    async def _repeat_step(
        self, order: cmd.Envelope, command: cmd.RepeatStep, checkpoints: CheckpointWriter
    ) -> None:
        """Repeat a logged step and report its digest, without publishing it or a book entry."""
        started = self.host.now_ns()
        result = await self.learner.train_step(
            await fetch_batch(self.store, command), command.step_index
        )
        checkpoints.record_batch(command.trajectories)
        checkpoints.save_often()
        described = await self._files.build_manifest(
            await self._files.copy(),
            version=command.version,
            step=result.step + 1,
            specs=self._specs,
            probe=NO_PROBE,
        )
        await self.host.hit_failpoint("trainer-repeat")
        self.host.record_span("repeating", started, self.host.now_ns(), step=command.step_index)
        if command.digest not in ("", described.digest):
            self.host.log.warning("repeat-differs", step=command.step_index + 1)
        repeated = ev.StepRepeated(
            step_index=command.step_index,
            version=command.version,
            digest=described.digest,
            published=command.digest,
        )
        self.host.emit(repeated, event_seq=order.cause, step=command.step_index + 1)

    # --- exporting ----------------------------------------------------------------------------

    async def _export_model(
        self, order: cmd.Envelope, command: cmd.ExportModel, publisher: WeightPublisher
    ) -> None:
        """Write the model, read it back and publish the result, which is then evaluated."""
        directory = self.host.run_dir / EXPORT_DIR
        started = self.host.now_ns()
        await self.host.hit_failpoint("trainer-export")
        await self._export_disk.until_room(lambda: save_model(self._files, directory))
        await self.learner.reload_weights(directory)
        self.host.record_span("exporting", started, self.host.now_ns())
        if not await publisher.publish_owed(command.version, command.step):
            raise RuntimeError("no slot of the relay became free for the export")
        exported = ev.ModelExported(version=command.version, path=str(directory))
        self.host.emit(exported, event_seq=order.cause, version=command.version)


async def check_weights(host: Host, learner: TrainerModel, dtype: str | None) -> None:
    """Compare what is published with the model's files: of a new run the values, too."""
    started = host.now_ns()
    if tensors := await learner.check_weights(dtype):
        seconds = round((host.now_ns() - started) / 1e9, 2)
        compared = "names and shapes" if dtype is None else f"values in {dtype}"
        host.log.info("weights-match", tensors=tensors, compared=compared, seconds=seconds)


def _book_line(
    command: cmd.TrainStep, result: StepResult, contents: str, incarnation: int
) -> bytes:
    """Return the book's line on a step: what was trained, and by which process."""
    line = {
        "incarnation": incarnation,
        "step": command.step_index,
        "version": command.version,
        "changed": result.changed,
        "digest": result.digest,
        "contents": contents,
        "ids": list(command.trajectories),
        "left_out": list(result.left_out),
    }
    return json.dumps(line).encode()


def _left_out(result: StepResult) -> tuple[ev.ExcludedRows, ...]:
    """Return excluded trajectories by origin; those of several suspects appear under each."""
    rows: dict[Origin, list[TrajectoryId]] = {}
    for sample_id, origins in result.left_out.items():
        for origin in origins:
            rows.setdefault(origin, []).append(TrajectoryId(sample_id))
    return tuple(
        ev.ExcludedRows(
            replica=replica,
            version=version,
            diff=suspect.diff,
            limit=suspect.limit,
            trajectories=tuple(rows[replica, version]),
        )
        for (replica, version), suspect in result.suspects.items()
    )


def make_probe(
    sequences: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], tolerance: float
) -> mf.Probe:
    """Build a probe; `scores`: the learner's log-probs; `tolerance`: mean nats per token."""
    return mf.Probe(
        sequences=tuple(tuple(s) for s in sequences),
        logprobs=tuple(tuple(s) for s in scores),
        tolerance=tolerance * PROBE_OUTLIER,
        mean_tolerance=tolerance,
    )


def probe_sequences(prompts: Sequence[bytes], longest: int) -> list[list[int]]:
    """Return text of the run: its prompts, concatenated and cut into equal pieces.

    The text is repeated if it is too short: a piece needs two tokens, and there may be a single
    prompt of one.
    """
    text = [token for ids in prompts for token in np.frombuffer(ids, "<i4").tolist()] or [0]
    length = min(PROBE_LENGTH, longest)
    text *= -(-2 // len(text))
    starts = range(0, min(len(text), PROBE_SEQUENCES * length), length)
    pieces = [text[start : start + length] for start in starts]
    return [piece for piece in pieces if len(piece) > 1]
