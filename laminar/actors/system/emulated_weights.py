"""The weights of an emulated run: bytes of a configured size that every step changes a part of.

Reads   seed, emulation.weights_mb, weights.dtype; a directory that was written here
Writes  slots of the relay's arena; directories with the bytes of a version
Gives   EmulatedWeights, EmulatedFiles (the ModelFiles of actors/model_files.py), read_checkpoint

They are published, sent, mapped and checked like a model's. A directory has them as they lie in a
slot, in a file whose name says what they are: no program can take it for a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from laminar.config import Config
from laminar.names.ids import hash64
from laminar.training.directories import ThreadedDirectories
from laminar.training.steps import ModelLayout
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, manifest_of
from laminar.weights.version.restored import Restored, restore

WEIGHTS_FILE = "emulated_weights.bin"
TENSORS = 8
"""Of equal size; a step changes one of them."""


class EmulatedWeights:
    """The present ones."""

    def __init__(self, config: Config) -> None:
        self._seed = config.seed
        self._dtype = "float32" if config.weights.dtype == "auto" else config.weights.dtype
        self.data: Bytes = np.empty(config.emulation.weights_mb << 20, np.uint8)
        for index in range(TENSORS):
            self.change(-1 - index)

    @property
    def layout(self) -> ModelLayout:
        count = len(self.data) // TENSORS // mf.ITEM_BYTES[self._dtype]
        shapes = tuple((f"emulated.{index}", (count,)) for index in range(TENSORS))
        return ModelLayout(shapes, self._dtype)

    def change(self, step: int) -> None:
        """What this step does to them."""
        size = len(self.data) // TENSORS
        start = step % TENSORS * size
        draw = np.random.Generator(np.random.PCG64(hash64(self._seed, "weights", step)))
        self.data[start : start + size] = np.frombuffer(draw.bytes(size), np.uint8)

    def fill(self, view: Bytes, specs: tuple[mf.TensorSpec, ...]) -> None:
        """Put them into a slot."""
        view[: len(self.data)] = self.data

    def read(self, directory: Path) -> None:
        """Take those of a directory instead."""
        self.data[:] = np.fromfile(directory / WEIGHTS_FILE, np.uint8)


class EmulatedFiles(ThreadedDirectories):
    """The directories of one run."""

    def __init__(self, weights: EmulatedWeights) -> None:
        self._weights = weights

    async def copy(self) -> Bytes:
        return self._weights.data.copy()

    async def describe(
        self, weights: Bytes, *, specs: tuple[mf.TensorSpec, ...], **facts: Any
    ) -> mf.Manifest:
        return await asyncio.to_thread(partial(manifest_of, weights, tensors=specs, **facts))

    async def write(
        self, directory: Path, weights: Bytes | None, extra: Mapping[str, bytes]
    ) -> None:
        content = self._weights.data if weights is None else weights
        await asyncio.to_thread(_write, directory, {WEIGHTS_FILE: content.tobytes(), **extra})


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def read_checkpoint(directory: Path, version: int) -> Restored:
    """A version that was saved; CheckpointError."""

    def fill(view: Bytes, manifest: mf.Manifest) -> None:
        content = np.fromfile(directory / WEIGHTS_FILE, np.uint8)
        if len(content) != len(view):
            raise mf.ManifestError(f"{WEIGHTS_FILE} has {len(content)} bytes, not {len(view)}")
        view[:] = content

    return restore(directory, version, fill)
