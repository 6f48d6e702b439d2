"""Warnings: each comes from its figure, once, and none from a run that is well."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from laminar.core.machine import StateMachine
from laminar.core.state.evaluation_scores import EvaluationResult, EvaluationStatistics
from laminar.core.state.scores import bits_of
from laminar.core.state.signals import RewardErrors
from laminar.core.state.state import State
from laminar.events import events as ev
from laminar.events.base import Event, Stamped
from laminar.events.reasons import EndedBy, FinishReason
from laminar.observe.metrics import MetricsWriter
from laminar.observe.warnings import ENDS_WINDOW, LIMITS, WINDOW, WarningMonitor, first_look
from tests.observe.test_metrics_and_status import TELEMETRY
from tools.kit.world import World
from tools.kit.world_parts import settings, step_completed

REFERENCE = Path(__file__).parents[2] / "configs" / "reference.toml"
WELL = {
    "groups/no_variance": 0.5,
    "reward/mean": 0.4,
    "response_length/clip_ratio": 0.1,
    "actor/entropy": 0.5,
}


@pytest.fixture
def state() -> State:
    world = World(settings(), num_eval=4, seed=3).run()
    machine = StateMachine()
    for stamped, _ in world.log[: len(world.log) // 2]:
        machine.handle_event(stamped)
    machine.state.evaluations.results.clear()
    return machine.state


class Seen:
    """A watch, and what it reported; a report reaches the state later, as in the coordinator."""

    def __init__(self, state: State) -> None:
        self.state, self.events = state, list[ev.TrainingWarning]()
        self.watch = WarningMonitor(self._report)

    def _report(self, event: Event) -> None:
        assert isinstance(event, ev.TrainingWarning)
        self.events.append(event)

    def take(self, event: Event) -> None:
        self.watch(
            Stamped(seq=1, time_ns=0, peer="x", incarnation=1, peer_seq=1, event=event),
            [],
            self.state,
        )

    def steps(self, count: int, **figures: float) -> list[str]:
        """Kinds of the warnings after so many steps with these figures."""
        for step in range(count):
            self.take(step_completed(step, step + 1, metrics=WELL | figures))
        return [event.kind for event in self.events]


@pytest.mark.parametrize(
    ("kind", "figures", "word", "window"),
    [
        ("no-signal", {"groups/no_variance": 0.9}, "90%", WINDOW),
        ("truncated", {"response_length/clip_ratio": 0.5}, "50%", ENDS_WINDOW),
        (
            "tool-timeouts",
            {"truncated/tool-timeout": 0.05, "truncated/turn-timeout": 0.06},
            "11% of the responses of the last 3 steps ended because their tools did not answer in "
            "time, most by env.turn_timeout_s",
            ENDS_WINDOW,
        ),
    ],
)
def test_a_figure_of_the_last_steps(
    state: State, kind: str, figures: dict[str, float], word: str, window: int
) -> None:
    seen = Seen(state)
    assert seen.steps(window - 1, **figures) == []
    assert seen.steps(3, **figures) == [kind]
    assert word in seen.events[0].text
    below = {name: value - 0.01 for name, value in figures.items()}
    assert Seen(State(settings=state.settings, logic=1)).steps(30, **below) == []


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({}, "truncated: by data.max_response_length. Raise"),
        ({"length": 0.6}, "truncated: 60% by data.max_response_length. Raise"),
        (
            {"length": 0.1, "max-turns": 0.4, "context-full": 0.1},
            "40% by env.max_turns, 10% by data.max_response_length, 10% by env.max_context_tokens",
        ),
        ({"tool-timeout": 0.6}, "truncated: 60% by env.tool_timeout_s. Raise the first limit"),
    ],
)
def test_truncation_names_the_setting_of_each_limit(
    state: State, shares: dict[str, float], words: str
) -> None:
    seen = Seen(state)
    figures = {f"truncated/{name}": share for name, share in shares.items()}
    seen.steps(ENDS_WINDOW, **figures, **{"response_length/clip_ratio": 0.6})
    assert seen.events[0].kind == "truncated"
    assert words in seen.events[0].text


def test_every_limit_has_a_setting() -> None:
    assert set(LIMITS) == {FinishReason.LENGTH, *EndedBy} - {EndedBy.NONE}
    assert all(
        name in REFERENCE.read_text() for name in (k.rsplit(".")[-1] for k in LIMITS.values())
    )


def test_lost_signal_is_told_from_one_that_never_was(state: State) -> None:
    seen = Seen(state)
    assert seen.steps(3) == []
    assert seen.steps(WINDOW, **{"groups/no_variance": 0.99, "reward/mean": 0.0}) == ["no-signal"]
    assert "mean reward 0; in the first 5 steps 0.24)" in seen.events[0].text


def test_entropy_is_held_against_the_first_steps(state: State) -> None:
    seen = Seen(state)
    assert seen.steps(20) == []
    assert seen.steps(WINDOW, **{"actor/entropy": 0.049}) == ["entropy"]
    assert "from 0.5 to 0.049" in seen.events[0].text


def test_entropy_that_falls_while_the_reward_rises_is_learning(state: State) -> None:
    seen = Seen(state)
    assert seen.steps(WINDOW) == []
    assert seen.steps(WINDOW, **{"actor/entropy": 0.01, "reward/mean": 0.41}) == []
    assert seen.steps(WINDOW, **{"actor/entropy": 0.01, "reward/mean": 0.39}) == ["entropy"]


def test_entropy_near_that_of_the_uniform_distribution(state: State) -> None:
    """Of a vocabulary of 32 tokens: 3.47 nats."""
    whole = {"actor/max_entropy": math.log(32)}
    assert Seen(state).steps(30, **whole, **{"actor/entropy": 3.1}) == []
    seen = Seen(state)
    assert seen.steps(WINDOW, **whole, **{"actor/entropy": 3.13}) == ["near-uniform"]
    assert "3.13 nats per token, near the 3.47" in seen.events[0].text
    assert Seen(state).steps(30, **{"actor/entropy": 30.0}) == []  # of an older trainer


def test_experts_without_tokens_in_every_step(state: State) -> None:
    seen = Seen(state)
    assert seen.steps(WINDOW - 1, **{"actor/router_load/dead": 3.0}) == []
    assert seen.steps(1, **{"actor/router_load/dead": 0.0}) == []
    assert seen.steps(WINDOW, **{"actor/router_load/dead": 2.0}) == ["dead-experts"]
    assert "at least 2 experts" in seen.events[0].text


def test_gradients_that_are_not_finite_in_a_row(state: State) -> None:
    seen = Seen(state)
    state.signals.nonfinite_in_row = 2
    assert seen.steps(3) == []
    state.signals.nonfinite_in_row = 3
    assert seen.steps(1) == ["non-finite"]
    assert "the last 3 updates were not finite" in seen.events[0].text
    assert "optim.lr" in seen.events[0].text


def test_gradients_of_the_critic_are_watched_too(state: State) -> None:
    seen = Seen(state)
    assert seen.steps(2, **{"critic/nonfinite_updates": 2.0}) == []
    assert seen.steps(1) == []
    assert seen.steps(3, **{"critic/nonfinite_updates": 2.0}) == ["non-finite"]
    assert "the critic's last 6 updates" in seen.events[0].text
    assert "critic.lr" in seen.events[0].text


def loaded(diff: float | None) -> ev.WeightsLoaded:
    return ev.WeightsLoaded(
        version=1, step=1, digest="d", probe_diff=9.0, seconds=1, reloaded=True, probe_kl=diff
    )


@pytest.mark.parametrize(
    ("probe", "parts", "remedy"),
    [
        (0.01, "0.01 from numerics (measured on the probe, with equal weights) and 0.21", "lr or"),
        (0.2, "0.2 from numerics (measured on the probe, with equal weights) and 0.02", "dtype"),
        (0.7, "0.22 from numerics (measured on the probe, with equal weights) and 0 ", "dtype"),
        (None, "0 from numerics (measured on the probe, with equal weights) and 0.22", "lr or"),
    ],
)
def test_a_mismatch_that_grows_names_its_larger_part(
    state: State, probe: float | None, parts: str, remedy: str
) -> None:
    seen = Seen(state)
    seen.take(loaded(probe))
    for value in (float("nan"), 0.01, 0.02, 0.03):
        assert seen.steps(1, **{"mismatch_kl/mean": value}) == []
    assert seen.steps(4, **{"mismatch_kl/mean": 0.22}) == []
    assert seen.steps(1, **{"mismatch_kl/mean": 0.22}) == ["mismatch-grows"]
    text = seen.events[0].text
    assert "averages 0.22 nats per token over the last 5 steps, with a median of 0.02" in text
    assert parts in text and remedy in text


@pytest.mark.parametrize(("before", "now"), [(0.01, 0.2), (0.1, 0.49), (0.3, 0.3)])
def test_a_mismatch_that_is_small_or_usual_is_none(state: State, before: float, now: float) -> None:
    seen = Seen(state)
    seen.steps(10, **{"mismatch_kl/mean": before})
    assert seen.steps(9, **{"mismatch_kl/mean": now}) == []


@pytest.mark.parametrize(
    ("rates", "kinds"),
    [
        ([0.2, 0.4, 1.0, 1.0, 0.8, 0.3], []),  # warm-up, then a decay
        ([0.2, 0.2, 0.4, 1.0, 1.0], []),  # warm-up after that of a critic
        ([1.0, 0.8, 0.9], ["learning-rate"]),
        ([1.0, 0.2, 1.0], ["learning-rate"]),
    ],
)
def test_a_rate_that_rises_again(state: State, rates: list[float], kinds: list[str]) -> None:
    seen = Seen(state)
    for rate in rates:
        seen.steps(1, **{"actor/lr": rate})
    assert [event.kind for event in seen.events] == kinds
    assert all("rose from" in event.text for event in seen.events)


@pytest.mark.parametrize(
    ("moved", "losses", "kinds"),
    [
        (0.1, [0.0, 1e-4, -1e-9, 2e-4], []),
        (0.0, [0.0, 0.0, 0.0], []),  # nothing was trained
        (0.1, [0.0, 0.0], ["kl-zero"]),
        (0.1, [-0.0, -1e-3, 1e-3, -1e-3], []),
        (0.1, [1e-3, -1e-5, -1e-5], []),  # the rounding of a sum over 10,000 tokens
        (0.1, [1e-3, -1e-3, -2e-3], ["kl-negative"]),
    ],
)
def test_kl_to_the_reference(
    state: State, moved: float, losses: list[float], kinds: list[str]
) -> None:
    seen = Seen(state)
    for loss in losses:
        figures = {"actor/kl_loss": loss, "perf/total_num_tokens": 1e4}
        seen.steps(1, **figures, **{"mismatch/moved": moved})
    assert [event.kind for event in seen.events] == kinds


def published(version: int, digest: str) -> ev.WeightsPublished:
    return ev.WeightsPublished(
        version=version, step=version, digest=digest, num_bytes=4, held=(version,)
    )


@pytest.mark.parametrize(("changed", "kinds"), [(True, ["weights-unchanged"]), (False, [])])
def test_versions_with_the_same_bytes(state: State, changed: bool, kinds: list[str]) -> None:
    seen = Seen(state)
    for version, digest in enumerate("abbc"):
        seen.take(published(version, digest))
        seen.take(step_completed(version, version + 1, changed=changed or version != 1))
    assert [event.kind for event in seen.events] == kinds
    assert all("version 2 was published with the bytes of version 1" in e.text for e in seen.events)


@pytest.mark.parametrize(
    ("dropped", "kinds"),
    [
        ({"too-few-scored": 4}, []),  # few
        ({"too-few-scored": 9}, []),  # below a tenth
        ({"no-variance": 90, "run-ended": 30, "end-of-data": 5}, []),  # as planned
        ({"too-few-scored": 12, "quarantined": 8}, ["dropped-groups"]),
    ],
)
def test_groups_that_are_dropped(state: State, dropped: dict[str, int], kinds: list[str]) -> None:
    groups = state.work.ledger.groups
    groups.trained, groups.dropped = 100, dropped
    seen = Seen(state)
    assert seen.steps(1) == kinds
    assert all("20 of 120 prompts were dropped" in event.text for event in seen.events)


def test_siblings_that_began_with_different_prompts(state: State) -> None:
    assert Seen(state).steps(1) == []
    assert Seen(state).steps(2, **{"groups/prompts_differ": 0.25}) == ["prompts-differ"]


def test_a_coordinator_that_comes_back_knows_the_first_steps(state: State, tmp_path: Path) -> None:
    lines = [WELL | {"training/global_step": step, "event": step} for step in range(1, 11)]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"val/version": 3}\n[1]\n{"cut')
    seen = Seen(state)
    MetricsWriter(tmp_path, TELEMETRY, earlier=seen.watch.take_figures)
    assert seen.steps(WINDOW, **{"actor/entropy": 0.01}) == ["entropy"]
    none: list[dict[str, float]] = []
    MetricsWriter(tmp_path / "none", TELEMETRY, earlier=none.append)
    assert none == []


def test_each_kind_comes_once_also_after_a_restart(state: State) -> None:
    assert Seen(state).steps(30, **{"groups/no_variance": 1.0}) == ["no-signal"]
    state.signals.warnings["no-signal"] = "said"
    assert Seen(state).steps(30, **{"groups/no_variance": 1.0}) == []


def test_failing_rewards(state: State) -> None:
    seen = Seen(state)
    rewarded = next(
        stamped.event
        for stamped, _ in World(settings(), seed=3).run().log
        if isinstance(stamped.event, ev.TrajectoryRewarded)
    )
    for answers, failed in ((63, 60), (100, 5), (100, 6)):
        state.signals.rewards = RewardErrors(
            window=bytearray(1), answers=answers, errors={"error": failed}, first="ValueError: q"
        )
        assert seen.events == []
        seen.take(rewarded)
    assert [event.kind for event in seen.events] == ["reward-errors"]
    assert "6 of 100 responses (6%), first: ValueError: q" in seen.events[0].text


def result(step: int, score: float, error: float) -> EvaluationResult:
    figures = EvaluationStatistics(
        prompts=100,
        answers_per_prompt=1,
        answered=100,
        passed=0,
        missing=0,
        tokens=1,
        truncated=0,
        reward_bits=bits_of(score),
        score_se_bits=bits_of(error),
        share_se_bits=bits_of(0.0),
    )
    return EvaluationResult(
        index=step, version=step, step=step, final=False, total=100, correct=0, figures=figures
    )


def test_a_held_out_score_that_falls(state: State) -> None:
    seen = Seen(state)
    for step, score in ((0, 0.3), (10, 0.5), (20, 0.4)):  # by two standard errors of the difference
        state.evaluations.results.append(result(step, score, 0.05 / 2**0.5))
        assert seen.steps(1) == []
    state.evaluations.results.append(result(30, 0.34, 0.05 / 2**0.5))
    assert seen.steps(1) == ["held-out-falls"]
    assert "from 0.5 after step 10 to 0.34 after step 30" in seen.events[0].text


def test_what_an_event_says_by_itself(state: State) -> None:
    seen = Seen(state)
    part = ev.ExcludedRows(
        replica="rollout-1", version=7, trajectories=("0.1.2",), diff=0.5, limit=0.1
    )
    seen.take(step_completed(3, 4, metrics=WELL, left_out=(part,)))
    seen.take(ev.WeightsRejected(version=8, reason="the probe differs by 3"))
    state.data.num_train = state.settings.groups_per_step - 1
    seen.take(ev.DataLoaded(num_train=1, num_eval=0, overlap=0, digest=""))
    assert [event.kind for event in seen.events] == ["mismatch", "weights", "few-prompts"]
    assert "rollout-1 with weight version 7" in seen.events[0].text
    assert "the probe differs by 3" in seen.events[1].text


def test_what_was_found_before_the_run(state: State, tmp_path: Path) -> None:
    """At the first event; once, also when the coordinator comes back."""
    (tmp_path / "first_look.json").write_text('{"template": "twice", "reward-order": "less"}')
    state.signals.warnings["reward-order"] = "said"
    events: list[Event] = []
    watch = WarningMonitor(events.append, at_start=first_look(tmp_path))
    for _ in range(2):
        event = step_completed(0, 1, metrics=WELL)
        stamped = Stamped(seq=1, time_ns=0, peer="x", incarnation=1, peer_seq=1, event=event)
        watch(stamped, [], state)
    assert [(e.kind, e.text) for e in events if isinstance(e, ev.TrainingWarning)] == [
        ("template", "twice")
    ]
    assert first_look(tmp_path / "none") == {}


def test_an_ended_run_is_not_warned_of(state: State) -> None:
    state.run.phase = "ended"
    assert Seen(state).steps(30, **{"groups/no_variance": 1.0}) == []
