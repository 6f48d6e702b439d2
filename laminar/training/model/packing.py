"""Packing of samples into passes through a model: each prompt read once, or padded rows.

Reads   TrainSample (steps.py)
Gives   MicroBatches, one for each forward and backward pass

Siblings share a prompt, which is most of what a step of short responses reads. If the model's
attention can read it once (shared_prefix_attention.py), a pass is one flat row, [prompt | response
| response ...] for each prompt; positions restart at the end of the prompt. The last token of a
response is not read, as it predicts nothing. The prompt's last token predicts the first token of
every response, so its gradient is the sum over them. Samples belong together if their prompts are
equal, and so do the branches of a sample that begin with the same context.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from laminar.config import Config
from laminar.training.model.micro_batches import (
    MicroBatch,
    SequenceRun,
    SharedPrompt,
    TokenRows,
    collate_samples,
    concat_to_tensor,
    micro_batch,
    micro_batches,
)
from laminar.training.model.policy import Compute, LoadedPolicy
from laminar.training.ranks import SINGLE_RANK, Ranks, assign_sequences
from laminar.training.steps import SampleRow, TrainSample

Siblings = list[TrainSample]
"""Samples of one prompt, shortest response first: equal lengths are adjacent."""


def build_passes(
    samples: Sequence[TrainSample],
    max_tokens: int,
    device: torch.device,
    *,
    prompts_once: bool,
    ranks: Ranks = SINGLE_RANK,
) -> list[MicroBatch]:
    """Build this rank's passes, of at most `max_tokens` each or one sample.

    Every sample is in one pass of one rank. All ranks have the same number of passes: an empty one
    reads the shortest sample."""
    cut = _pack_shared_prompts if prompts_once else _pack_padded
    of_ranks = cut(samples, max_tokens, ranks.size)
    made = collate_siblings if prompts_once else collate_samples
    own = [made(chosen, device) for chosen in of_ranks[ranks.rank]]
    for _ in range(max(map(len, of_ranks)) - len(own)):
        shortest = min(samples, key=lambda s: s.length)
        own.append(replace(collate_samples([shortest], device), empty=True))
    return own


def gather_tokens(
    samples: Sequence[TrainSample], passes: Iterable[tuple[MicroBatch, Tensor]], ranks: Ranks
) -> Tensor:
    """Gather figures [tokens] float64 of all response tokens of `samples`, in order.

    `passes`: those of this rank with their figures [tokens], merged over all ranks. Other samples
    are ignored.
    """
    ends = itertools.accumulate(len(s.response_ids) for s in samples)
    end_of = {s.sample_id: end for s, end in zip(samples, ends, strict=True)}
    found = torch.zeros(max(end_of.values(), default=0), dtype=torch.float64)
    for micro, figures in passes:
        if micro.empty:
            continue
        of_samples = figures.cpu().split(micro.rows.counts.tolist())
        for sample_id, own in zip(micro.sample_ids, of_samples, strict=True):
            if (end := end_of.get(sample_id)) is not None:
                found[end - len(own) : end] = own
    return ranks.all_reduce(found)


def make_pass_builder(
    config: Config, policy: LoadedPolicy, compute: Compute, ranks: Ranks
) -> Callable[[Sequence[TrainSample]], list[MicroBatch]]:
    """Return a function that builds this rank's passes through a model."""
    tokens, device = config.trainer.micro_batch_tokens, policy.device

    def build(samples: Sequence[TrainSample]) -> list[MicroBatch]:
        once = policy.reads_prompts_once(compute)
        return build_passes(samples, tokens, device, prompts_once=once, ranks=ranks)

    return build


def _pack_padded(samples: Sequence[TrainSample], max_tokens: int, ranks: int) -> list[Any]:
    """Return the samples of each pass, by rank."""
    found = []
    for share in assign_sequences([s.length for s in samples], ranks):
        own = [samples[i] for i in share]
        lines = [s for s in own if not s.parents]
        rows = micro_batches([s.length for s in lines], max_tokens)
        alone = [[s] for s in own if s.parents]
        found.append(alone + [[lines[i] for i in chosen] for chosen in rows])
    return found


def _pack_shared_prompts(samples: Sequence[TrainSample], max_tokens: int, ranks: int) -> list[Any]:
    """Return the siblings of each pass, by rank.

    Siblings stay together unless they exceed a pass or the share of a rank: then each part reads
    the prompt separately.
    """
    by_prompt: dict[bytes, Siblings] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_ids.tobytes(), []).append(sample)
    fair = -(-sum(map(_count_tokens, by_prompt.values())) // ranks)
    limit = min(max_tokens, fair)
    parts = [part for siblings in by_prompt.values() for part in _split_siblings(siblings, limit)]
    return [
        _first_fit([parts[i] for i in share], max_tokens)
        for share in assign_sequences(list(map(_count_tokens, parts)), ranks)
    ]


def _first_fit(parts: Sequence[Siblings], max_tokens: int) -> list[list[Siblings]]:
    """Pack parts into passes, largest first: if memory runs out, it does so at once."""
    found: list[list[Siblings]] = []
    room: list[int] = []
    for part in sorted(parts, key=_count_tokens, reverse=True):
        tokens = _count_tokens(part)
        at = next((i for i, left in enumerate(room) if tokens <= left), len(room))
        if at == len(room):
            found.append([])
            room.append(max_tokens)
        found[at].append(part)
        room[at] -= tokens
    return found


def _split_siblings(siblings: Siblings, max_tokens: int) -> list[Siblings]:
    """Split siblings into parts of at most `max_tokens`, starting from the longest response."""
    found: list[Siblings] = []
    room = 0
    prompt = len(siblings[0].prompt_ids)
    for sample in sorted(siblings, key=_count_read_tokens, reverse=True):
        if not found or _count_read_tokens(sample) > room:
            found.append([])
            room = max_tokens - prompt
        found[-1].append(sample)
        room -= _count_read_tokens(sample)
    return [part[::-1] for part in found]


def _count_read_tokens(sample: TrainSample) -> int:
    """Count the tokens that are read after the prompt, and with the prompts of other roots."""
    if not sample.parents:
        return sample.length - len(sample.prompt_ids) - 1
    rows = sample.list_rows()
    prompts = {row.ids[: row.prompt].tobytes(): row.prompt for row in rows[1:]}
    prompts.pop(sample.prompt_ids.tobytes(), None)
    return sum(len(row.ids) - row.prompt - 1 for row in rows) + sum(prompts.values())


def _count_tokens(siblings: Siblings) -> int:
    return len(siblings[0].prompt_ids) + sum(map(_count_read_tokens, siblings))


def collate_siblings(groups: Sequence[Siblings], device: torch.device) -> MicroBatch:
    """Build the tensors of one pass over one flat row."""
    samples = [sample for siblings in groups for sample in siblings]
    ids: list[ArrayLike] = []
    positions: list[ArrayLike] = []
    index = [np.empty(len(sample.response_ids), dtype=np.int64) for sample in samples]
    prompts = []
    start = 0
    for tree in _iter_trees(groups, index):
        prompt, rows = tree[0][1].prompt, [row for _, row in tree]
        lengths = [len(row.ids) - prompt - 1 for row in rows]
        ids += [rows[0].ids[:prompt], *(row.ids[prompt:-1] for row in rows)]
        positions += [np.arange(prompt), *(prompt + np.arange(length) for length in lengths)]
        prompts.append(_build_shared_prompt(start, prompt, lengths))
        last, start = start + prompt - 1, start + prompt
        for (found, row), length in zip(tree, lengths, strict=True):
            at = start + row.places - prompt - 1
            found[row.tokens] = np.where(row.places == prompt, last, at)
            start += length
    responses = [sample.response_ids for sample in samples]
    rows_read = TokenRows(
        input_ids=concat_to_tensor(ids, device)[None],
        index=concat_to_tensor(index, device),
        targets=concat_to_tensor(responses, device),
        counts=np.array(list(map(len, responses)), dtype=np.int64),
        positions=concat_to_tensor(positions, device)[None],
        prompts=tuple(prompts),
    )
    return micro_batch(samples, rows_read, device)


def _iter_trees(
    groups: Sequence[Siblings], index: Sequence[NDArray[np.int64]]
) -> Iterator[list[tuple[NDArray[np.int64], SampleRow]]]:
    """Yield the rows of each prompt, shortest first, with the index of their sample's tokens."""
    of_samples = iter(index)
    for siblings in groups:
        by_prompt: dict[bytes, list[tuple[NDArray[np.int64], SampleRow]]] = {}
        for sample, found in zip(siblings, of_samples, strict=False):
            for row in sample.list_rows():
                by_prompt.setdefault(row.ids[: row.prompt].tobytes(), []).append((found, row))
        for tree in by_prompt.values():
            yield sorted(tree, key=lambda pair: len(pair[1].ids))


def _build_shared_prompt(start: int, prompt: int, lengths: Sequence[int]) -> SharedPrompt:
    """Locate a prompt and its responses in a row; `lengths`: of the responses, ascending.

    A single response forms one sequence with its prompt; an empty response is in no run."""
    end = start + prompt
    if len(lengths) == 1:
        return SharedPrompt(SequenceRun(start, end + lengths[0], 1), ())
    runs = []
    for length, count in Counter(filter(None, lengths)).items():
        runs.append(SequenceRun(end, end + length * count, count))
        end = runs[-1].stop
    return SharedPrompt(SequenceRun(start, start + prompt, 1), tuple(runs))
