"""Versions in checkpoints: the manifest stored with a model, and the bit-exact way back.

Reads   a checkpoint directory: model.safetensors, version.msgpack (the manifest)
Gives   the bytes of a version as they lie in a slot; VersionRestoreError for anything else

A checkpoint has the trainer's parameters; a version has the same tensors in the published type, as
engines load them. The conversion is exact, so the manifest's digest proves on any machine that a
checkpoint yields the weights that were published under its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes
from laminar.weights.version.restored import RestoredVersion, VersionRestoreError, restore_version
from laminar.weights.version.tensors import write_tensors

MODEL_FILE = "model.safetensors"


def read_version(directory: Path, version: int) -> RestoredVersion:
    """Restore a version from a checkpoint and verify its digest."""

    def fill(view: Bytes, manifest: mf.Manifest) -> None:
        try:
            write_tensors(view, manifest.tensors, _iter_tensors(directory / MODEL_FILE))
        except SafetensorError as error:
            raise VersionRestoreError(f"{directory}: {error}") from error

    return restore_version(directory, version, fill)


def _iter_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors, holding only one at a time in memory."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            yield name, tensors.get_tensor(name)
