"""The flash kernel of a GPU over the pieces of a row with shared prompts
(shared_prefix_attention.py).

Reads   queries, keys and values of a flat row, bfloat16, and where its prompts and responses are
Gives   outputs and log-sum-exps of a row's sequences to themselves, and of responses to their
        prompts; the gradients of both

The kernel takes sequences of any lengths behind each other (FlashAttention-2, Dao 2023: `varlen`),
and several heads of queries for one of keys. So a row is one call for all sequences and one for all
prompts, however many there are. Where they begin is worked out once for a row, not in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from laminar.training.model.micro_batches import SharedPrompt

Prompts = Sequence[SharedPrompt]
ROWS = 4  #: whose places are kept: of one pass, beside those of the passes around it
_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Bounds(NamedTuple):
    """Of sequences behind each other."""

    starts: Tensor  #: [sequences + 1] int32
    longest: int


class Places(NamedTuple):
    """Of one row."""

    all: Bounds  #: prompts and responses, in their order
    by: Tensor  #: [tokens] int64: those of responses that read a shared prompt
    of: Tensor  #: [tokens] int64: those of these prompts
    responses: Bounds  #: in `by`; all that read one prompt are one sequence
    prompts: Bounds  #: in `of`


def to_themselves(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of each prompt and response: [heads, width, size], sums [heads, width]."""
    at = places(tuple(prompts), query.device)
    return _attend(query, key, value, at.all, at.all, scale, causal=True)


def to_prompts(
    query: Tensor, key: Tensor, value: Tensor, prompts: Prompts, scale: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The places of all responses, their outputs and sums."""
    at = places(tuple(prompts), query.device)
    if not len(at.by):
        return
    tensors = (_taken(query, at.by), _taken(key, at.of), _taken(value, at.of))
    yield at.by, *_attend(*tensors, at.responses, at.prompts, scale, causal=False)


def to_themselves_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    prompts: Prompts,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `output` and `sums` are those of the whole softmax."""
    at = places(tuple(prompts), query.device)
    tensors = (gradient, query, key, value, output)
    return _differentiate(*tensors, sums, at.all, at.all, scale, causal=True)


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
    """The places of all responses and of their prompts; gradients of the responses' queries and of
    the prompts' keys and values."""
    at = places(tuple(prompts), query.device)
    if not len(at.by):
        return
    by, of = at.by, at.of
    tensors = (_taken(gradient, by), _taken(query, by), _taken(key, of), _taken(value, of))
    whole = (_taken(output, by), sums[:, by])
    bounds = (at.responses, at.prompts)
    yield by, of, *_differentiate(*tensors, *whole, *bounds, scale, causal=False)


@lru_cache(maxsize=ROWS)
def places(prompts: tuple[SharedPrompt, ...], device: torch.device) -> Places:
    """Where a row's sequences are, on the device."""
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
    return Places(
        _bounds(lengths, device),
        _index(by, device),
        _index(of, device),
        _bounds(response_lengths, device),
        _bounds(prompt_lengths, device),
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> Bounds:
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
    return Bounds(starts, max(lengths, default=0))


def _index(parts: Sequence[ArrayLike], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, by: Bounds, of: Bounds, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """[heads, tokens, size] and sums [heads, tokens] float32."""
    tensors = (_tokens_first(query), _tokens_first(key), _tokens_first(value))
    bounds = (by.starts, of.starts, by.longest, of.longest)
    output, sums, *_ = _forward(*tensors, *bounds, 0.0, causal, False, scale=scale)
    return output.transpose(0, 1), sums


def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    by: Bounds,
    of: Bounds,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, [heads, tokens, size] each."""
    tensors = [_tokens_first(tensor) for tensor in (gradient, query, key, value, output)]
    bounds = (by.starts, of.starts, by.longest, of.longest)
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout
    found = _backward(
        *tensors, sums.contiguous(), *bounds, 0.0, causal, unused, unused[:0], scale=scale
    )
    of_query, of_key, of_value = (part.transpose(0, 1) for part in found)
    return of_query, of_key, of_value


def _taken(tensor: Tensor, at: Tensor) -> Tensor:
    """[heads, tokens at these places, size], in memory as the kernel takes it."""
    return tensor.transpose(0, 1)[at].transpose(0, 1)


def _tokens_first(tensor: Tensor) -> Tensor:
    """[heads, tokens, size] -> [tokens, heads, size], as the kernel takes it."""
    return tensor.transpose(0, 1).contiguous()
