"""The checks can fail: each rule of the design, taken out, is missed by some random world soon.

A rule whose absence nobody notices is either not needed or not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.core import admission, buffering, machine, recovery, siblings
from laminar.core.state import Group, Replica, State, Trajectory
from laminar.core.turn import Turn
from laminar.events import events as ev
from tests.core.random_worlds import check_end, random_world

SEEDS = 60
EVENTS_MAX = 5_000  #: three times what the longest of these runs needs


def lost_work_only_to_admitting_replicas(patch: pytest.MonkeyPatch) -> None:
    place_for = recovery._place_for

    def planted(state: State, trajectory: Trajectory, able: Any) -> Replica | None:
        replica = place_for(state, trajectory, able)
        return replica if replica is not None and admission.admits(state, replica) else None

    patch.setattr(recovery, "_place_for", planted)


def closed_for_good_after_groups_per_version(patch: pytest.MonkeyPatch) -> None:
    refusal = admission.refusal

    def planted(state: State, replica: Replica) -> str:
        if replica.took >= state.settings.groups_per_version:
            return "draining"
        return refusal(state, replica)

    patch.setattr(admission, "refusal", planted)


def bound_counted_from_the_next_batch_on(patch: pytest.MonkeyPatch) -> None:
    """d >= s instead of d >= s - 1."""

    def planted(deadlines: dict[int, int], chosen: int, groups_per_step: int) -> bool:
        return all(
            sum(n for deadline, n in deadlines.items() if deadline <= d)
            <= groups_per_step * (d - chosen + 1)
            for d in deadlines
            if d >= chosen
        )

    patch.setattr(admission, "bound_holds", planted)
    patch.setattr(buffering, "bound_holds", planted)


def skipped_publish_is_not_owed(patch: pytest.MonkeyPatch) -> None:
    def planted(turn: Turn, event: ev.PublishSkipped) -> None:
        """The trainer went on, and nothing is remembered."""

    patch.setitem(machine.HANDLERS, ev.PublishSkipped, planted)


def batch_chosen_without_preserving_the_bound(patch: pytest.MonkeyPatch) -> None:
    def planted(state: State, batch: list[Group]) -> bool:
        return True

    patch.setattr(buffering, "preserves_bound", planted)


def dropped_group_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    def planted(state: State, group: Group) -> None:
        """Called by drops only; batch choice has its own name for it."""

    patch.setattr(siblings, "unchosen_less", planted)


@pytest.mark.parametrize(
    "plant",
    [
        lost_work_only_to_admitting_replicas,
        closed_for_good_after_groups_per_version,
        bound_counted_from_the_next_batch_on,
        skipped_publish_is_not_owed,
        batch_chosen_without_preserving_the_bound,
        dropped_group_keeps_its_place,
    ],
)
def test_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            check_end(random_world(seed).run(EVENTS_MAX))
