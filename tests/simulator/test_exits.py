"""The ways in which a coordinator ends by itself, and what follows: again, or over for a reason."""

from __future__ import annotations

import pytest

from laminar.coordinator.restarts import GiveUp
from laminar.eventlog.crashes import CRASHES_MAX
from laminar.names import exit_codes
from tools.kit.sim_worlds import config, ran
from tools.simulator.run import run_seed
from tools.simulator.world import World

SMALL = {"replicas": 4, "total_steps": 4, "num_train": 60, "seconds": 30.0}


@pytest.mark.parametrize("kind", ["event-crashes", "disk-full-long"])
def test_crash_or_full_disk_that_passes_is_survived(kind: str) -> None:
    """Coordinators end and are started again until the event is handled, or the disk has room;
    the run completes, and every book agrees."""
    for seed in (3, 4, 5):
        outcome = run_seed(config(kind, **SMALL), seed)
        assert not outcome.invariant, outcome.details
        assert outcome.coordinators > 1 and not outcome.failure


def test_event_that_always_crashes_ends_the_run_by_its_name() -> None:
    """In good order: the books are closed, the exit code is 1."""
    for seed in range(1, 9):
        world = ran(config("event-poison", **SMALL), seed)
        state = world.coordinator.state
        assert state is not None and state.exit_code == 1
        assert state.failure.startswith(f"the coordinator crashed {CRASHES_MAX} times on ")
        assert "PlantedError" in state.failure
        crashes = world.coverage.counts["coordinator:handlingfailed-in-a-turn"]
        assert crashes == CRASHES_MAX


def test_disk_that_stays_full_ends_the_run_from_outside() -> None:
    """When it has been waited for; the log is whole, so the run could go on."""
    world = World(config("disk-full-for-good", disk_wait_s=60.0, **SMALL), 3)
    assert world.run()
    over = world.coordinator.over
    assert over is not None and over.code == exit_codes.LOG_UNWRITABLE
    assert "could not be written for 60 s" in over.reason
    assert world.scheduler.now / 1e9 > 60


def test_giving_up_for_no_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tools.simulator.runtime.exits.Restarts.ended",
        lambda *_: GiveUp(exit_codes.CRASHED, "no more"),
    )
    outcome = run_seed(config("event-crashes", **SMALL), 3)
    assert outcome.invariant == "given_up_for_a_reason"
