"""Training steps of tiny models for the processes of rank_group.py, on one process or ranks.

Everything is a function of its arguments, so a test can also run it in its own process.
"""

from __future__ import annotations

import asyncio
import errno
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from laminar.actors.trainer import NO_PROBE
from laminar.config import Config, resolve_config
from laminar.run.directory import RESUME_FILE
from laminar.storage.rules import TokenSpan
from laminar.training import distributed_learner
from laminar.training import learner as learner_module
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.checkpoints import checkpoint
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.critic import Critic
from laminar.training.distributed_learner import RankedFiles, RankedLearner, RankWorker
from laminar.training.learner import Learner
from laminar.training.metrics import TokenFigures
from laminar.training.model import fsdp, loading, lora
from laminar.training.model import policy as model_module
from laminar.training.model.fsdp import ShardedPolicy
from laminar.training.model.policy import BasePolicy, LoadedPolicy
from laminar.training.model.shared_prefix_attention import read_prompts_once
from laminar.training.ranks import (
    SINGLE_RANK,
    RankLayout,
    Ranks,
    Rendezvous,
    assign_sequences,
    form_node_groups,
    join_rank_group,
)
from laminar.training.shared_safetensors import (
    Rows,
    TensorLayouts,
    create_file,
    get_layouts,
    rows_of,
)
from laminar.training.steps import StepResult, TrainSample
from laminar.training.trainer_state import ResumeState, encode
from laminar.weights.version import manifest as mf
from laminar.weights.version.shared_rows import RowWriter, describe_rows
from laminar.weights.version.slot_writer import WriteTarget
from laminar.weights.version.slot_writer import encode as encode_target

VOCAB = 261
PROBE = [[1, 2, 3, 4, 5], [200, 7, 260]]
CPU = torch.device("cpu")
GRIDS = ((2, 2), (4, 1), (3, 1), (2, 3))
LAYOUTS = tuple(RankLayout(*grid, shard) for grid in GRIDS for shard in ("node", "all"))
"""Layouts over several nodes, whose groups exist if there are enough processes."""


def serve(rank: int, size: int, store: Path, timeout_s: float, pipe: Connection) -> None:
    """Answer the calls of a test until it is gone."""
    torch.set_num_threads(1)
    file: Any = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    join_rank_group(Rendezvous(file), rank, RankLayout(1, size, "node"), CPU, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    whole = {n: dist.new_group(list(range(n)), timeout) for n in range(1, size + 1)}
    layouts = [layout for layout in LAYOUTS if layout.size <= size]
    of_nodes = {layout: form_node_groups(rank, layout, timeout) for layout in layouts}
    while True:
        try:
            layout, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            ranks = Ranks(rank, layout.size, whole[layout.size], layout, of_nodes.get(layout))
            pipe.send((True, globals()[function](ranks, *args, **kwargs)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def make_model(seed: int = 0, *, tied: bool = True) -> Any:
    """Make a model with tensors of 261, 32, 16 and 2 rows; from three ranks on, some get none."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


def make_critic(seed: int = 5) -> Any:
    """Make a critic of the same layers, with a random head."""
    config = make_model(seed).config
    config.num_labels = 1
    torch.manual_seed(seed)
    model = Qwen3ForTokenClassification(config).eval()
    torch.nn.init.normal_(model.score.weight, 0.0, 0.3)
    torch.nn.init.constant_(model.score.bias, 0.2)
    return model


def make_config(flat: dict[str, Any]) -> Config:
    return resolve_config(
        {
            "model.name": "unused",
            "data.dataset": "unused",
            "data.max_response_length": 80,
            "optim.lr": 0.0,
            "optim.weight_decay": 0.0,
            "optim.clip_grad": 0.0,
            "algorithm.rollout_correction.mismatch_limit": 1e9,
            "trainer.micro_batch_tokens": 60,
        }
        | flat
    )


def make_samples(
    lengths: tuple[int, ...] = (9, 3, 12, 7, 1, 5, 8, 2, 14, 6, 4, 10),
    seed: int = 0,
    wrong: tuple[str, ...] = (),
    replicas: int = 2,
    flat: tuple[int, ...] = (),
) -> list[TrainSample]:
    """Make groups of four samples, with replicas in turn.

    `wrong`: replicas that had other weights; `flat`: groups whose rewards are equal."""
    rng = np.random.default_rng(seed)
    found = []
    for i, length in enumerate(lengths):
        replica = f"rollout-{i % replicas}"
        logprobs = rng.normal(-15.5 if replica in wrong else -5.5, 0.2, length)
        found.append(
            TrainSample(
                sample_id=f"0.{i // 4}.{i % 4}",
                group_id=f"0.{i // 4}",
                prompt_ids=rng.integers(0, VOCAB, 3 + i // 4).astype(np.int32),
                response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                logprobs=logprobs.clip(max=0).astype(np.float32),
                reward=0.5 if i // 4 in flat else float(rng.random()),
                temperature=(0.7, 1.0, 1.3)[i % 3],
                truncated=i % 4 == 1,
                spans=(TokenSpan(replica, 3, 3, length),),
            )
        )
    return found


def make_learner(
    ranks: Ranks | None, config: Config, *, tied: bool, offload: bool, dtype: torch.dtype
) -> Learner:
    """Make a learner, on one process without `ranks`.

    A KL term gives it a separate reference, and gae a critic."""

    def placed(model: Any) -> LoadedPolicy:
        if ranks is None:
            read_prompts_once(model)
            return LoadedPolicy(model, VOCAB, prompts_once=True)
        return fsdp.shard_model(model, VOCAB, ranks, CPU, offload=offload)

    def policy(seed: int) -> LoadedPolicy:
        model = make_model(seed, tied=tied).to(dtype)
        if config.lora.rank:
            lora.inject_adapters(model, config.lora)
            lora.initialize_adapters(model, config.seed)
            for name, parameter in lora.list_adapter_parameters(model):
                if ".lora_B." in name:  # not 0 once trained
                    torch.nn.init.normal_(parameter, 0.0, 0.2)
        return placed(model)

    reference = policy(1) if config.algorithm.use_kl_loss and not config.lora.rank else None
    own = policy(0)
    if config.lora.rank:
        own = replace(own, base="of a test")
    base = BasePolicy(own) if config.algorithm.use_kl_loss and config.lora.rank else None
    critic = placed(make_critic().to(dtype)) if config.has_critic else None
    return Learner(
        config, own, reference=reference or base, critic=critic, ranks=ranks or SINGLE_RANK
    )


def double_log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(logits / temperature[:, None], dim=-1)


@contextmanager
def in_double() -> Iterator[None]:
    """Compute in float64 where the product uses float32."""
    usual = fsdp.build_meta_model

    def build(*args: Any, **named: Any) -> Any:
        return usual(*args, **named).double()

    with (
        replaced(fsdp, "build_meta_model", build),
        replaced(model_module, "build_meta_model", build),
        replaced(model_module, "log_softmax_at", double_log_softmax),
        replaced(model_module, "cast_linear", lambda model, dtype: None),
    ):
        yield


def gradient(
    ranks: Ranks | None,
    settings: dict[str, Any],
    samples: list[TrainSample],
    *,
    tied: bool = True,
    offload: bool = False,
    planted: str = "",
) -> tuple[StepResult, dict[str, Any]]:
    """Run a step in float64, and return its result and the gradient of its last mini-batch.

    With a critic, return the results of `step_with_values`."""
    with in_double(), PLANTED[planted]():
        config = make_config(settings)
        learner = make_learner(ranks, config, tied=tied, offload=offload, dtype=torch.float64)
        if learner.critic is not None:
            return step_with_values(learner, samples)
        result = learner.train_step(samples, 3)
        policy = learner.policy
        grads = {
            name: policy.gather_tensor(p.grad).numpy().copy()
            for name, p in policy.model.named_parameters()
            if p.grad is not None
        }
    return result, grads


def step_with_values(
    learner: Learner, samples: list[TrainSample]
) -> tuple[StepResult, dict[str, Any]]:
    """Return a step's result, the values before it, and the moments after it.

    Moments stand for the gradients: of two models only one has its gradient at a time."""
    assert learner.critic is not None
    values = np.concatenate([s.values for s in learner.critic.assign_values(samples)])
    result = learner.train_step(samples, 3)
    found = {"values/of all tokens": values}
    for what, owner, policy in (
        ("policy", learner, learner.policy),
        ("critic", learner.critic, learner.critic.model),
    ):
        for name, tensor in iter_moments(policy.model, owner.optimizer):
            kind, _, of = name.partition(".")
            found[f"{what} {kind}/{of}"] = policy.gather_tensor(tensor).numpy().copy()
    return result, found


def count_exchanged(
    ranks: Ranks, settings: dict[str, Any], samples: list[TrainSample]
) -> tuple[int, int, int]:
    """Run a step; return elements this rank exchanged with other nodes, parameters, and passes.

    With a critic, the parameters are those of both models."""
    assert ranks.parts is not None
    column, exchanged, passes = ranks.parts.column, list[int](), list[int]()
    all_reduce, accumulate = dist.all_reduce, learner_module.accumulate_gradient

    def count_elements(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is column:
            exchanged.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def count_passes(policy: Any, reference: Any, mini: Any, *args: Any) -> Any:
        passes.append(mini.gradient_passes)
        return accumulate(policy, reference, mini, *args)

    options: dict[str, Any] = {"tied": True, "offload": False, "dtype": torch.float32}
    learner = make_learner(ranks, make_config(settings), **options)
    with (
        replaced(dist, "all_reduce", count_elements),
        replaced(learner_module, "accumulate_gradient", count_passes),
    ):
        learner.train_step(samples, 3)
    critic = [learner.critic.model] if learner.critic is not None else []
    parameters = [p for each in (learner.policy, *critic) for p in each.model.parameters()]
    owned = sum(rows_of(p).data.numel() for p in parameters)
    return sum(exchanged), owned, max(passes)


# --- bugs that a test must see ----------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def averaged() -> Iterator[None]:
    """Average the gradient over the ranks, as FSDP2 does by default."""
    with (
        replaced(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        replaced(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None),
    ):
        yield


@contextmanager
def counts_of_a_rank() -> Iterator[None]:
    """Count tokens and sequences over a rank's share only."""
    usual = Learner._plan_mini_batch

    def plan(self: Learner, samples: list[TrainSample]) -> Any:
        own = assign_sequences([s.length for s in samples], self.ranks.size)[self.ranks.rank]
        tokens = sum(len(samples[i].response_ids) for i in own)
        return replace(usual(self, samples), counts=BatchCounts(tokens, len(own)))

    with replaced(Learner, "_plan_mini_batch", plan):
        yield


def suspects_of_a_rank() -> Any:
    """Let each rank leave out only the suspects among its rows."""
    return replaced(TokenFigures, "join", lambda self, ranks, samples: None)


@contextmanager
def values_of_a_rank() -> Iterator[None]:
    """Let each rank know only the values of its rows, and take the others for 0."""
    usual = Critic.assign_values

    def with_values(self: Critic, samples: list[TrainSample]) -> list[TrainSample]:
        with replaced(Ranks, "all_reduce", lambda self, tensor: tensor):
            return usual(self, samples)

    with replaced(Critic, "assign_values", with_values):
        yield


def not_resharded() -> Any:
    """Keep the root's tensors whole after a pass without a backward pass."""
    return replaced(ShardedPolicy, "reshard", lambda self: None)


@contextmanager
def tied_by_address() -> Iterator[None]:
    """Identify tensors by their memory, which a sharded tensor does not show."""

    def named(model: Any) -> list[tuple[str, Rows]]:
        tensors = model.state_dict().items()
        found = {(t.data_ptr(), t.shape): (name, rows_of(t)) for name, t in reversed(tensors)}
        return list(found.values())

    def forms(model: Any) -> TensorLayouts:
        return get_layouts(dict(named(model)))

    with (
        replaced(distributed_learner, "iter_weight_rows", named),
        replaced(distributed_learner, "weight_forms", forms),
    ):
        yield


def buffers_as_they_are() -> Any:
    """Leave buffers that no file has uninitialized; cleared here, so that they are surely wrong."""

    def cleared(name: str, model: Any, device: torch.device) -> None:
        for buffer in model.buffers():
            buffer.zero_()

    return replaced(loading, "_make_buffers", cleared)


@contextmanager
def rows_elsewhere() -> Iterator[None]:
    """Give rank 1 the rows of rank 0."""

    def misplace(usual: Callable[[Any], Iterator[tuple[str, Rows]]]) -> Any:
        def found(source: Any) -> Iterator[tuple[str, Rows]]:
            for name, rows in usual(source):
                yield name, rows._replace(first=0 if dist.get_rank() == 1 else rows.first)

        return found

    with ExitStack() as stack:
        for module in (distributed_learner, checkpoint):
            for name in ("iter_rows", "iter_weight_rows"):
                stack.enter_context(replaced(module, name, misplace(getattr(module, name))))
        yield


@contextmanager
def others_write_late() -> Iterator[None]:
    """Let rank 0 continue before the other ranks have written; they write with the next order."""
    usual, late = RankWorker.execute_order, []

    def carry_out(self: RankWorker, order: Any) -> Any:
        while late:
            usual(self, late.pop())
        if dist.get_rank() and isinstance(
            order, distributed_learner.PutWeightsOrder | distributed_learner.WriteFilesOrder
        ):
            return late.append(order) or {}
        return usual(self, order)

    with replaced(RankWorker, "execute_order", carry_out):
        yield


def gradient_of_a_node() -> Any:
    """Sum the gradient over the ranks of each node, and never over nodes."""

    def build(self: Ranks, device: torch.device) -> Any:
        assert self.parts is not None
        return DeviceMesh.from_group(self.parts.row, device.type)

    return replaced(Ranks, "build_mesh", build)


@contextmanager
def gradient_of_a_pass() -> Iterator[None]:
    """Sum the first pass over the nodes, instead of all at the last one."""
    usual = ShardedPolicy.run_backward
    policies = list[ShardedPolicy]()

    def run_backward(self: ShardedPolicy, loss: Tensor, *, last: bool) -> None:
        usual(self, loss, last=not policies)
        policies.append(self)

    with replaced(ShardedPolicy, "run_backward", run_backward):
        yield


def rows_of_the_first_node() -> Any:
    """Bring no rows of other nodes to the first one."""
    return replaced(distributed_learner, "bring_rows", lambda ranks, held, found, **_: iter(found))


def rows_not_shared() -> Any:
    """Leave rows that the first node has read as zeros on the others."""

    def share(self: Ranks, rows: Tensor) -> None:
        if not self.reads_files:
            rows.zero_()

    return replaced(Ranks, "share_rows", share)


PLANTED: dict[str, Callable[[], Any]] = {
    "": nothing,
    "averaged": averaged,
    "gradient of a node": gradient_of_a_node,
    "gradient of a pass": gradient_of_a_pass,
    "counts of a rank": counts_of_a_rank,
    "suspects of a rank": suspects_of_a_rank,
    "values of a rank": values_of_a_rank,
    "not resharded": not_resharded,
    "tied by address": tied_by_address,
    "buffers as they are": buffers_as_they_are,
    "rows elsewhere": rows_elsewhere,
    "others write late": others_write_late,
    "rows of the first node": rows_of_the_first_node,
    "rows not shared": rows_not_shared,
}


# --- the orders of rank 0 ---------------------------------------------------------------------


class GroupGang:
    """The other ranks of a group, which receive orders by broadcast."""

    def __init__(self, ranks: Ranks) -> None:
        self.size, self._group = ranks.size, ranks._group

    async def start(self) -> None:
        pass

    async def run_on_all_ranks(self, body: bytes, own: Awaitable[Any]) -> tuple[Any, list[bytes]]:
        _broadcast(self._group, body)
        result = await own
        return result, (await asyncio.to_thread(_gather, self._group))[1:]


def _broadcast(group: Any, body: bytes = b"") -> bytes:
    """Broadcast a message of rank 0 to all ranks."""
    length = torch.tensor([len(body)])
    dist.broadcast(length, 0, group=group)
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else None
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, 0, group=group)
    return data.numpy().tobytes()


def _gather(group: Any, reply: bytes = b"") -> list[bytes]:
    """Return the replies of all ranks, once each has one."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, reply, group=group)
    return found


class GroupWorker(RankWorker):
    """A worker of ranks that have already joined."""

    def __init__(self, ranks: Ranks, config: Config) -> None:
        super().__init__(config, ranks.rank, Path(), lambda: VOCAB, RowWriter())
        self._ranks = ranks

    def _join_rank_group(self) -> Ranks:
        return self._ranks


class OnRanks:
    """The parts of a trainer actor on rank 0."""

    def __init__(self, learner: Any, files: Any) -> None:
        self.learner, self.files = learner, files

    async def load(self) -> None:
        layout = await self.learner.load()
        self.specs = mf.make_layout(layout.shapes, "float32")

    async def save(self, directory: Path) -> None:
        facts = self.learner.collect_facts()
        found = ResumeState(version=2, step=1, before="", batches=(), learner=facts)
        copied = await self.files.copy()
        directory.mkdir()
        await self.files.write(directory, copied, {RESUME_FILE: encode(found)})

    async def digest(self) -> str:
        facts = {"version": 2, "step": 1, "specs": self.specs, "probe": NO_PROBE}
        manifest: mf.Manifest = await self.files.build_manifest(await self.files.copy(), **facts)
        return manifest.digest


def on_ranks(
    ranks: Ranks,
    script: str,
    settings: dict[str, Any],
    *args: Any,
    double: bool = False,
    planted: str = "",
) -> Any:
    """Run a script of this file on rank 0, while the other ranks execute its orders."""
    config = make_config(settings)
    worker, gang = GroupWorker(ranks, config), GroupGang(ranks)
    with in_double() if double else nothing(), PLANTED[planted]():
        if ranks.rank == 0:
            try:
                files = RankedFiles(worker, gang, config.model.name, describe_rows)
                found = OnRanks(RankedLearner(worker, gang), files)
                return asyncio.run(globals()[script](found, *args))
            finally:
                _broadcast(ranks._group)
        failed: Exception | None = None
        while order := _broadcast(ranks._group):
            reply = b""
            try:
                reply = asyncio.run(worker.handle_order(order))
            except Exception as error:
                failed = error
            _gather(ranks._group, reply)
        if failed:
            raise failed
        return None


def write_twice(ranks: Ranks, settings: dict[str, Any], target: Path) -> list[bool]:
    """Write the weights twice, first while the disk is full for rank 0; return what failed."""
    worker, usual = GroupWorker(ranks, make_config(settings)), distributed_learner.write_rows
    worker.execute_order(distributed_learner.LoadOrder())
    if ranks.rank == 0:
        for name, file in worker.plan_files(copied=False).items():
            create_file(target / name, file.layouts)
    ranks.all_reduce(torch.zeros(1))

    def fail(path: Path, layouts: Any, rows: Any, rank: int) -> Any:
        if rank == 0:
            raise OSError(errno.ENOSPC, f"full after {next(rows)[0]}")
        return usual(path, layouts, rows, rank)

    failed = []
    for write in (fail, usual):
        with replaced(distributed_learner, "write_rows", write), suppress(OSError):
            failed.append(True)
            worker.execute_order(distributed_learner.WriteFilesOrder(str(target), False))
            failed[-1] = False
    ranks.all_reduce(torch.zeros(1))
    return failed


async def publish(trainer: OnRanks, path: str, samples: list[TrainSample]) -> Any:
    """Load, score, train a step, and put the weights into a file as into a slot."""
    await trainer.load()
    before = await trainer.learner.compute_logprobs(PROBE)
    result = await trainer.learner.train_step(samples, 3)
    after = await trainer.learner.compute_logprobs(PROBE)
    nbytes = mf.check_tensors(trainer.specs)
    Path(path).write_bytes(b"\1" * nbytes)
    target = WriteTarget(path=path, offset=0, nbytes=nbytes, specs=trainer.specs, kept=True)
    await trainer.learner.put_weights(encode_target(target))
    return result, before, after, await trainer.digest()


async def compare(trainer: OnRanks) -> int:
    """Load, and compare what would be published with the files."""
    await trainer.load()
    return await trainer.learner.check_weights("float32")


async def train_and_resume(trainer: OnRanks, target: str, samples: list[TrainSample]) -> str:
    """Load, compare, train three steps, save, restore; return the digest at load."""
    await compare(trainer)
    first = await trainer.digest()
    for step in range(3):
        await trainer.learner.train_step(samples, step)
    trained = await trainer.digest()
    assert trained != first, "three steps have changed nothing"
    await trainer.save(Path(target))
    await trainer.learner.train_step(samples, 3)
    await trainer.learner.restore_checkpoint(Path(target))
    assert await trainer.digest() == trained, "a restored checkpoint has another digest"
    return first


async def save_again(trainer: OnRanks, source: str, target: str) -> str:
    """Restore a checkpoint and write another one from it."""
    await trainer.load()
    await trainer.learner.compute_logprobs(PROBE)
    await trainer.learner.restore_checkpoint(Path(source))
    await trainer.save(Path(target))
    return await trainer.digest()


async def go_on(trainer: OnRanks, source: str, target: str, samples: list[TrainSample]) -> Any:
    """Run `save_again`, then a step, whose gradient shows in AdamW's norm and weights."""
    digest = await save_again(trainer, source, target)
    result = await trainer.learner.train_step(samples, 4)
    await trainer.save(Path(f"{target} and a step"))
    return digest, result


async def export(trainer: OnRanks, target: str) -> Any:
    """Write the model and read it back, as at the end of a run."""
    await trainer.load()
    Path(target).mkdir()
    await trainer.files.write(Path(target), None, {})
    await trainer.learner.reload_weights(Path(target))
    return await trainer.learner.compute_logprobs(PROBE)
