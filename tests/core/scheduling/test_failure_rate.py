"""Rewards and environments that fail: what is counted, and when the run ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from laminar.core.state.signals import RewardErrors
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import only, start_bench

BATCH = 4  #: answers of one batch: nothing is judged before
WINDOW = 4 * BATCH
FAILED = {"n": "unscored", "l": "reward-worker-lost", "f": "env-failed", "g": "env-lost"}
RAISED = "KeyError: 'x' (reward.py:4)"


class Scores:
    """A run that generates and rewards one answer after the other, and trains each batch."""

    def __init__(self, **changes: Any) -> None:
        self.bench = start_bench(changes, max_error_permille=500, total_steps=100, num_train=400)
        self._answers = self._in_turn()

    def _in_turn(self) -> Iterator[str]:
        while True:
            group = self.bench.open_groups()[0]
            for member in list(self.bench.group(group).members):
                if member in self.bench.state.work.trajectories:
                    yield member

    def give(self, word: str, purpose: str = "train") -> list[cmd.Command]:
        """The next answer is scored: o(k), e(rror), l(ost worker), n(ot applicable), or its
        environment f(ailed) or was g(one)."""
        bench, answer = self.bench, next(self._answers)
        if bench.trajectory(answer).is_unsampled:
            bench.request_turn(answer)
        bench.finish(answer)
        if word in "oe":
            reason, detail = ("ok", "") if word == "o" else ("error", RAISED)
            commands = bench.reward(answer, 0.0, reason, detail)
        else:
            commands = bench.fail(answer, FAILED[word])
        if bench.state.steps.batch is not None and not bench.state.run.draining:
            bench.train()
            bench.load_all()
        bench.write_ends()
        return commands

    def all(self, words: str) -> None:
        for word in words:
            assert not self.ending, words
            self.give(word)

    @property
    def ending(self) -> bool:
        return self.bench.state.run.draining

    @property
    def found(self) -> RewardErrors:
        rewards = self.bench.state.signals.rewards
        assert rewards is not None
        return rewards


def test_a_reward_that_always_fails_ends_the_run_after_one_batch() -> None:
    """Generated again and again it would never be noticed: no group with a score, no step."""
    scores = Scores()
    scores.all("e" * BATCH)
    assert scores.ending
    assert scores.bench.state.run.drain_failure.detail == (
        "the reward failed on 4 of the last 4 training responses, more than "
        "reward.max_error_share = 0.5; the first failure: KeyError: 'x' (reward.py:4)"
    )


def test_the_run_ends_as_after_ctrl_c_and_has_failed() -> None:
    """The batch in training is completed, the model exported, the books are closed; exit code 1."""
    scores = Scores(max_staleness=2, capacity=20)
    bench = scores.bench
    first, second, *others = bench.open_groups()
    bench.complete(first, second)
    assert bench.state.steps.batch is not None
    for member in [m for group in others[:3] for m in bench.group(group).members][:5]:
        bench.finish(member)
        bench.reward(member, 0.0, "error", RAISED)
    assert scores.ending and bench.state.steps.batch is not None
    commands = bench.train()
    assert only(cmd.ExportModel, commands) and not only(cmd.GenerateTrajectory, commands)
    bench.write_ends()
    assert bench.state.work.ledger.groups.trained == 2
    version = bench.state.versions.export
    bench.say("trainer-0", ev.ModelExported(version=version, path="export"))
    bench.publish(version, 1)
    bench.stop()
    state, run = bench.state, bench.state.run
    assert (run.phase, run.exit_code, state.versions.export_path) == ("ended", 1, "export")
    assert RAISED in run.failure
    assert state.work.ledger.tokens.live == 0


def test_a_process_lost_while_it_ends_does_not_hide_the_reason() -> None:
    """The trainer dies before the model is exported: the run ends at once, for its first reason."""
    scores = Scores()
    scores.all("e" * BATCH)
    scores.bench.kill("trainer-0", restarting=False)
    assert "the reward failed" in scores.bench.state.run.failure
    scores.bench.stop()
    assert (scores.bench.state.run.phase, scores.bench.state.run.exit_code) == ("ended", 1)


def test_a_reward_that_breaks_late_ends_the_run_within_the_window() -> None:
    """After a thousand good scores, half a window of failures is enough: 4 batches are judged."""
    scores = Scores()
    scores.all("o" * 200 + "e" * (WINDOW // 2))
    scores.all("e")
    assert scores.ending
    assert f"{WINDOW // 2 + 1} of the last {WINDOW} " in scores.bench.state.run.drain_failure.detail


def test_the_ring_counts_what_a_list_of_all_attempts_counts() -> None:
    """Any order of scores and failures: the run ends at the same answer."""
    for seed in range(20):
        chance = random.Random(seed)
        scores, failed = Scores(max_error_permille=300), list[bool]()
        while not scores.ending and len(failed) < 150:
            failed.append(chance.random() < 0.25)
            scores.give("e" if failed[-1] else "o")
            last = failed[-WINDOW:]
            assert scores.found.failed == sum(last)
            too_many = len(last) >= BATCH and sum(last) > 0.3 * len(last)
            assert scores.ending == too_many


def test_a_lost_worker_is_a_failure_and_not_applicable_is_no_attempt() -> None:
    """A function that dies on every answer never scores one; None says that the function has no
    opinion, and such answers are dropped."""
    scores = Scores()
    scores.all("lnlnln")
    assert not scores.ending
    scores.all("l")
    assert scores.ending
    assert scores.found.errors == {"worker-lost": 4} and scores.found.answers == 4
    assert scores.bench.state.work.ledger.trajectories.dropped["unscored"] == 3


def test_a_function_that_applies_to_nothing_ends_the_run() -> None:
    """No answer would ever be trained. One score, and the count begins again."""
    scores = Scores()
    scores.all("n" * (WINDOW - 1) + "o" + "n" * (WINDOW - 1))
    scores.all("n")
    assert scores.ending
    assert scores.bench.state.run.drain_failure.kind == "no-scores"
    assert scores.found.errors == {}


def test_a_share_of_one_never_ends_a_run() -> None:
    for word in "en":
        scores = Scores(max_error_permille=1000)
        scores.all(word * 3 * WINDOW)
        assert not scores.ending


def test_evaluations_are_counted_and_not_judged() -> None:
    """The held-out answers all fail; those that are trained do not. The figure is shown."""
    scores = Scores(num_eval=40, val_before_train=True, capacity=40)
    bench = scores.bench
    generate = only(cmd.GenerateTrajectory, bench.commands)
    held_out = [c.trajectory_id for c in generate if c.purpose == "eval"]
    assert len(held_out) == 40
    for answer in held_out:
        bench.finish(answer)
        bench.reward(answer, 0.0, "timeout")
    assert not scores.ending
    assert scores.found.errors == {"timeout": 40} and scores.found.attempts == 0


def test_the_first_detail_that_arrives_is_kept() -> None:
    scores = Scores(max_error_permille=1000)
    give: Callable[..., object] = scores.bench.reward
    for detail in ("", "first " * 200, "second"):
        answer = next(scores._answers)
        scores.bench.finish(answer)
        give(answer, 0.0, "error", detail)
    assert scores.found.first == ("first " * 200)[:500]


def test_an_environment_that_fails_on_a_fifth_of_its_calls_ends_the_run() -> None:
    """What ends with its replica is no failure of it, and neither is what happened long ago."""
    scores = Scores(max_sessions=400, max_staleness=20, capacity=100)
    scores.all("f" * 9 + "o" * 50 + "fooooo" * 9 + "g" * 20)
    assert not scores.ending
    scores.all("ff")  # eight of the 48 calls before
    assert scores.ending
    assert scores.bench.state.run.drain_failure.kind == "env-fails"
