"""The simulator can find bugs: each planted one breaks a promise within a few seeds.

What a promise is worth is what happens when the product does not keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.actors.protocol import CommandFilter
from laminar.coordinator.detector import FailureDetector
from laminar.coordinator.tick import Tick
from laminar.core import (
    admission,
    buffering,
    machine,
    membership,
    recovery,
    relays,
    siblings,
    weights,
)
from laminar.core.state import Group, Replica, State
from laminar.core.turn import Turn
from laminar.events import events as ev
from laminar.events.base import COORDINATOR
from laminar.net.session import ServerLink
from laminar.sim.run import run_seed
from laminar.storage import rules
from tests.sim.worlds import config

SEEDS = 60
EVENTS_MAX = 8_000  #: several times what one of these runs needs

Patch = pytest.MonkeyPatch


def sync_is_forgotten(patch: Patch) -> None:
    patch.setattr(Tick, "_make_durable", lambda tick: tick.log.flush())


def event_is_lost_between_link_and_machine(patch: Patch) -> None:
    receive = ServerLink.receive

    def planted(link: ServerLink, frame: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        bodies = receive(link, frame, now_ns)
        return bodies[:0] if bodies and bodies[0][0] % 7 == 0 else bodies

    patch.setattr(ServerLink, "receive", planted)


def actor_forgets_what_it_was_told(patch: Patch) -> None:
    patch.setattr(CommandFilter, "take", lambda _, command_id: True)


def store_fences_nobody(patch: Patch) -> None:
    patch.setattr(rules, "_barred", lambda row, placement: None if row else rules._unknown())


def silence_is_judged_after_half_a_lease(patch: Patch) -> None:
    lost = FailureDetector.lost

    def planted(detector: FailureDetector, *args: Any) -> Any:
        detector.lease_ns, lease_ns = detector.lease_ns // 2, detector.lease_ns
        try:
            return lost(detector, *args)
        finally:
            detector.lease_ns = lease_ns

    patch.setattr(FailureDetector, "lost", planted)


def fenced_processes_are_heard(patch: Patch) -> None:
    def planted(turn: Turn) -> bool:
        stamped = turn.stamped
        known = stamped.peer in turn.state.actors or stamped.peer == COORDINATOR
        return known or isinstance(stamped.event, ev.ActorJoined)

    patch.setattr(machine, "_from_known_sender", planted)


def lost_work_only_to_admitting_replicas(patch: Patch) -> None:
    place_for = recovery._place_for

    def planted(state: State, *args: Any) -> Replica | None:
        replica = place_for(state, *args)
        return replica if replica is not None and admission.admits(state, replica) else None

    patch.setattr(recovery, "_place_for", planted)


def skipped_publish_is_not_owed(patch: Patch) -> None:
    def planted(turn: Turn, event: ev.PublishSkipped) -> None:
        """The trainer went on, and nothing is remembered."""

    patch.setitem(machine.HANDLERS, ev.PublishSkipped, planted)


def debt_is_paid_although_a_later_publish_is_on_its_way(patch: Patch) -> None:
    patch.setattr(buffering, "debt_due", lambda state: state.owed >= 0)


def batch_chosen_without_preserving_the_bound(patch: Patch) -> None:
    def planted(state: State, batch: list[Group]) -> bool:
        return True

    patch.setattr(buffering, "preserves_bound", planted)


def dropped_group_keeps_its_place(patch: Patch) -> None:
    def planted(state: State, group: Group) -> None:
        """Called by drops only; batch choice has its own name for it."""

    patch.setattr(siblings, "unchosen_less", planted)


def poison_is_never_quarantined(patch: Patch) -> None:
    patch.setattr(recovery, "DEATHS_MAX", 1_000)


def dead_replica_keeps_its_work(patch: Patch) -> None:
    def planted(turn: Turn, name: str) -> None:
        turn.state.replicas.pop(name, None)

    patch.setattr(membership.recovery, "replica_lost", planted)


def splice_is_not_sent(patch: Patch) -> None:
    """The predecessor of a lost relay never hears who comes next."""
    forward = relays._forward

    def planted(turn: Turn, *args: Any) -> None:
        if isinstance(turn.stamped.event, ev.RelayReady):
            forward(turn, *args)

    patch.setattr(relays, "_forward", planted)


def rejoined_relay_is_not_fed(patch: Patch) -> None:
    forward = relays._forward

    def planted(turn: Turn, *args: Any) -> None:
        came_back = turn.state.newest >= 0 and isinstance(turn.stamped.event, ev.RelayReady)
        if not came_back:
            forward(turn, *args)

    patch.setattr(relays, "_forward", planted)


def owed_republish_is_forgotten(patch: Patch) -> None:
    patch.setattr(weights, "owe_newest", lambda turn: None)


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (sync_is_forgotten, ()),
        (event_is_lost_between_link_and_machine, ()),
        (actor_forgets_what_it_was_told, ("coordinator-killed",)),
        (store_fences_nobody, ("partition-one-way", "replica-paused")),
        (silence_is_judged_after_half_a_lease, ("partition",)),
        (fenced_processes_are_heard, ("partition-one-way", "replica-paused", "coordinator-killed")),
        (lost_work_only_to_admitting_replicas, ("replica-dies",)),
        (skipped_publish_is_not_owed, ("publish-skipped",)),
        (debt_is_paid_although_a_later_publish_is_on_its_way, ("publish-skipped",)),
        (batch_chosen_without_preserving_the_bound, ("hangs", "replica-slow")),
        (dropped_group_keeps_its_place, ("reward-fails",)),
        (poison_is_never_quarantined, ("poison-prompt",)),
        (dead_replica_keeps_its_work, ("replica-dies",)),
        (splice_is_not_sent, ("relay-dies",)),
        (rejoined_relay_is_not_fed, ("relay-dies",)),
        (owed_republish_is_forgotten, ("relay-dies",)),
    ],
)
def test_planted_bug_is_found(
    plant: Callable[[Patch], None], faults: tuple[str, ...], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    swarm = config(*faults, events_max=EVENTS_MAX)
    assert any(run_seed(swarm, seed).invariant for seed in range(SEEDS))
