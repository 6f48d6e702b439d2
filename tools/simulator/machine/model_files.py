"""Model directories and the trainer's book on a disk in virtual time that can be full.

Reads   the learner's weights; whether a fault strikes
Writes  the directories of the world, which outlive the process; lines of the book
Gives   SimModelFiles and SimBook, the ports of actors/model_files.py and actors/trainer.py;
        lay_origin, for a fork. Raises Violation
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from laminar.run.directory import ORIGIN_DIR, RESUME_FILE, VERSION_FILE
from laminar.training.trainer_state import LearnerFacts, ResumeState, encode
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, build_manifest
from laminar.weights.version.manifest import encode as encode_manifest
from tools.simulator.context import Context
from tools.simulator.machine.memory import COPY_S
from tools.simulator.machine.versions import ModelDirectory, manifest_for, weights_of
from tools.simulator.runtime.boot import RUN_DIR
from tools.simulator.runtime.process import SimProcess
from tools.simulator.runtime.violation import Violation

SAVE_S, SYNC_S, LINE_S = 0.2, 0.3, 0.01

ORIGIN_NAME = "of another run"
"""Name of the weights, and of the optimizer's moment, that a fork begins with."""


class Copied(NamedTuple):
    """The content of a checkpoint."""

    weights: Bytes
    moment: str


class TrainersDisk:
    """The disk that the trainer's process writes to."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process
        self._refused = False  #: whether the last write was refused

    async def takes(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.process.slow)

    def refuse_if_full(self) -> None:
        """Raise, as a fault, for a full disk; the next write succeeds."""
        self._refused = not self._refused and self.process.world.faults.trainers_disk_is_full()
        if self._refused:
            raise OSError(errno.ENOSPC, "No space left on device")


class SimModelFiles:
    """Directories of models, by path."""

    def __init__(
        self, disk: TrainersDisk, models: dict[str, ModelDirectory], present: Callable[[], Copied]
    ) -> None:
        """Serve `models` by path; `present` returns the learner's current content."""
        self._disk, self._models, self._present = disk, models, present

    async def copy(self) -> Copied:
        copied = self._present()
        await self._disk.takes(COPY_S)
        return copied

    async def build_manifest(self, weights: Copied, *, specs: Any, **facts: Any) -> mf.Manifest:
        return build_manifest(weights.weights, tensors=specs, **facts)

    async def create_partial(self, directory: Path) -> Path:
        partial = directory.with_name(f".{directory.name}.partial")
        self._models[str(partial)] = ModelDirectory()
        return partial

    async def write(
        self, directory: Path, copied: Copied | None, extra: Mapping[str, bytes]
    ) -> None:
        await self._disk.takes(SAVE_S)
        self._disk.refuse_if_full()
        weights, moment = copied or Copied(self._present().weights, "")
        self._models[str(directory)] = ModelDirectory(weights, moment, extra, synced=False)

    async def sync(self, directory: Path) -> None:
        await self._disk.takes(SYNC_S)
        self._models[str(directory)].synced = True

    async def rename(self, directory: Path, name: Path) -> None:
        """Check whole_under_its_name: a directory is complete on disk before it gets its name."""
        if str(directory) not in self._models:
            raise FileNotFoundError(errno.ENOENT, f"there is no {directory}")
        found = self._models[str(name)] = self._models.pop(str(directory))
        if not found.synced:
            raise Violation("whole_under_its_name", f"{name} is not on the disk yet")

    async def find_directories(self, parent: Path, name: str) -> dict[Path, bytes]:
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
    """The trainer's book: a line is written as a whole or not at all."""

    def __init__(self, disk: TrainersDisk, chance: random.Random) -> None:
        self._disk, self._chance = disk, chance

    async def enter(self, line: bytes) -> None:
        await self._disk.takes(self._chance.uniform(0, LINE_S))
        self._disk.refuse_if_full()
        self._disk.process.world.checks.training.booked(json.loads(line))
        await self._disk.takes(LINE_S)

    def close(self) -> None:
        """Do nothing: every line is already on the disk."""


def lay_origin(world: Context, models: dict[str, ModelDirectory], names: dict[bytes, str]) -> None:
    """Put the checkpoint of another run that a fork begins with on the shared disk."""
    origin = world.scenario.origin
    if origin is None:
        return
    weights = weights_of(ORIGIN_NAME)
    facts = LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})
    resume = ResumeState(
        version=origin.version, step=origin.step, before=origin.digest, batches=(), learner=facts
    )
    manifest = manifest_for(weights, origin.version, origin.step)
    extra = {RESUME_FILE: encode(resume), VERSION_FILE: encode_manifest(manifest)}
    models[str(RUN_DIR / ORIGIN_DIR)] = ModelDirectory(weights, ORIGIN_NAME, extra)
    names[weights.tobytes()] = ORIGIN_NAME
    world.coverage.hit("fork:begun")
