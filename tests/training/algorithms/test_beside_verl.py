"""Losses, advantages and corrections beside verl's own functions, in float64 over ragged batches.

verl's wheel is taken without its dependencies: its package files are empty here, and what its
modules import from elsewhere is made up. Skipped, with the reason, where it cannot be downloaded.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from laminar.config import Config
from laminar.config.algorithm_rules import ESTIMATORS, LOSS_OPTIONS, REJECTIONS
from laminar.training.algorithms.advantages import AdvantageInputs, Estimator, later_errors
from laminar.training.algorithms.correction import compute_correction
from laminar.training.algorithms.loss_terms import BatchCounts, token_coefficients, value_losses
from laminar.training.algorithms.policy_losses import PolicyLoss

pytestmark = pytest.mark.long
Make = Callable[..., Config]
ROOT = Path(__file__).parents[3]
KEPT = Path.home() / ".cache" / "laminar-tests"
DIVISOR, COUNTS = 64, BatchCounts(tokens=400, sequences=17)  # of a larger mini-batch
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def unpacked() -> Path:
    """The files of the wheel."""
    wanted = (ROOT / "requirements" / "verl.txt").read_text().split()[0]
    place = KEPT / wanted.replace("==", "-")
    if not place.is_dir():
        command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(KEPT)]
        done = subprocess.run([sys.executable, "-m", *command, wanted], capture_output=True)
        wheels = list(KEPT.glob(f"{place.name}-*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.decode().strip().splitlines()[-1:]
            pytest.skip(f"{wanted} cannot be downloaded: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(place)
    return place


class Anything:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def made_up(name: str, **known: Any) -> None:
    """A module that has whatever it is asked for."""
    module = types.ModuleType(name)

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (Anything,), {})

    module.__getattr__ = attribute  # type: ignore[method-assign]
    vars(module).update(known)
    sys.modules[name] = module


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    """verl.trainer.ppo.core_algos, and rollout_corr_helper as its attribute."""
    place, before = unpacked(), set(sys.modules)
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.trainer.config"):
        package = types.ModuleType(name)
        package.__path__ = [str(place / name.replace(".", "/"))]
        sys.modules[name] = package
    for name in ("omegaconf", "tensordict", "verl.workers", "verl.protocol"):
        made_up(name)
    made_up("verl.workers.config")
    made_up("verl.workers.config.actor")
    made_up("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: None)
    groupwise = importlib.import_module("verl.utils.groupwise")
    vars(sys.modules["verl.utils"]).update(vars(groupwise))
    algorithm = importlib.import_module("verl.trainer.config.algorithm")
    vars(sys.modules["verl.trainer.config"])["AlgoConfig"] = algorithm.AlgoConfig
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    core.ActorConfig, core.AlgoConfig = Settings, type("Other", (), {})
    core.corrections = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    yield core
    for name in set(sys.modules) - before:
        del sys.modules[name]


class Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Batch(NamedTuple):
    lengths: list[int]
    mask: Tensor  #: [sequences, longest]
    old: Tensor
    log_probs: Tensor
    engine: Tensor
    advantages: Tensor

    def flat(self, matrix: Tensor) -> Tensor:
        return matrix[self.mask.bool()]

    def spread(self, flat: Tensor) -> Tensor:
        return torch.zeros_like(self.old).masked_scatter(self.mask.bool(), flat)


def batches(count: int) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = int(rng.integers(2, 9))
        lengths = rng.integers(1, 30, size)
        shape = (size, int(lengths.max()))
        mask = torch.tensor((np.arange(shape[1])[None] < lengths[:, None]).astype(float))
        old = torch.tensor(-rng.random(shape) * 4 - 0.05)
        moved, off = torch.tensor(rng.normal(size=(2, *shape)))
        worth = torch.tensor(rng.normal(size=size))[:, None] * mask
        yield Batch(lengths.tolist(), mask, old, old + 0.5 * moved, old + 0.2 * off, worth)


def verl_settings(aggregation: str) -> Settings:
    return Settings(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        tau_pos=1.0,
        tau_neg=1.05,
        policy_loss=Settings(dro_beta=0.3),
        loss_agg_mode=aggregation,
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": COUNTS.tokens,
            "global_batch_size": COUNTS.sequences,
            "loss_scale_factor": DIVISOR,
        },
    )


@pytest.mark.parametrize("kind", ["none", "token", "sequence", "icepop"])
@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "seq-mean-token-sum-norm", "token-sum"])
@pytest.mark.parametrize("name", LOSS_OPTIONS)
def test_value_and_gradient_of_every_loss(
    name: str, aggregation: str, kind: str, verl: Any, make_config: Make
) -> None:
    if name == "geo_mean" and kind not in ("none", "sequence"):
        pytest.skip("verl takes the geometric mean of the weights there, and we weigh each token")
    keys = {
        "algorithm.policy_loss.loss_mode": name,
        "algorithm.policy_loss.options": {"dro_beta": 0.3} if name == "dro" else {},
        "algorithm.loss_agg_mode": aggregation,
        "algorithm.rollout_correction.rollout_is": "token" if kind == "icepop" else kind,
        "algorithm.rollout_correction.rollout_is_threshold": "0.8_1.3" if kind == "icepop" else 2,
    }
    algorithm = make_config(keys).algorithm
    loss = PolicyLoss(algorithm)
    for batch in batches(12):
        lengths = torch.tensor(batch.lengths)
        found = compute_correction(
            batch.flat(batch.old), batch.flat(batch.engine), lengths, algorithm.rollout_correction
        )
        weights = None
        if kind != "none":
            weights, _ = verl.corrections.compute_rollout_correction_weights(
                batch.old - batch.engine,
                batch.mask,
                algorithm.rollout_correction.rollout_is,
                algorithm.rollout_correction.rollout_is_threshold,
            )
        theirs = batch.log_probs.clone().requires_grad_()
        expected, _ = verl.POLICY_LOSS_REGISTRY[name](
            batch.old,
            theirs,
            batch.advantages,
            batch.mask,
            aggregation,
            verl_settings(aggregation),
            weights,
        )
        (gradient,) = torch.autograd.grad(expected, theirs)
        ours = batch.flat(batch.log_probs).clone().requires_grad_()
        losses, _ = loss(
            ours,
            batch.flat(batch.old),
            batch.flat(batch.engine),
            batch.flat(batch.advantages),
            lengths,
        )
        # verl's geo_mean is a mean over the sequences that it is given
        counts = BatchCounts(COUNTS.tokens, len(lengths)) if name == "geo_mean" else COUNTS
        spread = lengths.repeat_interleave(lengths)
        coefficients = token_coefficients(loss.aggregation, spread, counts, DIVISOR)
        value = (coefficients * found(losses)).sum()
        (mine,) = torch.autograd.grad(value, ours)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        assert (batch.flat(gradient) - mine).norm() <= 1e-6 * gradient.norm()


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_every_estimator(name: str, by_std: bool, verl: Any, make_config: Make) -> None:
    keys = {"algorithm.adv_estimator": name, "algorithm.norm_adv_by_std_in_grpo": by_std}
    estimator = Estimator(make_config(keys).algorithm)
    rng = np.random.default_rng(1)
    for _ in range(40):
        groups, siblings = int(rng.integers(1, 5)), int(rng.integers(2, 6))
        size = groups * siblings
        lengths = rng.integers(1, 30, size)
        mask = torch.tensor((np.arange(lengths.max())[None] < lengths[:, None]).astype(float))
        rewards = rng.choice([0.0, 1.0], size) if rng.random() < 0.5 else rng.normal(size=size)
        placed = torch.zeros(mask.shape, dtype=torch.float64)
        placed[torch.arange(size), torch.tensor(lengths) - 1] = torch.tensor(rewards)
        index = np.repeat(np.arange(groups), siblings)
        if not np.ptp(rewards.reshape(groups, siblings), axis=1).any():
            continue  # exactly 0 here, and with verl's epsilons 2e-6
        more = {} if name == "grpo_passk" else {"norm_adv_by_std_in_grpo": by_std}
        expected, _ = verl.ADV_ESTIMATOR_REGISTRY[name](
            token_level_rewards=placed,
            response_mask=mask,
            index=index,
            config=Settings(gamma=1.0, norm_adv_by_std_in_grpo=by_std),
            **more,
        )
        inputs = AdvantageInputs(rewards, index, lengths, {}, estimator.options)
        found = inputs.per_token(np.array(estimator.estimate_advantages(inputs)))
        np.testing.assert_allclose(found, expected[mask.bool()], rtol=1e-6, atol=1e-6)


def drawn_values(rng: np.random.Generator) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Lengths, mask, rewards of the last tokens and values of one ragged batch."""
    size = int(rng.integers(2, 9))
    lengths = rng.integers(1, 40, size)
    mask = torch.tensor((np.arange(lengths.max())[None] < lengths[:, None]).astype(float))
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(size), torch.tensor(lengths) - 1] = torch.tensor(rng.normal(size=size))
    return lengths, mask, rewards, torch.tensor(rng.normal(size=mask.shape))


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.9])
def test_advantages_and_returns_of_gae(
    gamma: float, lam: float, verl: Any, make_config: Make
) -> None:
    keys = {"algorithm.adv_estimator": "gae", "algorithm.gamma": gamma, "algorithm.lam": lam}
    estimator = Estimator(make_config(keys).algorithm)
    rng = np.random.default_rng(2)
    for _ in range(40):
        lengths, mask, rewards, values = drawn_values(rng)
        keep = mask.bool()
        expected, returns = verl.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        inputs = AdvantageInputs(
            rewards.sum(1).numpy(),
            np.arange(len(lengths)),
            lengths,
            {},
            estimator.options,
            values[keep].numpy(),
        )
        found = np.concatenate(estimator.estimate_advantages(inputs))
        np.testing.assert_allclose(found, expected[keep], rtol=1e-6, atol=1e-6)
        found = later_errors(inputs, lam) + inputs.values
        np.testing.assert_allclose(found, returns[keep], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_and_gradient_of_the_value_loss(aggregation: str, verl: Any) -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        lengths, mask, returns, before = drawn_values(rng)
        keep = mask.bool()
        theirs = (before + torch.tensor(rng.normal(size=mask.shape)) * 0.7).requires_grad_()
        expected, share = verl.compute_value_loss(
            theirs, returns, before, mask, 0.5, loss_agg_mode=aggregation
        )
        (gradient,) = torch.autograd.grad(expected, theirs)
        ours = theirs.detach()[keep].requires_grad_()
        losses, clipped = value_losses(ours, before[keep], returns[keep], 0.5)
        spread = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
        counts = BatchCounts(int(lengths.sum()), len(lengths))
        value = (token_coefficients(aggregation, spread, counts, DIVISOR) * losses).sum()
        (mine,) = torch.autograd.grad(value, ours)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(clipped.mean().double(), share, rtol=1e-6, atol=1e-6)
        assert (gradient[keep] - mine).norm() <= 1e-6 * gradient.norm()


@pytest.mark.parametrize("rule", [*REJECTIONS, "token_k1,seq_mean_k3"])
def test_every_rule_masks_what_verl_masks(rule: str, verl: Any, make_config: Make) -> None:
    bound = {
        "token_k1": "0.8_1.2",
        "seq_sum_k1": "0.7",
        "seq_mean_k1": "0.95_1.05",
        "token_k1,seq_mean_k3": "0.7_1.4,0.03",
    }.get(rule, "0.3" if "sum" in rule else "0.1" if "max" in rule else "0.02")
    bound = "1.4" if rule == "seq_sum_k1" else bound
    keys = {
        "algorithm.rollout_correction.rollout_rs": rule,
        "algorithm.rollout_correction.rollout_rs_threshold": bound,
    }
    settings, masked, kept = make_config(keys).algorithm.rollout_correction, 0, 0
    for batch in batches(40):
        expected, _ = verl.corrections.compute_rollout_rejection_mask(
            batch.old - batch.engine, batch.mask, rule, bound
        )
        found = compute_correction(
            batch.flat(batch.old), batch.flat(batch.engine), torch.tensor(batch.lengths), settings
        )
        assert found.keep is not None
        assert torch.equal(found.keep, batch.flat(expected).bool())
        masked, kept = masked + int((~found.keep).sum()), kept + int(found.keep.sum())
    assert min(masked, kept) > 0
