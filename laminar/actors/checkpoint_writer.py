"""Checkpoints: the model as it is now, written to disk while the trainer goes on.

Reads   the policy's tensors
Writes  checkpoints/step_N/ of the run directory
Emits   CheckpointSaved

The trainer stands still for one copy of the weights and their probe; files, digest and the removal
of old checkpoints are the work of a thread. A checkpoint that is still being written when the next
is due makes that one be left out: the trainer never waits for a disk.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from laminar.actors.host import Host
from laminar.config import ConfigError
from laminar.events import events as ev
from laminar.rundir import CHECKPOINTS_DIR
from laminar.training.export import export_hf
from laminar.training.model import named_weights
from laminar.weights import checkpoint
from laminar.weights import manifest as mf

STOP_S = 8.0
"""How long a write may go on when the process ends; less than the node waits for its children."""
Tensors = dict[str, torch.Tensor]


class CheckpointWriter:
    """The checkpoints of one trainer."""

    def __init__(
        self,
        host: Host,
        model: PreTrainedModel,
        specs: tuple[mf.TensorSpec, ...],
        probe: Callable[[], mf.Probe],
    ) -> None:
        """`specs`: how a version is published. `probe`: of the present weights."""
        self.host = host
        self._model, self._specs, self._probe = model, specs, probe
        self._freq = host.config.trainer.save_freq
        self._keep = host.config.trainer.max_ckpt_to_keep
        self._kept: dict[int, Path] = {}  #: by version, oldest first
        self._writing: asyncio.Task[None] | None = None

    async def save_if_due(self, version: int, step: int, event_seq: int) -> None:
        """Begin a checkpoint of the weights after `step` steps; they may change on return."""
        if not self._freq or step % self._freq:
            return
        if self._writing is not None and not self._writing.done():
            self.host.log.warning("checkpoint-left-out", step=step, reason="one is being written")
            return
        started = time.monotonic_ns()
        tensors = await asyncio.to_thread(_copy, self._model)
        probe = await asyncio.to_thread(self._probe)
        self.host.span("saving", started, time.monotonic_ns(), step=step)
        work = self._save(version, step, tensors, probe, event_seq)
        self._writing = asyncio.create_task(work)

    async def close(self) -> None:
        """Let a write come to its end, for a while; what is half written has no name."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=STOP_S)

    async def _save(
        self, version: int, step: int, tensors: Tensors, probe: mf.Probe, event_seq: int
    ) -> None:
        """A disk that fails costs this checkpoint and nothing else."""
        path = f"{CHECKPOINTS_DIR}/step_{step}"
        directory = self.host.run_dir / path
        try:
            manifest = await asyncio.to_thread(
                checkpoint.describe,
                version=version,
                step=step,
                specs=self._specs,
                tensors=tensors.items(),
                probe=probe,
            )
            await asyncio.to_thread(self._write, directory, tensors, manifest)
        except (OSError, ConfigError) as error:
            self.host.log.error("checkpoint-failed", step=step, path=path, reason=str(error))
            return
        self._kept[version] = directory
        for error in await asyncio.to_thread(self._remove_old):
            self.host.log.warning("checkpoint-not-removed", reason=str(error))
        saved = ev.CheckpointSaved(version=version, step=step, path=path, kept=tuple(self._kept))
        self.host.emit(saved, event_seq=event_seq, version=version, path=path)

    def _write(self, directory: Path, tensors: Tensors, manifest: mf.Manifest) -> None:
        extra = {checkpoint.VERSION_FILE: mf.encode(manifest)}
        source = self.host.config.model.name
        export_hf(self._model, source, directory, tensors=tensors, extra=extra)

    def _remove_old(self) -> list[OSError]:
        """Those beyond the newest few; what went wrong. What is half removed is not kept."""
        errors = []
        while self._keep and len(self._kept) > self._keep:
            version = next(iter(self._kept))
            try:
                shutil.rmtree(self._kept.pop(version))
            except OSError as error:
                errors.append(error)
        return errors


def _copy(model: PreTrainedModel) -> Tensors:
    return {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(model)}
