"""What people read of events: steps are counted from 1, scores are numbers."""

from __future__ import annotations

from laminar.analysis.log.display import display_fields
from laminar.analysis.log.story import describe_message
from laminar.analysis.why.wording import abbreviate_event
from laminar.core.state.scores import bits_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId, TrajectoryId

NAME, GROUP = TrajectoryId("0.1.2"), GroupId("0.1")


def ending(end: str, step: int) -> cmd.TrajectoryEnding:
    return cmd.TrajectoryEnding(
        trajectory_id=NAME,
        group=GROUP,
        sibling=2,
        purpose="train",
        row_index=0,
        placement=1,
        end=end,
        reason="",
        step=step,
    )


def test_a_batch_has_the_number_of_its_step() -> None:
    done = ev.StepCompleted(
        step_index=51, version=52, changed=True, reason="", num_tokens=1, digest="d", metrics={}
    )
    assert abbreviate_event(done) == "step-completed version=52 step=52"
    assert "step=52" in describe_message(done)
    order = cmd.TrainStep(to="trainer-0", step_index=0, version=1, trajectories=(NAME,))
    assert describe_message(order).startswith("train-step step=1 version=1")
    assert (
        display_fields(cmd.ProposeBatch(to="strategy", step_index=4, count=1, candidates=()))[
            "step"
        ]
        == 5
    )
    assert display_fields(ev.BatchProposed(step_index=4, groups=()))["step"] == 5


def test_an_end_is_told_by_the_step_that_trained_it_or_came_before_it() -> None:
    ends = (ending("trained", 7), ending("evaluated", 7), ending("dropped", -1))
    told = display_fields(cmd.EndTrajectories(to="store-0", endings=ends))["endings"]
    assert [one["step"] for one in told] == [8, 7, -1]


def test_weights_are_told_by_the_steps_that_made_them() -> None:
    assert display_fields(cmd.PublishWeights(to="trainer-0", version=3, step=3))["step"] == 3


def test_a_score_is_a_number() -> None:
    rewarded = ev.TrajectoryRewarded(
        trajectory_id=NAME,
        placement=1,
        reward_bits=bits_of(0.25),
        correct=False,
        reason="ok",
        num_tokens=3,
    )
    assert "reward=0.25" in describe_message(rewarded) and "bits" not in describe_message(rewarded)
