"""Controls: runs whose outcome is known beforehand, so that a wrong system cannot pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.run.conftest import SMALL, history, train

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_on_policy_trains_only_what_the_newest_weights_generated(tmp_path: Path) -> None:
    """max_staleness = 0: nothing that is trained starts between a choice and the next load."""
    run = train(tmp_path, *SMALL, "async.max_staleness=0", "trainer.total_training_steps=4")
    assert run.code == 0, run.output
    assert run.summary["staleness_max"] == 0
    assert run.summary["staleness_mean"] == 0
    trained = {
        trajectory
        for item in history(run.directory)
        if isinstance(item, cmd.TrainStep)
        for trajectory in item.trajectories
    }
    between = False
    for item in history(run.directory):
        if isinstance(item, cmd.TrainStep):
            between = True
        elif isinstance(item, ev.WeightsLoaded):
            between = False
        elif isinstance(item, cmd.GenerateTrajectory) and between:
            assert item.trajectory_id not in trained, item
    assert len(trained) == 4 * 4 * 8


def test_learning_rate_zero_changes_nothing(tmp_path: Path) -> None:
    """lr 0, no decay, T = 0.7, ten steps: ratio 1, nothing clipped, every version byte-equal."""
    run = train(
        tmp_path,
        *SMALL,
        "optim.lr=0",
        "rollout.temperature=0.7",
        "trainer.total_training_steps=10",
        "trainer.test_freq=0",
        "data.train_batch_size=8",
        "rollout.group_size=4",
        "rollout.max_num_seqs=32",
        "algorithm.use_kl_loss=true",
        "algorithm.ppo_mini_batch_size=4",
    )
    assert run.code == 0, run.output
    published = [e for e in history(run.directory) if isinstance(e, ev.WeightsPublished)]
    assert len({event.digest for event in published}) == 1
    assert len(published) == 12
    steps = [line for line in run.metrics() if "actor/pg_loss" in line]
    assert len(steps) == 10
    for line in steps:
        assert line["train_rollout_logprob_abs_diff/max"] <= 1e-4
        assert line["actor/pg_clipfrac"] == 0
        assert line["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert line["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        assert line["rollout_corr/is_mean"] == pytest.approx(1, abs=1e-4)
    summary = run.summary
    assert abs(summary["eval_first"] - summary["eval_last"]) * 32 <= 1


REWARD = """
import random, re

def whether_right(prompts, completions, answer, **columns):
    found = [re.findall("<answer>(.*?)</answer>", text) for text in completions]
    scores = [float(bool(f) and f[-1] == a) for f, a in zip(found, answer)]
    {shuffle}
    return scores
"""
SHUFFLE = "random.Random(prompts[0]).shuffle(scores)"
LEARNING = [
    "trainer.total_training_steps=8",
    "trainer.test_freq=8",
    "data.dataset_size=2000",
    "data.max_response_length=64",
    "optim.lr=3e-4",
    "optim.lr_warmup_steps=2",
]


def test_it_learns_from_the_rewards_and_from_nothing_else(tmp_path: Path) -> None:
    """Shuffled within each group, the same rewards say nothing of the answers they are given to.

    An evaluation has one answer to a prompt, and its score stays its own. Three standard errors of
    the difference of two evaluations of 128 prompts are about 0.16.
    """
    rise = {}
    for name, shuffle in (("own", ""), ("shuffled", SHUFFLE)):
        reward = tmp_path / f"{name}.py"
        reward.write_text(REWARD.format(shuffle=shuffle))
        path = f"reward.custom_reward_function.path={reward}"
        run = train(tmp_path / name, *LEARNING, path)
        assert run.code == 0, run.output
        rise[name] = run.summary["eval_last"] - run.summary["eval_first"]
    assert rise["own"] >= 0.32, rise
    assert rise["shuffled"] <= 0.16, rise
