"""How often a process is started again, and after which pauses."""

from __future__ import annotations

from laminar.actors.restart_limit import TAKEN_S, RestartLimit, decide_node_restart
from laminar.config import load_config
from laminar.names import exit_codes
from tests.actors.parts import MINIMAL


def limit(*settings: str) -> RestartLimit:
    return RestartLimit(load_config([], [*MINIMAL, *settings]))


def test_the_first_restart_is_at_once_and_the_pauses_before_the_others_double() -> None:
    made = limit("recovery.max_restarts=20")
    assert [made.record_exit(float(number)) for number in range(10)] == [
        0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0
    ]  # fmt: skip


def test_a_restart_counts_no_longer_than_the_window() -> None:
    made = limit("recovery.max_restarts=2", "recovery.restart_window_s=100")
    assert [made.record_exit(at_s) for at_s in (0.0, 60.0)] == [0.0, 1.0]
    assert made.record_exit(99.0) == (
        "it was restarted 2 times within 100 s, and recovery.max_restarts is 2"
    )
    assert made.record_exit(100.0) == 1.0  # that of 60 s is left
    assert made.record_exit(300.0) == 0.0


def test_no_pause_is_so_long_that_the_coordinator_gives_up() -> None:
    made = limit("recovery.max_restarts=9", "coordinator.start_timeout_s=5")
    assert [made.record_exit(0.0) for _ in range(5)] == [0.0, 1.0, 2.0, 2.5, 2.5]


def test_a_node_that_was_fenced_for_its_silence_counts_towards_no_limit() -> None:
    """It was cut off for longer than its lease; one that is so at once is tried after longer and
    longer pauses. One that is refused, since another has its place, say, is given up."""
    made, fenced = limit("recovery.max_restarts=1"), exit_codes.FENCED
    assert [decide_node_restart(made, fenced, TAKEN_S, 0.0) for _ in range(3)] == [0.0] * 3
    assert [decide_node_restart(made, fenced, 1.0, 0.0) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [decide_node_restart(made, fenced, lived_s, 0.0) for lived_s in (TAKEN_S, 1.0)] == [
        0.0,
        1.0,
    ]
    disk = exit_codes.LOG_UNWRITABLE  # at its start; later on it counts
    assert [decide_node_restart(made, disk, 1.0, 0.0) for _ in range(3)] == [2, 4, 8]
    assert decide_node_restart(made, exit_codes.COORDINATOR_ABSENT, TAKEN_S, 0.0) == 1.0
    assert isinstance(decide_node_restart(made, exit_codes.COORDINATOR_ABSENT, TAKEN_S, 0.0), str)
