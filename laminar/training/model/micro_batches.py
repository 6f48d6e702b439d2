"""The split of trained samples into mini- and micro-batches, and the tensors of a micro-batch.

Reads   TrainSample (steps.py)
Gives   lists of indices, and MicroBatch: right-padded rows with flat per-token tensors

Rows are padded on the right and start at position 0, so a causal model needs no mask: real tokens
never see padding, and sequences never share a row. Per-token tensors are flat over the response
tokens of all rows, in the order of `sample_ids`: the softmax over the vocabulary covers trained
tokens only, and padding cannot enter a sum because it is not there.
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
from laminar.training.steps import Ids, SpanPart, TrainSample, parts_of


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
    counts: NDArray[np.int64]  #: [sequences] scored tokens of each
    positions: Tensor | None = None  #: [1, width] int64; None: from 0 in every row
    prompts: tuple[SharedPrompt, ...] = ()  #: all prompts of the row; (): a row is one sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward and backward pass; per-token tensors are [tokens] float32."""

    sample_ids: tuple[str, ...]  #: ids of the rows
    spans: tuple[TokenSpan, ...]  #: spans of all tokens
    parts: tuple[SpanPart, ...]  #: parts of these spans
    rows: TokenRows
    behaviour: Tensor
    advantages: Tensor
    temperature: Tensor
    lengths: Tensor  #: response length of the token's sequence
    sequence_lengths: Tensor  #: [rows] int64: response length of each row
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
    places = [np.arange(start, len(s)) for s, start in zip(sequences, starts, strict=True)]
    return _pad_rows(sequences, places, device)


def _pad_rows(
    sequences: Sequence[Ids], places: Sequence[NDArray[np.int64]], device: torch.device
) -> TokenRows:
    """Pad `sequences`; row i scores its tokens at places[i], each at least 1.

    The logits that predict the token at position p are those of position p - 1."""
    width = max(map(len, sequences))
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    index = []
    for row, (sequence, scored) in enumerate(zip(sequences, places, strict=True)):
        ids[row, : len(sequence)] = sequence
        index.append(row * width + scored - 1)
    targets = np.concatenate([s[scored] for s, scored in zip(sequences, places, strict=True)])
    return TokenRows(
        input_ids=torch.from_numpy(ids).to(device),
        index=torch.from_numpy(np.concatenate(index)).to(device),
        targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        counts=np.array([len(i) for i in index], dtype=np.int64),
    )


def collate_samples(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    """Build the tensors of one micro-batch of padded rows, in the order of `samples`."""
    sequences = [np.concatenate([s.prompt_ids, s.read_ids]) for s in samples]
    places = [len(s.prompt_ids) + s.sampled_at for s in samples]
    return micro_batch(samples, _pad_rows(sequences, places, device), device)


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
