"""A response of several turns: how it is cut changes nothing, and what was read between turns is in
no figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch

from laminar.config.algorithm import LossAggMode
from laminar.storage.rules import TokenSpan
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.model.micro_batches import collate_samples
from laminar.training.model.packing import collate_siblings
from laminar.training.model.policy import Compute
from laminar.training.objective import ObjectiveConfig, compute_objective
from laminar.training.steps import TrainSample

CPU = torch.device("cpu")
SPAN = TokenSpan("rollout-0", 0, 0, 6)
Make = Callable[..., Any]


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
    turns=(2, 1, 3), contexts=(np.array([90], dtype=np.int32), np.array([91, 92], dtype=np.int32))
)
READ = [11, 12, 90, 13, 91, 92, 14, 15, 16]


def test_contexts_are_read_between_the_turns() -> None:
    (row,) = TURNS.list_rows()
    assert row.ids[row.prompt :].tolist() == READ and row.prompt == 3
    assert row.ids[row.places].tolist() == TURNS.response_ids.tolist()
    assert TURNS.length == 3 + len(READ) and sample().length == 9


@pytest.mark.parametrize("once", [False, True])
def test_only_sampled_tokens_are_scored_each_by_the_token_before_it(once: bool) -> None:
    """Also where siblings read their prompt once."""
    other = replace(sample(), sample_id="0.0.1")
    micro = (
        collate_siblings([[other, TURNS]], CPU) if once else collate_samples([other, TURNS], CPU)
    )
    read = micro.rows.input_ids.flatten()
    assert micro.rows.counts.tolist() == [6, 6]
    assert micro.rows.targets.tolist() == [11, 12, 13, 14, 15, 16] * 2
    before = read[micro.rows.index[6:]].tolist()
    (row,) = TURNS.list_rows()
    assert before == row.ids[row.places - 1].tolist()
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


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_logits_of_what_was_only_read_have_no_gradient(
    mode: str, make_policy: Make, make_config: Make
) -> None:
    """With KL and entropy in the loss. The logits of a place are made of its last hidden state."""
    overrides = {"algorithm.loss_agg_mode": mode, "algorithm.entropy_coeff": 0.1}
    algorithm = make_config(overrides | {"algorithm.kl_loss_coef": 0.1}).algorithm
    config = ObjectiveConfig(algorithm, PolicyLoss(algorithm), 20, Compute(torch.float32, 1024))
    turns = replace(TURNS, contexts=tuple(c % 40 for c in TURNS.contexts))
    policy, reference, hidden = make_policy(0), make_policy(1), []

    def keep(_: object, __: object, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    policy.model.base_model.register_forward_hook(keep)
    micro = collate_samples([turns], CPU)
    compute_objective(
        policy, reference, micro, None, BatchCounts.from_samples([turns]), config
    ).loss.backward()
    (states,) = hidden
    moved = states.grad[0].abs().amax(dim=-1)
    predicts = [2 + at for at in (0, 1, 3, 6, 7, 8)]  # the token before each that was sampled
    assert [at for at, size in enumerate(moved.tolist()) if size != 0.0] == predicts
