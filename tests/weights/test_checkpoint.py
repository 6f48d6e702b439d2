"""A version comes back from its checkpoint bit for bit, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from laminar.run.directory import VERSION_FILE
from laminar.weights.version import checkpoint
from laminar.weights.version import manifest as mf
from laminar.weights.version.checkpoint import MODEL_FILE
from laminar.weights.version.hashes import build_manifest
from laminar.weights.version.restored import VersionRestoreError
from laminar.weights.version.tensors import write_tensors
from tools.kit.one_process import build_tensor_manifest

PROBE = mf.Probe(sequences=((1, 2),), logprobs=((-0.5,),), tolerance=0.1, mean_tolerance=0.1)
Tensors = dict[str, torch.Tensor]


def weights() -> Tensors:
    """As a trainer has them."""
    chance = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(33, 7, generator=chance),
        "layer.0": torch.randn(5, 3, 2, generator=chance) * 1e-6,
    }


def specs(dtype: str) -> tuple[mf.TensorSpec, ...]:
    return mf.make_layout([(name, tuple(t.shape)) for name, t in weights().items()], dtype)


def save(directory: Path, dtype: str = "bfloat16", version: int = 7) -> mf.Manifest:
    tensors = weights()
    manifest = build_tensor_manifest(
        version=version, step=version, specs=specs(dtype), tensors=tensors.items(), probe=PROBE
    )
    save_file(tensors, directory / MODEL_FILE)
    (directory / VERSION_FILE).write_bytes(mf.encode(manifest))
    return manifest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_version_is_the_one_that_was_published(dtype: str, tmp_path: Path) -> None:
    """A relay makes the same manifest of what the trainer writes into its slot."""
    slot = np.full(1 << 16, 0xEE, dtype=np.uint8)
    write_tensors(slot, specs(dtype), weights().items())
    published = build_manifest(slot, version=7, step=7, tensors=specs(dtype), probe=PROBE)
    assert save(tmp_path, dtype) == published
    found = checkpoint.read_version(tmp_path, 7)
    wanted = slot[: published.total_bytes].tobytes()
    assert found.manifest == published
    assert found.view.tobytes() == wanted
    assert Path(found.path).read_bytes() == wanted, "another process can open it, too"
    found.close()
    assert not Path(found.path).exists()


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, version=6)
    with pytest.raises(VersionRestoreError, match="holds version 6, not 7"):
        checkpoint.read_version(tmp_path, 7)


def test_one_changed_value_is_found(tmp_path: Path) -> None:
    save(tmp_path)
    changed = weights()
    changed["embed"][0, 0] += 1
    save_file(changed, tmp_path / MODEL_FILE)
    with pytest.raises(VersionRestoreError, match="expected xxh3_64"):
        checkpoint.read_version(tmp_path, 7)


@pytest.mark.parametrize("file", [MODEL_FILE, VERSION_FILE])
def test_missing_or_cut_files_are_named(file: str, tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(VersionRestoreError, match=tmp_path.name):
        checkpoint.read_version(tmp_path, 7)
    path.unlink()
    with pytest.raises(VersionRestoreError, match="No such file"):
        checkpoint.read_version(tmp_path, 7)


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    save_file({"embed": weights()["embed"]}, tmp_path / MODEL_FILE)
    with pytest.raises(VersionRestoreError, match="1 tensors were not written"):
        checkpoint.read_version(tmp_path, 7)
