"""The trajectory table: every pair of status and trigger, legal or not."""

from __future__ import annotations

import itertools

import pytest

from laminar.core.state import Trajectory
from laminar.core.transitions import IN_ENGINE, TRAJECTORY_MOVES, UNFINISHED, move
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.ids import GroupId, TrajectoryId
from tests.core.bench import Bench, only

STATUSES = ("dispatched", "running", "generated", "rewarded", "lost", "ending")
TRIGGERS = ("started", "finished", "rewarded", "lose", "dispatch", "end")
#: Written down a second time, as a picture: rows are statuses, columns triggers, "." is illegal.
PICTURE = {
    "dispatched": ("running", "generated", ".", "lost", ".", "ending"),
    "running": (".", "generated", ".", "lost", ".", "ending"),
    "generated": (".", ".", "rewarded", ".", ".", "ending"),
    "rewarded": (".", ".", ".", ".", ".", "ending"),
    "lost": (".", ".", ".", ".", "dispatched", "ending"),
    "ending": (".", ".", ".", ".", ".", "."),
}


@pytest.mark.parametrize(("status", "trigger"), list(itertools.product(STATUSES, TRIGGERS)))
def test_every_pair(status: str, trigger: str) -> None:
    trajectory = Trajectory(id=TrajectoryId("0.0.0"), group=GroupId("0.0"), sibling=0)
    trajectory.status = status
    target = PICTURE[status][TRIGGERS.index(trigger)]
    assert move(trajectory, trigger) == (target != ".")
    assert trajectory.status == (status if target == "." else target)


def test_table_has_no_status_or_trigger_besides() -> None:
    assert {s for s, _ in TRAJECTORY_MOVES} | set(TRAJECTORY_MOVES.values()) == set(STATUSES)
    assert {t for _, t in TRAJECTORY_MOVES} == set(TRIGGERS)
    assert set(IN_ENGINE) <= set(UNFINISHED) <= set(STATUSES)


def in_status(status: str) -> Bench:
    """A run whose trajectory 0.0.0 is in this status."""
    bench = Bench(max_staleness=0, replicas=1, capacity=4, resume_wait_ms=10**6)
    bench.start()
    if status == "running":
        started = ev.TrajectoryStarted(
            trajectory=TrajectoryId("0.0.0"), placement=1, tokens_resumed=0
        )
        bench.say("rollout-0", started)
    if status in ("generated", "rewarded"):
        bench.finish("0.0.0")
    if status == "rewarded":
        bench.reward("0.0.0")
    if status == "lost":
        bench.kill()
        bench.come_back()
    if status == "ending":
        bench.fail("0.0.0")
    assert bench.trajectory("0.0.0").status == status
    return bench


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("trigger", ["started", "finished", "rewarded"])
def test_illegal_event_changes_nothing_and_is_counted(status: str, trigger: str) -> None:
    """The same table, seen from outside: an event that is not legal now has no effect."""
    bench = in_status(status)
    trajectory = bench.trajectory("0.0.0")
    events: dict[str, ev.Event] = {
        "started": ev.TrajectoryStarted(
            trajectory=trajectory.id, placement=trajectory.placement, tokens_resumed=0
        ),
        "finished": ev.TrajectoryFinished(
            trajectory=trajectory.id,
            placement=trajectory.placement,
            num_tokens=3,
            finish_reason="stop",
        ),
        "rewarded": ev.TrajectoryRewarded(
            trajectory=trajectory.id,
            placement=trajectory.placement,
            score_bits=0,
            correct=False,
            reason="ok",
            num_tokens=3,
        ),
    }
    commands = bench.say("rollout-0", events[trigger])
    if PICTURE[status][TRIGGERS.index(trigger)] == ".":
        assert not commands and trajectory.status == status
        name = type(events[trigger]).__name__
        assert bench.state.ignored[f"{name}: old-placement"] == 1
    else:
        assert trajectory.status != status


def test_event_of_an_old_placement_is_ignored() -> None:
    """The answer was moved to another replica; the slow one finishes it all the same."""
    bench = Bench(groups_per_step=1, max_staleness=0, capacity=2, replicas=2, batch_wait_ms=1_000)
    bench.start()
    assert only(cmd.GenerateTrajectory, bench.wait(1_000))
    late = ev.TrajectoryFinished(
        trajectory=TrajectoryId("0.0.0"), placement=1, num_tokens=3, finish_reason="stop"
    )
    assert bench.say("rollout-0", late) == []
    assert bench.trajectory("0.0.0").status == "dispatched"
    assert bench.state.ledger.tokens.issued == 0
