"""Checkpoints: the model as it is now, written to disk while the trainer goes on.

Reads   the policy's tensors
Writes  checkpoints/step_N/ of the run directory
Emits   CheckpointSaved

The trainer stands still for one copy of the weights and their probe; files, digest and the removal
of old checkpoints go on beside it. A checkpoint that is still being written when the next is due
makes that one be left out: the trainer never waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.actors.model_files import ModelFiles, Weights, save_model
from laminar.config import ConfigError
from laminar.events import events as ev
from laminar.rundir import CHECKPOINTS_DIR, VERSION_FILE
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
    ) -> None:
        """`specs`: how a version is published. `probe`: of the present weights."""
        self.host = host
        self._files, self._specs, self._probe = files, specs, probe
        self._freq = host.config.trainer.save_freq
        self._keep = host.config.trainer.max_ckpt_to_keep
        self._kept: dict[int, Path] = {}  #: by version, oldest first
        self._idle = asyncio.Event()  #: none is being written
        self._idle.set()

    async def save_if_due(self, version: int, step: int, event_seq: int) -> None:
        """Begin a checkpoint of the weights after `step` steps; they may change on return."""
        if not self._freq or step % self._freq:
            return
        if not self._idle.is_set():
            self.host.log.warning("checkpoint-left-out", step=step, reason="one is being written")
            return
        started = self.host.now_ns()
        weights = await self._files.copy()
        probe = await self._probe()
        self.host.span("saving", started, self.host.now_ns(), step=step)
        self._idle.clear()
        self.host.spawn(self._save(version, step, weights, probe, event_seq))

    async def close(self) -> None:
        """Let a write come to its end, for a while; a part of a checkpoint has no name yet."""
        try:
            async with asyncio.timeout(STOP_S):
                await self._idle.wait()
        except TimeoutError:
            self.host.log.warning("checkpoint-left-out", reason="the trainer ends")

    async def _save(
        self, version: int, step: int, weights: Weights, probe: mf.Probe, event_seq: int
    ) -> None:
        try:
            await self._write(version, step, weights, probe, event_seq)
        finally:
            self._idle.set()

    async def _write(
        self, version: int, step: int, weights: Weights, probe: mf.Probe, event_seq: int
    ) -> None:
        """A disk that fails costs this checkpoint and nothing else."""
        path = f"{CHECKPOINTS_DIR}/step_{step}"
        directory = self.host.run_dir / path
        try:
            manifest = await self._files.describe(
                weights, version=version, step=step, specs=self._specs, probe=probe
            )
            await save_model(self._files, directory, weights, {VERSION_FILE: mf.encode(manifest)})
        except (OSError, ConfigError) as error:
            self.host.log.error("checkpoint-failed", step=step, path=path, reason=str(error))
            return
        self._kept[version] = directory
        await self._remove_old()
        saved = ev.CheckpointSaved(version=version, step=step, path=path, kept=tuple(self._kept))
        self.host.emit(saved, event_seq=event_seq, version=version, path=path)

    async def _remove_old(self) -> None:
        """Those beyond the newest few. What is half removed is not kept."""
        while self._keep and len(self._kept) > self._keep:
            version = next(iter(self._kept))
            try:
                await self._files.remove(self._kept.pop(version))
            except OSError as error:
                self.host.log.warning("checkpoint-not-removed", reason=str(error))
