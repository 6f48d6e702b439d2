"""PPO's critic: what its values are, what it is trained on, and what it leaves alone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, Qwen2ForTokenClassification

from laminar.actors.model_files import save_model
from laminar.config import ConfigError
from laminar.config.algorithm import LossAggMode
from laminar.training import critic
from laminar.training.algorithms import advantages
from laminar.training.algorithms.advantages import Estimator
from laminar.training.critic import Critic
from laminar.training.learner import Learner
from laminar.training.model.policy import (
    Compute,
    LoadedPolicy,
    build_critic,
    load_critic,
    load_policy,
)
from laminar.training.steps import CRITIC_WARMUP, TrainSample
from laminar.training.trainer_state import CheckpointError
from tests.training.plain_terms import plain_value_loss
from tests.training.saved_checkpoint import load_checkpoint, saved
from tools.kit.one_process import OneLearner, make_files, named_weights

Make = Callable[..., Any]
CPU = torch.device("cpu")
PPO = {"algorithm.adv_estimator": "gae"}
LEARNS = {**PPO, "optim.lr": 0.01, "critic.lr": 0.01}


@pytest.fixture
def make_critic(make_model: Make) -> Callable[..., LoadedPolicy]:
    """A critic of the tiny model's shape; `drawn`: with a head of random numbers."""

    def build(*, drawn: bool = False, dtype: torch.dtype = torch.float32) -> LoadedPolicy:
        config = make_model(3).config
        config.num_labels = 1
        torch.manual_seed(4)
        model = Qwen2ForTokenClassification(config).to(dtype)
        found = build_critic(model, 48, device=CPU)
        if drawn:
            with torch.no_grad():
                model.score.weight.normal_(0.0, 0.3)
                model.score.bias.fill_(0.2)
        return found

    return build


@pytest.fixture
def make_learner(make_policy: Make, make_config: Make, make_critic: Make) -> Make:
    def build(settings: dict[str, Any], *, drawn: bool = False) -> Learner:
        return Learner(make_config(settings), make_policy(), critic=make_critic(drawn=drawn))

    return build


def content(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


# --- values and advantages ------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 60, 4096])
def test_a_value_is_that_of_the_text_before_its_token(
    budget: int, make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner({**PPO, "trainer.micro_batch_tokens": budget}, drawn=True)
    model = learner.critic.model.model
    for sample in learner.critic.assign_values(make_samples()):
        ids = np.concatenate([sample.prompt_ids, sample.response_ids])
        logits = model(input_ids=torch.tensor(ids)[None].long()).logits[0, :, 0].detach().numpy()
        first = len(sample.prompt_ids) - 1
        np.testing.assert_allclose(sample.values, logits[first:-1], atol=1e-5)


def inputs(samples: list[TrainSample], **options: Any) -> Any:
    return advantages.inputs_of(samples, {"gamma": 1.0, "lam": 1.0, **options})


def with_values(samples: list[TrainSample], seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    return [replace(s, values=rng.normal(size=len(s.response_ids))) for s in samples]


def whitened(values: Any) -> Any:
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_errors_are_those_of_the_plain_recursion(lam: float, make_samples: Make) -> None:
    samples = with_values(make_samples())
    found = advantages.later_errors(inputs(samples, gamma=0.9), lam)
    returns = [plain_returns(s.values.tolist(), s.reward, 0.9, lam) for s in samples]
    values = np.concatenate([s.values for s in samples])
    np.testing.assert_allclose(found, np.concatenate(returns) - values, atol=1e-12)


def test_the_mean_of_the_group_as_value_is_grpo_without_std(
    make_samples: Make, make_config: Make
) -> None:
    samples = make_samples()
    means = {
        g: np.mean([s.reward for s in samples if s.group_id == g])
        for g in {s.group_id for s in samples}
    }
    samples = [replace(s, values=np.full(len(s.response_ids), means[s.group_id])) for s in samples]
    found = advantages.later_errors(inputs(samples), 1.0)
    keys = {"algorithm.norm_adv_by_std_in_grpo": False}
    plain = Estimator(make_config(keys).algorithm).assign_advantages(samples)
    np.testing.assert_allclose(found, np.concatenate([s.token_advantages for s in plain]))


def test_lambda_by_length_never_falls_below_0(make_samples: Make) -> None:
    lengths = np.array([1, 19, 20, 40, 2000])
    np.testing.assert_allclose(advantages.adaptive_lam(lengths), [0, 0, 0, 0.5, 0.99])
    samples = with_values(make_samples())
    each = [
        advantages.later_errors(inputs([s]), advantages.adaptive_lam(np.array([len(s.values)])))
        for s in samples
    ]
    found = advantages.estimate_gae(inputs(samples, lam="adaptive"))
    np.testing.assert_allclose(found, whitened(np.concatenate(each)), atol=1e-12)


@pytest.mark.parametrize("budget", [1, 4096])
def test_advantages_are_whitened_over_the_whole_batch(
    budget: int, make_learner: Make, make_samples: Make
) -> None:
    """Whatever it is split into. At a ratio of 1 the loss of a mini-batch is the mean advantage of
    its tokens, which whitening of its own would make 0."""
    settings = {
        **PPO,
        "data.train_batch_size": 3,
        "algorithm.ppo_mini_batch_size": 1,
        "algorithm.rollout_correction.rollout_is": "none",
        "trainer.micro_batch_tokens": budget,
    }
    learner = make_learner(settings, drawn=True)
    samples = learner.critic.assign_values(make_samples())
    expected = np.split(
        advantages.estimate_gae(inputs(samples)), np.cumsum(inputs(samples).lengths)[:-1]
    )
    groups = [expected[at : at + 4] for at in (0, 4, 8)]
    found = [update.pg_loss for update in learner.train_step(make_samples(), 0).updates]
    np.testing.assert_allclose(found, [-np.concatenate(g).mean() for g in groups], atol=1e-5)


def test_a_group_of_one_has_advantages(make_learner: Make, make_samples: Make) -> None:
    settings = {**LEARNS, "rollout.group_size": 1, "data.train_batch_size": 3}
    learner = make_learner(settings)
    before = content(learner.policy.model)
    result = learner.train_step(make_samples(siblings=1), 0)
    assert result.changed and content(learner.policy.model) != before


# --- its training ---------------------------------------------------------------------------------


def plain_values(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """[response tokens] of one sequence alone."""
    (row,) = sample.list_rows()
    at = torch.from_numpy(row.places - 1)
    found: torch.Tensor = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0, at, 0]
    return found


def plain_returns(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    found, later, after = list[float](), 0.0, 0.0
    for place, value in reversed(list(enumerate(values))):
        error = (reward if place == len(values) - 1 else 0.0) + gamma * after - value
        later, after = error + gamma * lam * later, value
        found.insert(0, later + value)
    return found


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("minis", [1, 3])
def test_two_steps_equal_the_plain_computation(
    mode: str, minis: int, make_learner: Make, make_samples: Make
) -> None:
    """In float64, with responses of one turn and of three, masked ones, and settings of [optim]
    that are none of the defaults; the rate alone is the critic's."""
    settings = {
        **PPO, "algorithm.loss_agg_mode": mode, "algorithm.truncated": "mask",
        "algorithm.gamma": 0.95, "algorithm.lam": 0.3, "critic.lam": 0.8, "critic.lr": 0.2,
        "critic.cliprange_value": 0.02, "optim.lr": 0.01, "optim.lr_warmup_steps": 4,
        "optim.betas": [0.6, 0.7], "optim.eps": 0.3, "optim.weight_decay": 0.1,
        "optim.clip_grad": 0.02, "trainer.micro_batch_tokens": 1 if minis == 1 else 60,
        "data.train_batch_size": 3, "algorithm.ppo_mini_batch_size": 3 // minis,
    }  # fmt: skip
    of = make_learner(settings, drawn=True).critic
    double = copy.deepcopy(of.model.model).double()
    optimizer = torch.optim.AdamW(
        double.parameters(), betas=(0.6, 0.7), eps=0.3, weight_decay=0.1, foreach=False
    )
    for step in range(2):
        samples = make_samples(turns=True, seed=step)
        before = {s.sample_id: plain_values(double, s).tolist() for s in samples}
        returns = {
            s.sample_id: plain_returns(before[s.sample_id], s.reward, 0.95, 0.8) for s in samples
        }
        sums, norms = np.zeros(4), []
        for at in range(0, 12, 12 // minis):
            batch = samples[at : at + 12 // minis]
            tokens = sum(len(s.response_ids) for s in batch)
            optimizer.zero_grad()
            for s in batch:
                share = {
                    "token-mean": 1 / tokens,
                    "token-sum": 1.0,
                    "seq-mean-token-sum": 1 / len(batch),
                    "seq-mean-token-mean": 1 / len(batch) / len(s.response_ids),
                    "seq-mean-token-sum-norm": 1 / len(batch) / 20,
                }[mode]
                values = plain_values(double, s) if not s.truncated else torch.zeros(0)
                given = zip(
                    values.tolist(), before[s.sample_id], returns[s.sample_id], strict=False
                )
                terms = [plain_value_loss(*each, 0.02) for each in given]
                slopes = torch.tensor([share * slope for _, slope, _ in terms])
                if terms:
                    values.backward(slopes.double())
                losses, held = (sum(term[i] for term in terms) for i in (0, 2))
                sums += [losses * share, held, float(values.detach().sum()), len(terms)]
            gradients = [p.grad for p in double.parameters()]
            norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
            for gradient in gradients:
                gradient *= 0.02 / max(norms[-1], 0.02)
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * (step + 1) / 4
            optimizer.step()
        found = of.train_step(of.assign_values(samples), step)
        wanted, known = (
            np.concatenate([each[s.sample_id] for s in samples]) for each in (returns, before)
        )
        assert found["critic/vf_loss"] == pytest.approx(sums[0] / minis, rel=1e-4)
        assert found["critic/vf_clipfrac"] == pytest.approx(sums[1] / sums[3], abs=1e-6)
        assert found["critic/vpred_mean"] == pytest.approx(sums[2] / sums[3], rel=1e-4)
        assert found["critic/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
        explained = 1 - np.var(wanted - known) / np.var(wanted)
        assert found["critic/explained_variance"] == pytest.approx(explained, rel=1e-4)
        assert (found["critic/vf_clipfrac"] > 0.02) == (minis > 1)
        for mine, expected in zip(of.model.model.parameters(), double.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-6)


def test_returns_are_of_the_reward_less_what_length_costs(
    make_config: Make, make_samples: Make
) -> None:
    samples = with_values([replace(s, penalty=-0.25) for s in make_samples(reward=1.0)])
    found = critic.returns_of(samples, make_config(PPO))
    np.testing.assert_allclose(np.concatenate(list(found.values())), 0.75)


def test_masked_responses_and_rows_left_out_are_not_trained_on(
    make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner({**LEARNS, "algorithm.truncated": "mask"})
    before = content(learner.critic.model.model)
    result = learner.train_step(make_samples(truncated=True), 0)
    assert content(learner.critic.model.model) == before
    assert result.metrics["critic/skipped_updates"] == 1
    wrong = make_learner({**LEARNS, "algorithm.rollout_correction.mismatch_limit": 1e-3})
    before = content(wrong.critic.model.model)
    result = wrong.train_step(make_samples(source=("rollout-0", 0, 0)), 0)
    assert len(result.left_out) == 12
    assert content(wrong.critic.model.model) == before


# --- warm-up --------------------------------------------------------------------------------------


def test_warm_up_moves_the_critic_and_nothing_of_the_policy(
    make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner({**LEARNS, "optim.weight_decay": 0.1, "trainer.critic_warmup": 8})
    before = content(learner.policy.model)
    explained = []
    for step in range(8):
        result = learner.train_step(make_samples(), step)
        assert (result.changed, result.skipped_reason) == (False, CRITIC_WARMUP)
        explained.append(result.metrics["critic/explained_variance"])
    assert content(learner.policy.model) == before and not learner.optimizer.state
    assert explained[-1] > 0.2 and explained[0] == 0.0
    assert result.mismatch  # engines are proven all the same
    result = learner.train_step(make_samples(), 8)
    assert result.changed and content(learner.policy.model) != before


def test_the_rate_of_the_policy_begins_after_the_warm_up(
    make_learner: Make, make_samples: Make
) -> None:
    settings = {**LEARNS, "optim.lr_warmup_steps": 2, "trainer.critic_warmup": 2}
    learner = make_learner(settings)
    found = [learner.train_step(make_samples(), step).metrics for step in range(4)]
    assert [m["actor/lr"] for m in found[2:]] == [0.005, 0.01]
    assert [m["critic/lr"] for m in found] == [0.005, 0.01, 0.01, 0.01]


# --- files ----------------------------------------------------------------------------------------


class Run:
    def __init__(self, source: Path, config: Any, samples: Make) -> None:
        self.source, self.config, self.samples = source, config, samples
        self.fresh()

    def fresh(self) -> None:
        name = str(self.source)
        policy = load_policy(name, "cpu", tokenizer_size=48)
        values = load_critic(name, "cpu", tokenizer_size=48) if self.config.has_critic else None
        self.learner = Learner(self.config, policy, critic=values)

    def train(self, *steps: int) -> list[Any]:
        found = [(step, self.samples(seed=step, source=("rollout-0", 0, 0))) for step in steps]
        return [self.learner.train_step(samples, step) for step, samples in found]

    async def save(self, directory: Path) -> Path:
        return await saved(self.learner, self.source, directory)


@pytest.fixture
def run(model_directory: Make, make_config: Make, make_samples: Make) -> Callable[..., Run]:
    source = model_directory(vocab_size=48)

    def build(settings: dict[str, Any] = LEARNS) -> Run:
        config = make_config({**settings, "model.name": str(source)})
        return Run(source, config, make_samples)

    return build


async def test_it_goes_on_from_a_checkpoint_to_the_bit(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    trained.train(0, 1)
    directory = await trained.save(tmp_path / "step_2")
    expected = trained.train(2, 3)
    values, policy = (
        content(m.model) for m in (trained.learner.critic.model, trained.learner.policy)
    )
    trained.fresh()
    load_checkpoint(directory, trained.learner)
    assert [r.metrics for r in trained.train(2, 3)] == [r.metrics for r in expected]
    assert content(trained.learner.critic.model.model) == values
    assert content(trained.learner.policy.model) == policy


async def test_a_damaged_critic_is_refused(tmp_path: Path, run: Callable[..., Run]) -> None:
    trained = run()
    trained.train(0)
    directory = await trained.save(tmp_path / "step_2")
    file = directory / "critic" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"its critic/optimizer.safetensors is damaged"):
        load_checkpoint(directory, trained.learner)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"critic/optimizer.safetensors"):
        load_checkpoint(directory, trained.learner)


async def test_a_fork_may_begin_with_a_new_critic_or_without_one(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    """Its checkpoint has one only where that run had one."""
    with_one, without = run(), run({"optim.lr": 0.01})
    with_one.train(0)
    without.train(0)
    first = await with_one.save(tmp_path / "with")
    second = await without.save(tmp_path / "without")
    assert (first / "critic").is_dir() and not (second / "critic").exists()
    with_one.fresh()
    load_checkpoint(second, with_one.learner)
    assert not with_one.learner.critic.model.model.score.weight.any()
    without.fresh()
    load_checkpoint(first, without.learner)


async def test_what_is_published_and_exported_has_nothing_of_it(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    trained.train(0)
    directory = await trained.save(tmp_path / "step_2")
    names = {name for name, _ in named_weights(trained.learner.policy.model)}
    assert not any("score" in name for name in names)
    exported = tmp_path / "export"
    await save_model(make_files(trained.learner, trained.source), exported)
    assert not (exported / "critic").exists()
    load_policy(str(exported), "cpu", tokenizer_size=48)
    load_policy(str(directory), "cpu", tokenizer_size=48)


def test_engines_are_given_the_policy_and_nothing_else(run: Callable[..., Run]) -> None:
    trained = run()
    learner = OneLearner(trained.config, 48)
    layout = asyncio.run(learner.load())
    asyncio.run(learner.train_step(trained.samples(), 0))
    expected = dict(named_weights(learner.learner.policy.model))
    assert dict(layout.shapes) == {name: tuple(t.shape) for name, t in expected.items()}
    given = learner.get_weights()
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())


def test_its_layers_are_those_of_the_model(model_directory: Make) -> None:
    source = str(model_directory(vocab_size=48))
    policy = load_policy(source, "cpu", tokenizer_size=48)
    values = load_critic(source, "cpu", tokenizer_size=48)
    assert content(values.model.base_model) == content(policy.model.base_model)
    assert values.prompts_once and not any(p.any() for p in values.model.score.parameters())


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded"):
        load_critic(str(tmp_path), "cpu", tokenizer_size=48)


def test_a_model_whose_head_is_no_decoders_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape = BertConfig(vocab_size=48, intermediate_size=8, max_position_embeddings=8, **sizes)
    BertForMaskedLM(shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be a critic: a BertForTokenClassification has"):
        load_critic(str(tmp_path), "cpu", tokenizer_size=48)


def test_it_has_to_be_loaded(make_policy: Make, make_config: Make) -> None:
    with pytest.raises(ConfigError, match="a critic is loaded if"):
        Learner(make_config(PPO), make_policy())


def test_values_in_bfloat16_are_near_those_in_float32(
    make_critic: Make, make_config: Make, make_samples: Make
) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made = Critic(make_config(PPO), make_critic(drawn=True), Compute(dtype, 64))
        samples = made.assign_values(make_samples())
        found.append(np.concatenate([s.values for s in samples]))
    assert 0 < np.abs(found[0] - found[1]).max() < 0.2
