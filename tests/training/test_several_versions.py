"""The age of responses that several versions sampled, against a plain count over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from laminar.storage.rules import TokenSpan
from laminar.training.engine_mismatch import find_oldest_steps
from laminar.training.metrics import batch_metrics, reward_by_version
from laminar.training.steps import TrainSample

Make = Callable[..., Any]
STEP = 30


def sampled_by_several(samples: list[TrainSample], seed: int) -> list[TrainSample]:
    """Versions are numbered from 100, skip some numbers, and may come in any order."""
    rng, found = np.random.default_rng(seed), []
    for s in samples:
        length = len(s.response_ids)
        cuts = [0, *sorted(set(rng.integers(1, length + 1, 3).tolist()) - {length}), length]
        steps = rng.integers(STEP - 6, STEP + 1, len(cuts) - 1).tolist()
        spans = (
            TokenSpan(f"rollout-{step % 2}", 100 + 2 * step, step, end - begin)
            for step, (begin, end) in zip(steps, pairwise(cuts), strict=True)
        )
        found.append(replace(s, spans=tuple(spans)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ages_are_counted_from_the_step_that_made_each_tokens_weights(
    seed: int, make_samples: Make
) -> None:
    """A response is as old as its oldest token, a token as old as its own weights."""
    samples = sampled_by_several(make_samples(groups=4, siblings=4, seed=seed), seed)
    steps = [[n.version_step for n in s.spans for _ in range(n.num_tokens)] for s in samples]
    assert any(row[0] > min(row) for row in steps) and any(row[-1] > min(row) for row in steps)
    oldest = [min(row) for row in steps]
    assert [s.version_step for s in samples] == oldest
    assert [s.weight_version for s in samples] == [100 + 2 * step for step in oldest]
    found = batch_metrics(samples, STEP)
    assert found["staleness/token_mean"] == pytest.approx(fmean(STEP - v for r in steps for v in r))
    assert found["staleness/token_max"] == STEP - min(oldest)
    name = "training/off_policy/trajectory_staleness"
    assert found[f"{name}/mean"] == pytest.approx(fmean(STEP - step for step in oldest))
    assert found[f"{name}/max"] == STEP - min(oldest)
    shortest_first = sorted(range(16), key=lambda i: len(steps[i]))
    for quarter in range(4):
        rows = shortest_first[4 * quarter : 4 * quarter + 4]
        mean = fmean(STEP - oldest[i] for i in rows)
        assert found[f"{name}/length_q{quarter + 1}"] == pytest.approx(mean)
    rewards = {
        100 + 2 * step: [s.reward for s, own in zip(samples, oldest, strict=True) if own == step]
        for step in sorted(set(oldest))
    }
    expected = {version: (pytest.approx(fmean(r)), len(r)) for version, r in rewards.items()}
    assert reward_by_version(samples) == expected
    behind = {
        100 + 2 * step: min(min(row) for row in steps if step in row)
        for step in {step for row in steps for step in row}
    }
    assert find_oldest_steps(samples) == behind
