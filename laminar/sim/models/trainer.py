"""The trainer's model: takes its time for a batch, keeps its own book, publishes versions.

Reads   rows of the store; TrainStep, PublishWeights, ExportModel commands
Emits   TrainerReady, StepCompleted, PublishSkipped, ModelExported, CheckpointSaved
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.ids import TrajectoryId
from laminar.sim.models import relay as r
from laminar.sim.models import store as s
from laminar.sim.models.idle import Idle
from laminar.sim.scenario import seconds
from laminar.storage.rules import Row

SLOT_POLL_NS = seconds(0.05)
EXPORT_S = 1.0
SAVE_S = 0.5
UNCHANGED = 0.1
"""Share of steps without signal: they publish the weights of the step before under a new number."""


class Checkpoint(NamedTuple):
    """What lies in a directory of the shared disk."""

    version: int
    step: int
    digest: str


class Trainer(Idle):
    """One job at a time, in the order of the commands."""

    def start(self) -> None:
        self.jobs: deque[Command] = deque()
        self.busy = True
        self.slot = -1
        self.asking = False
        self.digest = "w0"
        self._left_out: tuple[TrajectoryId, ...] = ()  #: of the batch that was trained last
        self._other = ""  #: added to the digest when the weights are handed over with other bytes
        self._relay, self._store = "relay-0", "store-0"
        self.process.compute(self.chance.uniform(0, self.scenario.start_s), self._loaded)

    def _loaded(self) -> None:
        self._with_slot(self._ready)

    def _ready(self) -> None:
        self.process.emit(ev.TrainerReady(num_parameters=1, weights_bytes=4))
        self._next()

    def handle(self, order: cmd.Order, command: Command) -> None:
        self.jobs.append(command)
        if not self.busy:
            self._next()

    def _next(self) -> None:
        self.busy = bool(self.jobs)
        if not self.jobs:
            return
        command = self.jobs.popleft()
        if isinstance(command, cmd.TrainStep):
            request = s.Fetch(tuple(command.trajectories))
            self.process.client.call(self._store, request, lambda rows: self._train(command, rows))
        elif isinstance(command, cmd.PublishWeights):
            self._other = "-other" if self.world.faults.publish_differs() else ""
            self._publish_somehow(command.version, command.step, self._told_done)
        elif isinstance(command, cmd.ExportModel):
            self.process.compute(EXPORT_S, self._export, command)

    def _told_done(self) -> None:
        self._other = ""
        self._next()

    # --- training -----------------------------------------------------------------------------

    def _train(self, command: cmd.TrainStep, rows: tuple[Row, ...]) -> None:
        self.world.checks.batch_fetched(command, rows)
        duration = self.scenario.train_s * self.chance.uniform(0.5, 1.5)
        duration += self.world.faults.long_step_s()
        self.process.compute(duration, self._trained, command)

    def _trained(self, command: cmd.TrainStep) -> None:
        self._left_out = tuple(
            row for row in command.trajectories if self.world.faults.engine_differs()
        )
        all_left_out = len(self._left_out) == len(command.trajectories)
        changed = self.chance.random() >= UNCHANGED and not all_left_out
        if changed:
            self.digest = f"w{command.step + 1}"
        if self.slot >= 0 and not self.world.faults.publish_fails():
            self._publish(
                command.version,
                command.step + 1,
                lambda: self._completed(command, changed),
                lambda: self._skipped(command, changed),
            )
        else:
            self._skipped(command, changed)

    def _skipped(self, command: cmd.TrainStep, changed: bool) -> None:
        skipped = ev.PublishSkipped(
            version=command.version, step=command.step + 1, reason="no slot was free"
        )
        self.process.emit(skipped)
        self._completed(command, changed)

    def _completed(self, command: cmd.TrainStep, changed: bool) -> None:
        left_out = self._left_out
        self.world.checks.trained(command, left_out)
        completed = ev.StepCompleted(
            step=command.step,
            version=command.version,
            changed=changed,
            reason="" if changed else "no signal",
            num_tokens=len(command.trajectories),
            digest=self.digest,
            metrics={},
            left_out=(
                *(
                    ev.LeftOut(replica="rollout-0", version=0, diff=1.0, limit=0.5, trajectories=p)
                    for p in (left_out[::2], left_out[1::2])
                    if p
                ),
            ),
        )
        self.process.emit(completed)
        freq, step = self.scenario.save_freq, command.step + 1
        if freq and step % freq == 0:
            weights = Checkpoint(command.version, step, self.digest)
            self.world.checks.made(command.version, self.digest)
            self.process.compute(SAVE_S, self._saved, f"checkpoints/step_{step}", weights)
        self._next()

    def _saved(self, path: str, weights: Checkpoint) -> None:
        """What is on disk stays there, whoever dies; the oldest make room."""
        disk = self.world.checkpoints
        disk[path] = weights
        keep = self.scenario.max_ckpt_to_keep or len(disk)
        while len(disk) > keep:
            del disk[next(iter(disk))]
        kept = tuple(checkpoint.version for checkpoint in disk.values())
        saved = ev.CheckpointSaved(version=weights.version, step=weights.step, path=path, kept=kept)
        self.process.emit(saved)

    def _export(self, command: cmd.ExportModel) -> None:
        def published() -> None:
            self.process.emit(ev.ModelExported(version=command.version, path="export"))
            self._next()

        self._publish_somehow(command.version, command.step, published)

    # --- slots --------------------------------------------------------------------------------

    def _publish_somehow(self, version: int, step: int, then: Callable[[], None]) -> None:
        """Again if the relay has died with the slot."""

        def again() -> None:
            self._publish_somehow(version, step, then)

        self._with_slot(lambda: self._publish(version, step, then, again))

    def _publish(
        self, version: int, step: int, then: Callable[[], None], refused: Callable[[], None]
    ) -> None:
        commit = r.Commit(self.slot, version, step, self.digest + self._other)
        self.world.checks.made(version, commit.digest)
        self.slot = -1

        def committed(taken: bool) -> None:
            self._ask_slot()
            (then if taken else refused)()

        self.process.client.call(self._relay, commit, committed)

    def _with_slot(self, then: Callable[[], None]) -> None:
        """Call once a slot is granted."""
        if self.slot >= 0:
            return then()
        self._ask_slot()
        self.process.after(SLOT_POLL_NS, self._with_slot, then)

    def _ask_slot(self) -> None:
        """Ask for the next slot until it is granted."""
        if self.asking or self.slot >= 0:
            return
        self.asking = True
        self.process.client.call(self._relay, r.Grant(), self._granted)

    def _granted(self, slot: int) -> None:
        self.asking, self.slot = False, slot
        if slot < 0:
            self.process.after(SLOT_POLL_NS, self._ask_slot)
