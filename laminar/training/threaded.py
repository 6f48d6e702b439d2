"""The learner and its model's files for an event loop: slow work runs in a thread.

Reads   the model's directory; samples, one step at a time
Writes  directories of models, below the run's directory
Gives   ThreadedLearner, ThreadedFiles: interfaces of the trainer actor (actors/trainer.py,
        actors/model_files.py)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from laminar.config import Config
from laminar.training.checkpoints import checkpoint, export
from laminar.training.checkpoints.atomic_directory import ThreadedDirectories
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.learner import Learner, load_learner, replace_weights, run_measured_step
from laminar.training.model import lora
from laminar.training.model.policy import load_critic, load_policy, named_weights, weight_forms
from laminar.training.model.weight_files import compare_published
from laminar.training.shared_safetensors import iter_rows
from laminar.training.steps import ModelLayout, StepResult, TrainSample
from laminar.training.trainer_state import LearnerFacts, ResumeState

Tensors = dict[str, torch.Tensor]


class CheckpointCopy(NamedTuple):
    """Content of a checkpoint, valid until the next copy."""

    weights: Tensors
    moments: Tensors
    adapters: Tensors
    critic: dict[str, Tensors]  #: by file


Describe = Callable[..., Any]
"""`build_tensor_manifest` in weights/version/checkpoint.py."""


class ThreadedLearner:
    """A learner of one process; it exists once loaded."""

    learner: Learner

    def __init__(
        self,
        config: Config,
        tokenizer_size: Callable[[], int],
        reached: Callable[[str], None] = Learner.reached,
    ) -> None:
        """Set up without loading.

        `tokenizer_size`: one more than the largest id, read from the model's directory.
        `reached`: failpoints."""
        self._reached = reached
        self._config = config
        self._tokenizer_size = tokenizer_size
        self._device = device_of(config.trainer.device)

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.policy.model

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the present weights, without copies."""
        return named_weights(self.model)

    async def load(self) -> ModelLayout:
        """Load the model; raises ConfigError."""
        config = self._config
        torch.set_num_threads(config.trainer.threads)
        transformers.utils.logging.disable_progress_bar()  # they would tear the live panel
        size = await asyncio.to_thread(self._tokenizer_size)
        self._load = partial(load_policy, device=self._device, tokenizer_size=size)
        critic = partial(load_critic, device=self._device, tokenizer_size=size)
        self.learner = await asyncio.to_thread(load_learner, config, self._load, critic)
        self.learner.reached = self._reached
        return self.learner.policy.describe_layout(weight_forms(self.model), self.learner.compute)

    async def check_weights(self, dtype: str | None) -> int:
        """Compare what is published with the model's files; raises ConfigError."""
        name, rows = self._config.model.name, iter_rows(self.iter_weights())
        return await asyncio.to_thread(compare_published, name, self.model, rows, dtype)

    async def train_step(self, samples: Sequence[TrainSample], step: int) -> StepResult:
        return await asyncio.to_thread(run_measured_step, self.learner, samples, step)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await asyncio.to_thread(self.learner.compute_logprobs, sequences)

    async def reload_weights(self, directory: Path) -> None:
        """Replace the weights by those of an export; with adapters only verify that they are equal.

        Raises CheckpointError."""
        if self.learner.policy.base:
            await asyncio.to_thread(checkpoint.read_back, directory, self.learner)
        else:
            await asyncio.to_thread(
                replace_weights, self.learner, lambda: self._load(str(directory))
            )

    def collect_facts(self) -> LearnerFacts:
        return self.learner.collect_facts()

    async def close(self) -> None:
        """Do nothing: it has no other processes."""

    async def restore_checkpoint(self, directory: Path) -> ResumeState:
        """Restore parameters and optimizer from a checkpoint; raises CheckpointError."""
        return await asyncio.to_thread(checkpoint.load_checkpoint, directory, self.learner)


class ThreadedFiles(ThreadedDirectories):
    """The model directories of one run."""

    def __init__(self, learner: Callable[[], Learner], source: str, describe: Describe) -> None:
        """Set up; `source`: the directory that the run's tokenizer came from."""
        self._learner = learner
        self._source = source
        self._describe = describe
        self._weights, self._moments, self._adapters = CopyBuffers(), CopyBuffers(), CopyBuffers()
        self._critic: dict[str, CopyBuffers] = defaultdict(CopyBuffers)

    async def copy(self) -> CheckpointCopy:
        return await asyncio.to_thread(self._copy)

    async def build_manifest(self, weights: CheckpointCopy, **facts: Any) -> Any:
        return await asyncio.to_thread(self._describe, tensors=weights.weights.items(), **facts)

    async def write(
        self, directory: Path, copied: CheckpointCopy | None, extra: Mapping[str, bytes]
    ) -> None:
        await asyncio.to_thread(self._write, directory, copied, extra)

    def _copy(self) -> CheckpointCopy:
        learner = self._learner()
        model = learner.policy.model
        critic = checkpoint.critic_tensors(learner.critic) if learner.critic is not None else {}
        return CheckpointCopy(
            self._weights.copy(named_weights(model)),
            self._moments.copy(iter_moments(model, learner.optimizer)),
            self._adapters.copy(lora.file_tensors(model)),
            {
                name: self._critic[name].copy((key, rows.data) for key, rows in found)
                for name, found in critic.items()
            },
        )

    def _write(
        self, directory: Path, copied: CheckpointCopy | None, extra: Mapping[str, bytes]
    ) -> None:
        weights, adapters = (copied.weights, copied.adapters) if copied else (None, None)
        model = self._learner().policy.model
        written = export.write_model(model, self._source, directory, weights, extra, adapters)
        if copied is not None:
            checkpoint.complete_checkpoint(directory, copied.moments, copied.critic, written)


def device_of(name: str) -> torch.device:
    """Return the device of trainer.device; auto is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class CopyBuffers:
    """Copies in host memory, one for each tensor name, which the next copy overwrites.

    Allocating memory each time costs more than the copy: the system clears every page at its first
    touch. The trainer stands still during a copy, so it reuses pages that exist.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy the tensors as they are now; the copies are valid until the next call."""
        return {name: self._get_buffer(name, tensor).copy_(tensor) for name, tensor in tensors}

    def _get_buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept
