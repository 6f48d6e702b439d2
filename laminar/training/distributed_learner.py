"""The learner of a trainer over its ranks: each has its rows of the model, a single one the whole.

Reads   the model's directory, by slices; samples, one step at a time
Writes  rows of slots and of files; directories of models, below the run's directory
Gives   RankedLearner, RankedFiles: interfaces of the trainer actor (actors/trainer.py,
        actors/model_files.py) on rank 0; RankWorker, the work of every rank; NoOtherRanks
Raises  ConfigError, CheckpointError, OSError from the disk; RankError

Rank 0 carries out every order itself, in a thread, and has the others do so at the same time: each
pass needs them all. An order has the whole batch, as it came from the store. A trainer of one
process works the same way, without other ranks; its model is divided by nothing, unless its state
is in host memory (trainer.offload).
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

import msgspec
import numpy as np
import torch
import transformers
from torch import Tensor

from laminar.config import Config
from laminar.training import shared_safetensors
from laminar.training.checkpoints import checkpoint, export, file_digests
from laminar.training.checkpoints.atomic_directory import ThreadedDirectories
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.checkpoints.file_digests import MODEL_FILE, OPTIMIZER_FILE
from laminar.training.learner import (
    Learner,
    load_learner,
    no_point,
    replace_weights,
    run_measured_step,
)
from laminar.training.model import lora
from laminar.training.model.fsdp import load_sharded, load_sharded_critic
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.model.policy import (
    get_base_rows,
    iter_weight_rows,
    load_critic,
    load_policy,
    weight_forms,
)
from laminar.training.model.weight_files import compare_published
from laminar.training.node_rows import bring_rows
from laminar.training.ranks import (
    SINGLE_RANK,
    RankLayout,
    Ranks,
    Rendezvous,
    device_of,
    join_rank_group,
)
from laminar.training.shared_safetensors import (
    Rows,
    TensorLayouts,
    WrittenSpan,
    get_layouts,
    iter_rows,
    write_rows,
)
from laminar.training.steps import ModelLayout, StepResult, TrainSample
from laminar.training.trainer_state import LearnerFacts, ResumeState

Result = TypeVar("Result")
FoundRows = Iterable[tuple[str, Rows]]
PutRows = Callable[[bytes, Iterable[tuple[str, int, Tensor]]], None]
"""Puts rows (name, first row, rows) at a Target's address (weights/version/shared_rows.py)."""


class _RankOrder(msgspec.Struct, frozen=True):
    """Base of the orders to all ranks."""


class LoadOrder(_RankOrder, tag="load", frozen=True):
    """Join the rank group, and load the model."""


class CheckOrder(_RankOrder, tag="check", frozen=True):
    """Compare what is published with the files of the model."""

    dtype: str | None  #: of the published values; None: compare names and shapes alone


class TrainOrder(_RankOrder, tag="train", frozen=True):
    batch: tuple[TrainSample, ...]  #: each rank computes the advantages from the whole batch
    step: int


class ScoreOrder(_RankOrder, tag="score", frozen=True):
    sequences: tuple[tuple[int, ...], ...]


class CopyOrder(_RankOrder, tag="copy", frozen=True):
    """Copy weights and optimizer, and replace the previous copy."""


class PutWeightsOrder(_RankOrder, tag="put", frozen=True):
    target: bytes
    copied: bool  #: whether from the copy; else the present weights


class WriteFilesOrder(_RankOrder, tag="write", frozen=True):
    """Write rows into the files of a directory, which rank 0 has created."""

    directory: str
    copied: bool  #: whether from the copy, with optimizer; else present weights alone


class RestoreOrder(_RankOrder, tag="restore", frozen=True):
    directory: str


class ReloadOrder(_RankOrder, tag="reload", frozen=True):
    directory: str


RankOrder = (
    LoadOrder
    | CheckOrder
    | TrainOrder
    | ScoreOrder
    | CopyOrder
    | PutWeightsOrder
    | WriteFilesOrder
    | RestoreOrder
    | ReloadOrder
)


RANK_POINTS: dict[type[_RankOrder], str] = {
    LoadOrder: "rank-load",
    TrainOrder: "rank-step",
    PutWeightsOrder: "rank-fill",
    WriteFilesOrder: "rank-write",
}
"""Failpoints of a rank other than the first, by the order that it is about to carry out."""


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(type(value))


def _decode_array(kind: Any, data: bytes) -> Any:
    """Decode an array; `kind`: a numpy.typing.NDArray type."""
    (item,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, item)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(RankOrder, dec_hook=_decode_array)
_written_decoder = msgspec.msgpack.Decoder(dict[str, list[WrittenSpan]])


class RankGroup(Protocol):
    """The other ranks (rank_processes.py)."""

    size: int

    async def start(self) -> None:
        """Start the ranks, and return when all take orders; raises RankError."""

    async def run_on_all_ranks(
        self, body: bytes, own: Awaitable[Result]
    ) -> tuple[Result, list[bytes]]:
        """Have the ranks carry out an order, while `own` does the same here."""

    async def close(self) -> None:
        """End the ranks."""


class NoOtherRanks:
    """The other ranks of a trainer of one process: none."""

    size = 1

    async def start(self) -> None:
        """Do nothing: there is none to start."""

    async def run_on_all_ranks(
        self, body: bytes, own: Awaitable[Result]
    ) -> tuple[Result, list[bytes]]:
        return await own, []

    async def close(self) -> None:
        """Do nothing: there is none to end."""


class FilePlan(NamedTuple):
    """The tensors of a file, and this rank's rows of them."""

    layouts: TensorLayouts
    held: Mapping[str, Rows]  #: without adapters
    found: FoundRows  #: the same, with adapters merged

    @staticmethod
    def from_rows(rows: Mapping[str, Rows]) -> FilePlan:
        return FilePlan(get_layouts(rows), rows, rows.items())


class RankWorker:
    """The work of one rank: a learner, and the destinations of its rows."""

    learner: Learner

    def __init__(
        self,
        config: Config,
        rank: int,
        meeting: Callable[[], Rendezvous] | None,
        tokenizer_size: Callable[[], int],
        put: PutRows,
        reached: Callable[[str], None] = no_point,
    ) -> None:
        """Set up without loading.

        `meeting`: opens the rendezvous of all ranks; None: the model is not divided.
        `tokenizer_size`: one more than the largest id, read from the model's directory. `reached`:
        failpoints (run/fail_points.py)."""
        self._config, self._rank, self._meeting = config, rank, meeting
        self._tokenizer_size, self._put, self._reached = tokenizer_size, put, reached
        self._device = device_of(config.trainer.device)
        if self._device.type == "cuda":  # the first GPUs of this process are of its node's ranks
            self._device = torch.device("cuda", rank % config.trainer.ranks)
        self._kept: dict[str, CopyBuffers] = defaultdict(CopyBuffers)
        self._copied: dict[str, dict[str, Rows]] = {}  #: by destination file
        self._published: torch.dtype | None = None  #: type of a version; known once loaded

    async def handle_order(self, order: bytes) -> bytes:
        """Carry out an order of rank 0, which has the result; reply with digests of files."""
        decoded = _decoder.decode(order)
        if (point := RANK_POINTS.get(type(decoded))) is not None:
            self._reached(point)
        result = await asyncio.to_thread(self.execute_order, decoded)
        return _encoder.encode(result) if isinstance(decoded, WriteFilesOrder) else b""

    def execute_order(self, order: RankOrder) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a setting of each thread
        match order:
            case LoadOrder():
                return self._load()
            case CheckOrder(dtype):
                return self._compare_published(dtype) if self._has_rows else 0
            case TrainOrder(batch, step):
                return run_measured_step(self.learner, batch, step)
            case ScoreOrder(sequences):
                return self.learner.compute_logprobs(sequences)
            case CopyOrder():
                return self._copy() if self._has_rows else None
            case PutWeightsOrder(target, copied):
                return self._put_rows(target, copied) if self._has_rows else None
            case WriteFilesOrder(directory, copied):
                return self._write_files(Path(directory), copied) if self._has_rows else {}
            case RestoreOrder(directory):
                return checkpoint.restore_checkpoint(Path(directory), self.learner)
            case ReloadOrder(directory):
                if self.learner.policy.base and not self._has_rows:
                    return None  # the first node reads and compares
                if self.learner.policy.base:
                    return checkpoint.read_back(Path(directory), self.learner)
                return replace_weights(self.learner, lambda: self._load_policy(directory))

    @property
    def _has_rows(self) -> bool:
        """Whether weights and files get rows from this rank; else another node has the same."""
        return self.learner.ranks.reads_files

    def plan_files(self, *, copied: bool) -> dict[str, FilePlan]:
        """Plan the files of a directory."""
        if copied:
            return {name: FilePlan.from_rows(rows) for name, rows in self._copied.items()}
        model = self.learner.policy.model
        weights = FilePlan(weight_forms(model), get_base_rows(model), self.iter_weight_rows())
        found = {MODEL_FILE: weights}
        if self.learner.policy.base:
            found[ADAPTER_FILE] = FilePlan.from_rows(dict(iter_rows(lora.file_tensors(model))))
        return found

    def _compare_published(self, dtype: str | None) -> int:
        name, model = self._config.model.name, self.learner.policy.model
        return compare_published(name, model, self.iter_weight_rows(), dtype)

    def _put_rows(self, target: bytes, copied: bool) -> None:
        """Put this rank's rows into a target on the first node, from the others by way of it."""
        _, held, found = self.plan_files(copied=copied)[MODEL_FILE]
        ranks = self.learner.ranks
        rows = bring_rows(ranks, held, found, copied=copied, dtype=self._published)
        try:
            if ranks.on_first_node:
                self._put(target, ((name, r.first, r.data) for name, r in rows))
        finally:
            deque(rows, 0)  # other ranks take part in all of them

    def _write_files(self, directory: Path, copied: bool) -> dict[str, list[WrittenSpan]]:
        """Write this rank's rows of all files; return digests of what it wrote."""
        ranks, failed = self.learner.ranks, None
        spans = {}
        for name, (layouts, held, found) in self.plan_files(copied=copied).items():
            rows = bring_rows(ranks, held, found, copied=copied)
            try:
                if ranks.on_first_node and failed is None:
                    spans[name] = write_rows(directory / name, layouts, rows, self._rank)
            except OSError as error:
                failed = error
            deque(rows, 0)  # other ranks take part in all of them
        if failed is not None:
            raise failed
        return spans

    def iter_weight_rows(self) -> FoundRows:
        """Yield this rank's rows of the present weights, without copies."""
        return iter_weight_rows(self.learner.policy.model)

    def _load(self) -> ModelLayout:
        config = self._config
        torch.set_num_threads(config.trainer.threads)
        transformers.utils.logging.disable_progress_bar()
        ranks, self._load_policy, critic = self._make_loaders()
        self.learner = load_learner(config, self._load_policy, critic, ranks)
        self.learner.reached = self._reached
        policy, dtype = self.learner.policy, config.weights.dtype
        layout = policy.describe_layout(weight_forms(policy.model), self.learner.compute)
        self._published = getattr(torch, layout.engine_dtype if dtype == "auto" else dtype)
        return layout

    def _make_loaders(self) -> tuple[Ranks, Callable[..., Any], Callable[..., Any]]:
        """Return this rank in the group, and the functions that load a policy and a critic."""
        options: dict[str, Any] = {"device": self._device, "tokenizer_size": self._tokenizer_size()}
        if self._meeting is None:
            return SINGLE_RANK, partial(load_policy, **options), partial(load_critic, **options)
        ranks = self._join_rank_group()
        options |= {"ranks": ranks, "offload": self._config.trainer.offload == "all"}
        return ranks, partial(load_sharded, **options), partial(load_sharded_critic, **options)

    def _join_rank_group(self) -> Ranks:
        assert self._meeting is not None
        layout = RankLayout.from_config(self._config)
        timeout_s = self._config.trainer.collective_timeout_s
        return join_rank_group(self._meeting(), self._rank, layout, self._device, timeout_s)

    def _copy(self) -> None:
        learner = self.learner
        model = learner.policy.model
        found: dict[str, FoundRows] = {
            MODEL_FILE: iter_weight_rows(model),
            OPTIMIZER_FILE: iter_rows(iter_moments(model, learner.optimizer)),
        }
        if learner.critic is not None:
            found |= checkpoint.critic_tensors(learner.critic)
        if learner.policy.base:
            found[ADAPTER_FILE] = iter_rows(lora.file_tensors(model))
        self._copied = {name: _copy_rows(self._kept[name], each) for name, each in found.items()}


class CopyBuffers:
    """Copies in host memory, one for each tensor name, which the next copy overwrites.

    Allocating memory each time costs more than the copy: the system clears every page at its first
    touch. The trainer stands still during a copy, so it reuses pages that exist.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy the tensor as it is now; the copy is valid until the next one of this name."""
        return self._get_buffer(name, tensor).copy_(tensor)

    def _get_buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept


def _copy_rows(kept: CopyBuffers, present: FoundRows) -> dict[str, Rows]:
    """Copy this rank's rows; only one of the tensors needs to exist at a time."""
    found = {}
    for name, rows in present:
        found[name] = rows._replace(data=kept.copy(name, rows.data))
    return shared_safetensors.sort_rows(found)


class _AllRanks:
    """Rank 0's worker together with those of the other ranks."""

    def __init__(self, worker: RankWorker, gang: RankGroup) -> None:
        self.worker, self.gang = worker, gang

    async def __call__(self, order: RankOrder) -> Any:
        """Carry out an order on all ranks; return the result of rank 0."""
        return (await self.collect(order))[0]

    async def collect(self, order: RankOrder) -> tuple[Any, list[bytes]]:
        """Carry out an order on all ranks; return the result of rank 0, and all replies."""
        own = asyncio.to_thread(self.worker.execute_order, order)
        body = _encoder.encode(order) if self.gang.size > 1 else b""
        return await self.gang.run_on_all_ranks(body, own)


class RankedLearner:
    """The learners of all ranks; they exist once loaded."""

    def __init__(self, worker: RankWorker, gang: RankGroup) -> None:
        """Set up; `worker`: of rank 0. `gang`: the others, not yet started."""
        self.worker, self._gang = worker, gang
        self._all = _AllRanks(worker, gang)

    async def load(self) -> ModelLayout:
        """Start the other ranks, and load the model; raises ConfigError."""
        await self._gang.start()
        layout: ModelLayout = await self._all(LoadOrder())
        return layout

    async def check_weights(self, dtype: str | None) -> int:
        """Compare what is published with the model's files; raises ConfigError."""
        tensors: int = await self._all(CheckOrder(dtype))
        return tensors

    async def train_step(self, samples: Sequence[TrainSample], step: int) -> StepResult:
        result: StepResult = await self._all(TrainOrder(tuple(samples), step))
        return result

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores: list[list[float]] = await self._all(ScoreOrder(tuple(map(tuple, sequences))))
        return scores

    async def put_weights(self, target: bytes) -> None:
        """Put the present weights into the encoded Target."""
        await self._all(PutWeightsOrder(target, False))

    async def reload_weights(self, directory: Path) -> None:
        """Replace the weights by those of an export; with adapters only verify that they are equal.

        Raises CheckpointError."""
        await self._all(ReloadOrder(os.fspath(directory)))

    def collect_facts(self) -> LearnerFacts:
        return self.worker.learner.collect_facts()

    async def close(self) -> None:
        await self._gang.close()

    async def restore_checkpoint(self, directory: Path) -> ResumeState:
        """Restore parameters and optimizer from a checkpoint; raises CheckpointError."""
        await asyncio.to_thread(checkpoint.verify_checkpoint, directory)
        resume: ResumeState = await self._all(RestoreOrder(os.fspath(directory)))
        return resume


class RankedFiles(ThreadedDirectories):
    """The model directories of one run, in which each rank writes its rows."""

    def __init__(
        self,
        worker: RankWorker,
        gang: RankGroup,
        source: str,
        describe: Callable[..., Awaitable[Any]],
    ) -> None:
        """Set up; `source`: the directory of the run's tokenizer; `describe`: `describe_rows`."""
        self._worker, self._source, self._describe = worker, source, describe
        self._all = _AllRanks(worker, gang)

    async def copy(self) -> bool:
        """Copy on all ranks, which keep the copy: there is one at a time."""
        await self._all(CopyOrder())
        return True

    async def build_manifest(self, weights: bool, **facts: Any) -> Any:
        async def fill(target: bytes) -> None:
            await self._all(PutWeightsOrder(target, weights))

        return await self._describe(fill=fill, **facts)

    async def write(self, directory: Path, copied: bool | None, extra: Mapping[str, bytes]) -> None:
        await asyncio.to_thread(self._create_files, directory, bool(copied), extra)
        own, replies = await self._all.collect(WriteFilesOrder(os.fspath(directory), bool(copied)))
        if copied:
            by_rank = [own, *map(_written_decoder.decode, replies)]
            spans = {n: [span for files in by_rank for span in files.get(n, ())] for n in own}
            await asyncio.to_thread(file_digests.write_digests, directory, spans)

    def _create_files(self, directory: Path, copied: bool, extra: Mapping[str, bytes]) -> None:
        """Write everything except the rows."""
        model = self._worker.learner.policy.model
        export.write_all_but_weights(model, self._source, directory, extra)
        for name, file in self._worker.plan_files(copied=copied).items():
            shared_safetensors.create_file(directory / name, file.layouts)
