"""What a trainer has of the world, in virtual time: learner, memory of its relay, files, its book.

Reads   samples of the store; faults
Writes  weights of some bytes, the book and the directories of models, which outlive the process
Gives   the ports of actors/trainer.py, actors/model_files.py and actors/weight_publisher.py

Weights follow from the weights before, the optimizer's moment, and the ids of the batch in their
order, so their digest says what they have seen.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from laminar.actors.host import Host
from laminar.actors.trainer import Trainer
from laminar.rundir import RESUME_FILE
from laminar.sim.models.idle import Idle
from laminar.sim.models.versions import PROBE_LOGPROB, SHAPES, weights_of
from laminar.sim.runtime.violation import Violation
from laminar.training import steps
from laminar.training.resume import CheckpointError, LearnerFacts, Resume, decode
from laminar.weights.arena.region import ArenaError
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, manifest_of

LAYOUT = steps.ModelLayout(SHAPES, "float32")
UNCHANGED = 0.1
"""Share of steps without signal: they publish the weights of the step before under a new number."""
MOMENT_CHARS = 66
"""A moment remembers two batches."""
COPY_S, SAVE_S, SYNC_S, LINE_S = 0.1, 0.2, 0.3, 0.01


@dataclass(slots=True)
class ModelDirectory:
    """What lies in a directory of the shared disk, and survives whoever wrote it."""

    weights: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    moment: str = ""  #: of the optimizer; empty: it is not there
    extra: Mapping[str, bytes] = field(default_factory=dict)
    synced: bool = True


class Copied(NamedTuple):
    """What a checkpoint is made of."""

    weights: Bytes
    moment: str


class SimTrainer(Idle):
    """The learner, and what else a trainer asks for."""

    def make_actor(self, host: Host) -> Trainer:
        self.name = self.moment = "w0"
        self.step = 0  #: how many they have seen
        self._boot = host.boot_id
        self._refused = False  #: the last write
        self._written = -1  #: the same of those that were put into a slot last
        files = SimModelFiles(self)
        return Trainer(host, self, partial(SimSlotWriter, self), files, SimBook(self))

    async def load(self) -> steps.ModelLayout:
        await self.work(self.chance.uniform(0, self.scenario.start_s))
        self._made(self.weights)
        return LAYOUT

    async def train_step(self, samples: Sequence[steps.TrainSample], step: int) -> steps.StepResult:
        self.world.checks.training.batch_fetched(step, samples)
        known = self.world.outcomes.get(digest := steps.ids_digest(samples))
        duration = self.scenario.train_s * self.chance.uniform(0.5, 1.5)
        await self.work(duration + self.world.faults.long_step_s())
        suspects, reason = known or self._outcome(samples)
        self.world.outcomes[digest] = suspects, reason
        left_out = steps.sampled_by(samples, suspects)
        self.step = step + 1
        if reason is None:
            self.moment = f"{self.moment} {digest}"[-MOMENT_CHARS:]
            self.name = xxhash.xxh3_64_hexdigest(f"{self.name} {self.moment}".encode())
        self._made(self.weights)
        return steps.StepResult(
            step=step,
            updates=(steps.Update((), reason, 0.0, 0.0, None),),
            metrics={},
            mismatch={},
            suspects=suspects,
            left_out=left_out,
            num_tokens=sum(len(s.response_ids) for s in samples),
            digest=digest,
        )

    def _outcome(
        self, samples: Sequence[steps.TrainSample]
    ) -> tuple[dict[steps.Origin, steps.Suspect], str | None]:
        """Of a batch that is trained the first time; it follows from the batch ever after."""
        origins = dict.fromkeys(steps.origin_of(span) for s in samples for span in s.spans)
        suspects = {o: steps.Suspect(1.0, 0.5) for o in origins if self._differs()}
        left_out = steps.sampled_by(samples, suspects)
        reason = steps.NO_SIGNAL if self.chance.random() < UNCHANGED else None
        return suspects, steps.MISMATCH if len(left_out) == len(samples) else reason

    @property
    def weights(self) -> Bytes:
        return weights_of(self.name)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[PROBE_LOGPROB] * (len(sequence) - 1) for sequence in sequences]

    async def reload(self, directory: Path) -> None:
        """It is what was written just now, as the digest of what is published then says."""
        await self.work(SAVE_S)

    async def restore(self, directory: Path) -> Resume:
        await self.work(SAVE_S)
        found = self.world.models.get(str(directory))
        if found is None and str(directory) in self.world.checks.training.lost:
            raise CheckpointError(f"{directory} is not there")
        if found is None or not found.moment:
            raise Violation("saved_is_whole", f"{directory} is loaded, and is not there")
        resume = decode(found.extra[RESUME_FILE])
        self.moment, self.step = found.moment, resume.step
        self.name = self.world.names[found.weights.tobytes()]
        self._made(self.weights)
        return resume

    def facts(self) -> LearnerFacts:
        return LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})

    def content(self) -> Bytes:
        """What goes into a slot; the same weights once more may, as a fault, be other bytes."""
        self.world.checks.training.handed_over(self._boot)
        again, self._written = self._written == self.step, self.step
        if again and self.world.faults.publish_differs():
            other = weights_of(f"{self.name}-other")
            self.world.checks.training.made_other(self.step, other)
            return other
        return self.weights

    async def work(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.process.slow)

    def refuse_if_full(self) -> None:
        """As a fault, a disk has no room for a write, and has it again for the next."""
        self._refused = not self._refused and self.world.faults.trainers_disk_is_full()
        if self._refused:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _differs(self) -> bool:
        return self.world.faults.engine_differs()

    def _made(self, weights: Bytes) -> None:
        self.world.names[weights.tobytes()] = self.name
        self.world.checks.training.made(self.step, weights)


class SimSlotWriter:
    """An arena that the trainer has mapped."""

    def __init__(self, trainer: SimTrainer, path: str) -> None:
        self.path, self._trainer = path, trainer
        if path not in trainer.world.arenas:
            raise ArenaError(f"{path} is not there")
        self._arena = trainer.world.arenas[path]

    async def prepare(self, slot: int) -> None:
        """Memory may, as a fault, come late, and then be too little."""
        if self._trainer.world.faults.publish_fails():
            await self._trainer.work(2 * self._trainer.scenario.train_s)
            raise ArenaError("there is no memory for the slot")

    async def write(self, slot: int, specs: tuple[mf.TensorSpec, ...]) -> None:
        """Half of it at once, and the rest when the copy is over."""
        content, view = self._trainer.content(), self._arena.slot(slot)
        half, end = len(content) // 2, len(content)
        view[:half] = content[:half]
        await self._trainer.work(COPY_S)
        view[half:end] = content[half:]

    def close(self) -> None:
        """Nobody waits for its memory."""


class SimModelFiles:
    """The directories of models, by path."""

    def __init__(self, trainer: SimTrainer) -> None:
        self._trainer, self._models = trainer, trainer.world.models

    async def copy(self) -> Copied:
        copied = Copied(self._trainer.weights, self._trainer.moment)
        await self._trainer.work(COPY_S)
        return copied

    async def describe(self, weights: Copied, *, specs: Any, **facts: Any) -> mf.Manifest:
        return manifest_of(weights.weights, tensors=specs, **facts)

    async def begin(self, directory: Path) -> Path:
        partial = directory.with_name(f".{directory.name}.partial")
        self._models[str(partial)] = ModelDirectory()
        return partial

    async def write(
        self, directory: Path, copied: Copied | None, extra: Mapping[str, bytes]
    ) -> None:
        await self._trainer.work(SAVE_S)
        self._trainer.refuse_if_full()
        weights, moment = copied or Copied(self._trainer.weights, "")
        self._models[str(directory)] = ModelDirectory(weights, moment, extra, synced=False)

    async def sync(self, directory: Path) -> None:
        await self._trainer.work(SYNC_S)
        self._models[str(directory)].synced = True

    async def rename(self, directory: Path, name: Path) -> None:
        """whole_under_its_name: whoever finds it, after whatever death, may read all of it."""
        if str(directory) not in self._models:
            raise FileNotFoundError(errno.ENOENT, f"there is no {directory}")
        found = self._models[str(name)] = self._models.pop(str(directory))
        if not found.synced:
            raise Violation("whole_under_its_name", f"{name} is not on the disk yet")

    async def found(self, parent: Path, name: str) -> dict[Path, bytes]:
        paths = {Path(path): model for path, model in self._models.items()}
        return {
            path: model.extra[name]
            for path, model in paths.items()
            if path.parent == parent and not path.name.startswith(".") and name in model.extra
        }

    async def remove(self, directory: Path) -> None:
        if self._models.pop(str(directory), None) is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no {directory}")


class SimBook:
    """The trainer's book: a line is in it as a whole, or not at all."""

    def __init__(self, trainer: SimTrainer) -> None:
        self._trainer = trainer

    async def enter(self, line: bytes) -> None:
        await self._trainer.work(self._trainer.chance.uniform(0, LINE_S))
        self._trainer.refuse_if_full()
        self._trainer.world.checks.training.booked(json.loads(line))
        await self._trainer.work(LINE_S)

    def close(self) -> None:
        """Every line of it is on the disk."""
