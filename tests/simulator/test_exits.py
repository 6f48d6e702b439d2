"""The ways in which a coordinator ends by itself, and what follows: again, or over for a reason."""

from __future__ import annotations

import pytest

from laminar.coordinator.restarts import GiveUp
from laminar.core.machine import HANDLING
from laminar.core.state.failures import FailureKind
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.names import exit_codes
from tools.kit.sim_worlds import config
from tools.simulator.run import make_world, run_seed

SMALL = {"replicas": 4, "total_training_steps": 4, "num_train": 60, "seconds": 30.0}


def test_full_disk_that_has_room_again_is_survived() -> None:
    """Coordinators end and are started again until the disk has room; the run completes, and every
    book agrees."""
    for seed in (3, 4, 5):
        outcome = run_seed(config("disk-full-long", **SMALL), seed)
        assert not outcome.invariant, outcome.details
        assert outcome.coordinators > 1 and not outcome.failure


def test_handler_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first event, which the finding names: no supervisor hides it by another start."""

    def broken(turn: object, event: Event) -> None:
        raise ZeroDivisionError("planted")

    handling = HANDLING[ev.TrainerReady]._replace(handler=broken)
    monkeypatch.setitem(HANDLING, ev.TrainerReady, handling)
    outcome = run_seed(config("disk-full-long", **SMALL), 3)
    assert outcome.invariant == "nothing_raises"
    assert "trainer-ready, message 1 of trainer-0" in outcome.details
    assert "ZeroDivisionError: planted" in outcome.details


def test_disk_that_stays_full_ends_the_run_from_outside() -> None:
    """When it has been waited for; the log is whole, so the run could go on."""
    world = make_world(config("disk-full-for-good", disk_full_timeout_s=60.0, **SMALL), 3)
    assert world.run()
    over = world.coordinator.over
    assert over is not None and over.failure.kind == FailureKind.DISK_FAILED
    assert "could not be written for 60 s" in over.failure.sentence
    assert world.scheduler.now / 1e9 > 60


def test_giving_up_for_no_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tools.simulator.runtime.exits.Restarts.decide_restart",
        lambda *_: GiveUp(exit_codes.CRASHED),
    )
    outcome = run_seed(config("disk-full-long", **SMALL), 3)
    assert outcome.invariant == "given_up_for_a_reason"
