"""A model in a directory of the run: whole under its name, or not there.

Reads   a copy of the weights, or the present ones
Writes  a directory, through ModelFiles
Raises  OSError: nothing of it is left, it can be tried again

Everything is written and synced beside the name first. Who finds the name may read all of it,
whenever the trainer or its machine died.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from laminar.weights.version import manifest as mf

Weights = Any
"""A copy of a model's weights and of its optimizer; only who made it looks into it."""


class ModelFiles(Protocol):
    """The trainer's model, as files; the work of threads. All raise OSError."""

    async def copy(self) -> Weights:
        """The present ones, which may change on return; good until the next copy."""

    async def build_manifest(
        self,
        weights: Weights,
        *,
        version: int,
        step: int,
        specs: tuple[mf.TensorSpec, ...],
        probe: mf.Probe,
    ) -> mf.Manifest:
        """The manifest that a relay would give the version that is made of these weights."""

    async def create_partial(self, directory: Path) -> Path:
        """An empty directory for what is to become `directory`."""

    async def write(
        self, directory: Path, weights: Weights | None, extra: Mapping[str, bytes]
    ) -> None:
        """Put the model into a directory, with further files; None: with its present weights, and
        without the optimizer."""

    async def sync(self, directory: Path) -> None:
        """All its files are on the disk on return."""

    async def rename(self, directory: Path, name: Path) -> None:
        """Give it this name, in the place of what had it; durable on return, also after a power
        cut."""

    async def find_directories(self, parent: Path, name: str) -> dict[Path, bytes]:
        """Directories in `parent` that have a file of this name, with what is in it, in order."""

    async def remove(self, directory: Path) -> None:
        """Remove it with its files."""


async def pass_failpoint(point: str) -> None:
    """The hook of a save that does nothing, before a name is given and after."""


async def save_model(
    files: ModelFiles,
    directory: Path,
    weights: Weights | None = None,
    extra: Mapping[str, bytes] | None = None,
    reached: Callable[[str], Awaitable[None]] = pass_failpoint,
) -> None:
    """Write a model, the present one if no weights are given."""
    partial = await files.create_partial(directory)
    try:
        await files.write(partial, weights, extra or {})
        await files.sync(partial)
        await reached("trainer-checkpoint")
        await files.rename(partial, directory)
        await reached("trainer-checkpoint-named")
    except OSError:
        with suppress(OSError):
            await files.remove(partial)  # a full disk needs the room
        raise
