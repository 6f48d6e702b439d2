"""Why a process was lost: the reason that is known first, and how it ended only without one."""

from __future__ import annotations

import pytest

from laminar.core.state.process_failures import ProcessFailures
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped

NAME = "rollout-0"


def ended(boot: str, code: int) -> ev.ProcessExited:
    return ev.ProcessExited(actor=NAME, boot_id=boot, code=code, restarting=True)


def joined(boot: str) -> ev.ActorJoined:
    return ev.ActorJoined(name=NAME, role="rollout", boot_id=boot, node="node-0", pid=1)


KILLED = ended("a", -9)
FIRST, JOINED = joined("a"), joined("b")
SILENT = ev.HeartbeatLost(actor=NAME, actor_incarnation=1, silent_ms=5_000)
RESTART = cmd.RestartActor(to="node-0", actor=NAME, boot_id="boot", reason="it sampled nothing")


def told(*events: Event, orders: tuple[Command, ...] = ()) -> str:
    """After these; `orders` are decided on the first."""
    losses = ProcessFailures()
    for seq, event in enumerate(events):
        stamped = Stamped(seq=seq, time_ns=0, peer=NAME, incarnation=1, peer_seq=0, event=event)
        losses.record_event(stamped, [] if seq else orders)
    return losses.why[NAME]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((KILLED,), "killed by SIGKILL"),
        ((ended("a", 7),), "exit code 7"),
        ((ended("a", -35),), "killed by signal 35"),
        ((SILENT, KILLED), "nothing was heard from it for 5000 ms"),
        ((ev.ActorFailed(reason="no memory", user_error=False), KILLED), "no memory"),
        ((SILENT, KILLED, JOINED, ended("b", -9)), "killed by SIGKILL"),
        ((SILENT, JOINED, ended("b", -9)), "killed by SIGKILL"),
        ((FIRST, SILENT, JOINED, KILLED), "nothing was heard from it for 5000 ms"),
        ((FIRST, JOINED, ended("never-joined", 7), KILLED), "exit code 7"),
    ],
)
def test_the_reason_that_is_known_first(events: tuple[Event, ...], why: str) -> None:
    assert told(*events) == why


def test_an_order_has_its_reason() -> None:
    timer = ev.TimerFired(timer=f"progress:{NAME}")
    stop = cmd.StopActor(to=NAME, reason="the run ends")
    assert told(timer, KILLED, orders=(stop, RESTART)) == "it sampled nothing"


def test_an_end_in_good_order_is_no_loss() -> None:
    losses = ProcessFailures()
    stamped = Stamped(
        seq=1, time_ns=0, peer="node-0", incarnation=1, peer_seq=1, event=ended("a", 0)
    )
    losses.record_event(stamped, [])
    assert losses.why == {}
