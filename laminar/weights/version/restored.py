"""A version restored from disk into separate shared memory and verified by its digest.

Reads   a checkpoint directory: version.msgpack (the manifest), and the bytes that `fill` reads
Gives   Restored; VersionRestoreError for anything else

Does not import torch: the caller reads the model's file (checkpoint.py, for real models).
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
    """A directory that does not hold the requested version, or not any more."""


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
        """Close the descriptor; the memory is freed when no process maps it any more."""
        os.close(self._fd)


class RestoredVersion(SharedBytes):
    """A version in separate memory; `view` has the bytes as in a slot."""

    def __init__(self, manifest: mf.Manifest) -> None:
        super().__init__(f"version-{manifest.version}", manifest.total_bytes)
        self.manifest = manifest


def restore_version(
    directory: Path, version: int, fill: Callable[[Bytes, mf.Manifest], None]
) -> RestoredVersion:
    """Restore and verify a version; `fill` writes its bytes to the view or raises OSError."""
    try:
        manifest = mf.decode((directory / VERSION_FILE).read_bytes())
        if manifest.version != version:
            raise VersionRestoreError(
                f"{directory} holds version {manifest.version}, not {version}"
            )
        restored = RestoredVersion(manifest)
        try:
            fill(restored.view, manifest)
            verify_weights(restored.view, manifest)
        except BaseException:
            restored.close()
            raise
    except (OSError, mf.ManifestError, WeightsCorrupt) as error:
        raise VersionRestoreError(f"{directory}: {error}") from error
    return restored
