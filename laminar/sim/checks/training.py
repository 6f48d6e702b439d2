"""Checks of what is trained, and of the weights that come of it, with books of their own.

Reads   batches and weights of the simulated learner, lines of the trainer's book, directories of
        models, what is decided and what the trainer reports
Raises  Violation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.rundir import VERSION_FILE
from laminar.sim.interfaces import Process, World
from laminar.sim.runtime.violation import Violation
from laminar.training.steps import TrainSample
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, verify


class TrainingChecks:
    """The books of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.book: dict[str, int] = {}  #: trained trajectories, with their step
        self._booked: set[int] = set()  #: steps with a line; asked for membership only
        self._steps: dict[int, int] = {}  #: by version: completed steps when it is made
        self._made: dict[int, set[str]] = {}  #: digests by completed steps, likewise
        #: that each boot was told to carry out
        self._pulls: dict[str, list[cmd.PullWeights]] = {}
        self._saved: dict[int, str] = {}  #: directories of checkpoints by version
        self.lost: set[str] = set()  #: directories that somebody else removed, likewise

    def decided(self, command: Command) -> None:
        """The coordinator gives a version its number."""
        if isinstance(command, cmd.TrainStep):
            self._steps[command.version] = command.step_index + 1
        elif isinstance(command, cmd.PublishWeights | cmd.ExportModel):
            self._steps[command.version] = command.step

    def batch_fetched(self, step: int, samples: Sequence[TrainSample]) -> None:
        """What is trained is rewarded, not ended, and young enough.

        A run that has failed drops its last batch, which its trainer may still have to fetch.
        """
        if self.world.checks.failure[0]:
            return
        for sample in samples:
            row = self.world.rows[sample.sample_id]
            if row.status != "rewarded" or row.end is not None:
                what = f"{row.id} is in batch {step}, and is {row.end or row.status}"
                raise Violation("trained_is_rewarded", what, row.id)
            if step - sample.version_step > self.world.scenario.settings.max_staleness:
                what = f"{row.id} of step {sample.version_step} is in batch {step}"
                raise Violation("staleness_within_bound", what, row.id)

    def booked(self, line: dict[str, Any]) -> None:
        """at_most_one_trained: a line of the trainer's book is on the disk."""
        self._booked.add(line["step"])
        left_out = {*line["left_out"]}
        for trajectory in (t for t in line["ids"] if t not in left_out):
            if trajectory in self.book:
                what = f"{trajectory} is in batch {self.book[trajectory]} and in {line['step']}"
                raise Violation("at_most_one_trained", what, trajectory)
            self.book[trajectory] = line["step"]

    def told(self, process: Process, command: Command) -> None:
        """It carries this out."""
        if isinstance(command, cmd.PullWeights):
            self._pulls.setdefault(process.boot_id, []).append(command)

    def reported(self, process: Process, event: Event) -> None:
        """What the trainer says must be on the disk by now."""
        if isinstance(event, ev.StepCompleted) and event.step_index not in self._booked:
            raise Violation("booked_before_reported", f"step {event.step_index} is not in the book")
        if isinstance(event, ev.CheckpointSaved):
            self._checkpoint(process, event)
        if isinstance(event, ev.WeightsLoaded):
            self.loaded(process, event)

    def _checkpoint(self, process: Process, event: ev.CheckpointSaved) -> None:
        """saved_is_whole: what is under its name gives the weights of the version back, and what
        is kept is there."""
        path = self._saved[event.version] = str(process.current.run_dir / event.path)
        for version in event.kept:
            kept = self._saved.get(version, "")
            if kept not in self.world.models and kept not in self.lost:
                raise Violation("saved_is_whole", f"version {version} is not kept in {kept!r}")
        found = self.world.models.get(path)
        if found is None or not found.synced:
            raise Violation("saved_is_whole", f"{event.path} is not on the disk")
        try:
            manifest = mf.decode(found.extra[VERSION_FILE])
            verify(found.weights, manifest)
        except (KeyError, mf.ManifestError, WeightsCorrupt) as error:
            raise Violation("saved_is_whole", f"{event.path}: {error!r}") from error
        if manifest.version != event.version or not self.made_as(event.version, manifest.digest):
            what = f"{event.path} has {manifest.digest} as version {manifest.version}"
            raise Violation("saved_is_whole", what)

    def made(self, steps: int, weights: Bytes) -> None:
        """The trainer's weights after so many steps, or what it hands over in their place."""
        self._made.setdefault(steps, set()).add(xxhash.xxh3_128_hexdigest(weights.data))

    def loaded(self, process: Process, event: ev.WeightsLoaded) -> None:
        """loaded_is_trained: what was asked for, as the trainer made it, whatever way it came."""
        asked = any(
            event.version == pull.version if pull.exact else event.version >= pull.version
            for pull in self._pulls.get(process.boot_id, ())
        )
        if not asked or not self.made_as(event.version, event.digest):
            what = f"{process.boot_id} was asked for {self._pulls.get(process.boot_id)}: {event}"
            raise Violation("loaded_is_trained", what, process.name)

    def made_as(self, version: int, digest: str) -> bool:
        """These are weights that the trainer made under this number."""
        return digest in self._made.get(self._steps.get(version, -1), ())
