"""The flash kernel of a GPU for shared_prefix_attention.py.

Reads   queries, keys and values of a flat bfloat16 row, and the positions of its prompts and
        responses
Gives   outputs and log-sum-exps of a row's sequences to themselves, and of responses to their
        prompts; the gradients of both

The kernel takes concatenated sequences of any lengths (FlashAttention-2, Dao 2023: `varlen`), and
several query heads for one key head. So a row takes one call for all its sequences and one for all
its prompts. Their ranges are computed once for a row, not in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from laminar.training.model.micro_batches import SharedPrompt, concat_to_tensor

Prompts = Sequence[SharedPrompt]
CACHED_ROWS = 4  #: rows whose ranges are cached: one pass and its neighbours
_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class SequenceBounds(NamedTuple):
    """Bounds of concatenated sequences."""

    starts: Tensor  #: [sequences + 1] int32
    longest: int


class AttentionRanges(NamedTuple):
    """Query and key ranges of one row."""

    all: SequenceBounds  #: prompts and responses, in their order
    by: Tensor  #: [tokens] int64: responses that read a shared prompt
    of: Tensor  #: [tokens] int64: these prompts
    responses: SequenceBounds  #: bounds in `by`; all that read one prompt are one sequence
    prompts: SequenceBounds  #: bounds in `of`


def attend_to_self(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend causally in each prompt and response: [heads, width, size], sums [heads, width]."""
    at = compute_ranges(tuple(prompts), query.device)
    return _run_attention(query, key, value, at.all, at.all, scale, causal=True)


def to_prompts(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield once the positions of all responses, their outputs and sums."""
    at = compute_ranges(tuple(prompts), query.device)
    if not len(at.by):
        return
    tensors = (
        _gather_tokens(query, at.by),
        _gather_tokens(key, at.of),
        _gather_tokens(value, at.of),
    )
    yield at.by, *_run_attention(*tensors, at.responses, at.prompts, scale, causal=False)


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
    at = compute_ranges(tuple(prompts), query.device)
    tensors = (gradient, query, key, value, output)
    return _run_attention_backward(*tensors, sums, at.all, at.all, scale, causal=True)


def to_prompts_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    prompts: Prompts,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield once the positions of all responses and of their prompts, and three gradients.

    Gradients: of the responses' queries, and of the prompts' keys and values."""
    at = compute_ranges(tuple(prompts), query.device)
    if not len(at.by):
        return
    by, of = at.by, at.of
    tensors = (
        _gather_tokens(gradient, by),
        _gather_tokens(query, by),
        _gather_tokens(key, of),
        _gather_tokens(value, of),
    )
    whole = (_gather_tokens(output, by), sums[:, by])
    bounds = (at.responses, at.prompts)
    yield by, of, *_run_attention_backward(*tensors, *whole, *bounds, scale, causal=False)


@lru_cache(maxsize=CACHED_ROWS)
def compute_ranges(prompts: tuple[SharedPrompt, ...], device: torch.device) -> AttentionRanges:
    """Compute the ranges of a row's sequences, as tensors on the device."""
    lengths, prompt_lengths, response_lengths = [], [], []
    by: list[ArrayLike] = [[]]
    of: list[ArrayLike] = [[]]
    for prompt, responses in prompts:
        for run in (prompt, *responses):
            lengths += [(run.stop - run.start) // run.sequences] * run.sequences
        if responses:
            of.append(np.arange(prompt.start, prompt.stop))
            by.append(np.arange(responses[0].start, responses[-1].stop))
            prompt_lengths.append(len(of[-1]))  # type: ignore[arg-type]
            response_lengths.append(len(by[-1]))  # type: ignore[arg-type]
    return AttentionRanges(
        _make_bounds(lengths, device),
        concat_to_tensor(by, device),
        concat_to_tensor(of, device),
        _make_bounds(response_lengths, device),
        _make_bounds(prompt_lengths, device),
    )


def _make_bounds(lengths: Sequence[int], device: torch.device) -> SequenceBounds:
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
    return SequenceBounds(starts, max(lengths, default=0))


def _run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by: SequenceBounds,
    of: SequenceBounds,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs [heads, tokens, size] and sums [heads, tokens] float32."""
    tensors = (_put_tokens_first(query), _put_tokens_first(key), _put_tokens_first(value))
    bounds = (by.starts, of.starts, by.longest, of.longest)
    output, sums, *_ = _forward(*tensors, *bounds, 0.0, causal, False, scale=scale)
    return output.transpose(0, 1), sums


def _run_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    by: SequenceBounds,
    of: SequenceBounds,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value, [heads, tokens, size] each."""
    tensors = [_put_tokens_first(tensor) for tensor in (gradient, query, key, value, output)]
    bounds = (by.starts, of.starts, by.longest, of.longest)
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout
    found = _backward(
        *tensors, sums.contiguous(), *bounds, 0.0, causal, unused, unused[:0], scale=scale
    )
    of_query, of_key, of_value = (part.transpose(0, 1) for part in found)
    return of_query, of_key, of_value


def _gather_tokens(tensor: Tensor, at: Tensor) -> Tensor:
    """Gather [heads, tokens at these positions, size], in the kernel's memory layout."""
    return tensor.transpose(0, 1)[at].transpose(0, 1)


def _put_tokens_first(tensor: Tensor) -> Tensor:
    """Transpose [heads, tokens, size] to [tokens, heads, size], the kernel's layout."""
    return tensor.transpose(0, 1).contiguous()
