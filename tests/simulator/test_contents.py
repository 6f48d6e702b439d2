"""What a learner is handed otherwise than the engines made it is found, part by part."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from laminar.engines.emulated.fake_tokens import logprobs_of, prompt_of, tokens_of
from laminar.events import commands as cmd
from laminar.names import ids
from laminar.names.ids import Purpose
from laminar.storage.rules import Span
from laminar.training.steps import TrainSample
from tools.kit.sim_worlds import config
from tools.simulator.checks.contents import Contents
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import Scenario, draw

GROUP = ids.train_group(0, 3)
NAME = ids.trajectory(GROUP, 1)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return draw(config(), 1)


def order(to: str = "rollout-0", attempt: int = 1, placement: int = 1) -> cmd.GenerateTrajectory:
    return cmd.GenerateTrajectory(
        to=to,
        trajectory_id=NAME,
        group=GROUP,
        sibling=1,
        purpose=Purpose.TRAIN,
        row_index=7,
        attempt=attempt,
        placement=placement,
        version=4,
        version_step=4,
        seed=0,
    )


def sample(scenario: Scenario, attempt: int = 1, **changes: Any) -> TrainSample:
    """As two replicas have made it, one after the other, where it is long enough."""
    seed = ids.trajectory_seed(scenario.settings.seed, GROUP, 1, attempt)
    count, limit = scenario.lengths.of(seed), scenario.lengths.limit
    tokens = np.frombuffer(tokens_of(seed, 0, count, ends=count < limit), "<i4")
    parts = [("rollout-0", 1), ("rollout-1", count - 1)] if count > 1 else [("rollout-0", 1)]
    made = TrainSample(
        sample_id=NAME,
        group_id=GROUP,
        prompt_ids=np.array(prompt_of("train", 7), "<i4"),
        response_ids=tokens,
        logprobs=np.frombuffer(logprobs_of(seed, 0, count), "<f4"),
        reward=float(int(tokens.sum()) % 2),
        temperature=1.0,
        truncated=count >= limit,
        spans=tuple(Span(name, 4, 4, number) for name, number in parts),
    )
    return dataclasses.replace(made, **changes)


def made_by(scenario: Scenario, made: TrainSample, *orders: cmd.GenerateTrajectory) -> Contents:
    """Engines with version 4 have sampled its parts, as they were ordered."""
    contents, start = Contents(scenario, lambda version, digest: digest == f"d{version}"), 0
    for order, span in zip(orders, made.spans, strict=False):
        contents.begun(order)
        contents.sampled(order, start, start + span.num_tokens, "d4")
        start += span.num_tokens
    return contents


def check(scenario: Scenario, handed: TrainSample, failed: tuple[str, ...] = ()) -> None:
    contents = made_by(scenario, sample(scenario), order(), order("rollout-1", placement=2))
    contents.handed([handed], failed)


def test_what_the_engines_made_is_sound(scenario: Scenario) -> None:
    made = sample(scenario)
    check(scenario, made)
    check(scenario, dataclasses.replace(made, reward=0.0), (NAME,))


def test_every_part_that_is_another_is_named(scenario: Scenario) -> None:
    made = sample(scenario)
    others = {
        "group": {"group_id": "0.4"},
        "prompt": {"prompt_ids": np.array([0, 8], "<i4")},
        "tokens": {"response_ids": np.roll(made.response_ids, 1)},
        "log-probs": {"logprobs": np.roll(made.logprobs, 1)},
        "cut-off": {"truncated": not made.truncated},
        "reward": {"reward": 1.0 - made.reward},
        "versions": {"spans": tuple(s._replace(weight_version=5) for s in made.spans)},
    }
    for part, changes in others.items():
        with pytest.raises(Violation, match=f"with other {part}"):
            check(scenario, dataclasses.replace(made, **changes))


def test_an_older_attempt_is_not_what_counts(scenario: Scenario) -> None:
    spans = (Span("rollout-1", 4, 4, len(sample(scenario, 2).response_ids)),)
    second = sample(scenario, 2, spans=spans)
    contents = made_by(scenario, second, order("rollout-1", attempt=2, placement=2))
    contents.begun(order(placement=3))
    contents.handed([second], ())
    with pytest.raises(Violation, match="handed_as_made"):
        contents.handed([sample(scenario)], ())


def test_in_flight_a_part_may_be_of_later_weights_and_never_of_others(scenario: Scenario) -> None:
    """Each part is held against what its engine had; a later part is of no older weights."""
    settings = msgspec.structs.replace(scenario.settings, in_flight=True)
    flying = msgspec.structs.replace(scenario, settings=settings)
    made = sample(flying)
    count = len(made.response_ids)
    assert count > 1
    contents = Contents(flying, lambda version, digest: digest == f"d{version}")
    contents.begun(order())
    contents.sampled(order(), 0, 1, "d4")
    contents.sampled(order(), 1, count, "d5")
    right = (Span("rollout-0", 4, 4, 1), Span("rollout-0", 5, 5, count - 1))
    contents.handed([dataclasses.replace(made, spans=right)], ())
    for wrong in (
        (Span("rollout-0", 4, 4, count),),
        (Span("rollout-0", 4, 4, 2), Span("rollout-0", 5, 5, count - 2)),
        (Span("rollout-0", 4, 4, 1), Span("rollout-1", 5, 5, count - 1)),
    ):
        with pytest.raises(Violation, match="with other versions"):
            contents.handed([dataclasses.replace(made, spans=wrong)], ())
    contents.sampled(order(placement=2), 0, 1, "d5")
    contents.sampled(order(placement=2), 1, count, "d4")
    older = (Span("rollout-0", 5, 5, 1), Span("rollout-0", 4, 4, count - 1))
    with pytest.raises(Violation, match="with other versions"):
        contents.handed([dataclasses.replace(made, spans=older)], ())
