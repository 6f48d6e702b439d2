"""The split of trained samples into mini- and micro-batches, and the tensors of a micro-batch.

Reads   TrainSample (steps.py)
Gives   lists of indices, and MicroBatch: right-padded rows with flat per-token tensors

Rows are padded on the right and start at position 0, so a causal model needs no mask: real tokens
never see padding, and sequences never share a row. Per-token tensors are flat over the response
tokens of all samples, in the order of `sample_ids`: the softmax over the vocabulary covers trained
tokens only, and padding cannot enter a sum because it is not there. The rows of a sample, one for
each of its branches, are in one micro-batch: whatever is summed over its tokens sees them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from laminar.storage.rules import TokenSpan
from laminar.training.steps import Ids, SampleRow, SpanPart, TrainSample, parts_of


class SequenceRun(NamedTuple):
    """Sequences of one length, adjacent in a row; they do not read each other."""

    start: int
    stop: int
    sequences: int


class SharedPrompt(NamedTuple):
    """A prompt in a row, followed by the responses that read it."""

    prompt: SequenceRun  #: a run of one sequence
    responses: tuple[SequenceRun, ...]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Sequences as the model reads them, and the positions of the scored tokens' logits."""

    input_ids: Tensor  #: [rows, width] int64, right-padded; with `prompts` one row
    index: Tensor  #: [tokens] int64 into the flattened [rows * width] logits
    targets: Tensor  #: [tokens] int64
    counts: NDArray[np.int64]  #: [samples] scored tokens of each
    positions: Tensor | None = None  #: [1, width] int64; None: from 0 in every row
    prompts: tuple[SharedPrompt, ...] = ()  #: all prompts of the row; (): a row is one sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward and backward pass; per-token tensors are [tokens] float32."""

    sample_ids: tuple[str, ...]
    spans: tuple[TokenSpan, ...]  #: spans of all tokens
    parts: tuple[SpanPart, ...]  #: parts of these spans
    rows: TokenRows
    behaviour: Tensor
    advantages: Tensor
    temperature: Tensor
    lengths: Tensor  #: response length of the token's sample
    sequence_lengths: Tensor  #: [samples] int64: response length of each
    empty: bool = False  #: whether its rows belong to another rank and do not count here


def by_group(samples: Sequence[TrainSample]) -> dict[str, list[TrainSample]]:
    """Group samples by group id; groups and siblings keep their order of appearance."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def mini_batches(samples: Sequence[TrainSample], groups: int) -> list[list[TrainSample]]:
    """Cut into runs of `groups` whole groups; the last one of a short batch may be smaller."""
    siblings = list(by_group(samples).values())
    starts = range(0, len(siblings), groups)
    return [[s for group in siblings[i : i + groups] for s in group] for i in starts]


def select_unmasked(samples: Sequence[TrainSample], truncated: str) -> list[TrainSample]:
    """Select the samples that have a gradient; `truncated`: algorithm.truncated."""
    return [s for s in samples if not (truncated == "mask" and s.truncated)]


def micro_batches(lengths: Sequence[int], max_padded_tokens: int) -> list[list[int]]:
    """Return indices of rows that share a pass: rows * longest <= max_padded_tokens, or one row.

    Rows are sorted by length to limit padding, longest first so that a lack of memory shows at
    once. Equal lengths keep their order: the split is a function of the arguments.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found: list[list[int]] = []
    for i in order:
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= max_padded_tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def pad_token_rows(
    sequences: Sequence[Ids], starts: Sequence[int], device: torch.device
) -> TokenRows:
    """Pad `sequences`; row i scores its tokens from position starts[i] >= 1 to its end."""
    rows = [
        SampleRow(start, s, np.arange(len(s) - start), np.arange(start, len(s)))
        for s, start in zip(sequences, starts, strict=True)
    ]
    return _pad_rows([[row] for row in rows], device)


def _pad_rows(samples: Sequence[Sequence[SampleRow]], device: torch.device) -> TokenRows:
    """Pad the rows of each sample, which scores its tokens in order.

    The logits that predict the token at position p are those of position p - 1."""
    rows = [row for own in samples for row in own]
    width = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    starts, index = iter(range(0, ids.size, width)), []
    for own in samples:
        index.append(np.empty(sum(len(row.tokens) for row in own), dtype=np.int64))
        for row in own:
            start = next(starts)
            ids[start // width, : len(row.ids)] = row.ids
            index[-1][row.tokens] = start + row.places - 1
    at = np.concatenate(index)
    return TokenRows(
        input_ids=torch.from_numpy(ids).to(device),
        index=torch.from_numpy(at).to(device),
        targets=torch.from_numpy(ids.reshape(-1)[at + 1]).to(device),
        counts=np.array([len(i) for i in index], dtype=np.int64),
    )


def collate_samples(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    """Build the tensors of one micro-batch of padded rows, in the order of `samples`."""
    rows = _pad_rows([sample.list_rows() for sample in samples], device)
    return micro_batch(samples, rows, device)


def micro_batch(
    samples: Sequence[TrainSample], rows: TokenRows, device: torch.device
) -> MicroBatch:
    """Build the micro-batch of `samples`, whose tokens are in `rows` in the same order."""

    def per_token(values: Sequence[float]) -> Tensor:
        repeated = np.repeat(np.asarray(values, dtype=np.float32), rows.counts)
        return torch.from_numpy(repeated).to(device)

    behaviour = np.concatenate([s.logprobs for s in samples]).astype(np.float32)
    advantages = np.concatenate([s.token_advantages for s in samples]).astype(np.float32)
    return MicroBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        spans=tuple(span for s in samples for span in s.spans),
        parts=tuple(part for s in samples for part in parts_of(s.spans)),
        rows=rows,
        behaviour=torch.from_numpy(behaviour).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        temperature=per_token([s.temperature for s in samples]),
        lengths=per_token([len(s.response_ids) for s in samples]),
        sequence_lengths=torch.from_numpy(rows.counts).to(device),
    )


def concat_to_tensor(parts: Sequence[ArrayLike], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
