"""A model in a directory of the run: complete under its name, or absent.

Reads   a copy of the weights, or the present ones
Writes  a directory, through ModelFiles
Raises  OSError: nothing of it is left, it can be retried

All files are written and synced under a temporary name first. A reader that finds the final name
can read all of it, whenever the trainer or its machine died.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from laminar.weights.version import manifest as mf

Weights = Any
"""A copy of a model's weights and optimizer; opaque to all but its creator."""


class ModelFiles(Protocol):
    """The trainer's model as files, accessed in threads. All methods raise OSError."""

    async def copy(self) -> Weights:
        """Copy the present weights, which may change on return; valid until the next copy."""

    async def build_manifest(
        self,
        weights: Weights,
        *,
        version: int,
        step: int,
        specs: tuple[mf.TensorSpec, ...],
        probe: mf.Probe,
    ) -> mf.Manifest:
        """Return the manifest that a relay would give to a version with these weights."""

    async def create_partial(self, directory: Path) -> Path:
        """Create an empty temporary directory that will become `directory`."""

    async def write(
        self, directory: Path, weights: Weights | None, extra: Mapping[str, bytes]
    ) -> None:
        """Write the model and extra files; None: the present weights, without the optimizer."""

    async def sync(self, directory: Path) -> None:
        """Sync all files of the directory to disk."""

    async def rename(self, directory: Path, name: Path) -> None:
        """Rename the directory, replacing `name`; durable on return."""

    async def find_directories(self, parent: Path, name: str) -> dict[Path, bytes]:
        """Return the directories in `parent` with such a file, and its content, in order."""

    async def remove(self, directory: Path) -> None:
        """Remove the directory with its files."""


async def pass_failpoint(point: str) -> None:
    """Do nothing; the default hook of a save, before and after the rename."""


async def save_model(
    files: ModelFiles,
    directory: Path,
    weights: Weights | None = None,
    extra: Mapping[str, bytes] | None = None,
    reached: Callable[[str], Awaitable[None]] = pass_failpoint,
) -> None:
    """Write a model; without `weights`, the present one."""
    partial = await files.create_partial(directory)
    try:
        await files.write(partial, weights, extra or {})
        await files.sync(partial)
        await reached("trainer-checkpoint")
        await files.rename(partial, directory)
        await reached("trainer-checkpoint-named")
    except OSError:
        with suppress(OSError):
            await files.remove(partial)  # a full disk needs the space
        raise
