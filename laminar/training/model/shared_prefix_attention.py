"""Attention over rows in which all responses share one copy of their prompt.

Reads   queries, keys and values of a flat row, and the positions of its prompts and responses
Gives   `attend_shared_prefix`, which transformers calls in every layer; `find_padding_reason`,
        `read_prompts_once`

A response attends to its prompt and to itself. That takes two kinds of calls of the flash kernel:
all responses to a prompt against the prompt, and each response, causal, against itself. Each call
gives an output and the log-sum-exp of its scores; weighted with both log-sum-exps, the outputs add
up to the softmax over all keys. The backward kernel needs output and log-sum-exp only to recompute
the probabilities: given those of the whole softmax, each call gives its exact share of the gradient
(as in ring attention, Liu et al. 2023). Nothing is masked or padded. The kernel calls are in
shared_prefix_attention_cpu.py and shared_prefix_attention_cuda.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laminar.config.families import get_family
from laminar.training.model import shared_prefix_attention_cpu, shared_prefix_attention_cuda
from laminar.training.model.micro_batches import SharedPrompt

TokenIndices = slice | Tensor
"""Positions of tokens in a row."""

ATTENTION_NAME = "laminar_prompts_once"
GPU_HEAD_SIZES = range(8, 257, 8)  #: head sizes that the flash kernel takes unpadded


def find_padding_reason(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Return why the model cannot read a prompt once for all its responses; None: it can.

    `device`: where it computes, maybe not where its parameters are; `dtype`: the compute type.
    """
    config = model.config
    if device.type not in ("cpu", "cuda"):
        return f"the trainer computes on {device.type}"
    if not get_family(config.model_type).shares_prompts:
        return f"the model is of type {config.model_type}, whose attention was not tried so"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        return f"all layers have a window of {config.sliding_window} tokens"
    if other := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(other))}"
    return _find_gpu_padding_reason(config, dtype) if device.type == "cuda" else None


def _find_gpu_padding_reason(config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"the flash kernel of a GPU needs bfloat16, not {str(dtype).removeprefix('torch.')}"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in GPU_HEAD_SIZES:
        return f"the flash kernel of a GPU takes head sizes in multiples of 8 up to 256, not {size}"
    return None


def read_prompts_once(model: PreTrainedModel) -> None:
    """Have all layers call `attend_shared_prefix`; rows without `prompts` are not affected."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend_shared_prefix)
    model.set_attn_implementation(ATTENTION_NAME)


def attend_shared_prefix(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    prompts: Sequence[SharedPrompt] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with query [rows, heads, width, size]; return [rows, width, heads, size].

    Keys may have fewer heads. Without `prompts` rows are padded; with them there is one row.
    """
    if not prompts:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    tensors = [query[0], key[0], value[0]]
    if torch.is_autocast_enabled(query.device.type):  # like torch's own attention
        dtype = torch.get_autocast_dtype(query.device.type)
        tensors = [tensor.to(dtype) for tensor in tensors]
    output: Tensor = _SharedPrefixAttention.apply(*tensors, prompts, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(0, 1)[None].contiguous(), None


class _SharedPrefixAttention(torch.autograd.Function):
    """Autograd function: query [heads, width, size], key and value [heads of keys, width, size]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompts: Sequence[SharedPrompt],
        scale: float,
    ) -> Tensor:
        kernel: Any = shared_prefix_attention_cuda if query.is_cuda else shared_prefix_attention_cpu
        output: Tensor
        output, sums = kernel.attend_to_self(query, key, value, prompts, scale)
        for at, *found in kernel.to_prompts(query, key, value, prompts, scale):
            _merge_attention(output, sums, at, *found)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.kernel, ctx.prompts, ctx.scale = kernel, prompts, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (gradient, *ctx.saved_tensors, ctx.prompts, ctx.scale)
        of_query, of_key, of_value = ctx.kernel.attend_to_self_backward(*arguments)
        for at, of, *more in ctx.kernel.to_prompts_backward(*arguments):
            of_query[:, at] += more[0]
            of_key[:, of] += more[1]
            of_value[:, of] += more[2]
        return of_query, of_key, of_value, None, None


def _merge_attention(
    output: Tensor, sums: Tensor, at: TokenIndices, of_prompt: Tensor, sums_of_prompt: Tensor
) -> None:
    """Merge attention to the prompt into the responses' attention to themselves, in place."""
    own, own_sums = output[:, at], sums[:, at]
    both = torch.logaddexp(own_sums, sums_of_prompt)
    of_prompt = of_prompt * (sums_of_prompt - both).exp()[..., None]
    output[:, at] = (own * (own_sums - both).exp()[..., None] + of_prompt).to(output.dtype)
    sums[:, at] = both
