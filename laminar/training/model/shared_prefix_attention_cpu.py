"""The flash kernel of a CPU for shared_prefix_attention.py.

Reads   queries, keys and values of a flat row, and the positions of its prompts and responses
Gives   outputs and log-sum-exps of a row's sequences to themselves, and of responses to their
        prompts; the gradients of both

The kernel takes sequences of one length, so there is a call for each run of equal lengths. It needs
as many key heads as query heads: keys are repeated for a sequence that attends to itself. Attention
to a prompt is not causal, so the tokens of all heads that share keys form one long query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laminar.training.model.micro_batches import SequenceRun, SharedPrompt

Prompts = Sequence[SharedPrompt]
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_to_self(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend causally in each prompt and response: [heads, width, size], sums [heads, width]."""
    tensors = (query, _repeat_for_queries(query, key), _repeat_for_queries(query, value))
    output = torch.empty_like(query)
    sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for run in _iter_runs(prompts):
        found = _forward(*(_split_run(tensor, run) for tensor in tensors), 0.0, True, scale=scale)
        at = slice(run.start, run.stop)
        output[:, at], sums[:, at] = map(_join_run, found)
    return output, sums


def to_prompts(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each prompt the slice of its responses, their outputs and sums."""
    for of, by in _iter_prompt_slices(prompts):
        asked = query[:, by]
        output, sums = _forward(
            _fold_heads(asked, key), key[None, :, of], value[None, :, of], 0.0, scale=scale
        )
        yield by, output.reshape_as(asked), sums.reshape(asked.shape[:2])


def attend_to_self_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    prompts: Prompts,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value; `output`, `sums`: those of the whole softmax."""
    own_key, own_value = _repeat_for_queries(query, key), _repeat_for_queries(query, value)
    tensors = (gradient, query, own_key, own_value, output, sums)
    found = [torch.empty_like(tensor) for tensor in (query, own_key, own_value)]
    for run in _iter_runs(prompts):
        parts = _backward(*(_split_run(tensor, run) for tensor in tensors), 0.0, True, scale=scale)
        for whole, part in zip(found, parts, strict=True):
            whole[:, run.start : run.stop] = _join_run(part)
    return found[0], _sum_for_keys(found[1], key), _sum_for_keys(found[2], key)


def to_prompts_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    prompts: Prompts,
    scale: float,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield for each prompt the slices of its responses and itself, and three gradients.

    Gradients: of the responses' queries, and of the prompt's keys and values."""
    for of, by in _iter_prompt_slices(prompts):
        found = _backward(
            _fold_heads(gradient[:, by], key),
            _fold_heads(query[:, by], key),
            key[None, :, of],
            value[None, :, of],
            _fold_heads(output[:, by], key),
            _fold_heads(sums[:, by], key),
            0.0,
            False,
            scale=scale,
        )
        yield by, of, found[0].reshape_as(query[:, by]), found[1][0], found[2][0]


def _iter_runs(prompts: Prompts) -> Iterator[SequenceRun]:
    for shared in prompts:
        yield from (shared.prompt, *shared.responses)


def _iter_prompt_slices(prompts: Prompts) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of each prompt that has responses, and of these responses."""
    for prompt, responses in prompts:
        if responses:
            yield (slice(prompt.start, prompt.stop), slice(responses[0].start, responses[-1].stop))


def _split_run(tensor: Tensor, run: SequenceRun) -> Tensor:
    """Reshape [heads, width, ...] to [sequences of the run, heads, length, ...]."""
    sequences: Tensor = tensor[:, run.start : run.stop].unflatten(1, (run.sequences, -1))
    return sequences.transpose(0, 1)


def _join_run(tensor: Tensor) -> Tensor:
    """Reshape [sequences, heads, length, ...] to [heads, sequences * length, ...]."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _fold_heads(tensor: Tensor, key: Tensor) -> Tensor:
    """Reshape [heads, tokens, ...] to [1, heads of keys, tokens of all heads that share one, ...].

    Valid only if every query reads all keys.
    """
    heads, tokens = tensor.shape[:2]
    return tensor.reshape(1, len(key), heads // len(key) * tokens, *tensor.shape[2:])


def _repeat_for_queries(query: Tensor, key: Tensor) -> Tensor:
    repeats = len(query) // len(key)
    return key if repeats == 1 else key.repeat_interleave(repeats, 0)


def _sum_for_keys(gradient: Tensor, key: Tensor) -> Tensor:
    if len(gradient) == len(key):
        return gradient
    by_key: Tensor = gradient.unflatten(0, (len(key), -1))
    return by_key.sum(1)
