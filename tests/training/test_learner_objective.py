"""Loss and gradient of a step against a plain computation with loops and float64.

The plain computation shares nothing with the code under test: one sequence at a time through a
float64 copy of the model, Python arithmetic per token, its own advantages and aggregation.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from laminar.config import Config
from laminar.config.algorithm import LossAggMode
from laminar.training.learner import Learner
from laminar.training.steps import TrainSample
from tests.training.plain_terms import plain_kept

MODES = get_args(LossAggMode)
Make = Callable[..., Any]


def vocabulary_log_probs(model: torch.nn.Module, sample: TrainSample) -> Tensor:
    """[response tokens, vocab] of one sequence alone, at its temperature; of each branch alone."""
    response, read, found = iter(sample.response_ids.tolist()), list[list[int]](), {}
    turns, contexts = sample.turns or [len(sample.response_ids)], [sample.prompt_ids]
    parents = sample.parents or range(-1, len(turns) - 1)
    for parent, context, count in zip(parents, [*contexts, *sample.contexts], turns, strict=True):
        before = read[parent] if parent >= 0 else []
        read.append([*before, *context.tolist(), *(next(response) for _ in range(count))])
    for turn, ids in enumerate(read):
        if turn not in parents:  # the first branch that has a turn gives its logits
            logits = model(input_ids=torch.tensor([ids])).logits[0] / sample.temperature
            while turn >= 0:
                end = len(read[turn]) - 1
                found.setdefault(turn, logits[end - turns[turn] : end])
                turn = parents[turn]
    return torch.log_softmax(torch.cat([found[turn] for turn in range(len(turns))]), dim=-1)


def token_log_probs(model: torch.nn.Module, sample: TrainSample) -> Tensor:
    table = vocabulary_log_probs(model, sample)
    return torch.stack([table[t, i] for t, i in enumerate(sample.response_ids.tolist())])


def recorded(model: torch.nn.Module, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples as an engine with these weights would have recorded them."""
    with torch.no_grad():
        return [replace(s, logprobs=token_log_probs(model, s).float().numpy()) for s in samples]


def disturbed(samples: Sequence[TrainSample], scale: float, seed: int = 7) -> list[TrainSample]:
    """Behaviour log-probs that are off by a normal of that size, as of stale weights."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            s,
            logprobs=(s.logprobs + rng.normal(0, scale, len(s.logprobs)))
            .clip(max=-1e-3)
            .astype(np.float32),
        )
        for s in samples
    ]


def plain_advantages(samples: Sequence[TrainSample]) -> dict[str, float]:
    found = {}
    for sample in samples:
        rewards = [s.reward for s in samples if s.group_id == sample.group_id]
        spread = statistics.stdev(rewards) + 1e-6
        found[sample.sample_id] = (sample.reward - statistics.mean(rewards)) / spread
    return found


def plain_token_loss(
    log_prob: Tensor, proximal: float, behaviour: float, advantage: float, config: Config
) -> Tensor:
    a = config.algorithm
    correction = a.rollout_correction
    ratio = (log_prob - (behaviour if correction.bypass_mode else proximal)).exp()
    bounded = min(max(float(ratio.detach()), 1 - a.clip_ratio_low), 1 + a.clip_ratio_high)
    loss = -advantage * ratio
    if float(loss.detach()) < -advantage * bounded:
        loss = torch.tensor(-advantage * bounded, dtype=torch.float64)
    if advantage < 0 and float(loss.detach()) > -advantage * a.clip_ratio_c:
        loss = torch.tensor(-advantage * a.clip_ratio_c, dtype=torch.float64)
    if correction.bypass_mode:
        return loss
    return loss * min(math.exp(proximal - behaviour), float(correction.rollout_is_threshold))


def plain_rejections(proximal: Tensor, sample: TrainSample, config: Config) -> list[bool]:
    correction = config.algorithm.rollout_correction
    rules = correction.rollout_rs.split(",") if correction.rollout_rs else []
    bounds = correction.rollout_rs_threshold.split(",")
    log_ratios = (proximal - torch.from_numpy(sample.logprobs).double()).tolist()
    kept = [plain_kept(*given, log_ratios) for given in zip(rules, bounds, strict=False)]
    return [all(each) for each in zip([True] * len(log_ratios), *kept, strict=True)]


def plain_kl(log_prob: Tensor, reference: float, kind: str) -> Tensor:
    """k3 is bounded at 10, and what is bounded has no gradient."""
    x = log_prob - reference
    if kind == "k2":
        return x**2 / 2
    k3 = (-x).exp() - 1 + x
    return k3 if float(k3.detach()) < 10 else torch.tensor(10.0, dtype=torch.float64)


def plain_total(
    per_sample: list[list[Tensor]], lengths: list[int], mode: str, limit: int
) -> Tensor:
    """Aggregate the per-token values of the unmasked samples; lengths are those of all samples."""
    total = torch.zeros((), dtype=torch.float64)
    for values in per_sample:
        for value in values:
            share = {
                "token-mean": 1 / sum(lengths),
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / len(lengths),
                "seq-mean-token-mean": 1 / len(lengths) / len(values),
                "seq-mean-token-sum-norm": 1 / len(lengths) / limit,
            }[mode]
            total = total + share * value
    return total


def plain_objective(
    model: torch.nn.Module,
    samples: Sequence[TrainSample],
    config: Config,
    proximal: dict[str, Tensor],
    reference: torch.nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """(whole loss, policy part) of one mini-batch."""
    a = config.algorithm
    advantages = plain_advantages(samples)
    policy, kl, entropy = [], [], []
    for s in samples:
        if a.truncated == "mask" and s.truncated:
            continue
        table = vocabulary_log_probs(model, s)
        log_probs = [table[t, i] for t, i in enumerate(s.response_ids.tolist())]
        kept = plain_rejections(proximal[s.sample_id], s, config)
        given = zip(log_probs, proximal[s.sample_id], s.logprobs, kept, strict=True)
        policy.append(
            [
                plain_token_loss(p, float(q), float(b), advantages[s.sample_id], config) * keep
                for p, q, b, keep in given
            ]
        )
        entropy.append([-(row.exp() * row).sum() for row in table])
        if reference is not None:
            with torch.no_grad():
                anchors = token_log_probs(reference, s).tolist()
            kl.append(
                [plain_kl(p, r, a.kl_loss_type) for p, r in zip(log_probs, anchors, strict=True)]
            )
    lengths = [len(s.response_ids) for s in samples]
    limit = config.data.max_response_length
    pg = plain_total(policy, lengths, a.loss_agg_mode, limit)
    loss = pg - a.entropy_coeff * plain_total(entropy, lengths, a.loss_agg_mode, limit)
    return loss + a.kl_loss_coef * plain_total(kl, lengths, a.loss_agg_mode, limit), pg


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and found
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-4
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).abs().max())
        assert difference <= 1e-5 * scale, name


OPTIONS = {
    "no-kl": {},
    "k3": {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.3},
    "k2-bypass-entropy": {
        "algorithm.use_kl_loss": True,
        "algorithm.kl_loss_coef": 0.3,
        "algorithm.kl_loss_type": "k2",
        "algorithm.entropy_coeff": 0.1,
        "algorithm.rollout_correction.bypass_mode": True,
    },
    "rejection-k3-entropy": {
        "algorithm.use_kl_loss": True,
        "algorithm.kl_loss_coef": 0.3,
        "algorithm.entropy_coeff": 0.1,
        "algorithm.rollout_correction.rollout_rs": "token_k2,seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "1.5,0.6_1.7",
    },
    "bypass-mask": {
        "algorithm.truncated": "mask",
        "algorithm.rollout_correction.bypass_mode": True,
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradient_equal_the_plain_computation(
    mode: str, options: dict[str, Any], make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Temperatures 0.7, 1.0 and 1.3 in one batch, and responses of one turn and of three; dual clip
    active wherever clipping can act."""
    flat = {"algorithm.loss_agg_mode": mode, "trainer.micro_batch_tokens": 60} | options
    config, policy, reference = make_config(flat), make_policy(0), make_policy(1)
    samples = disturbed(recorded(policy.model, make_samples(turns=True)), 1.5)
    assert any(sample.contexts for sample in samples)

    double = copy.deepcopy(policy.model).double()
    with torch.no_grad():
        proximal = {s.sample_id: token_log_probs(double, s) for s in samples}
    use_kl = config.algorithm.use_kl_loss
    anchor = copy.deepcopy(reference.model).double() if use_kl else None
    loss, pg = plain_objective(double, samples, config, proximal, anchor)
    loss.backward()

    result = Learner(config, policy, reference=reference).train_step(samples, 0)
    assert result.metrics["actor/pg_loss"] == pytest.approx(float(pg.detach()), rel=1e-5, abs=1e-6)
    assert_same_gradient(gradients(policy.model), gradients(double))
    assert ("actor/kl_loss" in result.metrics) == use_kl
    if use_kl:
        kl = (float(loss.detach()) - float(pg.detach())) / config.algorithm.kl_loss_coef
        assert config.algorithm.entropy_coeff or result.metrics["actor/kl_loss"] == pytest.approx(
            kl, rel=1e-5
        )
    if config.algorithm.rollout_correction.bypass_mode:
        assert result.metrics["actor/pg_clipfrac_lower"] > 0.02
        assert result.metrics["actor/pg_clipfrac"] > 0.1
    else:
        assert result.metrics["rollout_corr/is_clipped_fraction"] > 0.1
    assert 0.1 < result.metrics.get("rollout_corr/rs_masked_fraction", 0.5) < 0.9


@pytest.mark.parametrize("bypass", [False, True])
def test_two_mini_batches_clip_against_the_weights_at_the_start_of_the_step(
    bypass: bool, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """AdamW with a large epsilon, so that float noise in a tiny gradient stays noise."""
    config = make_config(
        {
            "algorithm.ppo_mini_batch_size": 2,
            "data.train_batch_size": 4,
            "algorithm.rollout_correction.bypass_mode": bypass,
            "optim.lr": 0.2,
            "optim.eps": 0.3,
            "optim.weight_decay": 0.1,
        }
    )
    policy = make_policy(0)
    samples = disturbed(recorded(policy.model, make_samples(groups=4)), 0.3)
    double = copy.deepcopy(policy.model).double()
    with torch.no_grad():
        proximal = {s.sample_id: token_log_probs(double, s) for s in samples}
    optimizer = torch.optim.AdamW(double.parameters(), lr=0.2, eps=0.3, weight_decay=0.1)
    losses = []
    for half in (samples[:8], samples[8:]):
        optimizer.zero_grad()
        loss, pg = plain_objective(double, half, config, proximal)
        loss.backward()
        optimizer.step()
        losses.append(float(pg.detach()))

    result = Learner(config, policy).train_step(samples, 0)
    assert [u.pg_loss for u in result.updates] == pytest.approx(losses, rel=1e-4)
    assert result.metrics["actor/pg_clipfrac"] > 0.02  # the second half has moved
    assert_same_gradient(gradients(policy.model), gradients(double))
    for found, expected in zip(policy.model.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_micro_batches_chunks_and_order_change_neither_loss_nor_gradient_nor_metrics(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    reference = make_policy(1)
    samples = disturbed(recorded(make_policy(0).model, make_samples()), 1.0)
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    outcomes = []
    splits = [(10**6, 1024), (1, 1024), (61, 1024), (61, 5)]
    for (budget, chunk), order in zip(splits, [samples, samples, shuffled, samples], strict=True):
        config = make_config(
            {
                "trainer.micro_batch_tokens": budget,
                "trainer.logit_chunk_tokens": chunk,
                "algorithm.use_kl_loss": True,
                "algorithm.entropy_coeff": 0.05,
            }
        )
        policy = make_policy(0)
        result = Learner(config, policy, reference=reference).train_step(order, 0)
        outcomes.append((result.metrics, gradients(policy.model)))
    for found, gradient in outcomes[1:]:
        assert_same_gradient(gradient, outcomes[0][1])
        assert found == pytest.approx(outcomes[0][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("minis", [1, 2])
def test_at_learning_rate_zero_nothing_moves_and_every_ratio_is_one(
    minis: int, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Behaviour from a plain forward at T = 0.7; several versions, all with these weights."""
    config = make_config(
        {
            "algorithm.use_kl_loss": True,
            "algorithm.ppo_mini_batch_size": 4 // minis,
            "data.train_batch_size": 4,
        }
    )
    policy, reference = make_policy(0), make_policy(0)
    samples = recorded(policy.model, make_samples(groups=4, temperature=0.7))
    before = [p.detach().numpy().tobytes() for p in policy.model.parameters()]
    learner = Learner(config, policy, reference=reference)
    for step in range(2):
        found = learner.train_step(samples, step).metrics
        assert found["actor/ppo_kl"] == 0.0
        assert found["actor/pg_clipfrac"] == found["actor/pg_clipfrac_lower"] == 0.0
        assert found["actor/kl_loss"] == 0.0
        assert found["rollout_corr/is_mean"] == pytest.approx(1.0, abs=1e-4)
        assert found["rollout_corr/is_max"] == pytest.approx(1.0, abs=1e-4)
        assert found["train_rollout_logprob_abs_diff/max"] <= 1e-4
        assert found["mismatch_kl/mean"] <= 1e-7
        assert found["actor/grad_norm"] > 0
    assert [p.detach().numpy().tobytes() for p in policy.model.parameters()] == before
    # The same test sees a temperature that is not the sampling one.
    wrong = [replace(s, temperature=1.0) for s in samples]
    assert learner.train_step(wrong, 2).metrics["train_rollout_logprob_abs_diff/max"] > 0.05


def test_decoupled_with_the_behaviour_as_proximal_policy_equals_bypass(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    found = []
    samples = recorded(make_policy(0).model, make_samples())
    for bypass in (False, True):
        policy = make_policy(0)
        config = make_config({"algorithm.rollout_correction.bypass_mode": bypass})
        Learner(config, policy).train_step(samples, 0)
        found.append(gradients(policy.model))
    assert_same_gradient(found[0], found[1])


def test_uncapped_weights_and_one_update_equal_reinforce_with_importance_sampling(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy(0)
    config = make_config(
        {
            "algorithm.rollout_correction.rollout_is_threshold": 1e9,
            "algorithm.loss_agg_mode": "token-sum",
        }
    )
    samples = disturbed(recorded(policy.model, make_samples()), 1.0)
    double = copy.deepcopy(policy.model).double()
    advantages = plain_advantages(samples)
    for s in samples:
        log_probs = token_log_probs(double, s)
        weights = (log_probs.detach() - torch.from_numpy(s.logprobs).double()).exp()
        (-advantages[s.sample_id] * weights * log_probs).sum().backward()
    result = Learner(config, policy).train_step(samples, 0)
    assert_same_gradient(gradients(policy.model), gradients(double))
    assert result.metrics["rollout_corr/is_max"] > 5.0
    assert result.metrics["rollout_corr/is_clipped_fraction"] == 0.0


def test_without_importance_sampling_stale_log_probs_have_no_effect(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """rollout_is = none, decoupled, one mini-batch: the behaviour is measured, never used."""
    fresh = recorded(make_policy(0).model, make_samples())
    found = []
    for samples in (fresh, disturbed(fresh, 1.0)):
        policy = make_policy(0)
        config = make_config({"algorithm.rollout_correction.rollout_is": "none"})
        result = Learner(config, policy).train_step(samples, 0)
        found.append(gradients(policy.model))
        assert "rollout_corr/is_mean" not in result.metrics
    assert_same_gradient(found[0], found[1])


def test_ids_beyond_the_tokenizer_are_outside_the_softmax(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy(0, limit=40)
    samples = [
        replace(s, prompt_ids=s.prompt_ids % 40, response_ids=s.response_ids % 40)
        for s in make_samples(groups=1)
    ]
    scores = Learner(make_config(), policy).compute_logprobs(
        [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in samples]
    )
    for sample, score in zip(samples, scores, strict=True):
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0]
        logits[:, 40:] = -torch.inf
        table = torch.log_softmax(logits, -1)
        assert score == pytest.approx(
            [table[i, t].item() for i, t in enumerate(ids[0, 1:])], abs=1e-5
        )
