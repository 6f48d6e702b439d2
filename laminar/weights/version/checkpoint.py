"""A version on disk: what to write beside a model, and how to get the version back bit for bit.

Reads   a checkpoint directory: model.safetensors, version.msgpack (the manifest)
Gives   the bytes of a version as they lie in a slot; CheckpointError for anything else

A checkpoint has the trainer's parameters, a version has what engines take: the same tensors in the
published type. Conversion is exact, so the digest of the manifest proves that a checkpoint gives
the weights that were published under its number, on whatever machine it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, build_manifest
from laminar.weights.version.restored import Restored, VersionRestoreError, restore_version
from laminar.weights.version.tensors import write_tensors

MODEL_FILE = "model.safetensors"


def build_tensor_manifest(
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
    return build_manifest(view, version=version, step=step, tensors=specs, probe=probe)


def read_version(directory: Path, version: int) -> Restored:
    """This version, proved by its digest."""

    def fill(view: Bytes, manifest: mf.Manifest) -> None:
        try:
            write_tensors(view, manifest.tensors, _iter_tensors(directory / MODEL_FILE))
        except SafetensorError as error:
            raise VersionRestoreError(f"{directory}: {error}") from error

    return restore_version(directory, version, fill)


def _iter_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors one after the other: only one is in memory beside the version."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            yield name, tensors.get_tensor(name)
