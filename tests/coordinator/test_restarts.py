"""Which ends of a coordinator are final, and how the others are followed by a new start."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.config.reading import read_toml
from laminar.coordinator.exit_reason import find_failure
from laminar.coordinator.restarts import (
    DEATHS_MAX,
    PAUSE_MAX_S,
    SERVED_S,
    GiveUp,
    Restart,
    Restarts,
)
from laminar.core.rules import LogicError
from laminar.core.state.failures import FailureKind
from laminar.eventlog.writer import LogGrew, LogTaken
from laminar.names import exit_codes
from laminar.names.ports import DiskError


def pause(verdict: Restart | GiveUp) -> float:
    assert isinstance(verdict, Restart)
    return verdict.pause_s


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("the key"), exit_codes.USER_ERROR),
        (LogicError("another logic"), exit_codes.USER_ERROR),
        (LogTaken("another coordinator has it"), exit_codes.USER_ERROR),
        (LogGrew("it wrote until a moment ago"), exit_codes.CRASHED),
        (DiskError(28, "No space left on device"), exit_codes.LOG_UNWRITABLE),
        (OSError(9, "Bad file descriptor"), exit_codes.CRASHED),
        (OSError(116, "Stale file handle"), exit_codes.LOG_UNWRITABLE),
        (AssertionError("no fixpoint"), exit_codes.CRASHED),
        (ValueError("too large"), exit_codes.CRASHED),
    ],
)
def test_what_ended_a_coordinator_decides_its_exit_code(error: Exception, code: int) -> None:
    """A failure of the program is started again, a mistake of the user and a failed run are not."""
    failure = find_failure(error)
    assert failure.kind.record.exit_code == code
    assert (code in exit_codes.FINAL) is (code == exit_codes.USER_ERROR)
    assert str(error.args[-1]) in failure.sentence


@pytest.mark.parametrize("code", exit_codes.FINAL)
def test_a_run_that_ended_is_over(code: int) -> None:
    assert Restarts(1.0, 300.0, 300.0).decide_restart(code, 0.0, 0.0) == GiveUp(code)


@pytest.mark.parametrize("code", [exit_codes.CRASHED, -9, 99])
def test_a_death_is_followed_by_a_start_with_a_growing_pause_up_to_a_limit(code: int) -> None:
    restarts = Restarts(1.0, 300.0, 300.0)
    pauses = [pause(restarts.decide_restart(code, 0.1, 0.0)) for _ in range(DEATHS_MAX)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0] and set(pauses[4:]) == {PAUSE_MAX_S}
    last = restarts.decide_restart(code, 0.1, 0.0)
    assert isinstance(last, GiveUp) and str(code) in last.failure.sentence
    assert (last.code, last.failure.kind) == (exit_codes.CRASHED, FailureKind.CRASHED)


def test_a_coordinator_that_had_worked_is_started_again_at_once() -> None:
    restarts = Restarts(1.0, 300.0, 300.0)
    for _ in range(5):
        restarts.decide_restart(exit_codes.CRASHED, 0.0, 0.0)
    assert pause(restarts.decide_restart(exit_codes.CRASHED, SERVED_S, 0.0)) == 1.0


@pytest.mark.parametrize(("served_s", "again"), [(299.0, False), (300.0, True)])
def test_a_coordinator_that_stood_still_is_restarted_once(served_s: float, again: bool) -> None:
    restarts = Restarts(0.0, 300.0, 300.0)
    assert isinstance(restarts.decide_restart(-9, 1.0, 0.0, stood_still=True), Restart)
    verdict = restarts.decide_restart(-9, served_s, 400.0, stood_still=True)
    assert isinstance(verdict, Restart) is again
    if isinstance(verdict, GiveUp):
        assert verdict.failure.kind == FailureKind.STALLED
        assert "coordinator holds the run up: it stood still again" in verdict.failure.sentence


def test_a_full_disk_is_waited_for_as_long_as_the_config_says() -> None:
    """However often that is: the deaths for want of room do not count to the limit."""
    restarts, now, tries = Restarts(0.0, 300.0, 300.0), 0.0, 0
    while isinstance(
        verdict := restarts.decide_restart(exit_codes.LOG_UNWRITABLE, 0.2, now), Restart
    ):
        now, tries = now + verdict.pause_s, tries + 1
    assert now == 300.0 and tries > DEATHS_MAX
    assert verdict.code == exit_codes.LOG_UNWRITABLE and "300 s" in verdict.failure.sentence


def test_room_in_between_begins_the_wait_anew() -> None:
    restarts = Restarts(1.0, 300.0, 300.0)
    assert isinstance(restarts.decide_restart(exit_codes.LOG_UNWRITABLE, 0.0, 0.0), Restart)
    assert isinstance(restarts.decide_restart(exit_codes.LOG_UNWRITABLE, SERVED_S, 299.0), Restart)
    assert isinstance(restarts.decide_restart(exit_codes.LOG_UNWRITABLE, 0.0, 598.0), Restart)
    assert isinstance(restarts.decide_restart(exit_codes.LOG_UNWRITABLE, 0.0, 599.0), GiveUp)


def test_a_configuration_that_a_failing_disk_hides_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied") as refused:
        read_toml(tmp_path / "config.toml")
    assert find_failure(refused.value).kind == FailureKind.DISK_FAILED
