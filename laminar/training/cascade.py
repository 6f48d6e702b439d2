"""Attention over rows that hold a prompt once, with all responses to it behind it.

Reads   queries, keys and values of a flat row, and where its prompts and responses are
Gives   `attend`, which transformers calls in every layer; `why_padded`, `read_prompts_once`

A response attends to its prompt and to itself. These are two calls of the flash kernel: one for all
responses to a prompt against the prompt, one for each response, causal, against itself. Each gives
an output and the log-sum-exp of its scores; with the log-sum-exp of both, the outputs are weighted
to what one softmax over all keys gives. The backward kernel needs an output and a log-sum-exp only
to make the probabilities again: given those of the whole softmax, each call gives its exact share
of the gradient (as in ring attention, Liu et al. 2023). Nothing is masked, copied or padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laminar.training.batching import Run, SharedPrompt

NAME = "laminar_prompts_once"
MODEL_TYPES = ("llama", "qwen2", "qwen3")
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def why_padded(model: PreTrainedModel, device: torch.device) -> str:
    """Why the model does not read a prompt once for all its responses; empty: it does.

    `device`: where it computes, which need not be where its parameters are.
    """
    config = model.config
    if device.type != "cpu":
        return f"the trainer computes on {device.type}"
    if config.model_type not in MODEL_TYPES:
        return f"the model is of type {config.model_type}, not {', '.join(MODEL_TYPES)}"
    if other := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(other))}"
    return ""


def read_prompts_once(model: PreTrainedModel) -> None:
    """Have all layers call `attend`; rows without shared prompts are computed as before."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    model.set_attn_implementation(NAME)


def attend(
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
    """query [rows, heads, width, size] -> [rows, width, heads, size]; keys may have fewer heads.

    Without `prompts` rows are padded; with them there is one row.
    """
    if not prompts:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    tensors = [query[0], key[0], value[0]]
    if torch.is_autocast_enabled(query.device.type):  # as for torch's own attention
        dtype = torch.get_autocast_dtype(query.device.type)
        tensors = [tensor.to(dtype) for tensor in tensors]
    output: Tensor = _Cascade.apply(*tensors, prompts, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(0, 1)[None].contiguous(), None


class _Cascade(torch.autograd.Function):
    """query [heads, width, size], key and value [heads of keys, width, size]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompts: Sequence[SharedPrompt],
        scale: float,
    ) -> Tensor:
        own_key, own_value = _per_query_head(query, key), _per_query_head(query, value)
        output = torch.empty_like(query)
        sums = query.new_empty(
            query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for shared in prompts:
            for run in (shared.prompt, *shared.responses):
                at = slice(run.start, run.stop)
                own = [_split(tensor, run) for tensor in (query, own_key, own_value)]
                found = _forward(*own, 0.0, True, scale=scale)
                output[:, at], sums[:, at] = map(_join, found)
            if shared.responses:
                of, by = _bounds(shared)
                found = _forward(
                    _fold(query[:, by], key), key[None, :, of], value[None, :, of], 0.0, scale=scale
                )
                _merge(output[:, by], sums[:, by], *found)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.prompts, ctx.scale = prompts, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        own_key, own_value = _per_query_head(query, key), _per_query_head(query, value)
        of_query = torch.empty_like(query)
        of_key, of_value = torch.empty_like(own_key), torch.empty_like(own_value)
        from_responses = []
        for shared in ctx.prompts:
            for run in (shared.prompt, *shared.responses):
                at = slice(run.start, run.stop)
                tensors = (gradient, query, own_key, own_value, output, sums)
                own = [_split(tensor, run) for tensor in tensors]
                found = _backward(*own, 0.0, True, scale=ctx.scale)
                of_query[:, at], of_key[:, at], of_value[:, at] = map(_join, found)
            if shared.responses:
                of, by = _bounds(shared)
                found = _backward(
                    _fold(gradient[:, by], key),
                    _fold(query[:, by], key),
                    key[None, :, of],
                    value[None, :, of],
                    _fold(output[:, by], key),
                    _fold(sums[:, by], key),
                    0.0,
                    False,
                    scale=ctx.scale,
                )
                of_query[:, by] += found[0].reshape_as(of_query[:, by])
                from_responses.append((of, found[1][0], found[2][0]))
        of_key, of_value = _per_key_head(of_key, key), _per_key_head(of_value, value)
        for of, more_of_key, more_of_value in from_responses:
            of_key[:, of] += more_of_key
            of_value[:, of] += more_of_value
        return of_query, of_key, of_value, None, None


def _bounds(shared: SharedPrompt) -> tuple[slice, slice]:
    """Where the prompt is, and where the responses to it."""
    prompt, responses = shared
    return slice(prompt.start, prompt.stop), slice(responses[0].start, responses[-1].stop)


def _split(tensor: Tensor, run: Run) -> Tensor:
    """[heads, width, ...] -> [sequences of the run, heads, length, ...]"""
    sequences: Tensor = tensor[:, run.start : run.stop].unflatten(1, (run.sequences, -1))
    return sequences.transpose(0, 1)


def _join(tensor: Tensor) -> Tensor:
    """[sequences, heads, length, ...] -> [heads, sequences * length, ...]"""
    return tensor.transpose(0, 1).flatten(1, 2)


def _fold(tensor: Tensor, key: Tensor) -> Tensor:
    """[heads, tokens, ...] -> [1, heads of keys, tokens of all heads that share one, ...].

    Only where every query reads all keys.
    """
    heads, tokens = tensor.shape[:2]
    return tensor.reshape(1, len(key), heads // len(key) * tokens, *tensor.shape[2:])


def _merge(output: Tensor, sums: Tensor, of_prompt: Tensor, sums_of_prompt: Tensor) -> None:
    """Add the attention to the prompt to the attention of responses to themselves, in place."""
    of_prompt, sums_of_prompt = of_prompt.reshape_as(output), sums_of_prompt.reshape_as(sums)
    both = torch.logaddexp(sums, sums_of_prompt)
    own_share = (sums - both).exp()[..., None]
    output.copy_(output * own_share + of_prompt * (sums_of_prompt - both).exp()[..., None])
    sums.copy_(both)


def _per_query_head(query: Tensor, key: Tensor) -> Tensor:
    repeats = len(query) // len(key)
    return key if repeats == 1 else key.repeat_interleave(repeats, 0)


def _per_key_head(gradient: Tensor, key: Tensor) -> Tensor:
    if len(gradient) == len(key):
        return gradient
    by_key: Tensor = gradient.unflatten(0, (len(key), -1))
    return by_key.sum(1)
