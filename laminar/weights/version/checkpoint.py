"""A version on disk: what to write beside a model, and how to get the version back bit for bit.

Reads   a checkpoint directory: model.safetensors, version.msgpack (the manifest)
Gives   the bytes of a version as they lie in a slot; CheckpointError for anything else

A checkpoint has the trainer's parameters, a version has what engines take: the same tensors in the
published type. Conversion is exact, so the digest of the manifest proves that a checkpoint gives
the weights that were published under its number, on whatever machine it is read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from laminar.rundir import VERSION_FILE
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, manifest_of, verify
from laminar.weights.version.tensors import write_tensors

MODEL_FILE = "model.safetensors"


class CheckpointError(RuntimeError):
    """This directory does not hold the version that was asked for, or not any more."""


def describe(
    *,
    version: int,
    step: int,
    specs: tuple[mf.TensorSpec, ...],
    tensors: Iterable[tuple[str, torch.Tensor]],
    probe: mf.Probe,
) -> mf.Manifest:
    """The manifest of a version that is made of these tensors, as a relay would make it."""
    view = np.empty(mf.check_tensors(specs), dtype=np.uint8)
    write_tensors(view, specs, tensors)
    return manifest_of(view, version=version, step=step, tensors=specs, probe=probe)


class Restored:
    """A version in memory of its own, which this process and its children can open by a path."""

    def __init__(self, manifest: mf.Manifest) -> None:
        self.manifest = manifest
        self._fd = os.memfd_create(f"version-{manifest.version}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, manifest.total_bytes)
        #: uint8 [total_bytes], as in a slot
        self.view: Bytes = np.frombuffer(mmap.mmap(self._fd, manifest.total_bytes), dtype=np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Its memory is freed when no process has it mapped any more."""
        os.close(self._fd)


def read(directory: Path, version: int) -> Restored:
    """This version, proved by its digest."""
    try:
        manifest = mf.decode((directory / VERSION_FILE).read_bytes())
        if manifest.version != version:
            raise CheckpointError(f"{directory} holds version {manifest.version}, not {version}")
        restored = Restored(manifest)
        try:
            write_tensors(restored.view, manifest.tensors, _tensors(directory / MODEL_FILE))
            verify(restored.view, manifest)
        except BaseException:
            restored.close()
            raise
    except (OSError, SafetensorError, mf.ManifestError, WeightsCorrupt) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    return restored


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """One after the other: only one is in memory beside the version."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            yield name, tensors.get_tensor(name)
