"""Emulated models: the parts of an emulated run that take time instead of computing.

Reads   emulation.*, seed, weights.dtype; arenas, samples and directories, which are real
Writes  slots of the relay's arena; directories with the bytes of a version; timeline/NAME.steps
Gives   EmulatedPrompts, the PromptSource of actors/store.py; EmulatedParts, the ReplicaParts of
        actors/rollout.py; EmulatedLearner, the Learner of actors/trainer.py; EmulatedFiles, the
        ModelFiles of actors/model_files.py, with EmulatedWeights and read_checkpoint

Weights are bytes of a configured size; every step changes a part of them. They are published, sent,
mapped and checked like a model's. A directory has them as they lie in a slot, in a file whose name
prevents any program from mistaking it for a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from laminar.actors.host import Host
from laminar.actors.system.engine_steps import EngineSteps
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.config import Config
from laminar.engines.emulated.engine import EmulatedEngine, fingerprint_weights, make_fake_logprobs
from laminar.engines.emulated.fake_tokens import END_ID, make_tokens
from laminar.engines.protocol import ReplicaEngine, TokenDelta
from laminar.names.ids import hash64
from laminar.names.ports import is_transient
from laminar.run.directory import RESUME_FILE
from laminar.run.work_counter import count_work
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, PromptKey
from laminar.tasks.rewards.results import RewardCall, RewardResult
from laminar.training import steps
from laminar.training.checkpoints.atomic_directory import ThreadedDirectories
from laminar.training.trainer_state import CheckpointError, LearnerFacts, ResumeState, decode
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, build_manifest
from laminar.weights.version.restored import RestoredVersion, restore_version

WEIGHTS_FILE = "emulated_weights.bin"
TENSORS = 8  #: tensors of equal size; each step changes one of them


class EmulatedRewards:
    """Rewards determined by the tokens of the response, the same on every replica."""

    workers_lost = workers_killed = 0

    async def start(self) -> None:
        """Do nothing, since there are no workers."""

    async def close(self) -> None:
        """Do nothing, since there are no workers."""

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        return [RewardResult(float(sum(tokens) % 2)) for _, tokens in call.completions]


class EmulatedParts:
    """The parts of one emulated replica."""

    stop_ids = frozenset({END_ID})

    def __init__(self, host: Host) -> None:
        self._host = host
        self.rewards = EmulatedRewards()
        self.weights = ReplicaFiles(read_checkpoint)
        file = EngineSteps(host.run_dir, host.name)
        self._steps = host.add_outlet("engine steps", file.write)

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[TokenDelta]], None]
    ) -> ReplicaEngine:
        return EmulatedEngine(self._host.config, on_deltas)

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} emulated tokens"

    def record_steps(self, rows: bytes) -> None:
        self._steps.put(rows)


class EmulatedPrompts:
    """Prompts, data.dataset_size of data.max_prompt_length tokens; the last are held out."""

    def __init__(self, config: Config) -> None:
        self._data = config.data

    async def load(self) -> LoadedPrompts:
        data = self._data
        rows = [_make_payload(index) for index in range(data.dataset_size)]
        num_train = data.dataset_size - data.val_size
        digest = f"emulated, {data.dataset_size} of {data.max_prompt_length} tokens"
        return LoadedPrompts(rows[:num_train], rows[num_train:], 0, digest)

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        length = self._data.max_prompt_length
        return {
            key: make_tokens(hash64("prompt", str(m.decode_prompt(payload).prompt)), 0, length)
            for key, payload in prompts.items()
        }


def _make_payload(index: int) -> m.PromptPayload:
    return m.PromptPayload(
        prompt=f"emulated prompt {index}",
        ground_truth="",
        columns={},
        data_source="emulated",
        prompt_ids=b"",
    )


class EmulatedLearner:
    """A learner whose step takes time, changes some of the weights, and learns nothing."""

    def __init__(self, config: Config, weights: EmulatedWeights) -> None:
        self._train_s, self.weights = config.emulation.train_s, weights

    async def load(self) -> steps.ModelLayout:
        return self.weights.layout

    async def check_weights(self, dtype: str | None) -> int:
        return 0  # there are no files

    async def train_step(self, samples: Sequence[steps.TrainSample], step: int) -> steps.StepResult:
        for _ in range(slices := max(1, round(self._train_s))):
            await asyncio.sleep(self._train_s / slices)
            count_work()
        await asyncio.to_thread(self.weights.apply_step, step)
        return steps.StepResult(
            step=step,
            updates=(steps.Update(tuple(s.sample_id for s in samples), None, 0.0, 0.0, None),),
            metrics={
                "emulated": 1.0,
                "reward/mean": fmean(s.reward for s in samples),
                "response_length/mean": fmean(len(s.response_ids) for s in samples),
                **steps.token_staleness(samples, step),
            },
            mismatch={},
            suspects={},
            left_out={},
            num_tokens=sum(len(s.response_ids) for s in samples),
            digest=steps.ids_digest(samples),
        )

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        weights = await asyncio.to_thread(fingerprint_weights, self.weights.data)
        return make_fake_logprobs(weights, sequences)

    async def reload_weights(self, directory: Path) -> None:
        await asyncio.to_thread(self.weights.read, directory)

    async def close(self) -> None:
        """Do nothing: it has no other processes."""

    async def restore_checkpoint(self, directory: Path) -> ResumeState:
        """Read the weights; there is no optimizer, and a step depends on nothing else."""
        try:
            found = decode((directory / RESUME_FILE).read_bytes())
            await self.reload_weights(directory)
        except (OSError, CheckpointError) as error:
            if is_transient(error):
                raise
            raise CheckpointError(f"checkpoint {directory} cannot be read: {error}") from error
        return found

    def collect_facts(self) -> LearnerFacts:
        return LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})


class EmulatedWeights:
    """The present weights of an emulated run."""

    def __init__(self, config: Config) -> None:
        self._seed = config.seed
        self._dtype = "float32" if config.weights.dtype == "auto" else config.weights.dtype
        self.data: Bytes = np.empty(config.emulation.weights_mb << 20, np.uint8)
        for index in range(TENSORS):
            self.apply_step(-1 - index)

    @property
    def layout(self) -> steps.ModelLayout:
        count = len(self.data) // TENSORS // mf.ITEM_BYTES[self._dtype]
        shapes = tuple((f"emulated.{index}", (count,)) for index in range(TENSORS))
        return steps.ModelLayout(shapes, self._dtype)

    def apply_step(self, step: int) -> None:
        """Change the weights as this step does."""
        size = len(self.data) // TENSORS
        start = step % TENSORS * size
        draw = np.random.Generator(np.random.PCG64(hash64(self._seed, "weights", step)))
        self.data[start : start + size] = np.frombuffer(draw.bytes(size), np.uint8)

    def fill_slot(self, view: Bytes, specs: tuple[mf.TensorSpec, ...]) -> None:
        """Write the weights into a slot."""
        view[: len(self.data)] = self.data

    def read(self, directory: Path) -> None:
        """Replace the weights with those of a directory."""
        self.data[:] = np.fromfile(directory / WEIGHTS_FILE, np.uint8)


class EmulatedFiles(ThreadedDirectories):
    """The directories of an emulated run."""

    def __init__(self, weights: EmulatedWeights) -> None:
        self._weights = weights

    async def copy(self) -> Bytes:
        return self._weights.data.copy()

    async def build_manifest(
        self, weights: Bytes, *, specs: tuple[mf.TensorSpec, ...], **facts: Any
    ) -> mf.Manifest:
        return await asyncio.to_thread(partial(build_manifest, weights, tensors=specs, **facts))

    async def write(
        self, directory: Path, weights: Bytes | None, extra: Mapping[str, bytes]
    ) -> None:
        content = self._weights.data if weights is None else weights
        await asyncio.to_thread(_write, directory, {WEIGHTS_FILE: content.tobytes(), **extra})


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def read_checkpoint(directory: Path, version: int) -> RestoredVersion:
    """Restore a saved version; CheckpointError."""

    def fill(view: Bytes, manifest: mf.Manifest) -> None:
        content = np.fromfile(directory / WEIGHTS_FILE, np.uint8)
        if len(content) != len(view):
            raise mf.ManifestError(f"{WEIGHTS_FILE} has {len(content)} bytes, not {len(view)}")
        view[:] = content

    return restore_version(directory, version, fill)
