"""What a step does to weights, optimizer and metrics, and when it does nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from laminar.config import ConfigError
from laminar.training.learner import Learner
from laminar.training.metrics import reward_by_version
from laminar.training.model.policy import LoadedPolicy, digest_base_weights
from laminar.training.steps import NO_SIGNAL, NON_FINITE, get_origin

Make = Callable[..., Any]


def weights(policy: LoadedPolicy) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in policy.model.parameters()]


def flat_rewards(samples: list[Any], groups: set[str]) -> list[Any]:
    return [replace(s, reward=0.7) if s.group_id in groups else s for s in samples]


def test_a_step_without_signal_touches_neither_weights_nor_optimizer(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy()
    learner = Learner(make_config({"optim.lr": 0.1, "optim.weight_decay": 0.1}), policy)
    learner.train_step(make_samples(), 0)
    before, state = weights(policy), copy.deepcopy(learner.optimizer.state_dict()["state"])
    result = learner.train_step(flat_rewards(make_samples(siblings=3), {"0.0", "0.1", "0.2"}), 1)
    assert (result.changed, result.skipped_reason) == (False, NO_SIGNAL)
    assert weights(policy) == before
    after = learner.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], state[i][k]) for i in state for k in state[i])
    assert result.metrics["actor/skipped_updates"] == 1.0
    assert result.metrics["actor/no_signal_updates"] == 1.0
    assert (result.nonfinite_updates, result.metrics["actor/nonfinite_updates"]) == (0, 0.0)
    assert result.metrics["actor/entropy"] > 0  # the step is measured all the same


def test_all_trained_sequences_masked_is_a_step_without_signal(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy()
    config = make_config({"optim.lr": 0.1, "algorithm.truncated": "mask"})
    before = weights(policy)
    result = Learner(config, policy).train_step(make_samples(truncated=True), 0)
    assert (result.changed, result.skipped_reason) == (False, NO_SIGNAL)
    assert weights(policy) == before
    assert result.mismatch == {}
    assert result.metrics["response_length/clip_ratio"] == 1.0


@pytest.mark.parametrize(
    "term", [{"algorithm.use_kl_loss": True}, {"algorithm.entropy_coeff": 0.01}]
)
def test_a_kl_or_entropy_term_is_a_signal_of_its_own(
    term: dict[str, Any], make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy()
    learner = Learner(make_config({"optim.lr": 0.01} | term), policy, reference=make_policy(1))
    before = weights(policy)
    result = learner.train_step(flat_rewards(make_samples(), {"0.0", "0.1", "0.2"}), 0)
    assert (result.changed, result.skipped_reason) == (True, None)
    assert weights(policy) != before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied(
    value: float, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy()
    learner = Learner(make_config({"optim.lr": 0.01, "optim.clip_grad": 1.0}), policy)
    parameter = next(policy.model.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * value)
    before = weights(policy)
    result = learner.train_step(make_samples(), 0)
    assert (result.changed, result.skipped_reason) == (False, NON_FINITE)
    assert weights(policy) == before
    assert not learner.optimizer.state
    assert (result.nonfinite_updates, result.metrics["actor/nonfinite_updates"]) == (1, 1.0)
    assert result.metrics["actor/no_signal_updates"] == 0.0
    assert result.metrics["actor/skipped_updates"] == 1.0
    assert result.metrics["actor/max_entropy"] == pytest.approx(np.log(policy.vocab_limit))
    hook.remove()
    assert learner.train_step(make_samples(), 1).changed
    assert np.isfinite(parameter.detach().numpy()).all()


def test_one_mini_batch_without_signal_leaves_the_others_alone(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    config = make_config(
        {"optim.lr": 0.01, "data.train_batch_size": 3, "algorithm.ppo_mini_batch_size": 1}
    )
    result = Learner(config, make_policy()).train_step(flat_rewards(make_samples(), {"0.1"}), 0)
    assert [u.skipped_reason for u in result.updates] == [None, NO_SIGNAL, None]
    assert result.updates[1].sample_ids == ("0.1.0", "0.1.1", "0.1.2", "0.1.3")
    assert (result.changed, result.skipped_reason) == (True, NO_SIGNAL)


def test_bfloat16_computes_and_float32_keeps(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    policy = make_policy()
    learner = Learner(make_config({"optim.lr": 0.01, "trainer.dtype": "bfloat16"}), policy)
    exact = Learner(make_config(), make_policy()).compute_logprobs([[1, 2, 3, 4, 5]])[0]
    rounded = learner.compute_logprobs([[1, 2, 3, 4, 5]])[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.1)
    assert learner.train_step(make_samples(), 0).changed
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    moments = [s[k] for s in learner.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert {m.dtype for m in moments} == {torch.float32}
    assert len(moments) == 2 * len(list(policy.model.parameters()))


def test_the_rate_of_the_schedule_is_the_one_applied(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """First Adam update: every weight with a gradient moves by the rate, whatever its gradient."""
    config = make_config(
        {"optim.lr": 0.04, "optim.lr_warmup_steps": 4, "optim.lr_scheduler_type": "linear"}
    )
    policy = make_policy()
    before = policy.model.model.norm.weight.detach().clone()
    result = Learner(config, policy, total_steps=10).train_step(make_samples(), 1)
    moved = (policy.model.model.norm.weight.detach() - before).abs().max().item()
    assert result.metrics["actor/lr"] == pytest.approx(0.02)
    assert moved == pytest.approx(0.02, rel=1e-3)


def test_the_gradient_is_clipped_once_for_the_whole_mini_batch(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """However many micro-batches make it up: each clipped by itself, the sum would be another one,
    longer, and in another direction, though the norm that is reported is the same."""
    found = []
    for budget in (10**6, 30):
        config = {"optim.clip_grad": 0.01, "trainer.micro_batch_tokens": budget}
        policy = make_policy()
        result = Learner(make_config(config), policy).train_step(make_samples(), 0)
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        found.append((result.metrics["actor/grad_norm"], gradient))
    (norm, gradient), (split_norm, split_gradient) = found
    assert float(gradient.norm()) == pytest.approx(0.01, rel=1e-3) and norm > 0.1
    assert split_norm == pytest.approx(norm, rel=1e-4)
    assert torch.allclose(split_gradient, gradient, atol=1e-7)


def test_scores_are_the_same_alone_and_in_any_batch(make_policy: Make, make_config: Make) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 48, n).tolist() for n in (9, 1, 30, 2, 17, 30)]
    policy = make_policy()
    alone = [
        Learner(make_config(), policy).compute_logprobs([s], temperature=1.3)[0] for s in sequences
    ]
    for budget in (1, 35, 10**6):
        learner = Learner(make_config({"trainer.micro_batch_tokens": budget}), policy)
        together = learner.compute_logprobs(sequences, temperature=1.3)
        assert [len(s) for s in together] == [8, 0, 29, 1, 16, 29]
        for found, expected in zip(together, alone, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
    ids = torch.tensor([sequences[4]])
    with torch.no_grad():
        table = torch.log_softmax(policy.model(input_ids=ids).logits[0] / 1.3, -1)
    expected = [table[i, t].item() for i, t in enumerate(sequences[4][1:])]
    assert alone[4] == pytest.approx(expected, abs=1e-5)


def test_metrics_of_the_batch_are_those_of_its_samples(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    samples = make_samples(groups=2, siblings=4)
    result = Learner(make_config(), make_policy()).train_step(samples, 5)
    found, lengths = result.metrics, [len(s.response_ids) for s in samples]
    rewards = [s.reward for s in samples]
    assert found["reward/mean"] == found["critic/score/mean"] == pytest.approx(np.mean(rewards))
    assert found["reward/std"] == pytest.approx(np.std(rewards))
    assert found["response_length/max"] == max(lengths)
    assert found["response_length/min"] == min(lengths)
    assert found["response_length/p50"] == np.percentile(lengths, 50)
    assert found["response_length/clip_ratio"] == 0.25
    assert found["perf/total_num_tokens"] == sum(lengths) + sum(len(s.prompt_ids) for s in samples)
    assert found["training/off_policy/trajectory_staleness/mean"] == 1.5
    assert found["training/off_policy/trajectory_staleness/max"] == 2
    assert result.num_tokens == sum(lengths)
    by_version = {v: [s.reward for s in samples if s.weight_version == v] for v in (3, 4)}
    assert reward_by_version(samples) == {
        v: (pytest.approx(np.mean(r)), 4) for v, r in by_version.items()
    }
    assert all(isinstance(v, float) for v in found.values())


def test_the_score_is_reported_without_what_length_costs(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """It is trained as if the rewards had been lower, and reported as they are."""
    samples = make_samples(groups=2, siblings=4, reward=1.0)
    keys = {"optim.lr": 1e-2, "data.max_response_length": 15}
    costs = [-max(0.0, (len(s.response_ids) - 5) / 10) for s in samples]
    trained = [1.0 + cost for cost in costs]
    lower = [replace(s, reward=r) for s, r in zip(samples, trained, strict=True)]
    policies = make_policy(), make_policy()
    expected = Learner(make_config(keys), policies[0]).train_step(lower, 5)
    keys |= {"reward.overlong_buffer.len": 10}
    found = Learner(make_config(keys), policies[1]).train_step(samples, 5)
    assert (
        digest_base_weights(policies[0])
        == digest_base_weights(policies[1])
        != digest_base_weights(make_policy())
    )
    metrics = found.metrics
    assert metrics["reward/mean"] == metrics["critic/score/mean"] == 1.0
    assert metrics["critic/rewards/mean"] == pytest.approx(np.mean(trained))
    assert metrics["reward/overlong_ratio"] == np.mean([cost < 0 for cost in costs])
    assert metrics["groups/no_variance"] == expected.metrics["groups/no_variance"] == 0.0
    assert "critic/rewards/mean" not in expected.metrics


def test_groups_whose_siblings_agree_are_counted(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """All right, all wrong with one score, all wrong with several, some right; one began apart."""
    samples = make_samples(groups=4, siblings=2)
    scores = [(1.0, 1.0), (0.0, 0.0), (0.25, 0.5), (0.0, 1.0)]
    given = [score for pair in scores for score in pair]
    samples = [replace(s, reward=r, correct=r == 1.0) for s, r in zip(samples, given, strict=True)]
    samples[0] = replace(samples[0], prompt_ids=samples[0].prompt_ids[:-1])
    found = Learner(make_config(), make_policy()).train_step(samples, 5).metrics
    names = "all_right", "all_wrong", "no_variance", "prompts_differ"
    assert [found[f"groups/{name}"] for name in names] == [0.25, 0.5, 0.5, 0.25]
    found = Learner(make_config(), make_policy()).train_step(samples[2:], 5).metrics
    assert "groups/prompts_differ" not in found


def test_truncated_responses_are_counted_by_their_limit(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    ends = ["max-turns", "stop", "max-turns", "length"]
    samples = [
        replace(s, truncated=end != "stop", truncated_by=end)
        for s, end in zip(make_samples(groups=2, siblings=2), ends, strict=True)
    ]
    found = Learner(make_config(), make_policy()).train_step(samples, 5).metrics
    assert found["response_length/clip_ratio"] == 0.75
    shares = {name: value for name, value in found.items() if name.startswith("truncated/")}
    assert shares == {"truncated/max-turns": 0.5, "truncated/length": 0.25}


def test_what_a_reward_gives_besides_the_score_is_a_mean_over_those_that_have_it(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    samples = make_samples(groups=1, siblings=4)
    extras = [{"acc": 1.0, "form": 2.0}, {"acc": 0.0}, {"acc": 1.0}, {}]
    samples = [replace(s, extras=e) for s, e in zip(samples, extras, strict=True)]
    found = Learner(make_config(), make_policy()).train_step(samples, 5).metrics
    shown = {key: value for key, value in found.items() if key.startswith("reward_extra/")}
    assert shown == {"reward_extra/acc": pytest.approx(2 / 3), "reward_extra/form": 2.0}


def test_mismatch_is_kept_by_replica_and_version(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Engine log-probs off by 0.3 on one replica and 0 on the other, at two versions."""
    policy = make_policy()
    learner = Learner(make_config(), policy)
    samples = make_samples(groups=2, siblings=4, temperature=1.0)
    true = learner.compute_logprobs(
        [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in samples]
    )
    offset = {"rollout-0": 0.0, "rollout-1": 0.3}
    samples = [
        replace(
            s,
            logprobs=np.array(t[len(s.prompt_ids) - 1 :], np.float32)
            - np.float32(offset[s.spans[0].replica]),
        )
        for s, t in zip(samples, true, strict=True)
    ]
    found = learner.train_step(samples, 0).mismatch
    assert sorted(found) == [(r, v) for r in ("rollout-0", "rollout-1") for v in (3, 4)]
    for (replica, version), figure in found.items():
        off = offset[replica]
        assert figure.mean_abs_diff == pytest.approx(off, abs=1e-5)
        assert figure.mean_k3 == pytest.approx(np.exp(off) - 1 - off, abs=1e-5)
        assert figure.tokens == sum(
            len(s.response_ids) for s in samples if get_origin(s.spans[0]) == (replica, version)
        )


def test_figures_by_length_are_means_over_the_tokens_of_a_quarter(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Only the longest quarter of the samples has a ratio far above the clip range."""
    config = make_config({"algorithm.rollout_correction.bypass_mode": True})
    policy = make_policy()
    learner = Learner(config, policy)
    samples = []
    for i, s in enumerate(make_samples(groups=2, siblings=4, temperature=1.0)):
        ids = np.resize(s.response_ids, i + 1).astype(np.int32)
        score = learner.compute_logprobs([[*s.prompt_ids.tolist(), *ids.tolist()]])[0]
        exact = np.array(score[len(s.prompt_ids) - 1 :], np.float32)
        far = exact - (2.0 if i >= 6 else 0.0)
        spans = (s.spans[0]._replace(num_tokens=i + 1),)
        reward = float(i % 4 >= 2)
        samples.append(replace(s, response_ids=ids, logprobs=far, spans=spans, reward=reward))
    found = learner.train_step(samples, 0).metrics
    quarters = [found[f"actor/pg_clipfrac/length_q{q}"] for q in (1, 2, 3, 4)]
    assert quarters == [0.0, 0.0, 0.0, 1.0]
    assert found["actor/pg_clipfrac"] == pytest.approx(15 / 36)


def test_the_batch_is_checked_before_anything_is_trained(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    learner = Learner(make_config(), make_policy(limit=47))
    good = [
        replace(s, prompt_ids=s.prompt_ids % 47, response_ids=s.response_ids % 47)
        for s in make_samples(1)
    ]
    with pytest.raises(ValueError, match="batch is empty"):
        learner.train_step([], 0)
    with pytest.raises(ValueError, match="twice"):
        learner.train_step([*good, good[0]], 0)
    foreign = replace(good[1], response_ids=np.full_like(good[1].response_ids, 47))
    with pytest.raises(ValueError, match=r"response of sample 0\.0\.1 has an id outside 0\.\.46"):
        learner.train_step([good[0], foreign], 0)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        learner.compute_logprobs([[1, 2], []])


def test_a_kl_term_needs_a_reference_and_a_decay_needs_an_end(
    make_policy: Make, make_config: Make
) -> None:
    with pytest.raises(ConfigError, match="use_kl_loss"):
        Learner(make_config({"algorithm.use_kl_loss": True}), make_policy())
    with pytest.raises(ConfigError, match="lr_scheduler_type"):
        Learner(make_config({"optim.lr_scheduler_type": "cosine"}), make_policy())
