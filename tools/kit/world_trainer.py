"""The trainer of the test world: it trains, publishes, saves, and continues after a loss.

Reads   TrainStep, PublishWeights, ExportModel, LoadCheckpoint, RepeatStep
Gives   Trainers, a base of World
"""

from __future__ import annotations

import random

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Settings
from laminar.names import ids
from laminar.names.ids import TrajectoryId
from tools.kit.world_faults import FaultyProcesses
from tools.kit.world_parts import Process, Publish, Save, step_completed


class Trainers(FaultyProcesses):
    """Successive processes of the trainer, each of which must agree with those before it."""

    settings: Settings
    step_of: dict[int, int]
    saved: dict[int, tuple[tuple[str, ...], ...]]
    rounding_of: dict[int, str]
    consumed: dict[int, list[str]]

    def _do_PublishWeights(self, process: Process, command: cmd.PublishWeights, _: int) -> None:
        self._publish(Publish(command.version, command.step, process.rounding))

    def _publish(self, item: Publish) -> None:
        """Publish to the relay of the trainer's machine; a lost relay loses the weights."""
        version, step = item.version, item.step
        self.step_of[version] = step
        digest = f"d{step}{item.rounding}"
        event = ev.WeightsPublished(version=version, step=step, digest=digest, num_bytes=4, held=())
        self.later(self.processes["relay-0"], self.random.uniform(0.01, 0.3), event)

    def _checkpoints(self) -> tuple[ev.Checkpoint, ...]:
        """Return the checkpoints on the disk, as they describe themselves."""
        return tuple(
            ev.Checkpoint(
                version=version,
                step=len(batches),
                path=f"checkpoints/step_{len(batches)}",
                digest=ids.extend_chain_digest("", *batches),
            )
            for version, batches in self.saved.items()
        )

    def _do_LoadCheckpoint(self, process: Process, command: cmd.LoadCheckpoint, _: int) -> None:
        process.batches = list(self.saved[command.version])
        assert len(process.batches) == command.step, command
        process.rounding = self.rounding_of[command.version]
        process.kept = list(command.kept)
        self.saved = {version: self.saved[version] for version in command.kept}
        loaded = ev.CheckpointLoaded(version=command.version, step=command.step)
        self.later(process, self.random.uniform(0.1, 1.0), loaded)

    def _do_SaveCheckpoint(self, process: Process, command: cmd.SaveCheckpoint, _: int) -> None:
        assert len(process.batches) == command.step, command
        self.later(process, 0.2, Save(command.version, tuple(process.batches)))

    def _do_RepeatStep(self, process: Process, command: cmd.RepeatStep, _: int) -> None:
        """Repeat a step as it was trained the first time, on the same weights."""
        assert len(process.batches) == command.step_index, command
        left_out = self._left_out(command)
        rows = [t for t in command.trajectories if t not in left_out]
        assert rows == self.consumed[command.step_index], command
        process.batches.append(command.trajectories)
        if self.random.random() < self.faults.redo_differs:
            process.rounding = f" of {process.boot_id}"
        repeated = ev.StepRepeated(
            step_index=command.step_index,
            version=command.version,
            digest=f"d{command.step_index + 1}{process.rounding}",
            published=command.digest,
        )
        self.later(process, self.faults.train_s * self.random.uniform(0.5, 1.5), repeated)

    def _do_TrainStep(self, process: Process, command: cmd.TrainStep, _: int) -> None:
        assert len(process.batches) == command.step_index, command
        process.batches.append(command.trajectories)
        left_out = self._left_out(command)
        self.consumed[command.step_index] = [t for t in command.trajectories if t not in left_out]
        seconds = 0.3 + self.faults.train_s * self.random.uniform(0.5, 1.5)
        if self.random.random() < self.faults.skip_publish:
            skipped = ev.PublishSkipped(
                version=command.version, step=command.step_index + 1, reason=""
            )
            self.later(process, seconds, skipped)
        else:
            ahead = self.random.uniform(0, 0.3)  # the copy may be out before the trainer's book
            made = Publish(command.version, command.step_index + 1, process.rounding)
            self.later(process, seconds - ahead, made)
        done = step_completed(command.step_index, command.version, left_out)
        self.later(process, seconds, done)
        if self.random.random() < self.faults.save:
            save = Save(command.version, tuple(process.batches))
            self.later(process, seconds + self.random.choice([0.0, 0.2]), save)

    def _left_out(self, command: cmd.TrainStep | cmd.RepeatStep) -> tuple[TrajectoryId, ...]:
        """Draw the rows that the trainer does not train, from a separate generator."""
        share, rows = self.faults.leave_out, command.trajectories
        draw = random.Random(f"left out {self.settings.seed} {command.step_index}").random
        return tuple(t for t in rows if draw() < share) if share else ()

    def _save(self, process: Process, item: Save) -> None:
        """Save a checkpoint, keep the last two, and report it a little later."""
        self.saved[item.version] = item.batches
        self.rounding_of[item.version] = process.rounding
        process.kept.append(item.version)
        for old in process.kept[:-2]:
            self.saved.pop(old, None)
        process.kept = process.kept[-2:]
        step = len(item.batches)
        saved = ev.CheckpointSaved(
            version=item.version,
            step=step,
            path=f"checkpoints/step_{step}",
            kept=tuple(process.kept),
        )
        self.later(process, 0.1, saved)

    def _do_ExportModel(self, process: Process, command: cmd.ExportModel, _: int) -> None:
        self.later(process, 1.0, Publish(command.version, command.step, process.rounding))
        self.later(process, 1.0, ev.ModelExported(version=command.version, path="export"))
