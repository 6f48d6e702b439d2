"""Checkpoints in a model's directory: optimizer, critic, trainer.json, a digest of each file.

Reads   a checkpoint's directory
Writes  parameters and optimizer of a learner: with adapters, those of the adapters alone
Gives   `verify_checkpoint`, `restore_checkpoint`; CheckpointError for damage, ConfigError for
        another model's files, one sentence each; OSError while the disk fails

The published version in the directory has a digest too, but engines may use a shorter type than
the parameters have, so every byte that training resumes from is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laminar.config import ConfigError
from laminar.names.ports import is_transient
from laminar.run.directory import RESUME_FILE
from laminar.run.work_counter import count_work
from laminar.training import trainer_state
from laminar.training.checkpoints.file_digests import (
    CRITIC_MODEL_FILE,
    CRITIC_OPTIMIZER_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    check_digests,
)
from laminar.training.critic import Critic
from laminar.training.learner import Learner
from laminar.training.model import lora
from laminar.training.model.loading import copy_rows
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.model.policy import get_base_rows, iter_weight_rows
from laminar.training.ranks import SINGLE_RANK, Ranks
from laminar.training.shared_safetensors import Rows, iter_rows, rows_of
from laminar.training.trainer_state import CheckpointError, ForeignError, ResumeState

ADAM_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""Tensors in the file for each parameter that was ever updated (`exp_avg.NAME`, ...), with AdamW's
names: a step after a restart gives the same bytes as without it."""


def verify_checkpoint(directory: Path) -> None:
    """Check that every byte that training resumes from is as it was written."""
    try:
        check_digests(directory)
    except (OSError, CheckpointError) as error:
        if is_transient(error):
            raise
        raise _make_damage_error(directory, error) from error


def restore_checkpoint(directory: Path, learner: Learner) -> ResumeState:
    """Restore the learner, or this rank of it; only its rows of the files are read.

    If several nodes have the whole model, the first reads, and sends to the others."""
    try:
        found = trainer_state.decode((directory / RESUME_FILE).read_bytes())
        learner.restore_facts(found.learner)
        _load_policy(directory, learner)
        with safe_open(directory / OPTIMIZER_FILE, framework="pt") as file:
            restore_moments(learner.policy.model, learner.optimizer, file, learner.ranks)
        if learner.critic is not None and found.learner.critic:
            _load_critic(directory, learner.critic)
    except (OSError, SafetensorError, CheckpointError) as error:
        if is_transient(error):
            raise
        raise _make_damage_error(directory, error) from error
    except ForeignError as error:
        raise ConfigError(
            f"checkpoint {directory} cannot be trained on: {error}; restore the run's original "
            "settings"
        ) from error
    return found


def _make_damage_error(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} cannot be trained on: {error}")


def critic_tensors(critic: Critic) -> dict[str, Iterable[tuple[str, Rows]]]:
    """Return by file the critic's rows in a checkpoint, as they are now and not copied."""
    model = critic.model.model
    return {
        CRITIC_MODEL_FILE: iter_weight_rows(model),
        CRITIC_OPTIMIZER_FILE: iter_rows(iter_moments(model, critic.optimizer)),
    }


def _load_critic(directory: Path, critic: Critic) -> None:
    _load_tensors(directory, CRITIC_MODEL_FILE, get_base_rows(critic.model.model), critic.ranks)
    with safe_open(directory / CRITIC_OPTIMIZER_FILE, framework="pt") as file:
        restore_moments(critic.model.model, critic.optimizer, file, critic.ranks)


def _load_policy(directory: Path, learner: Learner) -> None:
    model, name = learner.policy.model, MODEL_FILE
    weights = get_base_rows(model)
    if learner.policy.base:  # base of that digest; its file has the adapters merged
        name, weights = ADAPTER_FILE, dict(iter_rows(lora.file_tensors(model)))
    _load_tensors(directory, name, weights, learner.ranks)


@torch.no_grad()
def _load_tensors(directory: Path, name: str, weights: Mapping[str, Rows], ranks: Ranks) -> None:
    with safe_open(directory / name, framework="pt") as file:
        other = sorted(set(file.keys()) ^ weights.keys())
        if other:
            raise ForeignError(f"its {name} belongs to another model: {other[0]!r} differs")
        for key, rows in weights.items():
            _load_rows(name, key, rows, file, ranks)


def read_back(directory: Path, learner: Learner) -> None:
    """Check that the file has the learner's merged weights, to the last bit; CheckpointError."""
    with safe_open(directory / MODEL_FILE, framework="pt") as file:
        for name, rows in iter_weight_rows(learner.policy.model):
            count_work()
            end = rows.first + len(rows.data)
            if not torch.equal(file.get_slice(name)[rows.first : end], rows.data.cpu()):
                raise CheckpointError(f"{name!r} in {directory} differs from what was written")


def _load_rows(of: str, name: str, rows: Rows, file: Any, ranks: Ranks) -> None:
    try:
        copy_rows(name, rows, file.get_slice(name), ranks)
    except ValueError as error:
        raise ForeignError(f"its {of} belongs to another model: {error}") from error


def iter_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the optimizer's state by file name, as it is now and not copied."""
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            for kind in ADAM_STATE_KEYS:
                yield f"{kind}.{name}", state[kind]


@torch.no_grad()
def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, file: Any, ranks: Ranks = SINGLE_RANK
) -> None:
    """Restore the optimizer's state from the file; a parameter not in it has had no update."""
    parameters = dict(model.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for key in file.keys():  # noqa: SIM118
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if kind not in ADAM_STATE_KEYS or parameter is None:
            raise ForeignError(f"its optimizer has {key!r}, which this model lacks")
        state = found.setdefault(name, {})
        if kind == "step":
            state[kind] = file.get_tensor(key).to(parameter.device)
            continue
        state[kind] = torch.empty_like(parameter)
        _load_rows(OPTIMIZER_FILE, key, rows_of(state[kind]), file, ranks)
    torn = next((name for name, state in found.items() if len(state) != len(ADAM_STATE_KEYS)), "")
    if torn:
        raise ForeignError(f"its optimizer lacks a part of the state of {torn!r}")
    optimizer.state.clear()
    for name, state in found.items():
        optimizer.state[parameters[name]] = state
