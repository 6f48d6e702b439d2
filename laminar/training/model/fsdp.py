"""A policy whose parameters are sharded by rows over the ranks of a trainer (FSDP2) or offloaded.

Reads   a model directory, by slices
Gives   ShardedPolicy, `load_sharded`, `load_sharded_critic`, `shard_model`
Raises  ConfigError, as policy.py does

Each rank has rows of every tensor (torch.chunk along the first dimension), and a whole layer only
while that layer computes. A whole model never exists here: the model is built on the meta device,
sharded, and filled from slices of the files. Gradients are summed over the ranks, not averaged:
coefficients already refer to the whole mini-batch, and a sum is exact for any number of ranks.
If each node has the whole model, rows are those of its ranks, and come from the first node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from laminar.config import Config
from laminar.training.model import lora
from laminar.training.model.loading import CPU, build_meta_model, fill_model
from laminar.training.model.micro_batches import TokenRows
from laminar.training.model.policy import (
    Compute,
    Entropy,
    LoadedPolicy,
    TokenScores,
    build_critic_model,
    check_head,
    digest_base_weights,
)
from laminar.training.model.shared_prefix_attention import find_padding_reason, read_prompts_once
from laminar.training.model.weight_files import HEAD, VALUE_HEAD
from laminar.training.ranks import Ranks
from laminar.training.shared_safetensors import rows_of


@dataclass(frozen=True, slots=True)
class ShardedPolicy(LoadedPolicy):
    """A policy on which all ranks run each pass together."""

    compute_device: torch.device = CPU  #: where passes run; parameters may be in host memory

    @property
    def device(self) -> torch.device:
        return self.compute_device

    def log_probs(
        self, rows: TokenRows, temperature: Tensor, compute: Compute, entropy: Entropy = "none"
    ) -> TokenScores:
        model: Any = self.model
        scores: TokenScores = model.with_parameters(
            LoadedPolicy.log_probs, self, rows, temperature, compute, entropy
        )
        if not torch.is_grad_enabled():
            self.reshard()
        return scores

    def values(self, rows: TokenRows, compute: Compute) -> Tensor:
        model: Any = self.model
        values: Tensor = model.with_parameters(LoadedPolicy.values, self, rows, compute)
        if not torch.is_grad_enabled():
            self.reshard()
        return values

    def run_backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a pass; nodes with the whole model each add theirs up at the end."""
        model: Any = self.model
        model.set_requires_all_reduce(last)
        LoadedPolicy.run_backward(self, loss, last=last)

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a whole tensor from all ranks; a collective call."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def cast_weights(self, dtype: torch.dtype) -> None:
        """Do nothing: FSDP2 takes one type per layer, and norms keep theirs."""

    def reshard(self) -> None:
        """Free the gathered tensors of the root module: only rows are published or saved.

        FSDP2 keeps them after a pass, for the backward pass that usually follows."""
        model: Any = self.model
        model.reshard()


def shard_model(
    model: PreTrainedModel, vocab_limit: int, ranks: Ranks, device: torch.device, *, offload: bool
) -> ShardedPolicy:
    """Shard a model, with parameters in memory or on the meta device, by rows over the ranks.

    `offload`: keep parameters, gradients and the optimizer's state in host memory.
    """
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mesh = ranks.build_mesh(device)
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    found: Any = model
    found.with_parameters = MethodType(_call_and_clone, model)
    register_fsdp_forward_method(model, "with_parameters")
    if once := not find_padding_reason(model, device):
        read_prompts_once(model)
    return ShardedPolicy(model, vocab_limit, once, compute_device=device)


def _call_and_clone(model: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` while the root's parameters are gathered, and return copies of its tensors.

    The head is not part of a model's `forward`. FSDP2 warns of views, hence the copies."""
    found = function(*args)
    if isinstance(found, Tensor):
        return found.clone()
    return TokenScores(*(tensor.clone() for tensor in found))


def load_sharded(
    name: str,
    ranks: Ranks,
    device: torch.device,
    *,
    tokenizer_size: int,
    offload: bool,
    adapt: Config | None = None,
) -> ShardedPolicy:
    """Load what `load_policy` loads, sharded over the ranks; raises ConfigError.

    A frozen base stays float32: FSDP2 takes one type per layer.
    """
    model = build_meta_model(name)
    if adapt is not None:
        lora.inject_adapters(model, adapt.lora)
    limit = min(model.get_output_embeddings().weight.shape[0], tokenizer_size)
    policy = _shard_and_fill(name, model, limit, ranks, device, offload=offload)
    if adapt is not None:
        lora.initialize_adapters(model, adapt.seed)
        policy = replace(policy, base=digest_base_weights(policy))
    check_head(name, policy)
    policy.reshard()
    return policy


def load_sharded_critic(
    name: str, ranks: Ranks, device: torch.device, *, tokenizer_size: int, offload: bool
) -> ShardedPolicy:
    """Load what `load_critic` loads, sharded over the ranks; raises ConfigError.

    The head is one row, which the first rank has."""
    model = build_critic_model(name)
    heads = (HEAD, VALUE_HEAD)
    critic = _shard_and_fill(name, model, tokenizer_size, ranks, device, offload=offload, but=heads)
    for key, parameter in model.named_parameters():
        if key.startswith(VALUE_HEAD):
            rows_of(parameter).data.zero_()
    return critic


def _shard_and_fill(
    name: str,
    model: PreTrainedModel,
    vocab_limit: int,
    ranks: Ranks,
    device: torch.device,
    *,
    offload: bool,
    but: tuple[str, ...] = (),
) -> ShardedPolicy:
    """Shard and fill a model on the meta device; `but`: name prefixes of tensors to leave out."""
    policy = shard_model(model, vocab_limit, ranks, device, offload=offload)
    fill_model(name, model, device, offload=offload, but=but, ranks=ranks)
    return policy
