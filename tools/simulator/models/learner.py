"""The trainer's learner in virtual time.

Reads   samples of the store, directories of models; faults
Gives   SimTrainer: the port of actors/trainer.py, and the actor over it and over its machine

Weights are a function of the weights before, the optimizer's moment and the ordered ids of the
batch, so their digest identifies the training history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import xxhash

from laminar.actors.host import Host
from laminar.actors.trainer import Trainer
from laminar.run.directory import RESUME_FILE
from laminar.storage.rules import Row
from laminar.training import steps
from laminar.training.trainer_state import CheckpointError, LearnerFacts, ResumeState, decode
from laminar.weights.version.hashes import Bytes
from tools.simulator.machine.memory import Arenas, SimSlotWriter
from tools.simulator.machine.model_files import SAVE_S, Copied, SimBook, SimModelFiles, TrainersDisk
from tools.simulator.machine.versions import PROBE_LOGPROB, SHAPES, ModelDirectory, weights_of
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.runtime.violation import Violation

LAYOUT = steps.ModelLayout(SHAPES, "float32")
UNCHANGED = 0.1
"""Share of steps without signal: they publish the weights of the step before under a new number."""
PASS_S = 5.0  #: longest pass of a model
MOMENT_CHARS = 66  #: length of a moment, which remembers two batches


class Lineage:
    """Results of earlier learners, which a restarted learner must reach again."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}  #: names of all weights that trainers had, by their bytes
        #: suspects of a batch, and why it changed nothing, by digest of the ids
        self.outcomes: dict[str, tuple[dict[steps.Origin, steps.MismatchSource], str | None]] = {}


class SimTrainer(Idle):
    """The learner, and the other parts that a trainer needs."""

    def __init__(
        self,
        process: SimProcess,
        arenas: Arenas,
        models: dict[str, ModelDirectory],
        lineage: Lineage,
        rows: Mapping[str, Row],
    ) -> None:
        super().__init__(process)
        self._arenas, self._models, self._lineage, self._rows = arenas, models, lineage, rows

    def make_actor(self, host: Host) -> Trainer:
        self.name = self.moment = "w0"
        self.step = 0  #: steps that the weights have been trained for
        self._boot = host.boot_id
        self._written = -1  #: step of the weights written to a slot last
        disk = TrainersDisk(self.process)
        files = SimModelFiles(disk, self._models, lambda: Copied(self.weights, self.moment))
        writer = partial(SimSlotWriter, self.process, self._arenas, self.content)
        return Trainer(host, self, writer, files, SimBook(disk, self.chance))

    async def load(self) -> steps.ModelLayout:
        start_s = self.chance.uniform(0, self.scenario.world.start_s)
        await self.work(start_s + self.world.faults.long_load_s())
        self._made(self.weights)
        return LAYOUT

    async def check_weights(self, dtype: str | None) -> int:
        return 0  # there are no files

    async def train_step(self, samples: Sequence[steps.TrainSample], step: int) -> steps.StepResult:
        self.world.checks.training.batch_fetched(step, samples)
        self.world.checks.contents.handed(samples, self._reward_failed(samples))
        known = self._lineage.outcomes.get(digest := steps.ids_digest(samples))
        duration = self.scenario.config.emulation.train_s * self.chance.uniform(0.5, 1.5)
        if self.world.faults.trainer_hangs():
            self.world.checks.training.hung[self._boot] = None
            await asyncio.Event().wait()
        await self.work(duration + self.world.faults.long_step_s())
        suspects, reason = known or self._outcome(samples)
        self._lineage.outcomes[digest] = suspects, reason
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

    def _reward_failed(self, samples: Sequence[steps.TrainSample]) -> set[str]:
        """Return the samples whose reward function failed."""
        reasons = {s.sample_id: self._rows[s.sample_id].reward_reason for s in samples}
        return {name for name, reason in reasons.items() if reason not in (None, "", "ok")}

    def _outcome(
        self, samples: Sequence[steps.TrainSample]
    ) -> tuple[dict[steps.Origin, steps.MismatchSource], str | None]:
        """Draw the outcome of a batch; when repeated, the batch has the same outcome."""
        origins = dict.fromkeys(steps.get_origin(span) for s in samples for span in s.spans)
        suspects = {o: steps.MismatchSource(1.0, 0.5) for o in origins if self._differs()}
        left_out = steps.sampled_by(samples, suspects)
        reason = steps.NO_SIGNAL if self.chance.random() < UNCHANGED else None
        return suspects, steps.MISMATCH if len(left_out) == len(samples) else reason

    @property
    def weights(self) -> Bytes:
        return weights_of(self.name)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[PROBE_LOGPROB] * (len(sequence) - 1) for sequence in sequences]

    async def reload_weights(self, directory: Path) -> None:
        """Take time only: the directory was just written, and a later digest checks the weights."""
        await self.work(SAVE_S)

    async def close(self) -> None:
        """Do nothing: its ranks are a part of this process."""

    async def restore_checkpoint(self, directory: Path) -> ResumeState:
        await self.work(SAVE_S)
        found = self._models.get(str(directory))
        if found is None and str(directory) in self.world.checks.training.lost:
            raise CheckpointError(f"{directory} does not exist")
        if found is not None and found.damaged:
            raise CheckpointError(f"{directory} is damaged")
        if found is None or not found.moment:
            raise Violation("saved_is_whole", f"{directory} is loaded, but does not exist")
        resume = decode(found.extra[RESUME_FILE])
        self.moment, self.step = found.moment, resume.step
        self.name = self._lineage.names[found.weights.tobytes()]
        self._made(self.weights)
        return resume

    def collect_facts(self) -> LearnerFacts:
        return LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})

    def content(self) -> Bytes:
        """Return the bytes for a slot; as a fault, the same weights may differ when repeated."""
        self.world.checks.training.handed_over(self._boot)
        again, self._written = self._written == self.step, self.step
        if again and self.world.faults.publish_differs():
            other = weights_of(f"{self.name}-other")
            self.world.checks.training.made_other(self.step, other)
            return other
        return self.weights

    async def work(self, duration_s: float) -> None:
        """Pass the time of a piece of work, of which a long one consists of many."""
        while duration_s > 0:
            await asyncio.sleep(min(duration_s, PASS_S) * self.process.slow)
            duration_s -= PASS_S
            self.process.current.count_work()

    def _differs(self) -> bool:
        return self.world.faults.engine_differs()

    def _made(self, weights: Bytes) -> None:
        self._lineage.names[weights.tobytes()] = self.name
        self.world.checks.training.made(self.step, weights)
