"""Checkpoints: model and optimizer, written to disk while training continues.

Reads   the policy's tensors, the optimizer's state, the ids of what was trained
Writes  checkpoints/step_N/ of the run directory
Emits   CheckpointSaved

The trainer pauses for one copy of its tensors and for the probe; files, digests and the removal of
old checkpoints are done in the background. An old checkpoint is removed once the coordinator knows
the new one, because until then no trainer would resume from the new one. The same holds for
payloads that all kept checkpoints cover. A checkpoint is due after steps or after minutes, which
limit the work that a lost trainer repeats; the coordinator decides from the checkpoints that it
knows, so its replay needs no clock. A trainer that has resumed may be lost again: it saves after
its first new step, and then as often as OFTEN_SHARE of its time allows. One that falls due during
another follows it: the trainer waits for a disk only if the coordinator waits for the checkpoint,
because the run pauses. The checkpoint that a fork began with counts like any other, but stays on
disk, because the fork cannot be trained again without it.
"""

from __future__ import annotations

import asyncio
import sys
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
"""Time limit for a write when the process ends; less than the node's limit for its children."""
OFTEN_SHARE = 0.1
"""Share of the time that is spent on checkpoints by a trainer that has resumed."""


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
        """Start without checkpoints.

        `specs`: the published layout. `probe`, `facts`: of the present weights. `covered` is called
        with the number of steps that all kept checkpoints contain.
        """
        self.host = host
        self._facts, self._covered = facts, covered
        self._before = ""  #: chained digest of the batches up to the last checkpoint
        self._batches: list[tuple[str, ...]] = []  #: batches since then
        self._files, self._specs, self._probe = files, specs, probe
        self._disk = DiskFullRetry(host, "the checkpoint")
        self._freq = host.config.trainer.save_freq
        self._longest_ns = int(host.config.trainer.save_minutes * 60e9) or sys.maxsize
        self._often = False  #: whether the trainer has resumed
        self._newest_ns = host.now_ns()  #: time of the newest checkpoint, else of the start
        self._due: tuple[int, int, int] | None = None  #: arguments of the save that is due
        #: held by the trainer during a job, which may change weights
        self.job_lock = asyncio.Lock()
        self._keep = host.config.trainer.max_ckpt_to_keep
        self._kept: dict[int, Path] = {}  #: checkpoints by version, oldest first
        self._steps: dict[int, int] = {}  #: steps of each version that was kept
        self._old: list[Path] = []  #: checkpoints to be removed
        self._idle = asyncio.Event()  #: set while no write is running
        self._idle.set()

    async def find_checkpoints(self) -> dict[Path, ResumeState]:
        """Return the readable checkpoints on disk, with their own descriptions."""
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
        """Continue from this checkpoint; remove those whose versions are not `kept`."""
        self._before, self._batches = resume.digest, []
        self.save_often()
        found = sorted((await self.find_checkpoints()).items(), key=lambda item: item[1].step)
        self._kept = {r.version: directory for directory, r in found if r.version in kept}
        self._steps = {r.version: r.step for _, r in found}
        self._old = [directory for directory, r in found if r.version not in kept]
        await self._remove_old()

    def save_often(self) -> None:
        """Save after the next step and often from then on, unless `save_freq` alone counts."""
        if self._longest_ns < sys.maxsize:
            self._often, self._longest_ns = True, 0

    def record_batch(self, batch: tuple[str, ...]) -> None:
        """Record that these trajectories were trained, in this order."""
        self._batches.append(batch)

    async def save_if_due(self, version: int, step: int, event_seq: int) -> None:
        """Start a checkpoint after `step` steps, if due; the weights may change on return.

        One that is due while another is being written follows it, at the latest after the next
        step."""
        if not self._freq:
            return
        overdue = self.host.now_ns() - self._newest_ns >= self._longest_ns
        if self._due or overdue or step % self._freq == 0:
            self._due = version, step, event_seq
            if self._idle.is_set():
                await self._start_save(*self._due, ordered=False)

    async def save(self, version: int, step: int, event_seq: int) -> None:
        """Start a checkpoint that the coordinator waits for, unless this version has one."""
        await self._idle.wait()
        if version not in self._kept:
            await self._start_save(version, step, event_seq, ordered=True)

    async def _start_save(
        self, version: int, step: int, event_seq: int, *, ordered: bool, waits: bool = False
    ) -> None:
        """Copy the weights, and write them in the background; `waits`: the trainer has no job."""
        started = self._newest_ns = self.host.now_ns()
        self._due = None
        weights = await self._files.copy()
        resume = self._take_resume_state(version, step)
        probe = await self._probe()
        if not waits:  # the span of the wait has this time, too
            self.host.record_span("saving", started, self.host.now_ns(), step=step)
        self._idle.clear()
        write = partial(self._write, resume, weights, probe, event_seq)
        self.host.spawn(self._save(step, write, ordered=ordered))

    def _take_resume_state(self, version: int, step: int) -> ResumeState:
        """Describe what was trained up to now, and start the next count."""
        batches = tuple(self._batches)
        resume = ResumeState(
            version=version, step=step, before=self._before, batches=batches, learner=self._facts()
        )
        self._before, self._batches = resume.digest, []
        return resume

    async def close(self) -> None:
        """Wait a limited time for a write to finish; an incomplete checkpoint has no name yet."""
        try:
            async with asyncio.timeout(STOP_S):
                await self._idle.wait()
        except TimeoutError:
            self.host.log.warning("checkpoint-left-out", reason="the trainer stops")

    async def _save(
        self, step: int, write: Callable[[], Awaitable[None]], *, ordered: bool
    ) -> None:
        """Write a checkpoint and remove old ones; a disk error affects this checkpoint only.

        If the coordinator waits for the checkpoint, a full disk is waited out and other errors are
        raised.
        """
        try:
            await (self._disk.until_room(write) if ordered else write())
        except OSError as error:
            self.host.log.error("checkpoint-failed", step=step, reason=str(error))
            if ordered:
                raise
        finally:
            self._idle.set()
        if self._often:
            took_ns = self.host.now_ns() - self._newest_ns
            most_ns = int(self.host.config.trainer.save_minutes * 60e9)
            self._longest_ns = min(round(took_ns / OFTEN_SHARE), most_ns)
        self.host.spawn(self._follow())
        covered = min((self._steps[version] for version in self._kept), default=0)
        await self._remove_old()
        await self._covered(covered)

    async def _follow(self) -> None:
        """Start the checkpoint that fell due during another, unless a job has started it."""
        async with self.job_lock:
            if self._due and self._idle.is_set():
                await self._start_save(*self._due, ordered=False, waits=True)

    async def _write(
        self, resume: ResumeState, weights: Weights, probe: mf.Probe, event_seq: int
    ) -> None:
        """Write one checkpoint; after an OSError nothing of it is left."""
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
        """Remove the old checkpoints, once the coordinator knows that they are not kept.

        Checkpoints that become old meanwhile wait for the next call.
        """
        old, self._old = self._old, []
        await self.host.wait_acknowledged()
        for directory in old:
            if directory.name == ORIGIN_DIR:
                continue
            try:
                await self._files.remove(directory)
            except OSError as error:
                self.host.log.warning("checkpoint-not-removed", reason=str(error))
