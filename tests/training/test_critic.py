"""PPO's critic: what its values are, what it is trained on, and what it leaves alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, Qwen2ForTokenClassification

from laminar.config import ConfigError
from laminar.training import critic
from laminar.training.algorithms import advantages
from laminar.training.algorithms.advantages import Estimator
from laminar.training.algorithms.loss_terms import value_losses
from laminar.training.checkpoints import checkpoint
from laminar.training.checkpoints.export import write_model
from laminar.training.critic import Critic
from laminar.training.learner import Learner
from laminar.training.model.micro_batches import MicroBatch, TokenRows
from laminar.training.model.policy import (
    Compute,
    LoadedPolicy,
    build_critic,
    load_critic,
    load_policy,
    named_weights,
)
from laminar.training.steps import CRITIC_WARMUP, TrainSample
from laminar.training.threaded import ThreadedLearner
from laminar.training.trainer_state import CheckpointError
from tests.training.saved_checkpoint import saved

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


def test_values_are_zero_before_the_first_step(make_learner: Make, make_samples: Make) -> None:
    values = make_learner(PPO).critic.assign_values(make_samples())
    assert not np.concatenate([s.values for s in values]).any()


def inputs(samples: list[TrainSample], **options: Any) -> Any:
    return advantages.inputs_of(samples, {"gamma": 1.0, "lam": 1.0, **options})


def with_values(samples: list[TrainSample], seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    return [replace(s, values=rng.normal(size=len(s.response_ids))) for s in samples]


def whitened(values: Any) -> Any:
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def test_with_gamma_and_lambda_1_it_is_reward_less_value(make_samples: Make) -> None:
    samples = with_values(make_samples())
    found = advantages.later_errors(inputs(samples), 1.0)
    expected = np.concatenate([s.reward - s.values for s in samples])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(
        advantages.estimate_gae(inputs(samples)), whitened(expected), atol=1e-12
    )


def test_with_lambda_0_it_is_the_next_error(make_samples: Make) -> None:
    samples = with_values(make_samples())
    found = advantages.later_errors(inputs(samples, gamma=0.9), 0.0)
    at = 0
    for s in samples:
        after = np.append(s.values[1:], 0.0)
        rewards = np.zeros(len(s.values))
        rewards[-1] = s.reward
        expected = rewards + 0.9 * after - s.values
        np.testing.assert_allclose(found[at : at + len(expected)], expected, atol=1e-12)
        at += len(expected)


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


def test_a_clipped_value_has_no_gradient() -> None:
    values = torch.tensor([0.2, 0.9, 0.9, -0.9], requires_grad=True)
    before, returns = torch.zeros(4), torch.tensor([1.0, 2.0, 0.0, 1.0])
    losses, clipped = value_losses(values, before, returns, 0.5)
    assert clipped.tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(losses, 0.5 * torch.tensor([0.64, 2.25, 0.81, 3.61]))
    losses.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.8, 0.0, 0.9, -1.9]))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_update_does_not_depend_on_the_budget(
    mode: str, make_learner: Make, make_samples: Make
) -> None:
    found = []
    for budget in (1, 50, 4096):
        settings = {
            **LEARNS,
            "optim.eps": 1e3,  # else Adam divides rounding by itself
            "critic.lr": 1e3,
            "algorithm.loss_agg_mode": mode,
            "trainer.micro_batch_tokens": budget,
        }
        learner = make_learner(settings, drawn=True)
        result = learner.train_step(make_samples(), 0)
        vector = torch.nn.utils.parameters_to_vector(learner.critic.model.model.parameters())
        found.append((vector.detach(), result.metrics))
    for vector, metrics in found[1:]:
        torch.testing.assert_close(vector, found[0][0], rtol=1e-4, atol=1e-6)
        for name in ("vf_loss", "vpred_mean", "explained_variance", "grad_norm"):
            expected = found[0][1][f"critic/{name}"]
            assert metrics[f"critic/{name}"] == pytest.approx(expected, rel=1e-4)


def test_it_is_trained_on_returns_as_they_are(make_learner: Make, make_samples: Make) -> None:
    """A constant reward is learnt: whitened returns would stay 0."""
    learner = make_learner({**LEARNS, "critic.cliprange_value": 10.0})
    samples = make_samples(reward=3.0)
    for step in range(40):
        result = learner.train_step(samples, step)
    assert result.metrics["critic/vpred_mean"] == pytest.approx(3.0, abs=0.3)
    assert result.metrics["critic/vf_loss"] < 0.1
    assert result.metrics["critic/explained_variance"] == 0.0


def test_returns_have_a_lambda_of_their_own(make_config: Make, make_samples: Make) -> None:
    samples = with_values(make_samples())
    keys = {**PPO, "algorithm.lam": 0.5, "critic.lam": 0.9, "algorithm.gamma": 0.98}
    found = critic.returns_of(samples, make_config(keys))
    errors = advantages.later_errors(inputs(samples, gamma=0.98), 0.9)
    values = np.concatenate([s.values for s in samples])
    np.testing.assert_allclose(
        np.concatenate([found[s.sample_id] for s in samples]), errors + values
    )


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
    checkpoint.load_checkpoint(directory, trained.learner)
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
        checkpoint.load_checkpoint(directory, trained.learner)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"critic/optimizer.safetensors"):
        checkpoint.load_checkpoint(directory, trained.learner)


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
    checkpoint.load_checkpoint(second, with_one.learner)
    assert not with_one.learner.critic.model.model.score.weight.any()
    without.fresh()
    checkpoint.load_checkpoint(first, without.learner)


async def test_what_is_published_and_exported_has_nothing_of_it(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    trained.train(0)
    directory = await trained.save(tmp_path / "step_2")
    names = {name for name, _ in named_weights(trained.learner.policy.model)}
    assert not any("score" in name for name in names)
    exported = tmp_path / "export"
    exported.mkdir()
    write_model(trained.learner.policy.model, str(trained.source), exported)
    assert not (exported / "critic").exists()
    load_policy(str(exported), "cpu", tokenizer_size=48)
    load_policy(str(directory), "cpu", tokenizer_size=48)


def test_engines_are_given_the_policy_and_nothing_else(run: Callable[..., Run]) -> None:
    trained = run()
    learner = ThreadedLearner(trained.config, lambda: 48)
    layout = asyncio.run(learner.load())
    asyncio.run(learner.train_step(trained.samples(), 0))
    expected = dict(named_weights(learner.learner.policy.model))
    assert dict(layout.shapes) == {name: tuple(t.shape) for name, t in expected.items()}
    given = dict(learner.iter_weights())
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())


def test_its_layers_are_those_of_the_model(model_directory: Make) -> None:
    source = str(model_directory(vocab_size=48))
    policy = load_policy(source, "cpu", tokenizer_size=48)
    values = load_critic(source, "cpu", tokenizer_size=48)
    assert content(values.model.base_model) == content(policy.model.base_model)
    assert values.prompts_once and not values.model.score.weight.any()


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


# --- bugs that a test must see ----------------------------------------------------------------


def values_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    usual = LoadedPolicy.values

    def values(self: LoadedPolicy, rows: TokenRows, compute: Compute) -> Any:
        last = rows.input_ids.numel() - 1
        return usual(self, replace(rows, index=(rows.index + 1).clamp(max=last)), compute)

    patch.setattr(LoadedPolicy, "values", values)


def whitened_returns(patch: pytest.MonkeyPatch) -> None:
    usual = critic.returns_of

    def returns_of(samples: list[TrainSample], config: Any) -> Any:
        found = usual(samples, config)
        flat = whitened(np.concatenate(list(found.values())))
        ends = np.cumsum([len(part) for part in found.values()])[:-1]
        return dict(zip(found, np.split(flat, ends), strict=True))

    patch.setattr(critic, "returns_of", returns_of)


def critic_among_the_weights(patch: pytest.MonkeyPatch) -> None:
    usual = ThreadedLearner.iter_weights

    def weights(self: ThreadedLearner) -> Iterator[Any]:
        yield from usual(self)
        yield from named_weights(self.learner.critic.model.model)

    patch.setattr(ThreadedLearner, "iter_weights", weights)


def critic_in_the_place_of_the_policy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ThreadedLearner, "model", property(lambda self: self.learner.critic.model.model))


def updates_in_the_warm_up(patch: pytest.MonkeyPatch) -> None:
    usual = Learner._batch
    patch.setattr(Learner, "_batch", lambda self, ready, trains: usual(self, ready, trains=True))


def whitened_by_pass(patch: pytest.MonkeyPatch) -> None:
    usual = Learner._passes

    def passes(self: Learner, samples: list[TrainSample]) -> list[MicroBatch]:
        parts = [(micro, whitened(micro.advantages.numpy())) for micro in usual(self, samples)]
        return [replace(micro, advantages=torch.from_numpy(part)) for micro, part in parts]

    patch.setattr(Learner, "_passes", passes)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = {
    "values-of-the-next-token": (
        values_of_the_next_token,
        partial(test_a_value_is_that_of_the_text_before_its_token, 60),
    ),
    "returns-whitened": (whitened_returns, test_returns_have_a_lambda_of_their_own),
    "critic-published": (
        critic_among_the_weights,
        test_engines_are_given_the_policy_and_nothing_else,
    ),
    "critic-published-instead": (
        critic_in_the_place_of_the_policy,
        test_engines_are_given_the_policy_and_nothing_else,
    ),
    "policy-moved-in-warm-up": (
        updates_in_the_warm_up,
        test_warm_up_moves_the_critic_and_nothing_of_the_policy,
    ),
    "whitened-by-pass": (
        whitened_by_pass,
        partial(test_advantages_are_whitened_over_the_whole_batch, 4096),
    ),
}


@pytest.mark.parametrize(("plant", "seen_by"), PLANTS.values(), ids=PLANTS)
def test_a_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    seen_by: Callable[..., None],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {name: request.getfixturevalue(name) for name in inspect.signature(seen_by).parameters}
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        seen_by(**wanted)
