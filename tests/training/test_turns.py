"""A response of several turns: how it is cut changes nothing, and what was read between turns is in
no figure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from laminar.storage.rules import Span
from laminar.training.batching import collate
from laminar.training.passes import collate_siblings
from laminar.training.steps import TrainSample

CPU = torch.device("cpu")
SPAN = Span("rollout-0", 0, 0, 6)


def sample(**changes: object) -> TrainSample:
    plain = TrainSample(
        sample_id="0.0.0",
        group_id="0.0",
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        response_ids=np.array([11, 12, 13, 14, 15, 16], dtype=np.int32),
        logprobs=np.linspace(-1, -2, 6, dtype=np.float32),
        reward=1.0,
        temperature=1.0,
        truncated=False,
        spans=(SPAN,),
        advantage=0.5,
    )
    return replace(plain, **changes)


TURNS = sample(
    turns=(2, 1, 3),
    contexts=(np.array([90], dtype=np.int32), np.array([91, 92], dtype=np.int32)),
)
READ = [11, 12, 90, 13, 91, 92, 14, 15, 16]


def test_contexts_are_read_between_the_turns() -> None:
    assert TURNS.read_ids.tolist() == READ
    assert [READ[at] for at in TURNS.sampled_at] == TURNS.response_ids.tolist()
    assert TURNS.length == 3 + len(READ) and sample().length == 9


@pytest.mark.parametrize("once", [False, True])
def test_only_sampled_tokens_are_scored_each_by_the_token_before_it(once: bool) -> None:
    """Also where siblings read their prompt once."""
    other = replace(sample(), sample_id="0.0.1")
    micro = collate_siblings([[other, TURNS]], CPU) if once else collate([other, TURNS], CPU)
    read = micro.rows.input_ids.flatten()
    assert micro.rows.counts.tolist() == [6, 6]
    assert micro.rows.targets.tolist() == [11, 12, 13, 14, 15, 16] * 2
    before = read[micro.rows.index[6:]].tolist()
    whole = [3, *READ]
    assert before == [whole[at] for at in TURNS.sampled_at]
    assert len(micro.behaviour) == len(micro.advantages) == 12
    assert {90, 91, 92} <= set(read.tolist()) and not {90, 91, 92} & set(
        micro.rows.targets.tolist()
    )


def test_positions_count_what_was_read() -> None:
    micro = collate_siblings([[TURNS]], CPU)
    assert micro.rows.positions is not None
    assert micro.rows.positions.flatten().tolist() == list(range(3 + len(READ) - 1))
    assert all(a < b for a, b in pairwise(micro.rows.index.tolist()))


@pytest.mark.parametrize("turns", [(2, 4), (6, 0, 0), (2, 1, 2)])
def test_turns_that_do_not_fit_are_refused(turns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has turns of"):
        replace(TURNS, turns=turns)
