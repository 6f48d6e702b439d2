"""The trainer's glue: what the learner gets is what the store has of a trajectory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from laminar.actors.trainer import _sample
from laminar.storage import messages as m

STOP_ID = 7


def stored(**changes: Any) -> m.Trajectory:
    """A rewarded trajectory: three sampled tokens, the last of them the stop token."""
    fields: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(m.Trajectory)}
    fields |= {
        "trajectory_id": "0.4.1",
        "group_id": "0.4",
        "prompt_ids": np.array([1, 2], "<i4").tobytes(),
        "tokens": np.array([3, 4, STOP_ID], "<i4").tobytes(),
        "logprobs": np.array([-0.5, -1.5, -0.25], "<f4").tobytes(),
        "score": 0.75,
        "temperature": 0.7,
        "finish_reason": "stop",
        "weight_version": 6,
        "version_step": 5,
        "replica": "rollout-1",
        "extras": {"acc": 1.0, "pred": "seven"},
    }
    return m.Trajectory(**(fields | changes))


def test_every_sampled_token_is_trained_the_stop_token_too() -> None:
    """Without it a model is never told when to end."""
    sample = _sample(stored())
    assert sample.prompt_ids.tolist() == [1, 2]
    assert sample.response_ids.tolist() == [3, 4, STOP_ID]
    assert sample.logprobs.tolist() == [-0.5, -1.5, -0.25]


@pytest.mark.parametrize(("finish_reason", "truncated"), [("stop", False), ("length", True)])
def test_what_the_engine_cut_is_known_as_truncated(finish_reason: str, truncated: bool) -> None:
    """And is not right, whatever its score."""
    sample = _sample(stored(finish_reason=finish_reason, score=1.0))
    assert (sample.truncated, sample.correct) == (truncated, not truncated)


def test_reward_origin_and_figures_are_those_of_the_store() -> None:
    """Text beside a score is for people, and no figure."""
    sample = _sample(stored())
    assert (sample.sample_id, sample.group_id) == ("0.4.1", "0.4")
    assert (sample.reward, sample.temperature) == (0.75, 0.7)
    assert (sample.weight_version, sample.version_step, sample.replica) == (6, 5, "rollout-1")
    assert sample.extras == {"acc": 1.0}


@pytest.mark.parametrize("missing", ["score", "temperature", "version_step"])
def test_what_was_never_rewarded_is_not_trained(missing: str) -> None:
    with pytest.raises(RuntimeError, match=r"0\.4\.1"):
        _sample(stored(**{missing: None}))
