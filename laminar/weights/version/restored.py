"""A version that was on disk, in memory of its own, proved by its digest.

Reads   a checkpoint directory: version.msgpack (the manifest), and the bytes as `fill` finds them
Gives   Restored; CheckpointError for anything else

Without torch: what is in the model's file is left to who calls (checkpoint.py, for real models).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from laminar.run.directory import VERSION_FILE
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, verify_weights


class VersionRestoreError(RuntimeError):
    """This directory does not hold the version that was asked for, or not any more."""


class SharedBytes:
    """Memory that this process and its children can open by a path."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.view: Bytes = np.frombuffer(mmap.mmap(self._fd, nbytes), dtype=np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """The memory is freed when no process has it mapped any more."""
        os.close(self._fd)


class Restored(SharedBytes):
    """A version in memory of its own; `view` is as in a slot."""

    def __init__(self, manifest: mf.Manifest) -> None:
        super().__init__(f"version-{manifest.version}", manifest.total_bytes)
        self.manifest = manifest


def restore_version(
    directory: Path, version: int, fill: Callable[[Bytes, mf.Manifest], None]
) -> Restored:
    """This version. `fill` puts its bytes into the view; OSError, ManifestError."""
    try:
        manifest = mf.decode((directory / VERSION_FILE).read_bytes())
        if manifest.version != version:
            raise VersionRestoreError(
                f"{directory} holds version {manifest.version}, not {version}"
            )
        restored = Restored(manifest)
        try:
            fill(restored.view, manifest)
            verify_weights(restored.view, manifest)
        except BaseException:
            restored.close()
            raise
    except (OSError, mf.ManifestError, WeightsCorrupt) as error:
        raise VersionRestoreError(f"{directory}: {error}") from error
    return restored
