"""The failure detector alone: grace after a pause, and words that may still lie in the socket."""

from __future__ import annotations

from laminar.coordinator.detector import TURNS_UNTIL_JUDGED, FailureDetector
from laminar.core.state import Actor

LEASE = 3_000


def actor(name: str, *, alive: bool = True) -> Actor:
    return Actor(
        name=name,
        role="rollout",
        node="node-0",
        pid=1,
        boot_id=f"{name}/a",
        incarnation=4,
        alive=alive,
    )


def run(detector: FailureDetector, start: int, end: int, step: int = 500) -> None:
    """Turns of a loop that is awake."""
    for now in range(start, end + 1, step):
        detector.turn(now, True)


def lost(detector: FailureDetector, now: int, heard: dict[str, int]) -> list[str]:
    actors = {"a": actor("a"), "b": actor("b"), "dead": actor("dead", alive=False)}
    return [e.actor for e in detector.lost(now, actors, heard)]


def test_silence_longer_than_the_lease_is_a_loss() -> None:
    """b was heard at 2000, a never since the start; the dead one is nobody's concern."""
    detector = FailureDetector(LEASE, 0)
    run(detector, 0, 4_500)
    assert lost(detector, 3_000, {"b/a": 2_000}) == []
    assert lost(detector, 3_001, {"b/a": 2_000}) == ["a"]
    assert lost(detector, 5_001, {"b/a": 2_000}) == ["a", "b"]


def test_who_speaks_or_joins_after_a_look_has_a_lease_of_its_own() -> None:
    """A look remembers when the next lease can end: what happened since must not be missed."""
    detector = FailureDetector(LEASE, 0)
    run(detector, 0, 9_000)
    actors, heard = {"a": actor("a")}, {"a/a": 4_000}
    assert detector.lost(4_500, actors, heard) == []
    actors["b"], heard["b/a"], heard["a/a"] = actor("b"), 5_000, 6_000
    assert detector.lost(8_000, actors, heard) == []
    assert [e.actor for e in detector.lost(8_001, actors, heard)] == ["b"]
    assert [e.actor for e in detector.lost(9_000, actors, heard)] == ["b"]
    assert [e.actor for e in detector.lost(9_001, actors, heard)] == ["a", "b"]


def test_loss_names_the_incarnation_and_the_silence() -> None:
    detector = FailureDetector(LEASE * 1_000_000, 0)
    found = detector.lost(4_000 * 1_000_000, {"a": actor("a")}, {})
    assert [(e.actor_incarnation, e.silent_ms) for e in found] == [(4, 4_000)]


def test_pause_of_the_loop_gives_everybody_a_full_lease() -> None:
    """More than a third of the lease between two turns: nobody could be heard meanwhile."""
    detector = FailureDetector(LEASE, 0)
    run(detector, 0, 2_000)
    detector.turn(2_000 + LEASE // 3 + 1, True)
    assert lost(detector, 2_000 + LEASE // 3 + 1 + LEASE, {}) == []
    assert lost(detector, 2_000 + LEASE // 3 + 2 + LEASE, {}) == ["a", "b"]


def test_short_delay_of_the_loop_gives_no_grace() -> None:
    """Else a busy loop would never find anybody dead."""
    detector = FailureDetector(LEASE, 0)
    run(detector, 0, LEASE, LEASE // 3)
    assert lost(detector, LEASE + 1, {}) == ["a", "b"]


def test_silence_is_not_judged_while_words_may_lie_unread() -> None:
    """The socket was not drained to its end: the missing heartbeat may be the next frame. But a
    socket that is never empty must not keep the dead alive: at most eight turns."""
    detector = FailureDetector(LEASE, 0)
    judged = [detector.turn(now, False) for now in range(TURNS_UNTIL_JUDGED + 1)]
    assert judged == [False] * (TURNS_UNTIL_JUDGED - 1) + [True] * 2
    assert detector.turn(20, True)
    assert not detector.turn(21, False)
