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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laminar.config import ConfigError
from laminar.run.directory import RESUME_FILE
from laminar.training import resume, tensor_file
from laminar.training.file_digests import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_digests,
    write_digests,
)
from laminar.training.learner import Learner
from laminar.training.model import named_weights
from laminar.training.resume import CheckpointError, ForeignError, Resume
from laminar.training.sharding import copy_rows
from laminar.training.tensor_file import Rows

KINDS = ("exp_avg", "exp_avg_sq", "step")
"""Tensors in the file for each parameter that was ever updated (`exp_avg.NAME`, ...), as AdamW has
them: a step after a restart gives the bytes that it would have given."""


def save(directory: Path, moments: Mapping[str, Tensor]) -> None:
    """Complete a directory that has all but the optimizer; OSError from the disk."""
    save_tensors(directory / OPTIMIZER_FILE, moments)
    write_digests(directory)


def load(directory: Path, learner: Learner) -> Resume:
    """Have the learner as it was."""
    check(directory)
    return take(directory, learner)


def check(directory: Path) -> None:
    """Every byte that training goes on from is as it was written."""
    try:
        check_digests(directory)
    except (OSError, CheckpointError) as error:
        raise _damaged(directory, error) from error


def take(directory: Path, learner: Learner) -> Resume:
    """Have the learner, or this rank of it, as it was; of the files, only its rows are read."""
    try:
        found = resume.decode((directory / RESUME_FILE).read_bytes())
        _load_weights(directory / MODEL_FILE, learner)
        with safe_open(directory / OPTIMIZER_FILE, framework="pt") as file:
            restore_moments(learner.policy.model, learner.optimizer, file)
        learner.restore(found.learner)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise _damaged(directory, error) from error
    except ForeignError as error:
        raise ConfigError(
            f"checkpoint {directory} cannot be trained on: {error}; give model.name the model that "
            "the run began with"
        ) from error
    return found


def _damaged(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} cannot be trained on: {error}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Whole tensors of one process; OSError from the disk."""
    rows = {name: Rows(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}
    tensor_file.create(path, rows)
    tensor_file.write(path, rows)


@torch.no_grad()
def _load_weights(path: Path, learner: Learner) -> None:
    weights = dict(named_weights(learner.policy.model))
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        other = sorted(names ^ weights.keys())
        if other:
            raise ForeignError(f"its {MODEL_FILE} is of another model: {other[0]!r} differs")
        for name, tensor in weights.items():
            _take_rows(MODEL_FILE, name, tensor, file)


def _take_rows(of: str, name: str, tensor: Tensor, file: Any) -> None:
    try:
        copy_rows(name, tensor, file.get_slice(name))
    except ValueError as error:
        raise ForeignError(f"its {of} is of another model: {error}") from error


def named_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state by the names of the file, as it is now and not copied."""
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            for kind in KINDS:
                yield f"{kind}.{name}", state[kind]


@torch.no_grad()
def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, file: Any) -> None:
    """Give the optimizer the state of the file; a parameter that is not in it has had no update."""
    parameters = dict(model.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for key in file.keys():  # noqa: SIM118
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if kind not in KINDS or parameter is None:
            raise ForeignError(f"its optimizer has {key!r}, which this model does not")
        state = found.setdefault(name, {})
        if kind == "step":
            state[kind] = file.get_tensor(key).to(parameter.device)
            continue
        state[kind] = torch.empty_like(parameter)
        _take_rows(OPTIMIZER_FILE, key, state[kind], file)
    torn = next((name for name, state in found.items() if len(state) != len(KINDS)), "")
    if torn:
        raise ForeignError(f"its optimizer lacks a part of the state of {torn!r}")
    optimizer.state.clear()
    for name, state in found.items():
        optimizer.state[parameters[name]] = state
