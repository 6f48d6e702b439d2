"""Checkpoints: model and optimizer as they are now, written to disk while the trainer goes on.

Reads   the policy's tensors, the optimizer's state, the ids of what was trained
Writes  checkpoints/step_N/ of the run directory
Emits   CheckpointSaved

The trainer stands still for one copy of its tensors and the probe; files, digests and the removal
of old checkpoints go on beside it. An old one goes when the coordinator knows the new one: until
then nobody would go on from the new one. So do the payloads that all kept ones cover. A
checkpoint that is still being written when the next is due makes that one be left out: the trainer
waits for a disk only where the coordinator waits for the checkpoint, since the run pauses. The one
that a fork began with counts like any other, and stays on the disk: to train the fork again,
nothing else will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.actors.disk_full_retry import DiskFullRetry
from laminar.actors.model_files import ModelFiles, Weights, save_model
from laminar.events import events as ev
from laminar.run.directory import CHECKPOINTS_DIR, ORIGIN_DIR, RESUME_FILE, VERSION_FILE
from laminar.training.trainer_state import (
    CheckpointError,
    LearnerFacts,
    ResumeState,
    decode,
    encode,
)
from laminar.weights.version import manifest as mf

if TYPE_CHECKING:
    from laminar.actors.host import Host

STOP_S = 8.0
"""How long a write may go on when the process ends; less than the node waits for its children."""


class CheckpointWriter:
    """The checkpoints of one trainer."""

    def __init__(
        self,
        host: Host,
        files: ModelFiles,
        specs: tuple[mf.TensorSpec, ...],
        probe: Callable[[], Awaitable[mf.Probe]],
        facts: Callable[[], LearnerFacts],
        covered: Callable[[int], Awaitable[None]],
    ) -> None:
        """`specs`: how a version is published. `probe`, `facts`: of the present weights. `covered`
        is told how many steps are in all checkpoints that are kept."""
        self.host = host
        self._facts, self._covered = facts, covered
        self._before = ""  #: chained digest of the batches up to the last checkpoint
        self._batches: list[tuple[str, ...]] = []  #: since then
        self._files, self._specs, self._probe = files, specs, probe
        self._disk = DiskFullRetry(host, "the checkpoint")
        self._freq = host.config.trainer.save_freq
        self._keep = host.config.trainer.max_ckpt_to_keep
        self._kept: dict[int, Path] = {}  #: by version, oldest first
        self._steps: dict[int, int] = {}  #: of each version that was kept
        self._old: list[Path] = []  #: to be removed
        self._idle = asyncio.Event()  #: none is being written
        self._idle.set()

    async def find_checkpoints(self) -> dict[Path, ResumeState]:
        """The checkpoints on the disk that can be read, as they describe themselves."""
        run_dir, described = self.host.run_dir, {}
        found = await self._files.find_directories(run_dir / CHECKPOINTS_DIR, RESUME_FILE)
        found |= await self._files.find_directories(run_dir, RESUME_FILE)  # the origin
        for directory, data in found.items():
            try:
                described[directory] = decode(data)
            except CheckpointError as error:
                self._pass_over(directory, error)
        return described

    def _pass_over(self, directory: Path, error: CheckpointError) -> None:
        self.host.log.warning("checkpoint-passed-over", path=str(directory), reason=str(error))

    async def resume_from(self, resume: ResumeState, kept: Collection[int]) -> None:
        """Training goes on from this one; those whose versions are not `kept` are removed."""
        self._before, self._batches = resume.digest, []
        found = sorted((await self.find_checkpoints()).items(), key=lambda item: item[1].step)
        self._kept = {r.version: directory for directory, r in found if r.version in kept}
        self._steps = {r.version: r.step for _, r in found}
        self._old = [directory for directory, r in found if r.version not in kept]
        await self._remove_old()

    def record_batch(self, batch: tuple[str, ...]) -> None:
        """Note that these trajectories have been trained, in this order."""
        self._batches.append(batch)

    async def save_if_due(self, version: int, step: int, event_seq: int) -> None:
        """Begin a checkpoint of the weights after `step` steps; they may change on return."""
        if not self._freq or step % self._freq:
            return
        if not self._idle.is_set():
            self.host.log.warning("checkpoint-left-out", step=step, reason="one is being written")
            return
        await self._start_save(version, step, event_seq, ordered=False)

    async def save(self, version: int, step: int, event_seq: int) -> None:
        """Begin a checkpoint that the coordinator waits for, if there is none of this version."""
        await self._idle.wait()
        if version not in self._kept:
            await self._start_save(version, step, event_seq, ordered=True)

    async def _start_save(self, version: int, step: int, event_seq: int, *, ordered: bool) -> None:
        started = self.host.now_ns()
        weights = await self._files.copy()
        resume = self._take_resume_state(version, step)
        probe = await self._probe()
        self.host.record_span("saving", started, self.host.now_ns(), step=step)
        self._idle.clear()
        write = partial(self._write, resume, weights, probe, event_seq)
        self.host.spawn(self._save(step, write, ordered=ordered))

    def _take_resume_state(self, version: int, step: int) -> ResumeState:
        """What was trained up to now; from here on it is counted anew."""
        batches = tuple(self._batches)
        resume = ResumeState(
            version=version, step=step, before=self._before, batches=batches, learner=self._facts()
        )
        self._before, self._batches = resume.digest, []
        return resume

    async def close(self) -> None:
        """Let a write come to its end, for a while; a part of a checkpoint has no name yet."""
        try:
            async with asyncio.timeout(STOP_S):
                await self._idle.wait()
        except TimeoutError:
            self.host.log.warning("checkpoint-left-out", reason="the trainer ends")

    async def _save(
        self, step: int, write: Callable[[], Awaitable[None]], *, ordered: bool
    ) -> None:
        """A disk that fails costs this checkpoint and nothing else; one that is full is waited for
        if the coordinator waits for the checkpoint."""
        try:
            await (self._disk.until_room(write) if ordered else write())
        except OSError as error:
            self.host.log.error("checkpoint-failed", step=step, reason=str(error))
            if ordered:
                raise
        finally:
            self._idle.set()
        covered = min((self._steps[version] for version in self._kept), default=0)
        await self._remove_old()
        await self._covered(covered)

    async def _write(
        self, resume: ResumeState, weights: Weights, probe: mf.Probe, event_seq: int
    ) -> None:
        """OSError: nothing of it is left."""
        version, step = resume.version, resume.step
        path = f"{CHECKPOINTS_DIR}/step_{step}"
        directory = self.host.run_dir / path
        manifest = await self._files.build_manifest(
            weights, version=version, step=step, specs=self._specs, probe=probe
        )
        extra = {VERSION_FILE: mf.encode(manifest), RESUME_FILE: encode(resume)}
        await save_model(self._files, directory, weights, extra, self.host.hit_failpoint)
        self._kept[version], self._steps[version] = directory, step
        while self._keep and len(self._kept) > self._keep:
            self._old.append(self._kept.pop(next(iter(self._kept))))
        saved = ev.CheckpointSaved(version=version, step=step, path=path, kept=tuple(self._kept))
        self.host.emit(saved, event_seq=event_seq, version=version, path=path)

    async def _remove_old(self) -> None:
        """Remove the checkpoints beyond the newest few, which the coordinator knows not to be kept.
        What is found to be old meanwhile waits for what is reported meanwhile."""
        old, self._old = self._old, []
        await self.host.wait_acknowledged()
        for directory in old:
            if directory.name == ORIGIN_DIR:
                continue
            try:
                await self._files.remove(directory)
            except OSError as error:
                self.host.log.warning("checkpoint-not-removed", reason=str(error))
