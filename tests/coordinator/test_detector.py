"""The failure detector alone: grace after a pause, and words that may still lie in the socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from laminar.coordinator.detector import ROUND_FRAMES, DetectorEvent, FailureDetector
from laminar.core.state.members import ActorState
from laminar.events.events import HeartbeatLost, NodeRecovered, NodeSilent

LEASE, NODE_LEASE = 3_000, 12_000


def actor(name: str, role: str = "rollout", *, alive: bool = True) -> ActorState:
    return ActorState(
        name=name, role=role, node="node-0", pid=1, boot_id=f"{name}/a", incarnation=4, alive=alive
    )


def run(detector: FailureDetector, start: int, end: int, step: int = 500) -> None:
    """Turns of a loop that is awake."""
    for now in range(start, end + 1, step):
        detector.begin_turn(now, 0, True, 2)


def lost(detector: FailureDetector, now: int, heard: dict[str, int]) -> list[str]:
    actors = {"a": actor("a"), "b": actor("b"), "dead": actor("dead", alive=False)}
    return [e.actor for e in losses(detector.judge_silence(now, actors, heard))]


def test_silence_longer_than_the_lease_is_a_loss() -> None:
    """b was heard at 2000, a never since the start; the dead one is nobody's concern."""
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    run(detector, 0, 4_500)
    assert lost(detector, 3_000, {"b/a": 2_000}) == []
    assert lost(detector, 3_001, {"b/a": 2_000}) == ["a"]
    assert lost(detector, 5_001, {"b/a": 2_000}) == ["a", "b"]


def test_who_speaks_or_joins_after_a_look_has_a_lease_of_its_own() -> None:
    """A look remembers when the next lease can end: what happened since must not be missed."""
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    run(detector, 0, 9_000)
    actors, heard = {"a": actor("a")}, {"a/a": 4_000}
    assert detector.judge_silence(4_500, actors, heard) == []
    actors["b"], heard["b/a"], heard["a/a"] = actor("b"), 5_000, 6_000
    assert detector.judge_silence(8_000, actors, heard) == []
    assert [e.actor for e in losses(detector.judge_silence(8_001, actors, heard))] == ["b"]
    assert [e.actor for e in losses(detector.judge_silence(9_000, actors, heard))] == ["b"]
    assert [e.actor for e in losses(detector.judge_silence(9_001, actors, heard))] == ["a", "b"]


def test_pause_of_the_loop_gives_everybody_a_full_lease() -> None:
    """More than a third of the lease between two turns: nobody could be heard meanwhile."""
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    run(detector, 0, 2_000)
    detector.begin_turn(2_000 + LEASE // 3 + 1, 0, True, 2)
    assert lost(detector, 2_000 + LEASE // 3 + 1 + LEASE, {}) == []
    assert lost(detector, 2_000 + LEASE // 3 + 2 + LEASE, {}) == ["a", "b"]


def test_silence_is_not_judged_while_words_may_lie_unread() -> None:
    """The missing heartbeat may be the next frame of a socket that was not read to its end, and
    with many processes it takes many turns until each had its turn. A socket that is never empty
    keeps nobody alive: after a round, silence counts up to when that round began."""
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    peers, frames = 4 * ROUND_FRAMES, ROUND_FRAMES // 2
    judged = [detector.begin_turn(now, frames, False, peers) for now in range(33)]
    assert [(at, upto) for at, upto in enumerate(judged) if upto is not None] == [(15, 0), (31, 15)]
    assert detector.begin_turn(40, 1, True, peers) == 40
    assert [detector.begin_turn(now, frames, False, 1) for now in (41, 42)] == [None, 40]


@pytest.mark.parametrize("role", ["node", "store", "trainer"])
def test_node_store_and_trainer_have_the_long_lease(role: str) -> None:
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    run(detector, 0, NODE_LEASE)
    actors = {"a": actor("a", role)}
    assert detector.judge_silence(LEASE + 1, actors, {}) == []
    assert detector.judge_silence(NODE_LEASE, actors, {}) == []
    assert [e.actor for e in losses(detector.judge_silence(NODE_LEASE + 1, actors, {}))] == ["a"]


# --- nodes ------------------------------------------------------------------------------------

AFTER = NODE_LEASE + 1


def losses(news: Sequence[DetectorEvent]) -> list[HeartbeatLost]:
    return [event for event in news if isinstance(event, HeartbeatLost)]


def machine(*roles: str, silent: bool = False) -> dict[str, ActorState]:
    """A node with processes of these roles, each by its role."""
    actors = {role: actor(role, role) for role in ("node", *roles)}
    for name, each in actors.items():
        each.node, each.boot_id = "node", name
    actors["node"].silent = silent
    return actors


def judged(now: int, actors: dict[str, ActorState], heard: dict[str, int]) -> list[DetectorEvent]:
    detector = FailureDetector(LEASE, NODE_LEASE, 0)
    run(detector, 0, now)
    return detector.judge_silence(now, actors, heard)


def test_silent_node_whose_actor_speaks_is_no_lost_machine() -> None:
    """It is told once, with how long it has been silent."""
    news = judged(AFTER, machine("rollout"), {"rollout": AFTER - LEASE})
    assert news == [NodeSilent(node="node", node_incarnation=4, silent_ms=0)]
    assert judged(AFTER, machine("rollout", silent=True), {"rollout": AFTER - LEASE}) == []


def test_silent_node_is_lost_with_the_last_of_its_actors() -> None:
    """And after them, so that each has its own reason."""
    heard = {"rollout": AFTER - LEASE - 1}
    for silent in (False, True):
        news = judged(AFTER, machine("rollout", silent=silent), heard)
        assert [event.actor for event in losses(news)] == ["rollout", "node"]
    nobody = machine()
    assert [event.actor for event in losses(judged(AFTER, nobody, {}))] == ["node"]


def test_actors_of_another_machine_and_dead_ones_do_not_speak_for_a_node() -> None:
    actors = machine("rollout")
    actors["rollout"].alive = False
    actors["other"] = actor("other", "relay")
    heard = {"rollout": AFTER, "other/a": AFTER}
    assert [event.actor for event in losses(judged(AFTER, actors, heard))] == ["node"]


def test_machine_that_may_be_lost_as_a_whole_is_waited_for() -> None:
    """Its trainer has been silent for longer than a short lease, and for less than its own: it may
    have gone with the node, or it may speak again; then the node has its lease anew."""
    actors, detector = machine("trainer"), FailureDetector(LEASE, NODE_LEASE, 0)
    heard = {"trainer": AFTER - LEASE - 1}
    assert detector.judge_silence(AFTER, actors, heard) == []
    assert detector.judge_silence(AFTER + LEASE, actors, heard) == []
    back = AFTER + 2 * LEASE
    assert detector.judge_silence(back, actors, {"trainer": back}) == []
    assert detector.judge_silence(back + NODE_LEASE, actors, {"trainer": back + NODE_LEASE}) == []
    after = back + NODE_LEASE + LEASE
    assert isinstance(detector.judge_silence(after, actors, {"trainer": after})[0], NodeSilent)


def test_silent_node_that_speaks_is_told_of_before_anybody_is_lost() -> None:
    """So that who is lost has somebody to restart it."""
    actors = machine("rollout", "relay", silent=True)
    news = judged(AFTER, actors, {"relay": AFTER, "node": AFTER - LEASE})
    assert isinstance(news[0], NodeRecovered) and news[0].node_incarnation == 4
    assert [event.actor for event in losses(news)] == ["rollout"]


# --- machines that are silent as a whole ----------------------------------------------------------


def machines(count: int) -> dict[str, ActorState]:
    """Each with its node and a replica, which are told apart by their names."""
    actors: dict[str, ActorState] = {}
    for number in range(count):
        for name, role in ((f"node-{number}", "node"), (f"replica-{number}", "rollout")):
            actors[name] = actor(name, role)
            actors[name].node, actors[name].boot_id = f"node-{number}", name
    return actors


def spoke(now: int, *numbers: int) -> dict[str, int]:
    return {f"{role}-{n}": now for n in numbers for role in ("node", "replica")}


def names(news: Sequence[DetectorEvent]) -> list[tuple[str, bool]]:
    return [(event.actor, event.cut_off) for event in losses(news)]


@pytest.mark.parametrize(("count", "silent"), [(2, 1), (3, 1), (4, 2)])
def test_who_is_silent_with_its_machine_is_lost_as_cut_off(count: int, silent: int) -> None:
    """No more than half of the machines, or too few to tell who is cut off."""
    heard = spoke(LEASE + 1, *range(silent, count))
    news = judged(LEASE + 1, machines(count), heard)
    assert names(news) == [(f"replica-{n}", True) for n in range(silent)]


def test_nobody_is_lost_before_the_long_lease_while_most_machines_are_silent() -> None:
    """It is the coordinator that is cut off; but a machine may be gone all the same."""
    detector, actors = FailureDetector(LEASE, NODE_LEASE, 0), machines(3)
    for now in range(LEASE, NODE_LEASE + 1, 100):
        detector.begin_turn(now, 0, True, 6)
        assert detector.judge_silence(now, actors, spoke(now, 0)) == []
    later = NODE_LEASE + LEASE + 1
    news = detector.judge_silence(later, actors, spoke(later, 0))
    assert [name for name, _ in names(news)] == ["replica-1", "replica-2", "node-1", "node-2"]


def test_every_lease_begins_anew_when_enough_machines_are_heard_again() -> None:
    """One is heard first; the words of the others are on their way."""
    detector, actors, back = FailureDetector(LEASE, NODE_LEASE, 0), machines(3), 2 * LEASE
    run(detector, 0, back + LEASE, 100)
    for now in range(0, back, 100):
        assert detector.judge_silence(now, actors, spoke(now, 0)) == []
    for now in range(back, back + LEASE, 100):
        assert detector.judge_silence(now, actors, spoke(now, 0, 1)) == []
    later = back + 2 * LEASE
    assert names(detector.judge_silence(later, actors, spoke(later, 0, 1))) == [("replica-2", True)]


def judged_often(end: int, heard: Callable[[int], dict[str, int]]) -> list[tuple[str, bool]]:
    """Who is lost by then on two machines, looked at as often as a loop would."""
    detector, actors = FailureDetector(LEASE, NODE_LEASE, 0), machines(2)
    for now in range(0, end, 100):
        detector.begin_turn(now, 0, True, 4)
        if lost := names(detector.judge_silence(now, actors, heard(now))):
            return lost
    return []


@pytest.mark.parametrize("later", [True, False])
def test_leases_of_a_machine_begin_anew_when_it_is_heard_again(later: bool) -> None:
    """Its replica is heard 2.5 s after its node, when its own lease would have been over; or never,
    and then it counts as cut off."""
    back = LEASE - 100

    def heard(now: int) -> dict[str, int]:
        again = {"node-0": now} if now > back else {}
        return spoke(now, 1) | again | ({"replica-0": now} if later and now > back + 2_500 else {})

    assert judged_often(back + LEASE, heard) == []
    assert judged_often(3 * LEASE, heard) == ([] if later else [("replica-0", True)])


def test_who_was_heard_since_its_machine_was_silent_is_not_cut_off() -> None:
    back = LEASE - 100

    def heard(now: int) -> dict[str, int]:
        again = {"node-0": now, "replica-0": back + 1} if now > back else {}
        return spoke(now, 1) | again

    assert judged_often(3 * LEASE, heard) == [("replica-0", False)]
