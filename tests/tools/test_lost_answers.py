"""The bench of kills: whose answers were lost, and when, read from the events of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event
from laminar.names import ids
from laminar.names.ids import Purpose
from tools.bench.kills.lost_answers import Log, Told, lost_answers

MS = 1_000_000  #: nanoseconds
NAME = "rollout-4"


def joined(pid: int) -> Event:
    return ev.ActorJoined(name=NAME, role="rollout", boot_id="b", node="node-0", pid=pid)


def exited() -> Event:
    return ev.ProcessExited(actor=NAME, boot_id="b", code=-9, restarting=True)


def silent() -> Event:
    return ev.HeartbeatLost(actor=NAME, actor_incarnation=1, silent_ms=5_000)


def ordered(number: int) -> Command:
    group = ids.train_group(0, number)
    return cmd.GenerateTrajectory(
        to=NAME,
        trajectory_id=ids.make_trajectory_id(group, 0),
        group=group,
        sibling=0,
        purpose=Purpose.TRAIN,
        row_index=number,
        attempt=1,
        placement=1,
        version=0,
        version_step=0,
        seed=number,
    )


def log_of(told: list[tuple[int, Event]]) -> Log:
    """Events by ms. A process is ordered as many answers as its pid says."""
    log = Log([], [])
    for seq, (ms, event) in enumerate(told, start=1):
        log.events.append(Told(ms * MS, seq, COORDINATOR, event))
        if isinstance(event, ev.ActorJoined):
            log.orders.extend((seq, ordered(10 * seq + n)) for n in range(event.pid))
    return log


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([(0, joined(1)), (100, exited())], id="soon-after-its-start"),
        pytest.param([(0, joined(1)), (100, joined(2))], id="back-before-its-end-was-told"),
        pytest.param([(0, joined(1)), (100, silent()), (200, exited())], id="silent-first"),
        pytest.param(
            [(0, joined(2)), (50, exited()), (99, joined(1)), (100, exited())], id="again"
        ),
    ],
)
def test_a_kill_loses_what_that_process_was_sampling(
    tmp_path: Path, told: list[tuple[int, Event]]
) -> None:
    """However soon it is killed: what that process had been ordered, and no other one."""
    assert lost_answers(tmp_path, log_of(told), NAME, 1)["lost"] == 1


def test_a_process_that_is_killed_before_it_has_joined_loses_nothing(tmp_path: Path) -> None:
    log = log_of([(0, joined(1)), (50, exited()), (99, exited())])
    assert lost_answers(tmp_path, log, NAME, 2)["lost"] == 0


def test_a_kill_without_an_end_in_the_log_is_an_error(tmp_path: Path) -> None:
    log = log_of([(0, joined(1)), (50, exited()), (99, joined(2))])
    with pytest.raises(RuntimeError, match="the end of rollout-4"):
        lost_answers(tmp_path, log, NAME, 2)
