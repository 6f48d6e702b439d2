"""Rows whose advantage is 0 are not read: only the figures of tokens show it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laminar.storage.rules import TokenSpan
from laminar.training import learner as learner_module
from laminar.training import steps
from laminar.training.algorithms import policy_losses
from laminar.training.algorithms.policy_losses import (
    ADVANTAGE_ONLY_LOSSES,
    POLICY_LOSSES,
    LossInputs,
)
from laminar.training.engine_mismatch import movement_rows
from laminar.training.learner import Learner
from laminar.training.model.policy import LoadedPolicy
from laminar.training.model.shared_prefix_attention import read_prompts_once
from tools.kit.rank_cases import gradient, make_samples, replaced

Make = Callable[..., Any]
LIMIT = 1e-12  #: of two ways to add up the same numbers in float64
AGGREGATIONS = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)  # fmt: skip
KL = {"algorithm.use_kl_loss": True}
MINI = {"data.train_batch_size": 4, "algorithm.ppo_mini_batch_size": 2}
SUSPECT = {"algorithm.rollout_correction.mismatch_limit": 1.5}
FLAT = make_samples(flat=(0, 1))


def with_and_without(
    settings: dict[str, Any], samples: list[steps.TrainSample]
) -> tuple[float, steps.StepResult, steps.StepResult]:
    """How far a step that skips rows is from one that reads all; and both."""
    with replaced(policy_losses, "ADVANTAGE_ONLY_LOSSES", frozenset()):
        expected, of_all = gradient(None, settings, samples)
    found, of_some = gradient(None, settings, samples)
    return far(of_some, of_all), found, expected


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The distance of two gradients, relative in norm."""
    assert found.keys() == expected.keys()
    one, other = (np.concatenate([g[n].ravel() for n in expected]) for g in (found, expected))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


NEEDING = sorted(ADVANTAGE_ONLY_LOSSES)
CASES: dict[str, dict[str, Any]] = {
    **{f"loss {name}": {"algorithm.policy_loss.loss_mode": name} for name in NEEDING},
    **{mode: {"algorithm.loss_agg_mode": mode} for mode in AGGREGATIONS},
    "mini-batches": MINI,
    "masked": {"algorithm.truncated": "mask"},
    "importance": {"algorithm.rollout_correction.rollout_is": "sequence"},
    "small passes": {"trainer.micro_batch_tokens": 20},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_a_step_that_reads_all(settings: dict[str, Any]) -> None:
    apart, found, expected = with_and_without(settings, FLAT)
    assert apart <= LIMIT
    for one, other in zip(found.updates, expected.updates, strict=True):
        assert one.sample_ids == other.sample_ids
        assert one.pg_loss == pytest.approx(other.pg_loss, abs=LIMIT)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=LIMIT)
    masked = 2 if "algorithm.truncated" in settings else 0
    assert found.metrics["actor/skipped_rows"] == 8 - masked - 2  # one of each of two replicas
    assert expected.metrics["actor/skipped_rows"] == 0
    assert found.num_tokens == expected.num_tokens
    assert found.metrics["critic/score/mean"] == expected.metrics["critic/score/mean"]


def flat_by_tokens() -> list[steps.TrainSample]:
    """An answer beside flat groups, whose advantage is 0 by chance: its reward is the mean."""
    others = make_samples(flat=(0, 1))
    rewards = (0.0, 0.5, 1.0, 0.5)
    return others[:8] + [replace(s, reward=r) for s, r in zip(others[8:], rewards, strict=True)]


def test_a_row_at_its_groups_mean_is_skipped_too() -> None:
    apart, found, _ = with_and_without(
        {"algorithm.norm_adv_by_std_in_grpo": False}, flat_by_tokens()
    )
    assert apart <= LIMIT
    assert found.metrics["actor/skipped_rows"] == 8


# --- where something else gives a gradient ----------------------------------------------------


@pytest.mark.parametrize(
    "term", [KL, {"algorithm.entropy_coeff": 0.01}], ids=["KL", "entropy bonus"]
)
def test_all_rows_are_read_where_they_have_a_gradient(term: dict[str, Any]) -> None:
    apart, found, _ = with_and_without(term, FLAT)
    assert (apart, found.metrics["actor/skipped_rows"]) == (0.0, 0.0)


def test_a_users_loss_is_given_all_rows(tmp_path: Path) -> None:
    """It may have a gradient without advantage, and then the batch has a signal."""
    path = tmp_path / "mine.py"
    path.write_text("def loss(batch):\n    return (batch.log_probs + 1.0) ** 2\n")
    settings = {"algorithm.policy_loss.loss_mode": f"{path}:loss"}
    apart, found, _ = with_and_without(settings, make_samples(flat=(0, 1, 2)))
    assert (apart, found.metrics["actor/skipped_rows"], found.changed) == (0.0, 0.0, True)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_that_need_an_advantage_are_0_without(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, rollout = (-3 * torch.rand(3, 40, generator=generator)).double()
    log_probs.requires_grad_()
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    options |= {"tau_pos": 1.0, "tau_neg": 1.05, "dro_beta": 0.3}
    lengths = torch.tensor([1, 30, 9])
    batch = LossInputs(log_probs, old, rollout, torch.zeros_like(old), lengths, options)
    losses = POLICY_LOSSES[name](batch)
    losses.sum().backward()
    vanishes = not losses.detach().any() and not log_probs.grad.any()  # type: ignore[union-attr]
    assert vanishes == (name in ADVANTAGE_ONLY_LOSSES)


# --- what stays proven ------------------------------------------------------------------------


def test_one_row_of_each_replica_and_version_is_scored(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """A version of which all groups are right stays proven; a batch without signal is measured."""
    samples = make_samples(reward=1.0)
    result = Learner(make_config(), make_policy()).train_step(samples, 5)
    assert (result.changed, result.skipped_reason) == (False, steps.NO_SIGNAL)
    assert result.mismatch.keys() == {steps.get_origin(span) for s in samples for span in s.spans}
    assert result.metrics["actor/skipped_rows"] == len(samples) - 4
    tokens = sum(m.tokens for m in result.mismatch.values())
    assert tokens == sum(len(s.response_ids) for s in steps.select_one_per_origin(samples))


def test_a_row_that_several_sampled_proves_them_all() -> None:
    first, second, third = make_samples(lengths=(6, 6, 6), replicas=1)
    spans = (TokenSpan("rollout-1", 4, 4, 2), TokenSpan("rollout-0", 3, 3, 4))
    both = replace(first, spans=spans)
    assert steps.select_one_per_origin([both, second, third]) == [both]
    assert steps.select_one_per_origin([second, third, both]) == [second, both]


def test_an_engine_whose_rows_have_no_gradient_is_found_and_left_out() -> None:
    """Its rows leave the counts, as any that came from other weights."""
    sick = [replace(s, logprobs=s.logprobs - 10) for s in FLAT[:4]]
    sick = [replace(s, spans=(TokenSpan("rollout-7", 3, 3, len(s.response_ids)),)) for s in sick]
    found, of_some = gradient(None, SUSPECT, sick + FLAT[4:])
    assert found.left_out.keys() == {s.sample_id for s in sick}
    expected, of_all = gradient(None, SUSPECT, FLAT[4:])
    assert far(of_some, of_all) <= LIMIT
    assert found.updates == expected.updates


# --- how far the updates move the policy --------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, MINI], ids=["one update", "two"])
def test_the_movement_is_that_of_the_rows_before_and_after(
    settings: dict[str, Any], make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """The scores before are those of the step: only the few rows are read again, once."""
    samples = make_samples(temperature=1.0)
    learner = Learner(make_config({"optim.lr": 0.01} | settings), make_policy())
    parts = movement_rows(samples, learner.config.trainer.micro_batch_tokens)
    few = [s for part in parts for s in part]
    rows = [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in few]
    before = learner.compute_logprobs(rows)
    read: list[int] = []
    with replaced(learner_module, "score_micro_batch", counted(read)):
        result = learner.train_step(samples, 3)
    after = learner.compute_logprobs(rows)
    found, starts = list(zip(few, before, after, strict=True)), (0, len(parts[0]))
    expected = []
    for start, part in zip(starts, parts, strict=False):
        pairs = [
            (a, b)
            for s, one, other in found[start : start + len(part)]
            for a, b in list(zip(one, other, strict=True))[len(s.prompt_ids) - 1 :]
        ]
        moved = sum(abs(b - a) for a, b in pairs)
        expected.append(moved / sum(1 - math.exp(a) for a, _ in pairs))
    assert result.metrics["mismatch/moved"] == pytest.approx(max(expected), rel=1e-3)
    assert sum(read) == len(few) + (len(samples) if settings else 0)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.0)])
def test_weights_that_stay_have_not_moved(
    dtype: str, most: float, make_model: Make, make_config: Make, make_samples: Make
) -> None:
    """In bfloat16 a row is rounded otherwise beside other rows, by more than a step may move it."""
    policy = LoadedPolicy(make_model(hidden_size=128), 48, prompts_once=True)
    read_prompts_once(policy.model)
    learner = Learner(make_config({"trainer.dtype": dtype}), policy)
    result = learner.train_step(make_samples(groups=16), 0)
    assert result.changed
    assert result.metrics["mismatch/moved"] <= most


def counted(read: list[int]) -> Callable[..., Any]:
    usual = learner_module.score_micro_batch

    def score(policy: LoadedPolicy, micro: Any, compute: Any) -> Any:
        read.append(len(micro.sample_ids))
        return usual(policy, micro, compute)

    return score


def test_a_row_that_is_left_out_is_in_no_baseline() -> None:
    """Rows at their group's mean are skipped once a row of other weights has left the baseline."""
    rewards = (9.0, 0.5, 0.5, 0.5)
    group = [replace(s, reward=r) for s, r in zip(FLAT[:4], rewards, strict=True)]
    other = replace(group[0], logprobs=group[0].logprobs - 10)
    other = replace(other, spans=(TokenSpan("rollout-7", 3, 3, len(other.response_ids)),))
    samples = [other, *group[1:], *FLAT[8:]]
    expected, of_all = gradient(None, SUSPECT, samples[1:])
    found, of_some = gradient(None, SUSPECT, samples)
    assert list(found.left_out) == [other.sample_id]
    assert far(of_some, of_all) <= LIMIT
    assert found.metrics["actor/skipped_rows"] == expected.metrics["actor/skipped_rows"] > 0
