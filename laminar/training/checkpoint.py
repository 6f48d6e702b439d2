"""A checkpoint beside its model: the optimizer, trainer.json, and a digest of each of its files.

Reads   a directory that `save` completed
Writes  optimizer.safetensors and digests.json into a directory that has a model and trainer.json;
        parameters and optimizer of a learner
Gives   `save`, `load`; CheckpointError for what is damaged, ConfigError for what is another
        model's, one sentence each

The published version in the directory has a digest of its own, but engines may take a shorter
type than the parameters have, so every byte that training goes on from is checked here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from laminar.config import ConfigError
from laminar.run.directory import RESUME_FILE
from laminar.training import resume
from laminar.training.file_digests import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_digests,
    write_digests,
)
from laminar.training.learner import Learner
from laminar.training.model import named_weights
from laminar.training.resume import CheckpointError, ForeignError, Resume

KINDS = ("exp_avg", "exp_avg_sq", "step")
"""Tensors in the file for each parameter that was ever updated (`exp_avg.NAME`, ...), as AdamW has
them: a step after a restart gives the bytes that it would have given."""


def save(directory: Path, moments: Mapping[str, Tensor]) -> None:
    """Complete a directory that has all but the optimizer; OSError from the disk."""
    save_tensors(directory / OPTIMIZER_FILE, moments)
    write_digests(directory)


def load(directory: Path, learner: Learner) -> Resume:
    """Have the learner as it was."""
    try:
        check_digests(directory)
        found = resume.decode((directory / RESUME_FILE).read_bytes())
        _load_weights(directory / MODEL_FILE, learner)
        with safe_open(directory / OPTIMIZER_FILE, framework="pt") as file:
            moments = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        restore_moments(learner.policy.model, learner.optimizer, moments)
        learner.restore(found.learner)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {directory} cannot be trained on: {error}") from error
    except ForeignError as error:
        raise ConfigError(
            f"checkpoint {directory} cannot be trained on: {error}; give model.name the model that "
            "the run began with"
        ) from error
    return found


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """OSError from the disk: the library has a name of its own for it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, f"{path}: {error}") from error


def _load_weights(path: Path, learner: Learner) -> None:
    weights = dict(named_weights(learner.policy.model))
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        other = sorted(names ^ weights.keys())
        if other:
            raise ForeignError(f"its {MODEL_FILE} is of another model: {other[0]!r} differs")
        for name, tensor in weights.items():
            saved = file.get_tensor(name)
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise ForeignError(
                    f"its {MODEL_FILE} is of another model: {name!r} is {saved.dtype} "
                    f"{tuple(saved.shape)}, and not {tensor.dtype} {tuple(tensor.shape)}"
                )
            with torch.no_grad():
                tensor.copy_(saved)


def named_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state by the names of the file, as it is now and not copied."""
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            for kind in KINDS:
                yield f"{kind}.{name}", state[kind]


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give the optimizer the state of the file; a parameter that is not in it has had no update."""
    parameters = dict(model.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if kind not in KINDS or parameter is None:
            raise ForeignError(f"its optimizer has {key!r}, which this model does not")
        if kind != "step" and tensor.shape != parameter.shape:
            raise ForeignError(
                f"its optimizer has {key!r} of shape {tuple(tensor.shape)}, and this model's "
                f"parameter has {tuple(parameter.shape)}"
            )
        found.setdefault(name, {})[kind] = tensor.to(parameter.device, copy=True)
    torn = next((name for name, state in found.items() if len(state) != len(KINDS)), "")
    if torn:
        raise ForeignError(f"its optimizer lacks a part of the state of {torn!r}")
    optimizer.state.clear()
    for name, state in found.items():
        optimizer.state[parameters[name]] = state
