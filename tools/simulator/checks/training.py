"""Checks of training and of the resulting weights, with independent books.

Reads   batches and weights of the simulated learner, lines of the trainer's book, directories of
        models, what is decided and what the trainer reports
Raises  Violation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from laminar.core.state.failures import FailureKind
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.roles import Role
from laminar.run.directory import VERSION_FILE
from laminar.training.steps import TrainSample
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, verify_weights
from tools.simulator.context import Process
from tools.simulator.runtime.boot import RUN_DIR
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World


class TrainingChecks:
    """Books of the training of one run."""

    def __init__(self, world: World, has_failed: Callable[[], bool]) -> None:
        self.world, self._has_failed = world, has_failed
        #: trajectories of each line of the trainer's book, by step and version
        self._lines: dict[tuple[int, int], list[str]] = {}
        self._steps_of: dict[str, int] = {}  #: steps by trajectory
        #: (event, version, ids) of each step in the log
        self._accepted: dict[int, tuple[int, int, tuple[str, ...]]] = {}
        self._repeated: dict[str, bool] = {}  #: whether a step was repeated, by boot
        #: latest order to each boot of the trainer
        self._told: dict[str, cmd.TrainStep | cmd.RepeatStep] = {}
        self._orders: dict[int, cmd.TrainStep] = {}  #: orders by version
        self._steps: dict[int, int] = {}  #: completed steps by version
        self._lineage: dict[int, str] = {}  #: digests by completed steps, of the trainer
        self._made: dict[int, set[str]] = {}  #: all digests by completed steps
        #: digests by completed steps that a fault published in place of the trainer's
        self._others: dict[int, set[str]] = {}
        #: pulls ordered, by boot
        self._pulls: dict[str, list[cmd.PullWeights]] = {}
        self._saved: dict[int, str] = {}  #: directories of checkpoints by version
        self.hung: dict[str, None] = {}  #: boots of trainers whose step never ends
        self.lost: set[str] = set()  #: directories of checkpoints removed by others
        #: paths of the checkpoints in the log, by the event that changed them
        self._kept: dict[int, tuple[str, ...]] = {}
        #: completed steps and path of the newest checkpoint at the last pause
        self._paused: tuple[int, str] = (0, "")
        self._is_paused = False

    def decided(self, command: Command) -> None:
        """Note the number that the coordinator gives a version."""
        if isinstance(command, cmd.TrainStep):
            self._steps[command.version] = command.step_index + 1
            self._orders[command.version] = command
        elif isinstance(command, cmd.PublishWeights | cmd.ExportModel):
            self._steps[command.version] = command.step
        elif isinstance(command, cmd.RepeatStep):
            self._is_needed(command)

    def _is_needed(self, command: cmd.RepeatStep) -> None:
        """Check pause_keeps_steps: a step saved at the pause of the run is not repeated."""
        steps, path = self._paused
        saved = self.world.models.get(path)
        if command.step_index < steps and saved is not None and not saved.damaged:
            raise Violation("pause_keeps_steps", f"{command}, but the run paused after {steps}")

    def _is_real_stall(self, event: ev.RunStalled, state: State) -> None:
        """Check stall_is_real: a trainer is blamed only for a step that never ends."""
        actor = state.members.actors.get(event.owner)
        if actor is not None and actor.role == Role.TRAINER and actor.boot_id not in self.hung:
            raise Violation("stall_is_real", f"{event}, but its step will end", event.owner)

    @property
    def book(self) -> set[str]:
        """Trajectories trained, by the lines of the book that the log has accepted."""
        lines = (self._lines[step, version] for step, (_, version, _) in self._accepted.items())
        return {trajectory for line in lines for trajectory in line}

    def observe(self, stamped: Stamped, state: State) -> None:
        """Note the steps that the log has; no other trainer may train them differently."""
        versions = state.versions
        event = stamped.event
        if isinstance(event, ev.RunStalled):
            self._is_real_stall(event, state)
        if isinstance(event, ev.CheckpointSaved | ev.TrainerReady) and versions.checkpoint_paths:
            self._kept[stamped.seq] = tuple(versions.checkpoint_paths.values())
        if state.run.paused and not self._is_paused:
            self._pauses(state)
        self._is_paused = state.run.paused
        if not isinstance(event, ev.StepCompleted) or state.steps.completed != event.step_index + 1:
            return
        order = self._orders.get(event.version)
        if event.step_index not in self._accepted and order is not None:
            accepted = stamped.seq, event.version, order.trajectories
            self._accepted[event.step_index] = accepted

    def _pauses(self, state: State) -> None:
        """Check pause_saves: the last step is saved, if no fault has struck the trainer."""
        newest = max(state.versions.checkpoint_paths, default=-1)
        steps = state.versions.step_of(newest) if newest >= 0 else 0
        trainer = self.world.processes["trainer-0"]
        struck = self.world.faults.explains(trainer) or state.versions.export >= 0
        if steps != state.steps.completed and not struck:
            what = f"{state.steps.completed} steps are completed, but {steps} are saved"
            raise Violation("pause_saves", what)
        self._paused = (
            steps,
            str(RUN_DIR / state.versions.checkpoint_paths[newest]) if newest >= 0 else "none",
        )

    def take_back(self, seq: int) -> None:
        """Forget what came after this event: it was lost with its coordinator."""
        self._accepted = {k: found for k, found in self._accepted.items() if found[0] <= seq}
        self._kept = {k: paths for k, paths in self._kept.items() if k <= seq}

    def none_to_go_on_from(self, state: State) -> None:
        """Check there_is_a_checkpoint: a run that failed for lack of a checkpoint had none."""
        if state.run.failed is None or state.run.failed.kind != FailureKind.NO_CHECKPOINT:
            return
        for path in next(reversed(self._kept.values()), ()):
            if str(RUN_DIR / path) not in self.lost:
                what = f"no process removed {path}: {state.run.failed.sentence}"
                raise Violation("there_is_a_checkpoint", what)

    def batch_fetched(self, step: int, samples: Sequence[TrainSample]) -> None:
        """Check that a batch is as ordered, rewarded, not ended, and within the staleness bound.

        A run that has failed drops its last batch, which its trainer may still have to fetch.
        """
        told = next(reversed(self._told.values()))
        if [s.sample_id for s in samples] != list(told.trajectories):
            raise Violation("trained_as_ordered", f"step {step} is of other rows than {told}")
        if isinstance(told, cmd.RepeatStep):
            return self._redone_as_logged(told)
        if self._has_failed():
            return
        for sample in samples:
            row = self.world.rows[sample.sample_id]
            if row.status != "rewarded" or row.end is not None:
                what = f"{row.id} is in batch {step}, but is {row.end or row.status}"
                raise Violation("trained_is_rewarded", what, row.id)
            if step - sample.version_step > self.world.scenario.settings.max_staleness:
                what = f"{row.id} of step {sample.version_step} is in batch {step}"
                raise Violation("staleness_within_bound", what, row.id)

    def _redone_as_logged(self, told: cmd.RepeatStep) -> None:
        """Check that a repeated step was accepted, with these rows in this order and version."""
        _, version, rows = self._accepted.get(told.step_index, (0, -1, ()))
        if (told.version, told.trajectories) != (version, rows):
            raise Violation("redone_as_logged", f"{told}, but the log has {version}: {rows}")

    def booked(self, line: dict[str, Any]) -> None:
        """Check at_most_one_trained, for a line of the trainer's book that is on disk.

        A batch that was interrupted may have a line of each trainer, each under a separate version.
        """
        key = line["step"], line["version"]
        if key in self._lines:
            raise Violation("at_most_one_trained", f"step and version {key} have two lines")
        left_out = {*line["left_out"]}
        self._lines[key] = [t for t in line["ids"] if t not in left_out]
        for trajectory in self._lines[key]:
            if self._steps_of.setdefault(trajectory, line["step"]) != line["step"]:
                what = f"{trajectory} is in batch {self._steps_of[trajectory]} and in {key}"
                raise Violation("at_most_one_trained", what, trajectory)

    def handed_over(self, boot_id: str) -> None:
        """Check redo_is_not_published: no weights go into a slot while a step is repeated."""
        told = self._told.get(boot_id)
        if isinstance(told, cmd.RepeatStep) and not self._repeated.get(boot_id):
            raise Violation("redo_is_not_published", f"{boot_id} was told {told}")

    def told(self, process: Process, command: Command) -> None:
        """Note the command that the trainer carries out."""
        if isinstance(command, cmd.TrainStep | cmd.RepeatStep):
            self._told.pop(process.boot_id, None)
            self._told[process.boot_id] = command
            self._repeated[process.boot_id] = False
        if isinstance(command, cmd.PullWeights):
            self._pulls.setdefault(process.boot_id, []).append(command)

    def reported(self, process: Process, event: Event) -> None:
        """Check that what the trainer reports is on disk by now."""
        if isinstance(event, ev.TrainerReady):
            for found in event.checkpoints:
                self._saved[found.version] = str(RUN_DIR / found.path)
        if isinstance(event, ev.StepRepeated):
            self._repeated[process.boot_id] = True
            others = self._others.get(event.step_index + 1, ())
            if event.published not in ("", event.digest, *others):
                raise Violation("redone_is_the_same", f"{event}", process.name)
        booked = self._lines
        if isinstance(event, ev.StepCompleted) and (event.step_index, event.version) not in booked:
            raise Violation("booked_before_reported", f"step {event.step_index} is not in the book")
        if isinstance(event, ev.CheckpointSaved):
            self._checkpoint(process, event)
        if isinstance(event, ev.WeightsLoaded):
            self.loaded(process, event)

    def _checkpoint(self, process: Process, event: ev.CheckpointSaved) -> None:
        """Check saved_is_whole: a checkpoint restores its version, and every kept one exists."""
        path = self._saved[event.version] = str(RUN_DIR / event.path)
        for version in event.kept:
            kept = self._saved.get(version, "")
            if kept not in self.world.models and kept not in self.lost:
                raise Violation("saved_is_whole", f"version {version} is not kept in {kept!r}")
        found = self.world.models.get(path)
        if found is None or not found.synced:
            raise Violation("saved_is_whole", f"{event.path} is not on the disk")
        try:
            manifest = mf.decode(found.extra[VERSION_FILE])
            verify_weights(found.weights, manifest)
        except (KeyError, mf.ManifestError, WeightsCorrupt) as error:
            raise Violation("saved_is_whole", f"{event.path}: {error!r}") from error
        if manifest.version != event.version or not self.made_as(event.version, manifest.digest):
            what = f"{event.path} has {manifest.digest} as version {manifest.version}"
            raise Violation("saved_is_whole", what)

    def made(self, steps: int, weights: Bytes) -> None:
        """Check one_lineage: every trainer has the same weights after the same number of steps."""
        digest = xxhash.xxh3_128_hexdigest(weights.data)
        if self._lineage.setdefault(steps, digest) != digest:
            what = f"step {steps} led to {digest}, but to {self._lineage[steps]} before"
            raise Violation("one_lineage", what)
        self._made.setdefault(steps, set()).add(digest)

    def made_other(self, steps: int, weights: Bytes) -> None:
        """Note weights that a fault publishes instead: a repeated step may differ from them."""
        digest = xxhash.xxh3_128_hexdigest(weights.data)
        self._made.setdefault(steps, set()).add(digest)
        self._others.setdefault(steps, set()).add(digest)

    def loaded(self, process: Process, event: ev.WeightsLoaded) -> None:
        """Check loaded_is_trained: the version asked for, as trained, whatever way it came."""
        asked = any(
            event.version == pull.version if pull.exact else event.version >= pull.version
            for pull in self._pulls.get(process.boot_id, ())
        )
        if not asked or not self.made_as(event.version, event.digest):
            what = f"{process.boot_id} was asked for {self._pulls.get(process.boot_id)}: {event}"
            raise Violation("loaded_is_trained", what, process.name)

    def made_as(self, version: int, digest: str) -> bool:
        """Return whether these are weights that the trainer made under this version."""
        return digest in self._made.get(self._steps.get(version, -1), ())

    def made_since(self, version: int, digest: str) -> bool:
        """Return whether the trainer made these weights under this version or a later one."""
        return any(self.made_as(later, digest) for later in self._steps if later >= version)
