"""What the program that kills processes of a run says of the time until they are back."""

from __future__ import annotations

from laminar.events import events as ev
from laminar.events.base import Event
from tests.kit.world_parts import step_completed
from tools.bench.kills import Kill, times

S = 1_000_000_000


def of(*happened: tuple[float, str, Event]) -> list[tuple[int, str, Event]]:
    return [(round(at_s * S), peer, event) for at_s, peer, event in happened]


def joined(name: str) -> ev.ActorJoined:
    return ev.ActorJoined(name=name, role=name.partition("-")[0], node="node-0", pid=1, boot_id="b")


def exited(name: str) -> ev.ProcessExited:
    return ev.ProcessExited(actor=name, boot_id="a", code=-9, restarting=True)


def test_a_step_that_the_killed_trainer_had_reported_is_not_the_next_one() -> None:
    events = of(
        (9.0, "trainer-0", step_completed(1, 1)),
        (10.1, "trainer-0", step_completed(2, 2)),
        (10.5, "node-0", exited("trainer-0")),
        (11.0, "trainer-0", joined("trainer-0")),
        (12.0, "trainer-0", ev.TrainerReady(num_parameters=1, weights_bytes=4)),
        (15.0, "trainer-0", step_completed(3, 3)),
    )
    assert times(Kill("trainer", "trainer-0", 10 * S), events) == {
        "noticed_s": 0.5,
        "joined_s": 1.0,
        "ready_s": 2.0,
        "next_step_s": 5.0,
    }


def test_who_is_not_back_has_no_next_step() -> None:
    events = of((10.5, "node-0", exited("store-0")), (11.0, "trainer-0", step_completed(1, 1)))
    assert times(Kill("store", "store-0", 10 * S), events) == {"noticed_s": 0.5}


def test_a_step_does_not_wait_for_a_reward_worker() -> None:
    events = of((11.0, "trainer-0", step_completed(1, 1)))
    assert times(Kill("reward-worker", "rollout-0", 10 * S), events) == {"next_step_s": 1.0}
